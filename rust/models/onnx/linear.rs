//! Matrix products over GGUF weights: `y = x * Wᵀ` as nodes and weights of a graph.
//!
//! Which kernel a tensor's type goes to, and products of floats, are here; quantized ones, and how a block's minimum is kept,
//! are in `packed`.

use super::decoder::Builder;
use super::graph::{Attribute, Element, write_floats};
use crate::models::gguf::blocks::{dequantize, row_bytes};
use crate::models::gguf::{Gguf, Kind, TensorInfo};
use crate::models::import::{Form, ImportError};

/// Bytes of a tensor that are read before their pages are given back.
const MAPPED: usize = 8 << 20;

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
    /// Codes of so many bits, of which so many share a scale.
    Packed {
        bits: usize,
        block: usize,
    },
    Float,
}

impl Builder<'_> {
    fn kernel(&self, kind: Kind) -> Kernel {
        match kind.coding() {
            Some(coding) if self.form != Form::Fp32 => Kernel::Packed { bits: coding.bits, block: coding.block },
            _ => Kernel::Float,
        }
    }

    /// Whether a tensor stays quantized.
    pub(super) fn keeps_codes(&self, kind: Kind) -> bool {
        self.kernel(kind) != Kernel::Float
    }

    /// `x` times the matrices' rows, one after the other in the last dimension. The result is named `out`.
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
            Kernel::Packed { bits, block } => self.packed(x, matrices, bits, block, out),
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
            each_row(gguf, matrices, |matrix, row| {
                buffer.clear();
                dequantize(matrix.tensor.kind, row, &mut buffer);
                finite(matrix.tensor, &buffer)?;
                Ok(write_floats(data, &buffer)?)
            })
        })?;
        self.read(matrices);
        Ok(())
    }

    /// Writes small vectors as one of floats, one after the other.
    pub(super) fn vector32(&mut self, vectors: &[Matrix<'_>], name: &str) -> Result<(), ImportError> {
        let mut values = Vec::new();
        for vector in vectors {
            let mut stored = Vec::with_capacity(vector.tensor.columns);
            dequantize(vector.tensor.kind, self.gguf.data(vector.tensor), &mut stored);
            finite(vector.tensor, &stored)?;
            values.append(&mut stored);
        }
        self.graph.floats::<ImportError>(name, &[values.len()], &values)?;
        self.read(vectors);
        Ok(())
    }
}

pub(super) fn rows(matrices: &[Matrix<'_>]) -> usize {
    matrices.iter().map(|matrix| matrix.tensor.rows).sum()
}

pub(super) fn columns(matrices: &[Matrix<'_>]) -> usize {
    matrices.first().map_or(0, |matrix| matrix.tensor.columns)
}

/// Visits the rows of all matrices, each as its bytes in the file, and gives their pages back.
pub(super) fn each_row(
    gguf: &Gguf,
    matrices: &[Matrix<'_>],
    mut visit: impl FnMut(&Matrix<'_>, &[u8]) -> Result<(), ImportError>,
) -> Result<(), ImportError> {
    for matrix in matrices {
        let data = gguf.data(matrix.tensor);
        let size = row_bytes(matrix.tensor.kind, matrix.tensor.columns);
        let mut kept = 0;
        for row in 0..matrix.tensor.rows {
            let source = matrix.source_row(row) * size;
            visit(matrix, data.get(source..source + size).unwrap_or_default())?;
            // Rows of a head are not visited in order; what is needed once more is read once more.
            if (row + 1) * size - kept >= MAPPED {
                gguf.release(data.get(kept..(row + 1) * size).unwrap_or_default());
                kept = (row + 1) * size;
            }
        }
        gguf.release(data.get(kept..).unwrap_or_default());
    }
    Ok(())
}

/// Refuses values that are infinite or not numbers.
pub(super) fn finite(tensor: &TensorInfo, values: &[f32]) -> Result<(), ImportError> {
    match values.iter().all(|value| value.is_finite()) {
        true => Ok(()),
        false => Err(ImportError::NotFinite { tensor: tensor.name.clone() }),
    }
}
