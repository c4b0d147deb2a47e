//! What the bytes of a tensor's row mean: floats, or blocks of 32 codes with a scale (and a minimum).
//!
//! A row at a time, into buffers the caller keeps. Which rows, and where they go, is the caller's business.

use half::{bf16, f16};

use super::Kind;

/// Elements in a quantized block.
pub const BLOCK: usize = 32;

fn half_at(bytes: &[u8], at: usize) -> f32 {
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

/// A row of four-bit blocks, taken apart: `w = scale * code + minimum`.
#[derive(Debug, Default)]
pub struct Row4 {
    /// One code (0 to 15) an element.
    pub codes: Vec<u8>,
    /// One scale a block.
    pub scales: Vec<f32>,
    /// One minimum a block.
    pub minimums: Vec<f32>,
}

impl Row4 {
    /// Takes a row of `Q4_0` or `Q4_1` apart; other types leave it empty.
    pub fn read(&mut self, kind: Kind, row: &[u8]) {
        self.codes.clear();
        self.scales.clear();
        self.minimums.clear();
        let (size, header) = match kind {
            Kind::Q4_0 => (18, 2),
            Kind::Q4_1 => (20, 4),
            _ => return,
        };
        for block in row.chunks_exact(size) {
            let scale = half_at(block, 0);
            self.scales.push(scale);
            self.minimums.push(if kind == Kind::Q4_1 { half_at(block, 2) } else { -8.0 * scale });
            // The low nibbles are the block's first half, the high ones its second.
            let packed = block.get(header..).unwrap_or_default();
            self.codes.extend(packed.iter().map(|byte| byte & 15));
            self.codes.extend(packed.iter().map(|byte| byte >> 4));
        }
    }
}

/// Appends the codes of a `Q8_0` row, moved by 128 so that they are unsigned, and its scales (`w = scale * (code - 128)`).
pub fn read_row8(row: &[u8], codes: &mut Vec<u8>, scales: &mut Vec<f32>) {
    for block in row.chunks_exact(34) {
        scales.push(half_at(block, 0));
        codes.extend(block.iter().skip(2).map(|code| code ^ 0x80));
    }
}

/// Appends a row of any type that is read, as 32-bit floats.
pub fn dequantize(kind: Kind, row: &[u8], into: &mut Vec<f32>) {
    match kind {
        Kind::F32 => into.extend(row.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes))),
        Kind::F16 => into.extend(row.as_chunks().0.iter().map(|bytes| f16::from_le_bytes(*bytes).to_f32())),
        Kind::Bf16 => into.extend(row.as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32())),
        Kind::Q4_0 | Kind::Q4_1 => {
            let mut parts = Row4::default();
            parts.read(kind, row);
            for (block, codes) in parts.codes.chunks_exact(BLOCK).enumerate() {
                let (scale, minimum) = (parts.scales[block], parts.minimums[block]);
                into.extend(codes.iter().map(|code| scale * f32::from(*code) + minimum));
            }
        }
        Kind::Q8_0 => {
            for block in row.chunks_exact(34) {
                let scale = half_at(block, 0);
                into.extend(block.iter().skip(2).map(|code| scale * f32::from(code.cast_signed())));
            }
        }
        Kind::Other(_) => {}
    }
}
