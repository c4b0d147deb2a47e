//! The operator of products: constants that are arranged once, rows that are split into digits, and tiles for each thread. The arithmetic is in [`crate::product`].

use std::cell::RefCell;
use std::ffi::CStr;

use super::{ALONE, each_row};
use crate::abi::{BYTES, FLOATS, MAYBE_BYTES, Node, Operator, Pass, Shared, Slot};
use crate::digits::{BLOCK, Digits, split};
use crate::pages;
use crate::product::{self, Rows, Unit};
use crate::weights::{TILE, Weights};

/// `x` times a matrix in codes, as MatMulNBits has it, with activations of 15 bits a block of 32.
///
/// Inputs: `x` `[…, columns]`; constants `codes` uint8 `[rows, columns / 32, 32 * bits / 8]`, `scales` `[rows, columns / 32]`, `zeros` uint8, packed like the codes, or left out, which is the
/// middle. Output: `[…, rows]`. Attributes: `bits` (4 or 8), `K` (columns), `N` (rows).
#[derive(Debug)]
pub struct Product {
    weights: Weights,
    unit: Unit,
}

/// Tiles of one unit of work: their weights stay in the nearest cache while rows pass by.
const TILES: usize = 2;
/// Rows of one unit of work.
const PASSING: usize = 16 * product::ROWS;

/// The rows of a pass in digits, with their scales and sums.
type InDigits = (Vec<[i8; 2 * BLOCK]>, Vec<f32>, Vec<i32>);

thread_local! {
    static DIGITS: RefCell<InDigits> = const { RefCell::new((Vec::new(), Vec::new(), Vec::new())) };
}

impl Operator for Product {
    const NAME: &'static CStr = c"Product";
    const INPUTS: &'static [Slot] = &[FLOATS, BYTES, FLOATS, MAYBE_BYTES];
    const OUTPUTS: &'static [Slot] = &[FLOATS];

    fn create(node: &Node) -> Result<Self, String> {
        let (bits, columns, rows) = (node.integer(c"bits")?, node.integer(c"K")?, node.integer(c"N")?);
        let unit = Unit::best(bits).ok_or("this processor multiplies no bytes")?;
        let codes = node.constant::<u8>(1)?.ok_or("the codes are no constant")?;
        let scales = node.constant::<f32>(2)?.ok_or("the scales are no constant")?;
        let zeros = if node.inputs()? > 3 { Some(node.constant::<u8>(3)?.ok_or("the zero points are no constant")?) } else { None };
        if !columns.is_multiple_of(BLOCK) {
            return Err(format!("{columns} columns"));
        }
        let weights = Weights::arrange(bits, rows, columns / BLOCK, codes.data, scales.data, zeros.map(|zeros| zeros.data))?;
        // What came in is read once more only where rows of an embedding are picked.
        pages::unneeded(codes.data);
        Ok(Self { weights, unit })
    }

    fn compute(&self, pass: &Pass<'_>) -> Result<(), String> {
        let x = pass.needed::<f32>(0)?;
        let (count, columns) = x.rows_and_columns();
        let (blocks, width) = (self.weights.blocks, self.weights.rows);
        if columns != blocks * BLOCK {
            return Err(format!("rows of {columns} numbers for {} columns", blocks * BLOCK));
        }
        let mut sizes = x.dims.clone();
        if let Some(last) = sizes.last_mut() {
            *last = width;
        }
        let out = pass.wanted(0, &sizes)?;
        DIGITS.with_borrow_mut(|(digits, scales, sums)| {
            digits.resize(count * blocks, [0; 2 * BLOCK]);
            scales.resize(count * blocks, 0.0);
            sums.resize(count * blocks, 0);
            let (all_digits, all_scales, all_sums) = (Shared::of(digits), Shared::of(scales), Shared::of(sums));
            each_row(pass, count, count * columns <= ALONE, |row| {
                let at = row * blocks;
                // SAFETY: each unit has a row of its own.
                let mut into = unsafe {
                    Digits { digits: all_digits.part(at, blocks), scales: all_scales.part(at, blocks), sums: all_sums.part(at, blocks) }
                };
                split(&x.data[row * columns..(row + 1) * columns], &mut into);
            })?;
            let rows = Rows { digits, scales, sums };
            let (strips, passes) = (self.weights.tiles().div_ceil(TILES), count.div_ceil(PASSING));
            pass.parallel(strips * passes, |unit| {
                let (strip, passing) = (unit / passes, unit % passes);
                let mut made = [[0.0; TILE]; product::ROWS];
                for tile in strip * TILES..((strip + 1) * TILES).min(self.weights.tiles()) {
                    let end = ((passing + 1) * PASSING).min(count);
                    for first in (passing * PASSING..end).step_by(product::ROWS) {
                        let some = product::ROWS.min(end - first);
                        self.unit.tile(&self.weights, tile, rows, first, some, &mut made);
                        for (row, made) in made.iter().enumerate().take(some) {
                            // SAFETY: each unit writes to the rows and columns of its own.
                            unsafe { out.part((first + row) * width + tile * TILE, TILE) }.copy_from_slice(made);
                        }
                    }
                }
            })
        })
    }
}
