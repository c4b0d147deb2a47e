//! The decoder graph: token ids and a key-value cache in, the last token's logits and the longer cache out.
//!
//! What goes in and out (`L` layers, `V` vocabulary, `K = min(256, V)`):
//!
//! | input | type | shape |
//! |---|---|---|
//! | `input_ids` | int64 | `[batch, sequence]` |
//! | `attention_mask` | int64 | `[batch, width]`: 1 for each position up to and with the new ones, then 0; `width` is free |
//! | `past_key_values.{0…L-1}.key`, `.value` | float | `[batch, kv_heads, capacity, head_dim]` |
//!
//! | output | type | shape |
//! |---|---|---|
//! | `logits` | float | `[batch, 1, V]`, of the last token of each row |
//! | `argmax` | int64 | `[batch]` |
//! | `topk_values`, `topk_indices` | float, int64 | `[batch, K]`, descending |
//! | `present.{0…L-1}.key`, `.value` | float | as `past_key_values`; bind the same buffers, then nothing is copied |
//!
//! A row's mask sum is its length after this step, at least `sequence`; a free row is given length 1. Rows of different lengths may be
//! decoded together (`sequence` 1); more than one new token with a past needs `batch` 1 (a limit of the attention kernel).

use std::collections::HashSet;

use super::graph::{Attribute, CAST_INT32, Element, Graph, Size};
use super::head::TOP;
use super::linear::Matrix;
use crate::models::gguf::Gguf;
use crate::models::import::{Form, ImportError};
use crate::models::llama::Llama;

/// A graph and what it is made from.
pub struct Builder<'a> {
    /// Where the weights come from.
    pub(super) gguf: &'a Gguf,
    /// Where nodes and weights go.
    pub(super) graph: Graph,
    /// How the weights are kept.
    pub(super) form: Form,
    /// What has been made once and may be used again.
    pub(super) made: HashSet<String>,
    /// Told how many bytes of weights were read.
    progress: &'a mut dyn FnMut(u64),
}

impl std::fmt::Debug for Builder<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Builder").field("form", &self.form).finish_non_exhaustive()
    }
}

impl<'a> Builder<'a> {
    /// A builder that reads `gguf` and tells `progress` the bytes of each tensor it has read.
    pub fn new(gguf: &'a Gguf, graph: Graph, form: Form, progress: &'a mut dyn FnMut(u64)) -> Self {
        Self { gguf, graph, form, made: HashSet::new(), progress }
    }

    /// Builds the whole decoder and returns the graph.
    ///
    /// # Errors
    /// A tensor that holds something else than numbers, or what the system says to a write.
    pub fn build(mut self, llama: &Llama) -> Result<Graph, ImportError> {
        self.inputs_and_outputs(llama);
        self.lengths();
        self.rotary_tables(llama)?;
        self.embed(llama)?;
        let mut residual = "hidden/0".to_owned();
        let mut added: Option<String> = None;
        for layer in 0..llama.layers {
            (residual, added) = self.layer(llama, layer, &residual, added.as_deref())?;
        }
        self.norm(llama, &residual, added.as_deref(), "output_norm.weight", "output_norm")?;
        self.head(llama)?;
        Ok(self.graph)
    }

