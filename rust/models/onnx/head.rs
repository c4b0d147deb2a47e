//! The end of the decoder graph: logits of the last token, and the best of them in order.

use super::decoder::Builder;
use super::graph::Attribute;
use super::linear::Matrix;
use super::packed::block;
use crate::models::gguf::Coding;
use crate::models::import::ImportError;
use crate::models::llama::Llama;

/// How many of the best logits the graph hands out.
pub(super) const TOP: usize = 256;
/// How many of them are computed anew in floats when the head is 8 bits wide.
const EXACT: usize = 64;

impl Builder<'_> {
    /// Logits of the last token only (prefill of 512 tokens is 1.3 times faster for it), and the best of them.
    pub(super) fn head(&mut self, llama: &Llama) -> Result<(), ImportError> {
        self.graph.node("Reshape", &["output_norm", "unflat"], &["output_norm/rows"], &[]);
        self.graph.integers("last", &[-1], false);
        self.graph.integers("first", &[0], true);
        self.graph.integers("top", &[TOP.min(llama.vocab) as i64], false);
        self.graph.node("Gather", &["output_norm/rows", "last"], &["last_hidden"], &[("axis", Attribute::Int(1))]);
        let name = if llama.tied { "token_embd.weight" } else { "output.weight" };
        let matrix = Matrix::plain(self.gguf.tensor(name)?);
        let owner = if llama.tied { "embedding" } else { "head" };
        let kept = self.keeps_codes(matrix.tensor.kind);
        if kept && matches!(matrix.tensor.kind.coding(), Some(Coding { bits: 8, zero: Some(_), .. })) {
            self.head8(llama, matrix, owner)?;
        } else {
            if !kept {
                let weight = format!("{owner}/weight");
                if !llama.tied {
                    self.matrix32(&[matrix], &weight)?;
                }
                self.product32("last_hidden", &weight, "logits");
            } else {
                self.linear("last_hidden", &[matrix], "logits")?;
            }
            self.graph.node("TopK", &["logits", "top"], &["top/values", "top/indices"], &[]);
        }
        self.graph.node("Squeeze", &["top/values", "axis_1"], &["topk_values"], &[]);
        self.graph.node("Squeeze", &["top/indices", "axis_1"], &["topk_indices"], &[]);
        self.graph.node("Gather", &["topk_indices", "first"], &["argmax"], &[("axis", Attribute::Int(1))]);
        Ok(())
    }

    /// An 8-bit head. The fast kernel rounds the hidden state to 8 bits, which moves logits by about 0.05 and flips close
    /// tokens; so the best [`EXACT`] candidates are computed again in floats, from their rows alone.
    fn head8(&mut self, llama: &Llama, matrix: Matrix<'_>, owner: &str) -> Result<(), ImportError> {
        let blocked = format!("{owner}/blocked");
        let (codes, scales) = (format!("{owner}/codes"), format!("{owner}/scales"));
        if !llama.tied {
            self.codes8(matrix, owner)?;
        }
        // One copy in the file serves both: the gather wants rows, the product wants blocks.
        self.graph.integers("head/shape", &[llama.vocab as i64, (llama.width / block(matrix)) as i64, block(matrix) as i64], false);
        self.graph.node("Reshape", &[&codes, "head/shape"], &[&blocked], &[]);
        self.product8("last_hidden", matrix, &blocked, &scales, "rough");
        let top = TOP.min(llama.vocab);
        let exact = EXACT.min(top.div_ceil(2));
        let axis = |axis| [("axis", Attribute::Int(axis))];
        self.graph.node("TopK", &["rough", "top"], &["rough/values", "rough/indices"], &[]);
        self.graph.integers("top/split", &[exact as i64, (top - exact) as i64], false);
        self.graph.node("Split", &["rough/indices", "top/split"], &["candidates", "others"], &axis(2));
        self.graph.node("Split", &["rough/values", "top/split"], &["candidates/rough", "others/values"], &axis(2));
        self.graph.node("Squeeze", &["candidates", "axis_1"], &["candidates/flat"], &[]);
        self.rows8(matrix, owner, "candidates/flat", "candidates/weight");
        self.product32("last_hidden", "candidates/weight", "candidates/values");
        self.graph.node("ScatterElements", &["rough", "candidates", "candidates/values"], &["logits"], &axis(2));
        self.graph.node("Concat", &["candidates/values", "others/values"], &["merged"], &axis(2));
        self.graph.node("TopK", &["merged", "top"], &["top/values", "top/order"], &[]);
        self.graph.node("GatherElements", &["rough/indices", "top/order"], &["top/indices"], &axis(2));
        Ok(())
    }
}
