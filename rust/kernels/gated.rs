//! The gate of a feed-forward layer: `silu(gate) * up`.

use super::lanes::{Sums, exp, widest};

widest!(fn gated_row(both: &[f32], sums: Sums, out: &mut [f32]) = row);

/// `out = gate / (1 + e^-gate) * up`, and its block sums behind it; `both` is `gate`, then `up`.
#[inline(always)]
fn row<const FUSED: bool>(both: &[f32], sums: Sums, out: &mut [f32]) {
    let columns = both.len() / 2;
    let (gate, up) = both.split_at(columns);
    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
        *out = gate / (1.0 + exp::<FUSED>(-gate)) * up;
    }
    sums.fill(out, columns);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gate_opens_and_shuts() {
        let gate = [-200.0, -3.0, 0.0, 0.5, 4.0, 200.0];
        let up = [1.0, 2.0, 3.0, -4.0, 5.0, 6.0_f32];
        let mut out = [0.0; 6];
        gated_row(&[gate, up].concat(), Sums::default(), &mut out);
        for at in 0..6 {
            let (gate, up) = (f64::from(gate[at]), f64::from(up[at]));
            let exact = gate / (1.0 + (-gate).exp()) * up;
            assert!((f64::from(out[at]) - exact).abs() <= 1e-6 * exact.abs().max(1e-6), "{} {exact}", out[at]);
        }
    }
}
