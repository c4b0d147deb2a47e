//! The end of the decoder graph: logits, and the best of them in order, of the last token and of every token of a short pass.
//!
//! A pass of up to [`POSITIONS`] tokens may be one that checks guessed tokens: it gives logits after each of them. A longer one reads
//! a prompt, and only its last token goes through the head (prefill of 512 tokens is 1.3 times faster for it).

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
/// The longest pass that gives logits of every position.
pub(super) const POSITIONS: usize = 32;

/// The logits of every position.
pub(super) const POSITION_LOGITS: &str = "position_logits";
/// The same, from hidden states that the kernel rounds.
pub(super) const ROUGH: &str = "rough";
/// The best of them in order, `[positions, 1, K]`.
pub(super) const TOP_VALUES: &str = "top/values";
/// Which they are.
pub(super) const TOP_INDICES: &str = "top/indices";
/// The constant that holds their number.
pub(super) const TOP_SIZE: &str = "top";

impl Builder<'_> {
    /// Logits of the positions, the best of them, and of both the part that belongs to the last token of each row.
    pub(super) fn head(&mut self, llama: &Llama) -> Result<(), ImportError> {
        self.graph.integers("first", &[0], true);
        self.graph.integers(TOP_SIZE, &[TOP.min(llama.vocab) as i64], false);
        self.positions(llama);
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
                self.product32("position_hidden", &weight, POSITION_LOGITS);
            } else {
                self.linear("position_hidden", &[matrix], POSITION_LOGITS)?;
            }
            self.graph.node("TopK", &[POSITION_LOGITS, TOP_SIZE], &[TOP_VALUES, TOP_INDICES], &[]);
        }
        self.graph.node("Squeeze", &[TOP_VALUES, "axis_1"], &["position_topk_values"], &[]);
        self.graph.node("Squeeze", &[TOP_INDICES, "axis_1"], &["position_topk_indices"], &[]);
        self.graph.node("Gather", &["position_topk_indices", "first"], &["position_argmax"], &[("axis", Attribute::Int(1))]);
        for output in ["logits", "argmax", "topk_values", "topk_indices"] {
            let all = format!("position_{output}");
            self.graph.node("Slice", &[&all, "last_position", "beyond", "axis_0", "kept"], &[output], &[]);
        }
        Ok(())
    }

    /// The hidden states that go through the head, `[batch * kept, 1, width]`: those of every position of a short pass, else those of the
    /// last one. Row after row, so that every `kept`-th of them, from `last_position` on, is the last of its row.
    fn positions(&mut self, llama: &Llama) {
        self.graph.metadata("emberd.positions", &POSITIONS.to_string());
        self.graph.integers("longest_checked", &[POSITIONS as i64], false);
        self.graph.integers("one/1", &[1], false);
        self.graph.integers("axis_0", &[0], false);
        self.graph.integers("beyond", &[i64::MAX], false);
        self.graph.integers("each_position", &[-1, 1, llama.width as i64], false);
        let end = [("start", Attribute::Int(1)), ("end", Attribute::Int(2))];
        self.graph.node("Shape", &["input_ids"], &["sequence_length"], &end);
        self.graph.node("LessOrEqual", &["sequence_length", "longest_checked"], &["is_short"], &[]);
        self.graph.node("Where", &["is_short", "sequence_length", "one/1"], &["kept"], &[]);
        self.graph.node("Sub", &["sequence_length", "kept"], &["first_kept"], &[]);
        self.graph.node("Sub", &["kept", "one/1"], &["last_position"], &[]);
        self.graph.node("Reshape", &["output_norm", "unflat"], &["output_norm/rows"], &[]);
        self.graph.node("Slice", &["output_norm/rows", "first_kept", "beyond", "axis_1"], &["output_norm/kept"], &[]);
        self.graph.node("Reshape", &["output_norm/kept", "each_position"], &["position_hidden"], &[]);
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
        self.product8("position_hidden", matrix, &blocked, &scales, ROUGH);
        let top = TOP.min(llama.vocab);
        let exact = EXACT.min(top.div_ceil(2));
        let axis = |axis| [("axis", Attribute::Int(axis))];
        self.graph.node("TopK", &[ROUGH, TOP_SIZE], &["rough/values", "rough/indices"], &[]);
        self.graph.integers("top/split", &[exact as i64, (top - exact) as i64], false);
        self.graph.node("Split", &["rough/indices", "top/split"], &["candidates", "others"], &axis(2));
        self.graph.node("Split", &["rough/values", "top/split"], &["candidates/rough", "others/values"], &axis(2));
        self.graph.node("Squeeze", &["candidates", "axis_1"], &["candidates/flat"], &[]);
        self.rows8(matrix, owner, "candidates/flat", "candidates/weight");
        self.product32("position_hidden", "candidates/weight", "candidates/values");
        self.graph.node("ScatterElements", &[ROUGH, "candidates", "candidates/values"], &[POSITION_LOGITS], &axis(2));
        self.graph.node("Concat", &["candidates/values", "others/values"], &["merged"], &axis(2));
        self.graph.node("TopK", &["merged", TOP_SIZE], &[TOP_VALUES, "top/order"], &[]);
        self.graph.node("GatherElements", &["rough/indices", "top/order"], &[TOP_INDICES], &axis(2));
        Ok(())
    }
}
