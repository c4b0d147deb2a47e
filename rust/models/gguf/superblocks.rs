//! Takes super-blocks of 256 elements apart: the K-quants and `IQ4_XS`, whose blocks have small whole scales of their own.
//!
//! A block's scale is the super-block's 16-bit float times its own whole number of at most 8 bits, so 32-bit floats hold it
//! exactly. A block that comes here is whole: rows are cut by `Kind::block`, and parsing has refused rows that end within one.
//!
//! Source: the block structures of <https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h>.

use super::Kind;
use super::blocks::{NON_LINEAR, Row, half_at, nibbles};

/// Elements of a super-block.
const ELEMENTS: usize = 256;

/// Appends what a super-block holds. Minimums are appended for those types that have them.
pub(super) fn read(kind: Kind, block: &[u8], into: &mut Row) {
    match kind {
        Kind::Q2K => two_bits(block, into),
        Kind::Q3K => three_bits(block, into),
        Kind::Q4K | Kind::Q5K => four_or_five_bits(kind, block, into),
        Kind::Q6K => six_bits(block, into),
        Kind::Iq4Xs => non_linear(block, into),
        _ => {}
    }
}

/// Cuts `sizes` bytes off, one after the other.
fn parts<const N: usize>(mut block: &[u8], sizes: [usize; N]) -> [&[u8]; N] {
    sizes.map(|size| {
        let (part, rest) = block.split_at_checked(size).unwrap_or_default();
        block = rest;
        part
    })
}

/// Element `at` of 2-bit numbers: of each half of 128 the four quarters lie above one another in 32 bytes.
fn pair(packed: &[u8], at: usize) -> u8 {
    packed[at / 128 * 32 + at % 32] >> (at % 128 / 32 * 2) & 3
}

/// 16 bytes with scale (low half) and minimum, 64 bytes of codes, the scale's and the minimum's float.
fn two_bits(block: &[u8], into: &mut Row) {
    let [steps, codes, _] = parts(block, [16, 64, 4]);
    let (scale, minimum) = (half_at(block, 80), half_at(block, 82));
    into.scales.extend(steps.iter().map(|step| scale * f32::from(step & 15)));
    into.minimums.extend(steps.iter().map(|step| -(minimum * f32::from(step >> 4))));
    into.codes.extend((0..ELEMENTS).map(|at| pair(codes, at)));
}

/// 32 bytes with the highest bit of the codes, 64 with the lower two, 12 with 16 scales of 6 bits, a float.
fn three_bits(block: &[u8], into: &mut Row) {
    let [high, low, steps, _] = parts(block, [32, 64, 12, 2]);
    let scale = half_at(block, 108);
    into.scales.extend((0..16).map(|at| {
        let lower = steps[at % 8] >> (at / 8 * 4) & 15;
        let upper = steps[8 + at % 4] >> (at / 4 * 2) & 3;
        scale * (f32::from(lower | upper << 4) - 32.0)
    }));
    into.codes.extend((0..ELEMENTS).map(|at| pair(low, at) | (high[at % 32] >> (at / 32) & 1) << 2));
}

/// Two floats, 12 bytes with 8 scales and 8 minimums of 6 bits, for `Q5_K` 32 bytes with the codes' highest bit, 128 with the
/// lower four.
fn four_or_five_bits(kind: Kind, block: &[u8], into: &mut Row) {
    let [_, steps, high, low] = parts(block, [4, 12, if kind == Kind::Q5K { 32 } else { 0 }, 128]);
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    for at in 0..8 {
        let (whole_scale, whole_minimum) = if at < 4 {
            (steps[at] & 63, steps[at + 4] & 63)
        } else {
            (steps[at + 4] & 15 | steps[at - 4] >> 6 << 4, steps[at + 4] >> 4 | steps[at] >> 6 << 4)
        };
        into.scales.push(scale * f32::from(whole_scale));
        into.minimums.push(-(minimum * f32::from(whole_minimum)));
    }
    // Two blocks of 32 share 32 bytes; the bit of a code is in the byte of its place and at the position of its block.
    for (at, packed) in low.chunks_exact(32).enumerate() {
        let first = into.codes.len();
        into.codes.extend(nibbles(packed));
        for (place, code) in into.codes[first..].iter_mut().enumerate() {
            *code |= high.get(place % 32).map_or(0, |bits| (bits >> (2 * at + place / 32) & 1) << 4);
        }
    }
}

/// 128 bytes with the lower four bits of the codes, 64 with the upper two, 16 signed scales, a float.
fn six_bits(block: &[u8], into: &mut Row) {
    let [low, high, steps, _] = parts(block, [128, 64, 16, 2]);
    let scale = half_at(block, 208);
    into.scales.extend(steps.iter().map(|step| scale * f32::from(step.cast_signed())));
    // Of each half of 128, the first 64 elements are the low halves of 64 bytes, the others the high ones. The code for 0 is
    // 32, and is to be 128.
    into.codes.extend((0..ELEMENTS).map(|at| {
        let lower = low[at / 128 * 64 + at % 64] >> (at % 128 / 64 * 4) & 15;
        (lower | pair(high, at) << 4) + 96
    }));
}

/// A float, 8 scales of 6 bits (2 bytes with the upper two bits of each, 4 with the lower four), 128 bytes of indices.
fn non_linear(block: &[u8], into: &mut Row) {
    let [_, upper, lower, codes] = parts(block, [2, 2, 4, 128]);
    let scale = half_at(block, 0);
    let upper = u16::from(upper[0]) | u16::from(upper[1]) << 8;
    into.scales.extend((0..8).map(|at| {
        let step = lower[at / 2] >> (at % 2 * 4) & 15 | ((upper >> (2 * at) & 3) as u8) << 4;
        scale * (f32::from(step) - 32.0)
    }));
    for packed in codes.chunks_exact(16) {
        into.codes.extend(nibbles(packed).map(|index| NON_LINEAR[usize::from(index)]));
    }
}