    /// Tells that these matrices have been read.
    pub(super) fn read(&mut self, matrices: &[Matrix<'_>]) {
        for matrix in matrices {
            (self.progress)(matrix.tensor.bytes() as u64);
        }
    }

    fn inputs_and_outputs(&mut self, llama: &Llama) {
        let batch = Size::Named("batch");
        let top = Size::Fixed(TOP.min(llama.vocab));
        self.graph.input("input_ids", Element::Int64, &[batch, Size::Named("sequence")]);
        self.graph.input("attention_mask", Element::Int64, &[batch, Size::Named("width")]);
        self.graph.output("logits", Element::Float, &[batch, Size::Fixed(1), Size::Fixed(llama.vocab)]);
        self.graph.output("argmax", Element::Int64, &[batch]);
        self.graph.output("topk_values", Element::Float, &[batch, top]);
        self.graph.output("topk_indices", Element::Int64, &[batch, top]);
        let cache = [batch, Size::Fixed(llama.kv_heads), Size::Named("capacity"), Size::Fixed(llama.head_dim)];
        for layer in 0..llama.layers {
            for part in ["key", "value"] {
                self.graph.input(&format!("past_key_values.{layer}.{part}"), Element::Float, &cache);
                self.graph.output(&format!("present.{layer}.{part}"), Element::Float, &cache);
            }
        }
    }

    /// Row lengths from the mask. Its width is never used: a wide mask kept in place costs no more than a narrow one,
    /// and the attention's scratch memory grows with the longest row, not with the capacity.
    fn lengths(&mut self) {
        self.graph.integers("axis_1", &[1], false);
        self.graph.integers("one", &[1], true);
        self.graph.node("ReduceSum", &["attention_mask", "axis_1"], &["lengths"], &[("keepdims", Attribute::Int(0))]);
        self.graph.node("Sub", &["lengths", "one"], &["last_positions"], &[]);
        self.graph.node("Cast", &["last_positions"], &["seqlens_k"], &[("to", CAST_INT32)]);
        self.graph.node("ReduceMax", &["lengths"], &["longest"], &[("keepdims", Attribute::Int(0))]);
        self.graph.node("Cast", &["longest"], &["total_sequence_length"], &[("to", CAST_INT32)]);
    }

    fn rotary_tables(&mut self, llama: &Llama) -> Result<(), ImportError> {
        let half = llama.frequencies.len();
        for (name, function) in [("rotary/cos", f64::cos as fn(f64) -> f64), ("rotary/sin", f64::sin)] {
            self.graph.tensor::<ImportError>(name, Element::Float, &[llama.context, half], |data| {
                let mut row = Vec::with_capacity(half);
                for position in 0..llama.context {
                    row.clear();
                    row.extend(llama.frequencies.iter().map(|frequency| function(position as f64 * frequency) as f32));
                    super::graph::write_floats(data, &row)?;
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Rows of the embedding, then everything up to the attention is `[batch * sequence, …]`.
    fn embed(&mut self, llama: &Llama) -> Result<(), ImportError> {
        let matrix = Matrix::plain(self.gguf.tensor("token_embd.weight")?);
        if self.keeps_codes(matrix.tensor.kind) {
            self.codes8(matrix, "embedding")?;
            self.rows8(matrix, "embedding", "input_ids", "embedded");
        } else {
            self.matrix32(&[matrix], "embedding/weight")?;
            self.graph.node("Gather", &["embedding/weight", "input_ids"], &["embedded"], &[]);
        }
        self.graph.integers("flat", &[-1, llama.width as i64], false);
        self.graph.integers("flat_attention", &[-1, (llama.heads * llama.head_dim) as i64], false);
        self.graph.integers("rest", &[-1], false);
        self.graph.node("Reshape", &["embedded", "flat"], &["hidden/0"], &[]);
        self.graph.node("Shape", &["input_ids"], &["batch_and_sequence"], &[]);
        self.graph.node("Concat", &["batch_and_sequence", "rest"], &["unflat"], &[("axis", Attribute::Int(0))]);
        Ok(())
    }

    /// RMS norm of `residual + added`; returns the name of that sum. The result is named `out`.
    fn norm(&mut self, llama: &Llama, residual: &str, added: Option<&str>, weight: &str, out: &str) -> Result<String, ImportError> {
        let tensor = self.gguf.tensor(weight)?;
        self.vector32(&[Matrix::plain(tensor)], weight)?;
        let epsilon = ("epsilon", Attribute::Float(llama.epsilon));
        let Some(added) = added else {
            let attributes = [epsilon, ("axis", Attribute::Int(-1)), ("stash_type", Attribute::Int(1))];
            self.graph.node("SimplifiedLayerNormalization", &[residual, weight], &[out], &attributes);
            return Ok(residual.to_owned());
        };
        let sum = format!("{out}/residual");
        self.graph.node("SkipSimplifiedLayerNormalization", &[residual, added, weight], &[out, "", "", &sum], &[epsilon]);
        Ok(sum)
    }

    /// One layer. Takes the residual stream as a sum not yet taken (`residual + added`) and returns it the same way, so
    /// that each addition is part of the norm after it.
    fn layer(&mut self, llama: &Llama, layer: usize, residual: &str, added: Option<&str>) -> Result<(String, Option<String>), ImportError> {
        let gguf = self.gguf;
        let tensor = |part: &str| gguf.tensor(&Llama::layer_tensor(layer, part));
        let name = |part: &str| format!("layer.{layer}/{part}");
        let weight = |part: &str| Llama::layer_tensor(layer, part);

        let input = name("attention_norm");
        let residual = self.norm(llama, residual, added, &weight("attn_norm"), &input)?;
        let attention = name("attention");
        self.attention(llama, layer, &input, &attention)?;

        let input = name("feed_forward_norm");
        let residual = self.norm(llama, &residual, Some(&attention), &weight("ffn_norm"), &input)?;
        let [both, gate, up, active, product, out] = ["gate_up", "gate", "up", "gate/silu", "product", "feed_forward"].map(name);
        self.linear(&input, &[Matrix::plain(tensor("ffn_gate")?), Matrix::plain(tensor("ffn_up")?)], &both)?;
        self.graph.node("Split", &[&both], &[&gate, &up], &[("axis", Attribute::Int(-1)), ("num_outputs", Attribute::Int(2))]);
        // QuickGelu(x) is x * sigmoid(alpha * x): SiLU when alpha is 1, in one node.
        self.graph.node("QuickGelu", &[&gate], &[&active], &[("alpha", Attribute::Float(1.0))]);
        self.graph.node("Mul", &[&active, &up], &[&product], &[]);
        self.linear(&product, &[Matrix::plain(tensor("ffn_down")?)], &out)?;
        Ok((residual, Some(out)))
    }
}
