//! Matrix products over GGUF weights: `y = x * Wᵀ` as nodes and weights of a graph.
//!
//! Four-bit blocks stay four-bit. ONNX Runtime's `MatMulNBits` computes `d * (q - z)` with a whole number `z`; a Q4_1 block
//! is `d * q + m`. With `z = round(-m / d)` what is left is one number a block, `r = m + d * z`, at most half a step `d`:
//!
//! ```text
//! y[n] = Σ_k d(q - z) x[k]  +  Σ_b r[n, b] * s[b]        s[b] = Σ of x over block b
//! ```
//!
//! The second sum is a product too, so `x` is extended by its block sums and the matrix by columns that hold `r` as
//! digits ([`DIGITS`] blocks, each with a fifteenth of the scale before it). One fused product does both. Measured
//! against a thin float product and an addition behind each matrix (135 M weights, two threads): kernels 9.3 ms instead of
//! 11.0 ms a token at batch 1, no difference at batch 8. `MatMulNBits` with float zero points would need none of this, but
//! leaves the fast kernel: 10 times slower.

use std::io::Write;

use super::decoder::Builder;
use super::graph::{Attribute, Element, write_floats};
use crate::models::gguf::blocks::{BLOCK, Row4, dequantize, read_row8, row_bytes};
use crate::models::gguf::{Kind, TensorInfo};
use crate::models::import::{Form, ImportError};

/// Digits that hold the rest of a block's minimum: two leave less than 1/400 of a quantization step.
const DIGITS: usize = 2;

/// `accuracy_level` of `MatMulNBits`: activations stay 32-bit floats.
const LEVEL_FLOAT: i64 = 1;
/// `accuracy_level` of `MatMulNBits`: activations are rounded to 8 bits a block, on the fly.
const LEVEL_INT8: i64 = 4;

/// A weight matrix: a tensor, and whether its rows must be put back into the order they had before conversion.
#[derive(Debug, Clone, Copy)]
pub(super) struct Matrix<'a> {
    pub(super) tensor: &'a TensorInfo,
    /// Heads whose rows llama.cpp's converter interleaved for its rotary embedding; 0 for none.
    pub(super) rotary_heads: usize,
}

impl<'a> Matrix<'a> {
    pub(super) fn plain(tensor: &'a TensorInfo) -> Self {
        Self { tensor, rotary_heads: 0 }
    }

    /// Where row `row` of the original matrix is in the file. The converter turned each head's halves
    /// `(a0 a1 … b0 b1 …)` into pairs `(a0 b0 a1 b1 …)`.
    fn source_row(&self, row: usize) -> usize {
        if self.rotary_heads == 0 {
            return row;
        }
        let size = self.tensor.rows / self.rotary_heads;
        let (head, within) = (row / size, row % size);
        head * size + 2 * (within % (size / 2)) + within / (size / 2)
    }
}

/// How a product is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kernel {
    Four,
    Eight,
    Float,
}

