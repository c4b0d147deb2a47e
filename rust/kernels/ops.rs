//! The operators: what they take and give, and how their work is shared among threads.

mod attention;
mod product;

use std::ffi::CStr;

pub use attention::Attention;
pub use product::Product;

use crate::abi::{FLOATS, MAYBE_FLOATS, Node, Operator, Pass, Slot, Table, table};
use crate::attention::knows;
use crate::digits::BLOCK;
use crate::gated::gated_row;
use crate::lanes::Sums;
use crate::norm::norm_row;
use crate::product::Unit;
use crate::weights::TILE;

/// All of them.
pub static ALL: [&Table; 4] = [&ATTENTION, &ADD_NORM, &GATED, &PRODUCT];

static ATTENTION: Table = table::<Attention>();
static ADD_NORM: Table = table::<AddNorm>();
static GATED: Table = table::<Gated>();
static PRODUCT: Table = table::<Product>();

/// Numbers whose norm one thread computes sooner than it wakes another.
const ALONE: usize = 1 << 14;
/// The same where each needs an exponential.
const ALONE_EXP: usize = 1 << 13;

/// Whether [`Attention`] computes heads of so many numbers.
#[must_use]
pub fn head(dim: usize) -> bool {
    knows(dim)
}

/// Whether [`Product`] computes a matrix of so many rows, in codes of `bits` with a scale for each `block` columns, and faster than the runtime.
#[must_use]
pub fn product(bits: usize, block: usize, rows: usize) -> bool {
    block == BLOCK && rows.is_multiple_of(TILE) && matches!(bits, 4 | 8) && Unit::best(bits).is_some()
}

fn sums(node: &Node) -> Result<Sums, String> {
    Ok(Sums { block: node.integer(c"block")?, digits: node.integer(c"digits")? })
}

/// Calls `row` for each of `rows`, on one thread where there is little to do.
fn each_row(pass: &Pass<'_>, rows: usize, alone: bool, row: impl Fn(usize) + Sync) -> Result<(), String> {
    if alone {
        (0..rows).for_each(row);
        return Ok(());
    }
    pass.parallel(rows, row)
}

/// RMS norm, of a sum where a second summand is given.
///
/// Inputs: `residual` `[…, columns]`, `weight` `[columns]`, `added` as `residual` or left out. Outputs: `out`, normed and followed by its block sums; `sum` (`residual + added`), where it
/// is wanted. Attributes: `epsilon`, `block`, `digits`.
#[derive(Debug)]
pub struct AddNorm {
    epsilon: f32,
    sums: Sums,
}

impl Operator for AddNorm {
    const NAME: &'static CStr = c"AddNorm";
    const INPUTS: &'static [Slot] = &[FLOATS, FLOATS, MAYBE_FLOATS];
    const OUTPUTS: &'static [Slot] = &[FLOATS, MAYBE_FLOATS];

    fn create(node: &Node) -> Result<Self, String> {
        Ok(Self { epsilon: node.float(c"epsilon")?, sums: sums(node)? })
    }

    fn compute(&self, pass: &Pass<'_>) -> Result<(), String> {
        let (residual, weight) = (pass.needed::<f32>(0)?, pass.needed::<f32>(1)?.data);
        let added = pass.input::<f32>(2)?;
        let (rows, columns) = residual.rows_and_columns();
        if weight.len() != columns || added.as_ref().is_some_and(|added| added.dims != residual.dims) {
            return Err(format!("{} weights for rows {:?}", weight.len(), residual.dims));
        }
        let wide = self.sums.extended(columns);
        let mut dims = residual.dims.clone();
        if let Some(last) = dims.last_mut() {
            *last = wide;
        }
        let out = pass.wanted(0, &dims)?;
        let sum = pass.output(1, &residual.dims)?;
        each_row(pass, rows, rows * wide <= ALONE, |row| {
            let range = row * columns..(row + 1) * columns;
            let added = added.as_ref().map(|added| &added.data[range.clone()]);
            // SAFETY: each unit has a row of its own.
            let (sum, out) = unsafe { (sum.as_ref().map(|sum| sum.part(range.start, columns)), out.part(row * wide, wide)) };
            norm_row(&residual.data[range], added, weight, self.epsilon, self.sums, sum, out);
        })
    }
}

/// `silu(gate) * up`.
///
/// Input: `both` `[…, 2 * columns]`, `gate` first. Output: `[…, columns]`, followed by its block sums. Attributes: `block`, `digits`.
#[derive(Debug)]
pub struct Gated {
    sums: Sums,
}

impl Operator for Gated {
    const NAME: &'static CStr = c"Gated";
    const INPUTS: &'static [Slot] = &[FLOATS];
    const OUTPUTS: &'static [Slot] = &[FLOATS];

    fn create(node: &Node) -> Result<Self, String> {
        Ok(Self { sums: sums(node)? })
    }

    fn compute(&self, pass: &Pass<'_>) -> Result<(), String> {
        let both = pass.needed::<f32>(0)?;
        let (rows, columns) = both.rows_and_columns();
        let wide = self.sums.extended(columns / 2);
        let mut dims = both.dims.clone();
        if let Some(last) = dims.last_mut() {
            *last = wide;
        }
        let out = pass.wanted(0, &dims)?;
        each_row(pass, rows, rows * columns <= ALONE_EXP, |row| {
            // SAFETY: each unit has a row of its own.
            gated_row(&both.data[row * columns..(row + 1) * columns], self.sums, unsafe { out.part(row * wide, wide) });
        })
    }
}
