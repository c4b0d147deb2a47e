//! Attention of a few queries over the keys and values of one head, with the rotary embedding.
//!
//! A *tile* is up to [`ROWS`] queries that read the same keys: the heads of a group, or neighbouring tokens, or both. What a query gets of finite numbers does not depend on its
//! tile: every product and sum has its own order.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m512, _mm512_add_ps, _mm512_castpd_ps, _mm512_castps_pd, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mul_ps, _mm512_permutexvar_ps,
    _mm512_set1_ps, _mm512_setr_epi32, _mm512_setzero_ps, _mm512_shuffle_f32x4, _mm512_shuffle_ps, _mm512_storeu_ps, _mm512_unpackhi_pd,
    _mm512_unpacklo_pd,
};

use super::lanes::{LANES, Lanes, exp, fused, total, widest};
#[cfg(target_arch = "x86_64")]
use super::lanes::{Width, width};

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
                    ($chunks, 1) => best::<$chunks, 1>(scale, queries, seen, keys, values, scores, out),
                    ($chunks, 2) => best::<$chunks, 2>(scale, queries, seen, keys, values, scores, out),
                    ($chunks, 3) => best::<$chunks, 3>(scale, queries, seen, keys, values, scores, out),
                    ($chunks, 4) => best::<$chunks, 4>(scale, queries, seen, keys, values, scores, out),
                )+
                // Nothing written would be an answer made of what was there before.
                sizes => unreachable!("heads of {} vectors and {} rows", sizes.0, sizes.1),
            }
        };
    }
    sizes!(1 2 3 4 5 6 8 12 16);
}

/// Whether [`tile`] computes heads of this size.
pub(crate) fn knows(dim: usize) -> bool {
    dim.is_multiple_of(LANES) && matches!(dim / LANES, 1 | 2 | 3 | 4 | 5 | 6 | 8 | 12 | 16)
}

#[allow(clippy::too_many_arguments)]
fn best<const CHUNKS: usize, const TILE: usize>(
    scale: f32,
    queries: &[f32],
    seen: &[Seen],
    keys: &[f32],
    values: &[f32],
    scores: &mut Vec<f32>,
    out: &mut [f32],
) {
    #[cfg(target_arch = "x86_64")]
    if width() == Width::Avx512 {
        // SAFETY: the processor has what the function is compiled for.
        return unsafe { wide::<CHUNKS, TILE>(scale, queries, seen, keys, values, scores, out) };
    }
    heads::<CHUNKS, TILE>(scale, queries, seen, keys, values, scores, out);
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
    let Seen { start, end } = span(seen);
    let length = end - start;
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

    let factors = softmax::<FUSED, TILE>(scores, length, seen, start);

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

/// The same with vectors of sixteen, to the bit: the lanes of sixteen sums are added up together, in the order of [`total`], and not each for itself.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
#[allow(clippy::too_many_arguments)]
unsafe fn wide<const CHUNKS: usize, const TILE: usize>(
    scale: f32,
    queries: &[f32],
    seen: &[Seen],
    keys: &[f32],
    values: &[f32],
    scores: &mut Vec<f32>,
    out: &mut [f32],
) {
    let dim = CHUNKS * LANES;
    let Seen { start, end } = span(seen);
    let length = (end - start).next_multiple_of(LANES);
    scores.resize(TILE * length, 0.0);
    let (keys, values) = (&keys[start * dim..end * dim], &values[start * dim..end * dim]);
    let (queries, out) = (&queries[..TILE * dim], &mut out[..TILE * dim]);
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let scale = _mm512_set1_ps(scale);

    for (at, sixteen) in keys.chunks(LANES * dim).enumerate() {
        for row in 0..TILE {
            let mut sums = [_mm512_setzero_ps(); LANES];
            // SAFETY: queries, keys and scores are as long as is read and written: the slices above say so.
            unsafe {
                let mut query = [_mm512_setzero_ps(); CHUNKS];
                for (chunk, query) in query.iter_mut().enumerate() {
                    *query = _mm512_loadu_ps(queries.as_ptr().add(row * dim + chunk * LANES));
                }
                for (sum, key) in sums.iter_mut().zip(sixteen.chunks_exact(dim)) {
                    for (chunk, query) in query.iter().enumerate() {
                        *sum = _mm512_fmadd_ps(*query, _mm512_loadu_ps(key.as_ptr().add(chunk * LANES)), *sum);
                    }
                }
                let all = _mm512_mul_ps(_mm512_permutexvar_ps(order, totals(&sums)), scale);
                _mm512_storeu_ps(scores[row * length + at * LANES..][..LANES].as_mut_ptr(), all);
            }
        }
    }

    let factors = softmax::<true, TILE>(scores, length, seen, start);

    let mut sums = [[_mm512_setzero_ps(); CHUNKS]; TILE];
    let rows: [&[f32]; TILE] = std::array::from_fn(|row| &scores[row * length..(row + 1) * length]);
    for (at, value) in values.chunks_exact(dim).enumerate() {
        for (chunk, value) in value.as_chunks::<LANES>().0.iter().enumerate() {
            // SAFETY: the array is as long as the vector.
            let value = unsafe { _mm512_loadu_ps(value.as_ptr()) };
            for (sums, weights) in sums.iter_mut().zip(rows) {
                sums[chunk] = _mm512_fmadd_ps(_mm512_set1_ps(weights[at]), value, sums[chunk]);
            }
        }
    }
    for ((out, sums), factor) in out.chunks_exact_mut(dim).zip(sums).zip(factors) {
        for (out, sum) in out.as_chunks_mut::<LANES>().0.iter_mut().zip(sums) {
            // SAFETY: the array is as long as the vector.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), _mm512_mul_ps(sum, _mm512_set1_ps(factor))) };
        }
    }
}

/// The totals of sixteen vectors: that of vector `4 p + q` in lane `4 q + p`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
fn totals(vectors: &[__m512; LANES]) -> __m512 {
    let halves = |a, b| _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
    let quarters = |a, b| _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
    let pairs = |a, b| {
        let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
        _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)))
    };
    let singles = |a, b| _mm512_add_ps(_mm512_shuffle_ps::<0x88>(a, b), _mm512_shuffle_ps::<0xdd>(a, b));
    let [a, b, c, d] = std::array::from_fn(|four| {
        let at = 4 * four;
        quarters(halves(vectors[at], vectors[at + 1]), halves(vectors[at + 2], vectors[at + 3]))
    });
    singles(pairs(a, b), pairs(c, d))
}

