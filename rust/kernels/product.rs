//! Products of rows in two digits with weights in codes: whole numbers within a block, floats from block to block, in one order.
//!
//! `y = Σ over blocks of scale_w * scale_x * (Σ code * whole - zero * Σ whole)`: what stands in the brackets is exact, so a row's result is the same to the bit whatever is
//! beside it, and whichever of the functions here computes it. Which processors are known is in [`Unit::best`].

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m128i, __m256i, __m512i, _mm_loadl_epi64, _mm_loadu_si128, _mm256_add_epi16, _mm256_add_epi32, _mm256_and_si256, _mm256_cvtepi32_ps,
    _mm256_cvtepu8_epi32, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_madd_epi16, _mm256_maddubs_epi16, _mm256_mul_ps,
    _mm256_mullo_epi32, _mm256_set1_epi8, _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps, _mm256_setzero_si256,
    _mm256_slli_epi32, _mm256_srli_epi16, _mm256_storeu_ps, _mm256_sub_epi32, _mm512_add_epi32, _mm512_and_si512, _mm512_cvtepi32_ps,
    _mm512_cvtepu8_epi32, _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mul_ps, _mm512_mullo_epi32,
    _mm512_set1_epi8, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512, _mm512_slli_epi32, _mm512_srli_epi16,
    _mm512_storeu_ps, _mm512_sub_epi32,
};

use super::digits::BLOCK;
use super::weights::{TILE, Weights};

/// Rows that are computed together with one reading of the weights.
pub(crate) const ROWS: usize = 8;

/// Rows in digits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows<'a> {
    /// `[row, block]`.
    pub(crate) digits: &'a [[i8; 2 * BLOCK]],
    /// `[row, block]`.
    pub(crate) scales: &'a [f32],
    /// `[row, block]`.
    pub(crate) sums: &'a [i32],
}

/// What computes products.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // Others have none but the one that tests compare with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    /// Sums of four products of bytes in one instruction, sixteen at a time (AVX-512 VNNI).
    Vnni,
    /// Sums of two products of bytes, sixteen at a time (AVX2); codes of 8 bits would overflow.
    Avx2,
    /// One number at a time.
    #[cfg_attr(not(test), allow(dead_code))]
    Plain,
}

impl Unit {
    /// The fastest one of this processor for codes of so many bits; `None` where the runtime's own product is faster.
    pub(crate) fn best(bits: usize) -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512vnni") && is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512f") {
                return Some(Self::Vnni);
            }
            if bits == 4 && is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                return Some(Self::Avx2);
            }
        }
        let _ = bits;
        None
    }

    /// Tile `tile` of the rows `first..first + count` (at most [`ROWS`]) of the product: `TILE` numbers a row, `out` is the row after row, `TILE` each.
    pub(crate) fn tile(self, weights: &Weights, tile: usize, rows: Rows<'_>, first: usize, count: usize, out: &mut [[f32; TILE]; ROWS]) {
        #[cfg(target_arch = "x86_64")]
        macro_rules! counts {
            ($function:ident, $bits:literal) => {
                match count {
                    // SAFETY: `best` has found that the processor has what the function is compiled for.
                    1 => unsafe { $function::<1, $bits>(weights, tile, rows, first, out) },
                    2 => unsafe { $function::<2, $bits>(weights, tile, rows, first, out) },
                    3 => unsafe { $function::<3, $bits>(weights, tile, rows, first, out) },
                    4 => unsafe { $function::<4, $bits>(weights, tile, rows, first, out) },
                    5 => unsafe { $function::<5, $bits>(weights, tile, rows, first, out) },
                    6 => unsafe { $function::<6, $bits>(weights, tile, rows, first, out) },
                    7 => unsafe { $function::<7, $bits>(weights, tile, rows, first, out) },
                    8 => unsafe { $function::<8, $bits>(weights, tile, rows, first, out) },
                    count => unreachable!("{count} rows of a tile"),
                }
            };
        }
        match (self, weights.bits) {
            #[cfg(target_arch = "x86_64")]
            (Self::Vnni, 4) => counts!(vnni, 4),
            #[cfg(target_arch = "x86_64")]
            (Self::Vnni, _) => counts!(vnni, 8),
            #[cfg(target_arch = "x86_64")]
            (Self::Avx2, 4) => counts!(avx2, 4),
            _ => plain(weights, tile, rows, first, count, out),
        }
    }
}

/// The same, one number at a time.
fn plain(weights: &Weights, tile: usize, rows: Rows<'_>, first: usize, count: usize, out: &mut [[f32; TILE]; ROWS]) {
    for (row, out) in out.iter_mut().enumerate().take(count) {
        out.fill(0.0);
        for block in 0..weights.blocks {
            let at = (first + row) * weights.blocks + block;
            let (codes, scales, zeros) = weights.block(tile, block);
            for (lane, out) in out.iter_mut().enumerate() {
                let mut sum = -(i32::from(zeros[lane]) * rows.sums[at]);
                for column in 0..BLOCK {
                    let whole = 128 * i32::from(rows.digits[at][column]) + i32::from(rows.digits[at][BLOCK + column]);
                    let code = match weights.bits {
                        8 => codes[column / 4][4 * lane + column % 4],
                        _ => codes[column / 8][4 * lane + column % 4] >> (column / 4 % 2 * 4) & 15,
                    };
                    sum += i32::from(code) * whole;
                }
                *out = (sum as f32).mul_add(scales[lane] * rows.scales[at], *out);
            }
        }
    }
}

