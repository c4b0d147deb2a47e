//! Arithmetic on sixteen floats at a time, written so that the compiler makes vectors of it, and the same result whatever their width.
//!
//! Every sum has one order, which depends on nothing but how long it is.

/// Floats that are computed together.
pub(crate) const LANES: usize = 16;
/// One step of a vector.
pub(crate) type Lanes = [f32; LANES];

/// Runs `$body` with the widest vectors that the processor has: `FUSED` says whether it multiplies and adds in one instruction.
macro_rules! widest {
    (fn $name:ident $(<$(const $generic:ident: $kind:ty),+>)? ($($argument:ident: $type:ty),* $(,)?) $(-> $output:ty)? = $body:ident) => {
        #[allow(clippy::too_many_arguments)]
        pub(crate) fn $name $(<$(const $generic: $kind),+>)? ($($argument: $type),*) $(-> $output)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
                #[allow(clippy::too_many_arguments)]
                fn avx512 $(<$(const $generic: $kind),+>)? ($($argument: $type),*) $(-> $output)? {
                    $body::<true $($(, $generic)+)?>($($argument),*)
                }
                #[target_feature(enable = "avx2,fma")]
                #[allow(clippy::too_many_arguments)]
                fn avx2 $(<$(const $generic: $kind),+>)? ($($argument: $type),*) $(-> $output)? {
                    $body::<true $($(, $generic)+)?>($($argument),*)
                }
                match $crate::lanes::width() {
                    // SAFETY: the processor has what the function is compiled for.
                    $crate::lanes::Width::Avx512 => return unsafe { avx512 $(::<$($generic),+>)? ($($argument),*) },
                    // SAFETY: as above.
                    $crate::lanes::Width::Avx2 => return unsafe { avx2 $(::<$($generic),+>)? ($($argument),*) },
                    $crate::lanes::Width::Plain => {}
                }
            }
            $body::<{ cfg!(target_arch = "aarch64") } $($(, $generic)+)?>($($argument),*)
        }
    };
}
pub(crate) use widest;

/// The vectors of this processor.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Width {
    Avx512,
    Avx2,
    Plain,
}

/// Looked up once by the standard library, then a load and a comparison.
#[cfg(target_arch = "x86_64")]
pub(crate) fn width() -> Width {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq");
    match (avx2, avx512) {
        (true, true) => Width::Avx512,
        (true, false) => Width::Avx2,
        _ => Width::Plain,
    }
}

/// `a * b + c`, rounded once where the processor does so in one instruction; where it does not, the one rounding would be a call for each number.
#[inline(always)]
pub(crate) fn fused<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// Sum of all lanes, halves first.
#[inline(always)]
pub(crate) fn total(lanes: &Lanes) -> f32 {
    let mut eight = [0.0; 8];
    for (at, sum) in eight.iter_mut().enumerate() {
        *sum = lanes[at] + lanes[at + 8];
    }
    let mut four = [0.0; 4];
    for (at, sum) in four.iter_mut().enumerate() {
        *sum = eight[at] + eight[at + 4];
    }
    (four[0] + four[2]) + (four[1] + four[3])
}

/// e to the power of `x`, to 2 units in the last place between -87 and 88; beyond, the value at that end.
#[inline(always)]
pub(crate) fn exp<const FUSED: bool>(x: f32) -> f32 {
    const ROUNDS: f32 = 12_582_912.0; // 1.5 * 2^23: added and taken away, it leaves the nearest whole number
    let x = x.clamp(-87.3, 88.3);
    let shifted = fused::<FUSED>(x, std::f32::consts::LOG2_E, ROUNDS);
    let whole = shifted - ROUNDS;
    // ln 2 in two parts, the first of which has few digits.
    let rest = fused::<FUSED>(whole, -0.693_359_4, x);
    let rest = fused::<FUSED>(whole, 2.121_944_4e-4, rest);
    let mut sum = 1.0 / 720.0;
    for factor in [1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        sum = fused::<FUSED>(sum, rest, factor);
    }
    // The whole number stands in the low bits of `shifted`; shifted up they are the exponent.
    f32::from_bits(sum.to_bits().wrapping_add(shifted.to_bits() << 23))
}

/// How the sums of a row's blocks stand behind it, for products whose matrices hold what is left of a block's minimum.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Sums {
    /// Numbers in a block; 0 where there are no sums.
    pub(crate) block: usize,
    /// How often the sums are repeated.
    pub(crate) digits: usize,
}

impl Sums {
    /// Numbers that each repetition takes: the sums, padded with zeros to whole blocks.
    fn width(self, columns: usize) -> usize {
        columns.checked_div(self.block).map_or(0, |blocks| blocks.div_ceil(self.block) * self.block)
    }

    /// How wide a row of `columns` is with its sums.
    pub(crate) fn extended(self, columns: usize) -> usize {
        columns + self.digits * self.width(columns)
    }

    /// Fills what follows the first `columns` numbers of `row`.
    #[inline(always)]
    pub(crate) fn fill(self, row: &mut [f32], columns: usize) {
        if self.block == 0 {
            return;
        }
        let (numbers, sums) = row.split_at_mut(columns);
        let Some((first, others)) = sums.split_at_mut_checked(self.width(columns)) else {
            return;
        };
        first.fill(0.0);
        for (sum, block) in first.iter_mut().zip(numbers.chunks(self.block)) {
            *sum = sum_of(block);
        }
        for repeated in others.chunks_exact_mut(first.len().max(1)) {
            repeated.copy_from_slice(first);
        }
    }
}

/// The sum of numbers, lane by lane.
#[inline(always)]
fn sum_of(numbers: &[f32]) -> f32 {
    let (steps, rest) = numbers.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];
    for step in steps {
        for (sum, number) in lanes.iter_mut().zip(step) {
            *sum += number;
        }
    }
    rest.iter().fold(total(&lanes), |sum, number| sum + number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn exp_is_near_that_of_the_library(x in -87.0f32..88.0) {
            for got in [exp::<true>(x), exp::<false>(x)] {
                let exact = f64::from(x).exp();
                prop_assert!(((f64::from(got) - exact) / exact).abs() < 3e-7, "{x}: {got} {exact}");
            }
        }
    }

    #[test]
    fn exp_has_ends() {
        assert!(exp::<true>(f32::NEG_INFINITY) < 2e-38 && exp::<true>(-1e9) >= 0.0);
        assert!(exp::<true>(1e9).is_finite());
        assert_eq!(exp::<true>(0.0), 1.0);
    }

    #[test]
    fn sums_stand_behind_their_row_once_for_each_digit() {
        let sums = Sums { block: 2, digits: 2 };
        let mut row = vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        row.resize(sums.extended(6), f32::NAN);
        sums.fill(&mut row, 6);
        assert_eq!(row, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 3.0, 7.0, 11.0, 0.0, 3.0, 7.0, 11.0, 0.0]);
        assert_eq!(Sums::default().extended(6), 6);
    }
}
