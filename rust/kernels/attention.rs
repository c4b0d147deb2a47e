//! Attention of a few queries over the keys and values of one head, with the rotary embedding.
//!
//! A *tile* is up to [`ROWS`] queries that read the same keys: the heads of a group, or neighbouring tokens, or both. What a query gets does not depend on its tile:
//! every product and sum has its own order.

use super::lanes::{LANES, Lanes, exp, fused, total, widest};

/// The most queries that are computed together: with more, their sums no longer fit a processor's vector registers.
pub(crate) const ROWS: usize = 4;

/// Rotates the halves of the first `2 * cos.len()` numbers of a head, and copies the others.
#[inline]
pub(crate) fn rotate(head: &[f32], cos: &[f32], sin: &[f32], out: &mut [f32]) {
    let half = cos.len();
    out.copy_from_slice(head);
    let (first, second) = out.split_at_mut(half);
    for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
    }
}

/// What a query may see: keys `start..end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) start: usize,
    pub(crate) end: usize,
}

/// Computes a tile. `queries` and `out` are `[rows, dim]` with `rows <= ROWS`, `keys` and `values` `[capacity, dim]`; `scores` is scratch, grown as it must.
/// `dim` is a multiple of 16, at most 256. Nothing is read of keys that no query sees.
#[allow(clippy::too_many_arguments)]
pub(crate) fn tile(
    dim: usize,
    scale: f32,
    queries: &[f32],
    seen: &[Seen],
    keys: &[f32],
    values: &[f32],
    scores: &mut Vec<f32>,
    out: &mut [f32],
) {
    macro_rules! sizes {
        ($($chunks:literal)+) => {
            match (dim / LANES, seen.len()) {
                $(
                    ($chunks, 1) => heads::<$chunks, 1>(scale, queries, seen, keys, values, scores, out),
                    ($chunks, 2) => heads::<$chunks, 2>(scale, queries, seen, keys, values, scores, out),
                    ($chunks, 3) => heads::<$chunks, 3>(scale, queries, seen, keys, values, scores, out),
                    ($chunks, 4) => heads::<$chunks, 4>(scale, queries, seen, keys, values, scores, out),
                )+
                _ => {}
            }
        };
    }
    sizes!(1 2 3 4 5 6 8 12 16);
}

/// Whether [`tile`] computes heads of this size.
pub(crate) fn knows(dim: usize) -> bool {
    dim.is_multiple_of(LANES) && matches!(dim / LANES, 1 | 2 | 3 | 4 | 5 | 6 | 8 | 12 | 16)
}

widest!(fn heads<const CHUNKS: usize, const TILE: usize>(scale: f32, queries: &[f32], seen: &[Seen], keys: &[f32], values: &[f32], scores: &mut Vec<f32>, out: &mut [f32]) = compute);

#[inline(always)]
fn compute<const FUSED: bool, const CHUNKS: usize, const TILE: usize>(
    scale: f32,
    queries: &[f32],
    seen: &[Seen],
    keys: &[f32],
    values: &[f32],
    scores: &mut Vec<f32>,
    out: &mut [f32],
) {
    let dim = CHUNKS * LANES;
    let start = seen.iter().map(|seen| seen.start).min().unwrap_or(0);
    let end = seen.iter().map(|seen| seen.end).max().unwrap_or(0);
    let length = end - start;
    scores.clear();
    scores.resize(TILE * length, 0.0);

    let mut query = [[[0.0; LANES]; CHUNKS]; TILE];
    for (query, row) in query.iter_mut().zip(queries.chunks_exact(dim)) {
        for (lanes, chunk) in query.iter_mut().zip(row.as_chunks::<LANES>().0) {
            *lanes = *chunk;
        }
    }
    for (at, key) in keys[start * dim..end * dim].chunks_exact(dim).enumerate() {
        let key = key.as_chunks::<LANES>().0;
        for (row, query) in query.iter().enumerate() {
            let mut sum: Lanes = [0.0; LANES];
            for chunk in 0..CHUNKS {
                for lane in 0..LANES {
                    sum[lane] = fused::<FUSED>(query[chunk][lane], key[chunk][lane], sum[lane]);
                }
            }
            scores[row * length + at] = total(&sum) * scale;
        }
    }

    let mut factors = [0.0; TILE];
    for (row, factor) in factors.iter_mut().enumerate() {
        let scores = &mut scores[row * length..(row + 1) * length];
        let (from, to) = (seen[row].start - start, seen[row].end - start);
        scores[..from].fill(0.0);
        scores[to..].fill(0.0);
        *factor = 1.0 / weights::<FUSED>(&mut scores[from..to]);
    }

    let mut sums = [[[0.0; LANES]; CHUNKS]; TILE];
    for (at, value) in values[start * dim..end * dim].chunks_exact(dim).enumerate() {
        let value = value.as_chunks::<LANES>().0;
        for (row, sums) in sums.iter_mut().enumerate() {
            let weight = scores[row * length + at];
            for chunk in 0..CHUNKS {
                for lane in 0..LANES {
                    sums[chunk][lane] = fused::<FUSED>(weight, value[chunk][lane], sums[chunk][lane]);
                }
            }
        }
    }
    for ((out, sums), factor) in out.chunks_exact_mut(dim).zip(&sums).zip(factors) {
        for (out, lanes) in out.as_chunks_mut::<LANES>().0.iter_mut().zip(sums) {
            for (out, sum) in out.iter_mut().zip(lanes) {
                *out = sum * factor;
            }
        }
    }
}

/// Turns scores into the weights of a softmax, each too large by the same factor, which is returned.
#[inline(always)]
fn weights<const FUSED: bool>(scores: &mut [f32]) -> f32 {
    let (steps, rest) = scores.as_chunks::<LANES>();
    let mut most: Lanes = [f32::NEG_INFINITY; LANES];
    for step in steps {
        for (most, score) in most.iter_mut().zip(step) {
            *most = if *score > *most { *score } else { *most };
        }
    }
    let most = most.iter().chain(rest).fold(f32::NEG_INFINITY, |most, score| if *score > most { *score } else { most });
    let mut lanes: Lanes = [0.0; LANES];
    let (steps, rest) = scores.as_chunks_mut::<LANES>();
    for step in steps {
        for (score, sum) in step.iter_mut().zip(&mut lanes) {
            *score = exp::<FUSED>(*score - most);
            *sum += *score;
        }
    }
    rest.iter_mut().fold(total(&lanes), |sum, score| {
        *score = exp::<FUSED>(*score - most);
        sum + *score
    })
}
