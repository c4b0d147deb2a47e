//! RMS norm of a row, of which the residual may be given as a sum not yet taken.

use super::lanes::{LANES, Sums, fused, total, widest};

widest!(fn norm_row(residual: &[f32], added: Option<&[f32]>, weight: &[f32], epsilon: f32, sums: Sums, sum: Option<&mut [f32]>, out: &mut [f32]) = row);

/// `out = x / sqrt(mean(x²) + epsilon) * weight` with `x = residual + added`, and its block sums behind it; `x` goes to `sum`.
/// All but `out` are as long as `weight`.
#[inline(always)]
fn row<const FUSED: bool>(
    residual: &[f32],
    added: Option<&[f32]>,
    weight: &[f32],
    epsilon: f32,
    sums: Sums,
    sum: Option<&mut [f32]>,
    out: &mut [f32],
) {
    let columns = weight.len();
    let x = &mut out[..columns];
    match added {
        Some(added) => {
            for ((x, residual), added) in x.iter_mut().zip(residual).zip(added) {
                *x = residual + added;
            }
        }
        None => x.copy_from_slice(&residual[..columns]),
    }
    if let Some(sum) = sum {
        sum.copy_from_slice(x);
    }
    let (steps, rest) = x.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];
    for step in steps {
        for (sum, number) in lanes.iter_mut().zip(step) {
            *sum = fused::<FUSED>(*number, *number, *sum);
        }
    }
    let squares = rest.iter().fold(total(&lanes), |sum, number| fused::<FUSED>(*number, *number, sum));
    let factor = 1.0 / (squares / columns as f32 + epsilon).sqrt();
    for (number, weight) in x.iter_mut().zip(weight) {
        *number = *number * factor * weight;
    }
    sums.fill(out, columns);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_normed_and_summed() {
        for columns in [5, 16, 33, 64] {
            let residual: Vec<f32> = (0..columns).map(|at| (at as f32 * 0.7).sin()).collect();
            let added: Vec<f32> = (0..columns).map(|at| (at as f32 * 0.3).cos()).collect();
            let weight: Vec<f32> = (0..columns).map(|at| 1.0 + at as f32 / 50.0).collect();
            for plus in [None, Some(added.as_slice())] {
                let x: Vec<f64> = (0..columns).map(|at| f64::from(residual[at]) + plus.map_or(0.0, |plus| f64::from(plus[at]))).collect();
                let factor = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / columns as f64 + 1e-5).sqrt();
                let (mut sum, mut out) = (vec![0.0; columns], vec![0.0; columns]);
                norm_row(&residual, plus, &weight, 1e-5, Sums::default(), Some(&mut sum), &mut out);
                for at in 0..columns {
                    assert!((f64::from(sum[at]) - x[at]).abs() < 1e-6);
                    assert!((f64::from(out[at]) - x[at] * factor * f64::from(weight[at])).abs() < 1e-5);
                }
            }
        }
    }
}
