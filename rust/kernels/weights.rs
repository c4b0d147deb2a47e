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

/// Blocks of tiles that one thread arranges sooner than it starts another.
const SMALL: usize = 512;

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, |threads| threads.get().min(4))
}

/// A matrix as it comes in.
#[derive(Clone, Copy)]
struct Source<'a> {
    bits: usize,
    blocks: usize,
    codes: &'a [u8],
    scales: &'a [f32],
    zeros: Option<&'a [u8]>,
}

impl Source<'_> {
    /// Arranges the tiles from `first` on, as many as there is room for.
    fn tiles(self, first: usize, into_codes: &mut [Vector], into_scales: &mut [[f32; TILE]], into_zeros: &mut [[u8; TILE]]) {
        let Self { bits, blocks, codes, scales, zeros } = self;
        let (code_bytes, zero_bytes) = (BLOCK * bits / 8, (blocks * bits).div_ceil(8));
        for (at, ((vectors, into_scales), into_zeros)) in into_codes.chunks_exact_mut(bits).zip(into_scales).zip(into_zeros).enumerate() {
            let (row, block) = ((first + at / blocks) * TILE, at % blocks);
            for lane in 0..TILE {
                let place = (row + lane) * blocks + block;
                into_scales[lane] = scales[place];
                if let Some(zeros) = zeros {
                    let zeros = &zeros[(row + lane) * zero_bytes..][..zero_bytes];
                    into_zeros[lane] = if bits == 8 { zeros[block] } else { zeros[block / 2] >> (4 * (block % 2)) & 15 };
                }
                let fours = codes[place * code_bytes..][..code_bytes].as_chunks::<4>().0;
                for (vector, &four) in vectors.iter_mut().zip(fours) {
                    vector.as_chunks_mut::<4>().0[lane] = if bits == 8 { four } else { halves(four) };
                }
            }
        }
    }
}

/// Eight columns are four bytes of two neighbours; here the first four of them are low halves and the others high ones.
#[inline(always)]
fn halves(four: [u8; 4]) -> [u8; 4] {
    let pairs = u32::from_le_bytes(four);
    let (low, high) = (pairs & 0x0f0f_0f0f, pairs >> 4 & 0x0f0f_0f0f);
    // Columns 0 2 4 6 and 1 3 5 7, put in order: 0 1 2 3 and 4 5 6 7.
    let first = low & 0xff | (high & 0xff) << 8 | (low & 0xff00) << 8 | (high & 0xff00) << 16;
    let second = low >> 16 & 0xff | (high >> 16 & 0xff) << 8 | (low >> 24) << 16 | (high >> 24) << 24;
    (first | second << 4).to_le_bytes()
}

impl Weights {
    /// Arranges a matrix of `rows` (whole tiles) and `blocks` blocks.
    ///
    /// # Errors
    /// Sizes that are not those of the tensors.
    pub(crate) fn arrange(
        bits: usize,
        rows: usize,
        blocks: usize,
        codes: &[u8],
        scales: &[f32],
        zeros: Option<&[u8]>,
    ) -> Result<Self, String> {
        let (code_bytes, zero_bytes) = (BLOCK * bits / 8, (blocks * bits).div_ceil(8));
        if blocks == 0
            || !matches!(bits, 4 | 8)
            || !rows.is_multiple_of(TILE)
            || codes.len() != rows * blocks * code_bytes
            || scales.len() != rows * blocks
            || zeros.is_some_and(|zeros| zeros.len() != rows * zero_bytes)
        {
            return Err(format!(
                "{rows} rows of {blocks} blocks of {bits} bits, {} bytes of codes and {} scales",
                codes.len(),
                scales.len()
            ));
        }
        let source = Source { bits, blocks, codes, scales, zeros };
        let count = rows / TILE * blocks;
        let mut made = Self {
            bits,
            rows,
            blocks,
            codes: vec![[0; 64]; count * bits],
            scales: vec![[0.0; TILE]; count],
            zeros: vec![[1 << (bits - 1); TILE]; count],
        };
        // Half of the time that a model takes to load is spent here, on pages that are touched for the first time.
        let tiles = (rows / TILE).div_ceil(if count < SMALL { 1 } else { threads() }).max(1);
        let parts = made
            .codes
            .chunks_mut(tiles * blocks * bits)
            .zip(made.scales.chunks_mut(tiles * blocks))
            .zip(made.zeros.chunks_mut(tiles * blocks));
        std::thread::scope(|scope| {
            let mut last = None;
            for (part, ((codes, scales), zeros)) in parts.enumerate() {
                let work = move || source.tiles(part * tiles, codes, scales, zeros);
                // The last part is this thread's own.
                if (part + 1) * tiles * TILE >= rows {
                    last = Some(work);
                } else {
                    scope.spawn(work);
                }
            }
            if let Some(mut work) = last {
                work();
            }
        });
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
