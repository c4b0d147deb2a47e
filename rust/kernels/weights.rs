//! Weights in codes of 4 or 8 bits, arranged so that a vector holds the same four columns of sixteen rows.
//!
//! What comes in is the form of the runtime's MatMulNBits: codes `[rows, blocks, 32 * bits / 8]` with the first of a byte's two in its low half, scales
//! `[rows, blocks]`, zero points `[rows, blocks]` packed like codes, or none, which means the middle.

use super::digits::BLOCK;

/// Rows that are computed together.
pub(crate) const TILE: usize = 16;

/// The codes of a block of a tile: `BYTES` vectors of 64 bytes, or half as many where two codes share one.
pub(crate) type Vector = [u8; 64];

/// A matrix.
#[derive(Debug)]
pub(crate) struct Weights {
    pub(crate) bits: usize,
    pub(crate) rows: usize,
    pub(crate) blocks: usize,
    /// `[tile, block, bits]` vectors. Of vector `v` with 8 bits, byte `4 r + j` is the code of row `r`, column `4 v + j`; with 4 bits its low half is that of column `8 v + j` and its high half
    /// that of `8 v + 4 + j`.
    codes: Vec<Vector>,
    /// `[tile, block, row]`.
    scales: Vec<[f32; TILE]>,
    /// `[tile, block, row]`.
    zeros: Vec<[u8; TILE]>,
}

impl Weights {
    /// Arranges a matrix of `rows` (whole tiles) and `blocks` blocks.
    ///
    /// # Errors
    /// Sizes that are not those of the tensors.
    pub(crate) fn arrange(bits: usize, rows: usize, blocks: usize, codes: &[u8], scales: &[f32], zeros: Option<&[u8]>) -> Result<Self, String> {
        let (code_bytes, zero_bytes) = (BLOCK * bits / 8, (blocks * bits).div_ceil(8));
        if !matches!(bits, 4 | 8)
            || !rows.is_multiple_of(TILE)
            || codes.len() != rows * blocks * code_bytes
            || scales.len() != rows * blocks
            || zeros.is_some_and(|zeros| zeros.len() != rows * zero_bytes)
        {
            return Err(format!("{rows} rows of {blocks} blocks of {bits} bits, {} bytes of codes and {} scales", codes.len(), scales.len()));
        }
        let tiles = rows / TILE;
        let mut made = Self {
            bits,
            rows,
            blocks,
            codes: vec![[0; 64]; tiles * blocks * bits],
            scales: vec![[0.0; TILE]; tiles * blocks],
            zeros: vec![[1 << (bits - 1); TILE]; tiles * blocks],
        };
        for row in 0..rows {
            let (tile, lane) = (row / TILE, row % TILE);
            for block in 0..blocks {
                let at = tile * blocks + block;
                made.scales[at][lane] = scales[row * blocks + block];
                if let Some(zeros) = zeros {
                    let zeros = &zeros[row * zero_bytes..(row + 1) * zero_bytes];
                    made.zeros[at][lane] = if bits == 8 { zeros[block] } else { zeros[block / 2] >> (4 * (block % 2)) & 15 };
                }
                let codes = &codes[(row * blocks + block) * code_bytes..][..code_bytes];
                let vectors = &mut made.codes[at * bits..(at + 1) * bits];
                if bits == 8 {
                    for (vector, four) in vectors.iter_mut().zip(codes.as_chunks::<4>().0) {
                        vector[4 * lane..4 * lane + 4].copy_from_slice(four);
                    }
                } else {
                    // Eight columns are four bytes of two neighbours; here the first four of them are low halves and the others high ones.
                    for (vector, &[a, b, c, d]) in vectors.iter_mut().zip(codes.as_chunks::<4>().0) {
                        let low = [a & 15, a >> 4, b & 15, b >> 4];
                        let high = [c & 15, c >> 4, d & 15, d >> 4];
                        for at in 0..4 {
                            vector[4 * lane + at] = low[at] | high[at] << 4;
                        }
                    }
                }
            }
        }
        Ok(made)
    }

    pub(crate) fn tiles(&self) -> usize {
        self.rows / TILE
    }

    /// Codes, scales and zero points of a block of a tile.
    #[inline(always)]
    pub(crate) fn block(&self, tile: usize, block: usize) -> (&[Vector], &[f32; TILE], &[u8; TILE]) {
        let at = tile * self.blocks + block;
        (&self.codes[at * self.bits..(at + 1) * self.bits], &self.scales[at], &self.zeros[at])
    }
}
