//! The operators: what they take and give, and how their work is shared among threads.

use std::cell::RefCell;
use std::ffi::CStr;

use crate::abi::{BYTES, FLOATS, INTEGERS, MAYBE_BYTES, MAYBE_FLOATS, Node, Operator, Pass, Shared, Slot, Table, table};
use crate::attention::{ROWS, Seen, knows, rotate, tile};
use crate::digits::{BLOCK, Digits, split};
use crate::gated::gated_row;
use crate::lanes::Sums;
use crate::norm::norm_row;
use crate::pages;
use crate::product::{self, Rows, Unit};
use crate::weights::{TILE, Weights};

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

thread_local! {
    /// Scores and rotated queries of the tile that a thread computes.
    static SCRATCH: RefCell<(Vec<f32>, Vec<f32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

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

/// Attention of new tokens over all before them and themselves, with the rotary embedding; writes their keys and values into the cache.
///
/// Inputs: `qkv` `[batch * sequence, (heads + 2 * kv_heads) * dim]`, `past_key`, `past_value` `[batch, kv_heads, capacity, dim]`, `last` int32 `[batch]` (the place
/// of each row's last new token), `cos`, `sin` `[context, half]`. Outputs: `context` `[batch * sequence, heads * dim]` and its block sums; `present_key`, `present_value` as the
/// past; where they are the same memory nothing is copied. Attributes: `heads`, `kv_heads`, `window` (0: none), `block`, `digits`, `scale`. Any `batch` goes with any `sequence`.
#[derive(Debug)]
pub struct Attention {
    heads: usize,
    kv_heads: usize,
    window: usize,
    scale: f32,
    sums: Sums,
}

impl Operator for Attention {
    const NAME: &'static CStr = c"Attention";
    const INPUTS: &'static [Slot] = &[FLOATS, FLOATS, FLOATS, INTEGERS, FLOATS, FLOATS];
    const OUTPUTS: &'static [Slot] = &[FLOATS, FLOATS, FLOATS];

    fn create(node: &Node) -> Result<Self, String> {
        let made = Self {
            heads: node.integer(c"heads")?,
            kv_heads: node.integer(c"kv_heads")?,
            window: node.integer(c"window")?,
            scale: node.float(c"scale")?,
            sums: sums(node)?,
        };
        if made.kv_heads == 0 || made.heads == 0 || !made.heads.is_multiple_of(made.kv_heads) {
            return Err(format!("{} heads for {} of keys", made.heads, made.kv_heads));
        }
        Ok(made)
    }

    fn compute(&self, pass: &Pass<'_>) -> Result<(), String> {
        let qkv = pass.needed::<f32>(0)?;
        let ((sizes, past_keys), (value_sizes, past_values)) = (pass.memory(1)?, pass.memory(2)?);
        let last = pass.needed::<i32>(3)?.data;
        let (cos, sin) = (pass.needed::<f32>(4)?, pass.needed::<f32>(5)?);
        let &[batch, kv_heads, capacity, dim] = sizes.as_slice() else {
            return Err(format!("keys of the shape {sizes:?}"));
        };
        let (tokens, width) = qkv.rows_and_columns();
        let (context, half) = cos.rows_and_columns();
        if kv_heads != self.kv_heads
            || value_sizes != sizes
            || width != (self.heads + 2 * kv_heads) * dim
            || last.len() != batch
            || sin.dims != cos.dims
            || 2 * half > dim
            || !knows(dim)
            || !tokens.is_multiple_of(batch.max(1))
        {
            return Err(format!("{width} numbers a token for caches {sizes:?}, {} rows, and angles {:?}", last.len(), cos.dims));
        }
        let wide = self.sums.extended(self.heads * dim);
        let out = pass.wanted(0, &[tokens, wide])?;
        let keys = pass.wanted(1, &sizes)?;
        let values = pass.wanted(2, &sizes)?;
        // SAFETY: no part of them is held yet.
        unsafe {
            keys.take(&past_keys);
            values.take(&past_values);
        }
        if tokens == 0 {
            return Ok(());
        }
        let sequence = tokens / batch;
        for &last in last {
            let length = i64::from(last) + 1;
            if length < sequence as i64 || length > capacity.min(context) as i64 {
                return Err(format!("a row of {length} tokens, {sequence} of them new, for caches of {capacity} and angles of {context}"));
            }
        }
        let work = Work {
            operator: self,
            qkv: qkv.data,
            last,
            cos: cos.data,
            sin: sin.data,
            half,
            dim,
            capacity,
            sequence,
            width,
            wide,
            keys,
            values,
            out,
        };
        let group = self.heads / kv_heads;
        if sequence == 1 {
            pass.parallel(batch * kv_heads, |unit| {
                let (row, head) = (unit / kv_heads, unit % kv_heads);
                work.store(row, head);
                work.attend(row, head, 0, group);
            })?;
        } else {
            pass.parallel(batch * kv_heads, |unit| work.store(unit / kv_heads, unit % kv_heads))?;
            // Pieces of a head follow each other: later ones see more, and each thread gets of all kinds.
            let pieces = (sequence * group).div_ceil(PIECE);
            pass.parallel(batch * kv_heads * pieces, |unit| {
                let (row, head, piece) = (unit / (kv_heads * pieces), unit / pieces % kv_heads, unit % pieces);
                work.attend(row, head, piece * PIECE, (piece * PIECE + PIECE).min(sequence * group));
            })?;
        }
        if self.sums.block > 0 {
            each_row(pass, tokens, tokens * wide <= ALONE, |token| {
                // SAFETY: each unit has a row of its own, and all that is read there was written before.
                self.sums.fill(unsafe { work.out.part(token * wide, wide) }, self.heads * dim);
            })?;
        }
        Ok(())
    }
}

/// Queries that are one unit of work where there are many: whole tiles.
const PIECE: usize = 16 * ROWS;

/// One pass of attention.
struct Work<'a> {
    operator: &'a Attention,
    qkv: &'a [f32],
    last: &'a [i32],
    cos: &'a [f32],
    sin: &'a [f32],
    half: usize,
    dim: usize,
    capacity: usize,
    sequence: usize,
    /// Numbers of a token in `qkv`.
    width: usize,
    /// Numbers of a token in `out`.
    wide: usize,
    keys: Shared<f32>,
    values: Shared<f32>,
    out: Shared<f32>,
}

impl Work<'_> {
    /// The place of a row's token, counted from the beginning of its text.
    fn place(&self, row: usize, token: usize) -> usize {
        self.last[row] as usize + 1 - self.sequence + token
    }

    fn head(&self, row: usize, token: usize, head: usize) -> &[f32] {
        let from = (row * self.sequence + token) * self.width + head * self.dim;
        &self.qkv[from..from + self.dim]
    }

    fn angles(&self, place: usize) -> (&[f32], &[f32]) {
        let range = place * self.half..(place + 1) * self.half;
        (&self.cos[range.clone()], &self.sin[range])
    }

    /// Puts a head's new keys and values into the cache.
    fn store(&self, row: usize, head: usize) {
        let (heads, kv_heads) = (self.operator.heads, self.operator.kv_heads);
        for token in 0..self.sequence {
            let place = self.place(row, token);
            let at = ((row * kv_heads + head) * self.capacity + place) * self.dim;
            let (cos, sin) = self.angles(place);
            // SAFETY: a unit writes to the places of its own row and head, which nobody else touches meanwhile.
            unsafe {
                rotate(self.head(row, token, heads + head), cos, sin, self.keys.part(at, self.dim));
                self.values.part(at, self.dim).copy_from_slice(self.head(row, token, heads + kv_heads + head));
            }
        }
    }

    /// Attention of queries `from..to` of a head's group, counted token by token.
    fn attend(&self, row: usize, head: usize, from: usize, to: usize) {
        let operator = self.operator;
        let (group, dim) = (operator.heads / operator.kv_heads, self.dim);
        let from_key = (row * operator.kv_heads + head) * self.capacity * dim;
        let length = (self.place(row, (to - 1) / group) + 1) * dim;
        // SAFETY: all keys and values that this unit reads are stored, by itself or before it began.
        let (keys, values) = unsafe { (self.keys.view(from_key, length), self.values.view(from_key, length)) };
        SCRATCH.with_borrow_mut(|(scores, queries)| {
            let mut done = from;
            while done < to {
                let rows = ROWS.min(to - done);
                queries.resize(2 * ROWS * dim, 0.0);
                let (queries, context) = queries.split_at_mut(ROWS * dim);
                let mut seen = [Seen { start: 0, end: 0 }; ROWS];
                for (at, seen) in seen.iter_mut().take(rows).enumerate() {
                    let (token, member) = ((done + at) / group, (done + at) % group);
                    let place = self.place(row, token);
                    let (cos, sin) = self.angles(place);
                    rotate(self.head(row, token, head * group + member), cos, sin, &mut queries[at * dim..(at + 1) * dim]);
                    let start = if operator.window == 0 { 0 } else { (place + 1).saturating_sub(operator.window) };
                    *seen = Seen { start, end: place + 1 };
                }
                let (queries, context) = (&queries[..rows * dim], &mut context[..rows * dim]);
                tile(dim, operator.scale, queries, &seen[..rows], keys, values, scores, context);
                for (at, context) in context.chunks_exact(dim).enumerate() {
                    let (token, member) = ((done + at) / group, (done + at) % group);
                    let to = (row * self.sequence + token) * self.wide + (head * group + member) * dim;
                    // SAFETY: each query has a place of its own, which no other unit writes to.
                    unsafe { self.out.part(to, dim) }.copy_from_slice(context);
                }
                done += rows;
            }
        });
    }
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
