//! Products over quantized weights, whose codes and scales stay the file's own.
//!
//! ONNX Runtime's `MatMulNBits` computes `d * (q - z)` with a whole number `z`; a block that has a minimum is `d * q + m`.
//! With `z = round(-m / d)` what is left is one number a block, `r = m + d * z`, at most half a step `d`:
//!
//! ```text
//! y[n] = Σ_k d(q - z) x[k]  +  Σ_b r[n, b] * s[b]        s[b] = Σ of x over block b
//! ```
//!
//! The second sum is a product too, so `x` is extended by its block sums and the matrix by columns that hold `r` as
//! digits ([`digits`] blocks, each with a fraction of the scale before it). One fused product does both. Measured
//! against a thin float product and an addition behind each matrix (135 M weights, two threads): kernels 9.3 ms instead of
//! 11.0 ms a token at batch 1, no difference at batch 8. `MatMulNBits` with float zero points would need none of this, but
//! leaves the fast kernel: 10 times slower.
//!
//! Codes of fewer bits than the kernel's use them all, so that a step is smaller and with it `r`.

use std::io::Write;

use super::decoder::Builder;
use super::graph::{Attribute, Element};
use super::linear::{Matrix, columns, each_row, finite, rows};
use crate::models::gguf::blocks::Row;
use crate::models::import::{Form, ImportError};

/// `accuracy_level` of `MatMulNBits`: activations stay 32-bit floats.
pub(super) const LEVEL_FLOAT: i64 = 1;
/// `accuracy_level` of `MatMulNBits`: activations are rounded to 8 bits a block, on the fly.
pub(super) const LEVEL_INT8: i64 = 4;

/// The longest row whose block sums are taken by one product with ones: as a matrix it is a sixteenth of the row, squared.
const ONE_PRODUCT: usize = 2048;

/// Codes of so many bits, of which so many share a scale, with so many digits for what is left of their minimums.
#[derive(Debug, Clone, Copy)]
struct Packing {
    bits: usize,
    block: usize,
    digits: usize,
}

/// Digits that hold what is left of a block's minimum: two of 4 bits leave less than 1/400 of a quantization step, one of 8
/// less than 1/500.
fn digits(bits: usize) -> usize {
    8 / bits
}

impl Packing {
    /// Blocks of a row that hold a digit.
    fn digit_blocks(self, columns: usize) -> usize {
        (columns / self.block).div_ceil(self.block)
    }

    /// Blocks of a row, those of digits included.
    fn blocks(self, columns: usize) -> usize {
        columns / self.block + self.digits * self.digit_blocks(columns)
    }

    /// The code in the middle.
    fn middle(self) -> u8 {
        1 << (self.bits - 1)
    }

    /// The largest code.
    fn largest(self) -> f64 {
        f64::from(u8::MAX >> (8 - self.bits))
    }
}

