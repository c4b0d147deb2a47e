//! What the bytes of a tensor's row mean: floats, or codes with a scale (and a minimum) for each block.
//!
//! A row at a time, into buffers the caller keeps. Which rows, and where they go, is the caller's business; what is inside a
//! super-block of 256 is that of `superblocks`.
//!
//! Source: the block structures of <https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h>.

use half::{bf16, f16};

use super::{Kind, superblocks};

/// What an index of `IQ4_NL` and `IQ4_XS` stands for, moved by 128.
pub(super) const NON_LINEAR: [u8; 16] = [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241];

pub(super) fn half_at(bytes: &[u8], at: usize) -> f32 {
    match bytes.get(at..at + 2) {
        Some(&[low, high]) => f16::from_le_bytes([low, high]).to_f32(),
        _ => f32::NAN,
    }
}

/// Bytes in a row of `columns` elements; 0 for a type that is not read.
pub fn row_bytes(kind: Kind, columns: usize) -> usize {
    match kind.block() {
        Some((elements, size)) => columns / elements as usize * size as usize,
        None => 0,
    }
}

/// A quantized row, taken apart: `w = scale * code + minimum`, exactly the file's numbers. How many elements share a scale is
/// that of [`Kind::coding`].
#[derive(Debug, Default)]
pub struct Row {
    /// One code an element.
    pub codes: Vec<u8>,
    /// One scale a block.
    pub scales: Vec<f32>,
    /// One minimum a block.
    pub minimums: Vec<f32>,
}

impl Row {
    /// Takes a row apart; types that have no [`Kind::coding`] leave it empty.
    pub fn read(&mut self, kind: Kind, row: &[u8]) {
        self.codes.clear();
        self.scales.clear();
        self.minimums.clear();
        let (Some(coding), Some((_, size))) = (kind.coding(), kind.block()) else {
            return;
        };
        for block in row.chunks_exact(size as usize) {
            match kind {
                Kind::Q2K | Kind::Q3K | Kind::Q4K | Kind::Q5K | Kind::Q6K | Kind::Iq4Xs => superblocks::read(kind, block, self),
                _ => self.read_block(kind, block),
            }
        }
        if let Some(zero) = coding.zero {
            let zero = f32::from(zero);
            self.minimums.extend(self.scales.iter().map(|scale| -zero * scale));
        }
    }

    fn read_block(&mut self, kind: Kind, block: &[u8]) {
        self.scales.push(half_at(block, 0));
        let header = if matches!(kind, Kind::Q4_1 | Kind::Q5_1) { 4 } else { 2 };
        if header == 4 {
            self.minimums.push(half_at(block, 2));
        }
        let rest = block.get(header..).unwrap_or_default();
        match kind {
            Kind::Q8_0 => self.codes.extend(rest.iter().map(|code| code ^ 0x80)),
            Kind::Q5_0 | Kind::Q5_1 => {
                let Some((high, packed)) = rest.split_first_chunk() else { return };
                let high = u32::from_le_bytes(*high);
                // Q5_0's 0 is the code 16, and is to be 128.
                let moved = if kind == Kind::Q5_0 { 112 } else { 0 };
                self.codes.extend(nibbles(packed).enumerate().map(|(at, low)| (low | ((high >> at & 1) as u8) << 4) + moved));
            }
            Kind::Iq4Nl => self.codes.extend(nibbles(rest).map(|index| NON_LINEAR[usize::from(index)])),
            _ => self.codes.extend(nibbles(rest)),
        }
    }
}

/// Four-bit numbers of a block: the low halves of its bytes are its first half, the high ones its second.
pub(super) fn nibbles(packed: &[u8]) -> impl Iterator<Item = u8> + '_ {
    packed.iter().map(|byte| byte & 15).chain(packed.iter().map(|byte| byte >> 4))
}

/// Appends a row of any type that is read, as 32-bit floats.
pub fn dequantize(kind: Kind, row: &[u8], into: &mut Vec<f32>) {
    match kind {
        Kind::F32 => into.extend(row.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes))),
        Kind::F16 => into.extend(row.as_chunks().0.iter().map(|bytes| f16::from_le_bytes(*bytes).to_f32())),
        Kind::Bf16 => into.extend(row.as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32())),
        _ => {
            let Some(coding) = kind.coding() else { return };
            let mut parts = Row::default();
            parts.read(kind, row);
            // Scale times code needs no more than the 24 bits of a float, so each value is rounded once at most.
            for ((codes, &scale), &minimum) in parts.codes.chunks_exact(coding.block).zip(&parts.scales).zip(&parts.minimums) {
                match coding.zero {
                    Some(zero) => into.extend(codes.iter().map(|code| scale * (f32::from(*code) - f32::from(zero)))),
                    None => into.extend(codes.iter().map(|code| scale * f32::from(*code) + minimum)),
                }
            }
        }
    }
}