/// All that some query of a tile sees.
#[inline(always)]
fn span(seen: &[Seen]) -> Seen {
    let start = seen.iter().map(|seen| seen.start).min().unwrap_or(0);
    Seen { start, end: seen.iter().map(|seen| seen.end).max().unwrap_or(0) }
}

/// Turns the scores of each query, `length` of them from key `start` on, into weights, which are 0 where it does not look; returns by what their sums are to be multiplied.
#[inline(always)]
fn softmax<const FUSED: bool, const TILE: usize>(scores: &mut [f32], length: usize, seen: &[Seen], start: usize) -> [f32; TILE] {
    std::array::from_fn(|row| {
        let scores = &mut scores[row * length..(row + 1) * length];
        let (from, to) = (seen[row].start - start, seen[row].end - start);
        scores[..from].fill(0.0);
        scores[to..].fill(0.0);
        1.0 / weights::<FUSED>(&mut scores[from..to])
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Attention of `seen.len()` queries by both ways, which must agree to the bit, and with double precision to a part in a million.
    fn both(dim: usize, seen: &[Seen], keys: usize) {
        let number = |seed: usize| (0..).map(move |at: usize| (((at + seed) * 7919 % 2003) as f32 / 1001.5 - 1.0) * 2.0);
        let queries: Vec<f32> = number(dim).take(seen.len() * dim).collect();
        let (k, v): (Vec<f32>, Vec<f32>) = (number(5).take(keys * dim).collect(), number(77).take(keys * dim).collect());
        let (mut scores, mut out) = (vec![f32::NAN; 3], vec![f32::NAN; seen.len() * dim]);
        tile(dim, 0.2, &queries, seen, &k, &v, &mut scores, &mut out);
        let mut plain = vec![f32::NAN; out.len()];
        match (dim / LANES, seen.len()) {
            (2, 1) => heads::<2, 1>(0.2, &queries, seen, &k, &v, &mut scores, &mut plain),
            (4, 3) => heads::<4, 3>(0.2, &queries, seen, &k, &v, &mut scores, &mut plain),
            (8, 4) => heads::<8, 4>(0.2, &queries, seen, &k, &v, &mut scores, &mut plain),
            _ => panic!("{dim} {}", seen.len()),
        }
        assert_eq!(out, plain);
        for (row, seen) in seen.iter().enumerate() {
            let dot = |key: usize| (0..dim).map(|at| f64::from(queries[row * dim + at]) * f64::from(k[key * dim + at])).sum::<f64>() * 0.2;
            let most = (seen.start..seen.end).map(dot).fold(f64::MIN, f64::max);
            let weights: Vec<f64> = (seen.start..seen.end).map(|key| (dot(key) - most).exp()).collect();
            for at in 0..dim {
                let sum: f64 = weights.iter().zip(seen.start..).map(|(weight, key)| weight * f64::from(v[key * dim + at])).sum();
                let exact = sum / weights.iter().sum::<f64>();
                assert!((f64::from(out[row * dim + at]) - exact).abs() < 1e-5, "{dim} {row} {at}: {} {exact}", out[row * dim + at]);
            }
        }
    }

    #[test]
    fn queries_of_a_tile_see_what_is_theirs_and_both_ways_agree() {
        let seen = |start, end| Seen { start, end };
        for end in [1, 2, 15, 16, 17, 31, 33, 100] {
            both(32, &[seen(0, end)], end);
            both(64, &[seen(0, end), seen(0, end), seen(0, end.div_ceil(2))], end);
            both(128, &[seen(end - 1, end), seen(end / 3, end), seen(0, end), seen(0, 1)], end);
        }
    }
}
