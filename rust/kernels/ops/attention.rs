//! The operator of attention: what is read and written where, and by which thread. The arithmetic is in [`crate::attention`].

use std::cell::RefCell;
use std::ffi::CStr;

use super::{ALONE, each_row, sums};
use crate::abi::{FLOATS, INTEGERS, Node, Operator, Pass, Shared, Slot};
use crate::attention::{ROWS, Seen, knows, rotate, tile};
use crate::lanes::Sums;

thread_local! {
    /// Scores and rotated queries of the tile that a thread computes.
    static SCRATCH: RefCell<(Vec<f32>, Vec<f32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
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
            || !tokens.is_multiple_of(batch)
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