impl Builder<'_> {
    fn kernel(&self, kind: Kind) -> Kernel {
        match kind {
            _ if self.form == Form::Fp32 => Kernel::Float,
            Kind::Q4_0 | Kind::Q4_1 => Kernel::Four,
            Kind::Q8_0 => Kernel::Eight,
            _ => Kernel::Float,
        }
    }

    /// Whether a tensor stays in bytes (the only quantized embedding that is kept as it is).
    pub(super) fn keeps_bytes(&self, kind: Kind) -> bool {
        self.kernel(kind) == Kernel::Eight
    }

    /// `x` times the matrices' rows, one after the other in the last dimension. Returns the name of the result, `out`.
    pub(super) fn linear(&mut self, x: &str, matrices: &[Matrix<'_>], out: &str) -> Result<(), ImportError> {
        let kernels: Vec<_> = matrices.iter().map(|matrix| self.kernel(matrix.tensor.kind)).collect();
        let Some((&kernel, others)) = kernels.split_first() else {
            return Ok(());
        };
        if others.iter().any(|other| *other != kernel) {
            let parts: Vec<_> = (0..matrices.len()).map(|part| format!("{out}/{part}")).collect();
            for (matrix, part) in matrices.iter().zip(&parts) {
                self.linear(x, &[*matrix], part)?;
            }
            let parts: Vec<_> = parts.iter().map(String::as_str).collect();
            self.graph.node("Concat", &parts, &[out], &[("axis", Attribute::Int(-1))]);
            return Ok(());
        }
        match kernel {
            Kernel::Four => self.linear4(x, matrices, out),
            Kernel::Eight => {
                let (codes, scales) = (format!("{out}/codes"), format!("{out}/scales"));
                self.codes8(matrices, &codes, &scales, true)?;
                self.product8(x, matrices, &codes, &scales, out);
                Ok(())
            }
            Kernel::Float => {
                let weight = format!("{out}/weight");
                self.matrix32(matrices, &weight)?;
                self.product32(x, &weight, out);
                Ok(())
            }
        }
    }

    /// `x` times the transpose of a float matrix `[rows, columns]`.
    pub(super) fn product32(&mut self, x: &str, weight: &str, out: &str) {
        self.graph.node("FusedMatMul", &[x, weight], &[out], &[("transB", Attribute::Int(1))]);
    }

    /// Writes matrices as floats, `[rows, columns]`.
    pub(super) fn matrix32(&mut self, matrices: &[Matrix<'_>], name: &str) -> Result<(), ImportError> {
        let (rows, columns) = (rows(matrices), columns(matrices));
        let gguf = self.gguf;
        let mut buffer = Vec::with_capacity(columns);
        self.graph.tensor::<ImportError>(name, Element::Float, &[rows, columns], |data| {
            each_row(matrices, |matrix, row| {
                buffer.clear();
                dequantize(matrix.tensor.kind, row_at(gguf.data(matrix.tensor), matrix, row), &mut buffer);
                finite(matrix.tensor, &buffer)?;
                Ok(write_floats(data, &buffer)?)
            })
        })?;
        self.read(matrices);
        Ok(())
    }

    /// Writes `Q8_0` matrices: codes `[rows, blocks, 32]`, or `[rows, columns]` unless `blocked`, and scales `[rows, blocks]`.
    pub(super) fn codes8(&mut self, matrices: &[Matrix<'_>], codes: &str, scales: &str, blocked: bool) -> Result<(), ImportError> {
        let (rows, columns) = (rows(matrices), columns(matrices));
        let gguf = self.gguf;
        let (mut buffer, mut scale_values) = (Vec::with_capacity(columns), Vec::with_capacity(rows * columns / BLOCK));
        let dims: &[usize] = if blocked { &[rows, columns / BLOCK, BLOCK] } else { &[rows, columns] };
        self.graph.tensor::<ImportError>(codes, Element::Byte, dims, |data| {
            each_row(matrices, |matrix, row| {
                buffer.clear();
                read_row8(row_at(gguf.data(matrix.tensor), matrix, row), &mut buffer, &mut scale_values);
                Ok(data.write_all(&buffer)?)
            })
        })?;
        if let Some(matrix) = matrices.first() {
            finite(matrix.tensor, &scale_values)?;
        }
        self.graph.floats::<ImportError>(scales, &[rows, columns / BLOCK], &scale_values)?;
        self.read(matrices);
        Ok(())
    }

    /// `x` times 8-bit matrices. Always with 8-bit activations: the runtime has no fast kernel for 8-bit weights and
    /// float activations (200 times slower for the head of a model of 135 M weights).
    pub(super) fn product8(&mut self, x: &str, matrices: &[Matrix<'_>], codes: &str, scales: &str, out: &str) {
        let attributes = quantized(columns(matrices), rows(matrices), 8, LEVEL_INT8);
        self.graph.node("MatMulNBits", &[x, codes, scales], &[out], &attributes);
    }

    fn linear4(&mut self, x: &str, matrices: &[Matrix<'_>], out: &str) -> Result<(), ImportError> {
        let (rows, columns) = (rows(matrices), columns(matrices));
        let extended = matrices.iter().any(|matrix| matrix.tensor.kind == Kind::Q4_1);
        let digits = if extended { DIGITS } else { 0 };
        let digit_blocks = (columns / BLOCK).div_ceil(BLOCK);
        let blocks = columns / BLOCK + digits * digit_blocks;
        let [codes, scales, zeros] = ["codes", "scales", "zeros"].map(|part| format!("{out}/{part}"));
        let gguf = self.gguf;
        let (mut all_scales, mut all_zeros) = (Vec::with_capacity(rows * blocks), Vec::with_capacity(rows * blocks.div_ceil(2)));
        let (mut row4, mut packed) = (Row4::default(), Vec::new());
        self.graph.tensor::<ImportError>(&codes, Element::Byte, &[rows, blocks, BLOCK / 2], |data| {
            each_row(matrices, |matrix, row| {
                row4.read(matrix.tensor.kind, row_at(gguf.data(matrix.tensor), matrix, row));
                finite(matrix.tensor, &row4.scales)?;
                finite(matrix.tensor, &row4.minimums)?;
                let zeros = split_minimums(&mut row4, digits, digit_blocks);
                packed.clear();
                packed.extend(row4.codes.as_chunks().0.iter().map(|[low, high]| low | high << 4));
                all_scales.extend_from_slice(&row4.scales);
                all_zeros.extend(zeros.chunks(2).map(|pair| pair[0] | pair.get(1).map_or(0, |high| high << 4)));
                Ok(data.write_all(&packed)?)
            })
        })?;
        self.graph.floats::<ImportError>(&scales, &[rows, blocks], &all_scales)?;
        self.graph.bytes::<ImportError>(&zeros, &[rows, blocks.div_ceil(2)], &all_zeros)?;
        self.read(matrices);
        let level = if self.form == Form::Exact { LEVEL_FLOAT } else { LEVEL_INT8 };
        let x = if extended { self.with_block_sums(x, columns)? } else { x.to_owned() };
        let attributes = quantized(blocks * BLOCK, rows, 4, level);
        self.graph.node("MatMulNBits", &[&x, &codes, &scales, &zeros], &[out], &attributes);
        Ok(())
    }

    /// `x` followed by its block sums, once for each digit and padded with zeros to whole blocks.
    fn with_block_sums(&mut self, x: &str, columns: usize) -> Result<String, ImportError> {
        let extended = format!("{x}/extended");
        if !self.extended.insert(extended.clone()) {
            return Ok(extended);
        }
        let (blocks, matrix) = (columns / BLOCK, format!("block_sums/{columns}"));
        if self.extended.insert(matrix.clone()) {
            // A product with ones where column and block belong together: one node for reshape, sum, pad and repeat.
            let width = blocks.next_multiple_of(BLOCK);
            let mut ones = vec![0.0; columns * DIGITS * width];
            for (column, row) in ones.chunks_exact_mut(DIGITS * width).enumerate() {
                for digit in row.chunks_exact_mut(width) {
                    digit[column / BLOCK] = 1.0;
                }
            }
            self.graph.floats::<ImportError>(&matrix, &[columns, DIGITS * width], &ones)?;
        }
        let sums = format!("{x}/block_sums");
        self.graph.node("MatMul", &[x, &matrix], &[&sums], &[]);
        self.graph.node("Concat", &[x, &sums], &[&extended], &[("axis", Attribute::Int(-1))]);
        Ok(extended)
    }
}

/// Turns a row's minimums into zero points (returned, one a block) and appends what is left as blocks of digits.
fn split_minimums(row: &mut Row4, digits: usize, digit_blocks: usize) -> Vec<u8> {
    let mut zeros = Vec::with_capacity(row.scales.len() + digits * digit_blocks);
    let mut rests = Vec::with_capacity(row.scales.len());
    for (&scale, &minimum) in row.scales.iter().zip(&row.minimums) {
        let (scale, minimum) = (f64::from(scale), f64::from(minimum));
        let zero = if scale == 0.0 { 8.0 } else { (-minimum / scale).round_ties_even().clamp(0.0, 15.0) };
        zeros.push(zero as u8);
        rests.push(minimum + scale * zero);
    }
    if digits == 0 {
        return zeros;
    }
    rests.resize(digit_blocks * BLOCK, 0.0);
    // Codes run from -8 to 7; a scale a little above max / 7.5 rounds every rest to one of -7…7.
    let mut steps: Vec<f64> =
        rests.chunks_exact(BLOCK).map(|block| block.iter().fold(0.0_f64, |most, rest| most.max(rest.abs())) / 7.49).collect();
    for _ in 0..digits {
        for (block, step) in rests.chunks_exact_mut(BLOCK).zip(&mut steps) {
            let scale = *step as f32;
            let divisor = f64::from(scale);
            for rest in block {
                let code = if scale == 0.0 { 0.0 } else { (*rest / divisor).round_ties_even().clamp(-8.0, 7.0) };
                row.codes.push((code + 8.0) as u8);
                *rest -= divisor * code;
            }
            row.scales.push(scale);
            zeros.push(8);
            *step = divisor / 15.0;
        }
    }
    zeros
}

fn quantized(columns: usize, rows: usize, bits: i64, level: i64) -> [(&'static str, Attribute); 5] {
    [
        ("K", Attribute::Int(columns as i64)),
        ("N", Attribute::Int(rows as i64)),
        ("bits", Attribute::Int(bits)),
        ("block_size", Attribute::Int(BLOCK as i64)),
        ("accuracy_level", Attribute::Int(level)),
    ]
}

fn rows(matrices: &[Matrix<'_>]) -> usize {
    matrices.iter().map(|matrix| matrix.tensor.rows).sum()
}

fn columns(matrices: &[Matrix<'_>]) -> usize {
    matrices.first().map_or(0, |matrix| matrix.tensor.columns)
}

fn each_row(matrices: &[Matrix<'_>], mut visit: impl FnMut(&Matrix<'_>, usize) -> Result<(), ImportError>) -> Result<(), ImportError> {
    for matrix in matrices {
        for row in 0..matrix.tensor.rows {
            visit(matrix, matrix.source_row(row))?;
        }
    }
    Ok(())
}

fn row_at<'d>(data: &'d [u8], matrix: &Matrix<'_>, row: usize) -> &'d [u8] {
    let size = row_bytes(matrix.tensor.kind, matrix.tensor.columns);
    data.get(row * size..(row + 1) * size).unwrap_or_default()
}

fn finite(tensor: &TensorInfo, values: &[f32]) -> Result<(), ImportError> {
    match values.iter().all(|value| value.is_finite()) {
        true => Ok(()),
        false => Err(ImportError::NotFinite { tensor: tensor.name.clone() }),
    }
}