impl Builder<'_> {
    /// `x` times matrices that are kept as codes. The result is named `out`.
    ///
    /// 8-bit weights always go with 8-bit activations: the runtime has no fast kernel for them and floats (200 times slower for
    /// the head of a model of 135 M weights).
    pub(super) fn packed(&mut self, x: &str, matrices: &[Matrix<'_>], bits: usize, block: usize, out: &str) -> Result<(), ImportError> {
        let (rows, columns) = (rows(matrices), columns(matrices));
        let extended = matrices.iter().any(|matrix| matrix.tensor.kind.coding().is_some_and(|coding| coding.zero.is_none()));
        let packing = Packing { bits, block, digits: if extended { digits(bits) } else { 0 } };
        let blocks = packing.blocks(columns);
        let [codes, scales, zeros] = ["codes", "scales", "zeros"].map(|part| format!("{out}/{part}"));
        let zero_bytes = (blocks * bits).div_ceil(8);
        let gguf = self.gguf;
        let (mut all_scales, mut all_zeros) = (Vec::with_capacity(rows * blocks), Vec::with_capacity(rows * zero_bytes));
        let mut parts = Row::default();
        self.graph.tensor::<ImportError>(&codes, Element::Byte, &[rows, blocks, block * bits / 8], |data| {
            each_row(gguf, matrices, |matrix, row| {
                parts.read(matrix.tensor.kind, row);
                finite(matrix.tensor, &parts.scales)?;
                finite(matrix.tensor, &parts.minimums)?;
                refine(&mut parts, matrix.tensor.kind.coding().map_or(0, |coding| coding.spare));
                let mut zeros = split_minimums(&mut parts, packing, packing.digit_blocks(columns));
                if bits == 4 {
                    zeros = zeros.chunks(2).map(|pair| pair[0] | pair.get(1).map_or(0, |high| high << 4)).collect();
                    parts.codes = parts.codes.as_chunks().0.iter().map(|[low, high]| low | high << 4).collect();
                }
                all_scales.extend_from_slice(&parts.scales);
                all_zeros.extend_from_slice(&zeros);
                Ok(data.write_all(&parts.codes)?)
            })
        })?;
        self.graph.floats::<ImportError>(&scales, &[rows, blocks], &all_scales)?;
        self.read(matrices);
        let mut inputs = vec![if extended { self.with_block_sums(x, columns, packing)? } else { x.to_owned() }, codes, scales];
        // Where the middle of a byte stands for 0 in every block, the kernel knows it.
        if bits == 4 || extended {
            self.graph.bytes::<ImportError>(&zeros, &[rows, zero_bytes], &all_zeros)?;
            inputs.push(zeros);
        }
        let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
        let level = if self.form == Form::Exact && bits == 4 { LEVEL_FLOAT } else { LEVEL_INT8 };
        let attributes = attributes(blocks * block, rows, packing, level);
        self.graph.node("MatMulNBits", &inputs, &[out], &attributes);
        Ok(())
    }

    /// Writes a matrix as bytes from which rows can be gathered ([`Builder::rows8`]): `NAME/codes` (`[rows, columns]`),
    /// `NAME/scales` and, if its blocks have them, `NAME/minimums` (`[rows, blocks]`).
    pub(super) fn codes8(&mut self, matrix: Matrix<'_>, name: &str) -> Result<(), ImportError> {
        let tensor = matrix.tensor;
        let (rows, columns) = (tensor.rows, tensor.columns);
        let Some(coding) = tensor.kind.coding() else {
            return Ok(());
        };
        let gguf = self.gguf;
        let (mut parts, mut scales, mut minimums) = (Row::default(), Vec::with_capacity(rows * columns / coding.block), Vec::new());
        self.graph.tensor::<ImportError>(&format!("{name}/codes"), Element::Byte, &[rows, columns], |data| {
            each_row(gguf, &[matrix], |_, row| {
                parts.read(tensor.kind, row);
                scales.extend_from_slice(&parts.scales);
                let moved = match coding.zero {
                    Some(zero) => 128 - zero,
                    None => {
                        minimums.extend_from_slice(&parts.minimums);
                        128
                    }
                };
                parts.codes.iter_mut().for_each(|code| *code = code.saturating_add(moved));
                Ok(data.write_all(&parts.codes)?)
            })
        })?;
        finite(tensor, &scales)?;
        finite(tensor, &minimums)?;
        let dims = [rows, columns / coding.block];
        self.graph.floats::<ImportError>(&format!("{name}/scales"), &dims, &scales)?;
        if coding.zero.is_none() {
            self.graph.floats::<ImportError>(&format!("{name}/minimums"), &dims, &minimums)?;
        }
        self.read(&[matrix]);
        Ok(())
    }

    /// `x` times a matrix of bytes in which 128 stands for 0, from codes `[rows, blocks, block]`.
    pub(super) fn product8(&mut self, x: &str, matrix: Matrix<'_>, codes: &str, scales: &str, out: &str) {
        let packing = Packing { bits: 8, block: block(matrix), digits: 0 };
        let attributes = attributes(matrix.tensor.columns, matrix.tensor.rows, packing, LEVEL_INT8);
        self.graph.node("MatMulNBits", &[x, codes, scales], &[out], &attributes);
    }

    /// Picks rows of a matrix that `codes8` wrote, as floats. Their shape is left open where blocks have minimums.
    pub(super) fn rows8(&mut self, matrix: Matrix<'_>, name: &str, ids: &str, out: &str) {
        let attributes = [
            ("bits", Attribute::Int(8)),
            ("block_size", Attribute::Int(block(matrix) as i64)),
            ("gather_axis", Attribute::Int(0)),
            ("quantize_axis", Attribute::Int(1)),
        ];
        let [codes, scales, minimums] = ["codes", "scales", "minimums"].map(|part| format!("{name}/{part}"));
        if matrix.tensor.kind.coding().is_none_or(|coding| coding.zero.is_some()) {
            self.graph.node("GatherBlockQuantized", &[&codes, ids, &scales], &[out], &attributes);
            return;
        }
        let [scaled, blocks, picked, columns] = ["scaled", "blocks", "minimums", "columns"].map(|part| format!("{out}/{part}"));
        self.graph.node("GatherBlockQuantized", &[&codes, ids, &scales], &[&scaled], &attributes);
        self.graph.node("Gather", &[&minimums, ids], &[&picked], &[]);
        self.graph.integers(&format!("{name}/block"), &[-1, block(matrix) as i64], false);
        self.graph.integers(&format!("{name}/one"), &[-1, 1], false);
        self.graph.node("Reshape", &[&scaled, &format!("{name}/block")], &[&blocks], &[]);
        self.graph.node("Reshape", &[&picked, &format!("{name}/one")], &[&columns], &[]);
        self.graph.node("Add", &[&blocks, &columns], &[out], &[]);
    }

    /// `x` followed by its block sums, once for each digit and padded with zeros to whole blocks.
    fn with_block_sums(&mut self, x: &str, columns: usize, packing: Packing) -> Result<String, ImportError> {
        let Packing { block, digits, .. } = packing;
        let blocks = columns / block;
        let width = packing.digit_blocks(columns) * block;
        let key = format!("{columns}/{block}/{digits}");
        let extended = format!("{x}/extended/{block}/{digits}");
        if !self.made.insert(extended.clone()) {
            return Ok(extended);
        }
        // A product with ones where a summand and its place belong together: one node for sum, pad and repeat. In long rows the
        // blocks are summed before, for the matrix grows with the square.
        let long = columns > ONE_PRODUCT;
        let (summands, each) = if long { (blocks, 1) } else { (columns, block) };
        let matrix = format!("block_sums/{key}");
        if self.made.insert(matrix.clone()) {
            let mut ones = vec![0.0; summands * digits * width];
            for (summand, row) in ones.chunks_exact_mut(digits * width).enumerate() {
                for digit in row.chunks_exact_mut(width) {
                    digit[summand / each] = 1.0;
                }
            }
            self.graph.floats::<ImportError>(&matrix, &[summands, digits * width], &ones)?;
            if long {
                self.graph.integers(&format!("{matrix}/shape"), &[blocks as i64, block as i64], false);
                self.graph.integers(&format!("{matrix}/axis"), &[-1], false);
            }
        }
        let sums = format!("{extended}/sums");
        if long {
            // The hidden state of a head has a dimension more than that of a layer.
            let [leading, shape, rows, plain] = ["leading", "shape", "rows", "plain"].map(|part| format!("{extended}/{part}"));
            self.graph.node("Shape", &[x], &[&leading], &[("end", Attribute::Int(-1))]);
            self.graph.node("Concat", &[&leading, &format!("{matrix}/shape")], &[&shape], &[("axis", Attribute::Int(0))]);
            self.graph.node("Reshape", &[x, &shape], &[&rows], &[]);
            self.graph.node("ReduceSum", &[&rows, &format!("{matrix}/axis")], &[&plain], &[("keepdims", Attribute::Int(0))]);
            self.graph.node("MatMul", &[&plain, &matrix], &[&sums], &[]);
        } else {
            self.graph.node("MatMul", &[x, &matrix], &[&sums], &[]);
        }
        self.graph.node("Concat", &[x, &sums], &[&extended], &[("axis", Attribute::Int(-1))]);
        Ok(extended)
    }
}