/// Four digits from column `4 * four` on, as one number to spread over a vector.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn four(digits: &[i8; 2 * BLOCK], four: usize) -> i32 {
    let [a, b, c, d] = digits.as_chunks::<4>().0[four];
    i32::from_le_bytes([a as u8, b as u8, c as u8, d as u8])
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn vnni<const COUNT: usize, const BITS: usize>(
    weights: &Weights,
    tile: usize,
    rows: Rows<'_>,
    first: usize,
    out: &mut [[f32; TILE]; ROWS],
) {
    let mut sums = [_mm512_setzero_ps(); COUNT];
    let low_half = _mm512_set1_epi8(15);
    for block in 0..weights.blocks {
        let (codes, scales, zeros) = weights.block(tile, block);
        let mut vectors = [_mm512_setzero_si512(); 8];
        // SAFETY: each pointer is to an array as long as is read.
        let (scale, zero) = unsafe {
            for (at, codes) in codes.iter().enumerate().take(BITS) {
                let loaded = _mm512_loadu_si512(codes.as_ptr().cast::<__m512i>());
                if BITS == 8 {
                    vectors[at] = loaded;
                } else {
                    vectors[2 * at] = _mm512_and_si512(loaded, low_half);
                    vectors[2 * at + 1] = _mm512_and_si512(_mm512_srli_epi16::<4>(loaded), low_half);
                }
            }
            (_mm512_loadu_ps(scales.as_ptr()), _mm512_cvtepu8_epi32(_mm_loadu_si128(zeros.as_ptr().cast::<__m128i>())))
        };
        for (row, sum) in sums.iter_mut().enumerate() {
            let at = (first + row) * weights.blocks + block;
            let digits = &rows.digits[at];
            let (mut high, mut low) = (_mm512_setzero_si512(), _mm512_setzero_si512());
            for (column, vector) in vectors.iter().enumerate() {
                high = _mm512_dpbusd_epi32(high, *vector, _mm512_set1_epi32(four(digits, column)));
                low = _mm512_dpbusd_epi32(low, *vector, _mm512_set1_epi32(four(digits, 8 + column)));
            }
            let whole = _mm512_add_epi32(_mm512_slli_epi32::<7>(high), low);
            let whole = _mm512_sub_epi32(whole, _mm512_mullo_epi32(zero, _mm512_set1_epi32(rows.sums[at])));
            *sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), _mm512_mul_ps(scale, _mm512_set1_ps(rows.scales[at])), *sum);
        }
    }
    for (out, sum) in out.iter_mut().zip(sums) {
        // SAFETY: the array is as long as the vector.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), sum) };
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<const COUNT: usize, const BITS: usize>(
    weights: &Weights,
    tile: usize,
    rows: Rows<'_>,
    first: usize,
    out: &mut [[f32; TILE]; ROWS],
) {
    let (low_half, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
    for half in 0..2 {
        let mut sums = [_mm256_setzero_ps(); COUNT];
        for block in 0..weights.blocks {
            let (codes, scales, zeros) = weights.block(tile, block);
            let mut vectors = [_mm256_setzero_si256(); 8];
            // SAFETY: each pointer is to an array at least as long as is read.
            let (scale, zero) = unsafe {
                for (at, codes) in codes.iter().enumerate().take(4) {
                    let loaded = _mm256_loadu_si256(codes.as_ptr().add(32 * half).cast::<__m256i>());
                    vectors[2 * at] = _mm256_and_si256(loaded, low_half);
                    vectors[2 * at + 1] = _mm256_and_si256(_mm256_srli_epi16::<4>(loaded), low_half);
                }
                let zeros = _mm_loadl_epi64(zeros.as_ptr().add(8 * half).cast::<__m128i>());
                (_mm256_loadu_ps(scales.as_ptr().add(8 * half)), _mm256_cvtepu8_epi32(zeros))
            };
            for (row, sum) in sums.iter_mut().enumerate() {
                let at = (first + row) * weights.blocks + block;
                let digits = &rows.digits[at];
                // Eight sums of two products of at most 15 * 127 fit 16 bits.
                let (mut high, mut low) = (_mm256_setzero_si256(), _mm256_setzero_si256());
                for (column, vector) in vectors.iter().enumerate() {
                    high = _mm256_add_epi16(high, _mm256_maddubs_epi16(*vector, _mm256_set1_epi32(four(digits, column))));
                    low = _mm256_add_epi16(low, _mm256_maddubs_epi16(*vector, _mm256_set1_epi32(four(digits, 8 + column))));
                }
                let (high, low) = (_mm256_madd_epi16(high, ones), _mm256_madd_epi16(low, ones));
                let whole = _mm256_add_epi32(_mm256_slli_epi32::<7>(high), low);
                let whole = _mm256_sub_epi32(whole, _mm256_mullo_epi32(zero, _mm256_set1_epi32(rows.sums[at])));
                *sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole), _mm256_mul_ps(scale, _mm256_set1_ps(rows.scales[at])), *sum);
            }
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            // SAFETY: half of the array is as long as the vector.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr().add(8 * half), sum) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digits::{Digits, split};
    use proptest::prelude::*;

    /// A matrix and rows of pseudo-random numbers, and all products by each unit that there is.
    fn products(bits: usize, tiles: usize, blocks: usize, count: usize, seed: u64, extreme: bool) -> Vec<(Unit, Vec<f32>)> {
        let mut state = seed | 1;
        let mut next = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        let rows = tiles * TILE;
        let byte = |next: &mut dyn FnMut() -> u64| if extreme { 0xff } else { next() as u8 };
        let codes: Vec<u8> = (0..rows * blocks * 4 * bits).map(|_| byte(&mut next)).collect();
        let zeros: Vec<u8> = (0..rows * (blocks * bits).div_ceil(8)).map(|_| if extreme { 0 } else { next() as u8 }).collect();
        let float = |next: &mut dyn FnMut() -> u64| (next() % 2001) as f32 / 1000.0 - 1.0;
        let scales: Vec<f32> = (0..rows * blocks).map(|_| float(&mut next)).collect();
        let x: Vec<f32> = (0..count * blocks * BLOCK).map(|_| if extreme { 1.0 } else { float(&mut next) }).collect();
        let weights = Weights::arrange(bits, rows, blocks, &codes, &scales, Some(&zeros)).unwrap();
        let (mut digits, mut row_scales, mut sums) = (vec![[0; 64]; count * blocks], vec![0.0; count * blocks], vec![0; count * blocks]);
        split(&x, &mut Digits { digits: &mut digits, scales: &mut row_scales, sums: &mut sums });
        let in_digits = Rows { digits: &digits, scales: &row_scales, sums: &sums };

        let value = |row: usize, column: usize| {
            let (block, within) = (column / BLOCK, column % BLOCK);
            let bytes = &codes[(row * blocks + block) * 4 * bits..];
            let zeros = &zeros[row * (blocks * bits).div_ceil(8)..];
            let (code, zero) = match bits {
                8 => (bytes[within], zeros[block]),
                _ => (bytes[within / 2] >> (4 * (within % 2)) & 15, zeros[block / 2] >> (4 * (block % 2)) & 15),
            };
            f64::from(scales[row * blocks + block]) * (f64::from(code) - f64::from(zero))
        };
        let mut made = Vec::new();
        for unit in
            [Some(Unit::Plain), Unit::best(bits), (bits == 4).then(|| Unit::best(4).map(|_| Unit::Avx2)).flatten()].into_iter().flatten()
        {
            let mut all = vec![0.0; count * rows];
            for tile in 0..tiles {
                for first in (0..count).step_by(ROWS) {
                    let mut out = [[f32::NAN; TILE]; ROWS];
                    let some = ROWS.min(count - first);
                    unit.tile(&weights, tile, in_digits, first, some, &mut out);
                    for (row, out) in out.iter().enumerate().take(some) {
                        all[(first + row) * rows + tile * TILE..][..TILE].copy_from_slice(out);
                    }
                }
            }
            for row in 0..count {
                for column in 0..rows {
                    let terms = (0..blocks * BLOCK).map(|k| (f64::from(x[row * blocks * BLOCK + k]), value(column, k)));
                    let (exact, size) = terms.fold((0.0, 0.0), |(sum, size), (x, w)| (sum + x * w, size + (x * w).abs() + w.abs() / 300.0));
                    let got = f64::from(all[row * rows + column]);
                    assert!((got - exact).abs() <= 1e-4 * size + 1e-6, "{unit:?} {bits} bits, row {row}, column {column}: {got} {exact}");
                }
            }
            made.push((unit, all));
        }
        made
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn all_units_give_the_same_bits_and_the_right_ones(
            bits in prop_oneof![Just(4_usize), Just(8)], tiles in 1_usize..4, blocks in 1_usize..6, count in 1_usize..20, seed: u64,
        ) {
            let made = products(bits, tiles, blocks, count, seed, false);
            for pair in made.windows(2) {
                prop_assert_eq!(&pair[0].1, &pair[1].1, "{:?} and {:?}", pair[0].0, pair[1].0);
            }
        }
    }

    #[test]
    fn the_largest_numbers_do_not_overflow() {
        for bits in [4, 8] {
            let made = products(bits, 1, 2, 9, 7, true);
            assert!(made.windows(2).all(|pair| pair[0].1 == pair[1].1));
        }
    }
}
