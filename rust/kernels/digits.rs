//! Rows as whole numbers of two digits: activations for products of bytes, 128 times finer than one byte.
//!
//! A block of 32 numbers has a scale; each number is `scale * (128 * high + low)`, with `high` from -127 to 127 and `low` from -64 to 63. What is rounded
//! away is at most 1/32512 of the block's largest number.

use super::lanes::widest;

/// Numbers that share a scale.
pub(crate) const BLOCK: usize = 32;
/// The largest whole number: 127 high digits of 128.
const LARGEST: f32 = 127.0 * 128.0;
/// Blocks whose numbers are all smaller are zeros: dividing by them would overflow.
const SMALLEST: f32 = 1e-30;

/// A row, block after block: 32 high digits, then 32 low ones.
#[derive(Debug)]
pub(crate) struct Digits<'a> {
    pub(crate) digits: &'a mut [[i8; 2 * BLOCK]],
    /// One a block.
    pub(crate) scales: &'a mut [f32],
    /// The sum of a block's whole numbers.
    pub(crate) sums: &'a mut [i32],
}

widest!(fn split(row: &[f32], into: &mut Digits<'_>) = blocks);

/// Splits a row, whose length is whole blocks. A block with a number that is infinite or none gets a scale that is none, so that it is not lost.
#[inline(always)]
fn blocks<const FUSED: bool>(row: &[f32], into: &mut Digits<'_>) {
    const ROUNDS: f32 = 12_582_912.0; // 1.5 * 2^23: added, it leaves the nearest whole number in the low bits
    let blocks = row.as_chunks::<BLOCK>().0;
    for (((block, digits), scale), sum) in blocks.iter().zip(&mut *into.digits).zip(&mut *into.scales).zip(&mut *into.sums) {
        let (mut most, mut finite) = ([0.0_f32; BLOCK], [0.0_f32; BLOCK]);
        for lane in 0..BLOCK {
            most[lane] = block[lane].abs();
            finite[lane] = block[lane] * 0.0;
        }
        for width in [16, 8, 4, 2, 1] {
            for lane in 0..width {
                most[lane] = if most[lane + width] > most[lane] { most[lane + width] } else { most[lane] };
                finite[lane] += finite[lane + width];
            }
        }
        let factor = if most[0] > SMALLEST { LARGEST / most[0] } else { 0.0 };
        *scale = most[0] / LARGEST + finite[0];
        let (mut all, mut whole) = (0_i32, [0_i32; BLOCK]);
        for lane in 0..BLOCK {
            whole[lane] = (block[lane] * factor + ROUNDS).to_bits() as i32 - ROUNDS.to_bits() as i32;
        }
        for lane in 0..BLOCK {
            let low = ((whole[lane] + 64) & 127) - 64;
            digits[lane] = ((whole[lane] - low) >> 7) as i8;
            digits[BLOCK + lane] = low as i8;
            all = all.wrapping_add(whole[lane]);
        }
        *sum = all;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn digits(row: &[f32]) -> (Vec<[i8; 64]>, Vec<f32>, Vec<i32>) {
        let blocks = row.len() / BLOCK;
        let (mut digits, mut scales, mut sums) = (vec![[0; 64]; blocks], vec![0.0; blocks], vec![0; blocks]);
        split(row, &mut Digits { digits: &mut digits, scales: &mut scales, sums: &mut sums });
        (digits, scales, sums)
    }

    proptest! {
        #[test]
        fn a_number_comes_back_to_one_part_in_30000_of_its_block(
            row in prop::collection::vec(prop_oneof![-1.0f32..1.0, -1e6f32..1e6, Just(0.0f32)], 64),
        ) {
            let (digits, scales, sums) = digits(&row);
            for (at, block) in row.chunks(BLOCK).enumerate() {
                let most = block.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
                let whole: Vec<i32> = (0..BLOCK).map(|k| 128 * i32::from(digits[at][k]) + i32::from(digits[at][BLOCK + k])).collect();
                prop_assert_eq!(whole.iter().sum::<i32>(), sums[at]);
                for (x, whole) in block.iter().zip(whole) {
                    prop_assert!(digits[at].iter().all(|digit| *digit > i8::MIN));
                    prop_assert!((x - whole as f32 * scales[at]).abs() <= most / 30_000.0);
                }
            }
        }
    }

    #[test]
    fn a_block_that_is_no_number_stays_none() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut row = vec![1.0; 64];
            row[40] = bad;
            let (_, scales, _) = digits(&row);
            assert!(scales[0].is_finite() && !scales[1].is_finite());
        }
        let (digits, scales, _) = digits(&[1e-38; 32]);
        assert_eq!((digits[0], scales[0] < 1e-40), ([0; 64], true));
    }
}