/// Multiplies codes and divides scales by a power of two, which changes no value and makes zero points as many times finer.
fn refine(row: &mut Row, spare: u32) {
    if spare > 0 {
        row.codes.iter_mut().for_each(|code| *code <<= spare);
        row.scales.iter_mut().for_each(|scale| *scale /= (1_u32 << spare) as f32);
    }
}

/// Turns a row's minimums into zero points (returned, one a block) and appends what is left as blocks of digits.
fn split_minimums(row: &mut Row, packing: Packing, digit_blocks: usize) -> Vec<u8> {
    let Packing { block, digits, .. } = packing;
    let (middle, largest) = (packing.middle(), packing.largest());
    let mut zeros = Vec::with_capacity(row.scales.len() + digits * digit_blocks);
    let mut rests = Vec::with_capacity(row.scales.len());
    for (&scale, &minimum) in row.scales.iter().zip(&row.minimums) {
        let (scale, minimum) = (f64::from(scale), f64::from(minimum));
        let zero = if scale == 0.0 { f64::from(middle) } else { (-minimum / scale).round_ties_even().clamp(0.0, largest) };
        zeros.push(zero as u8);
        rests.push(minimum + scale * zero);
    }
    if digits == 0 {
        return zeros;
    }
    rests.resize(digit_blocks * block, 0.0);
    // Codes of 4 bits run from -8 to 7; a scale a little above max / 7.5 rounds every rest to one of -7…7.
    let half = largest / 2.0;
    let mut steps: Vec<f64> =
        rests.chunks_exact(block).map(|block| block.iter().fold(0.0_f64, |most, rest| most.max(rest.abs())) / (half - 0.01)).collect();
    for _ in 0..digits {
        for (block, step) in rests.chunks_exact_mut(block).zip(&mut steps) {
            let scale = *step as f32;
            let divisor = f64::from(scale);
            for rest in block {
                let code = if scale == 0.0 { 0.0 } else { (*rest / divisor).round_ties_even().clamp(-half - 0.5, half - 0.5) };
                row.codes.push((code + f64::from(middle)) as u8);
                *rest -= divisor * code;
            }
            row.scales.push(scale);
            zeros.push(middle);
            *step = divisor / largest;
        }
    }
    zeros
}

/// Elements of a quantized tensor that share a scale.
pub(super) fn block(matrix: Matrix<'_>) -> usize {
    matrix.tensor.kind.coding().map_or(0, |coding| coding.block)
}

fn attributes(columns: usize, rows: usize, packing: Packing, level: i64) -> [(&'static str, Attribute); 5] {
    [
        ("K", Attribute::Int(columns as i64)),
        ("N", Attribute::Int(rows as i64)),
        ("bits", Attribute::Int(packing.bits as i64)),
        ("block_size", Attribute::Int(packing.block as i64)),
        ("accuracy_level", Attribute::Int(level)),
    ]
}
