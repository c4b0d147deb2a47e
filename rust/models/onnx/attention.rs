//! A layer's attention: queries, keys and values, what the family does to them before they meet, and the product of them all.

use super::decoder::Builder;
use super::graph::Attribute;
use super::linear::Matrix;
use crate::models::import::ImportError;
use crate::models::llama::{Family, Llama};

impl Builder<'_> {
    /// Attention over `input` (`[batch * sequence, width]`), through the output matrix; the result is named `out`.
    pub(super) fn attention(&mut self, llama: &Llama, layer: usize, input: &str, out: &str) -> Result<(), ImportError> {
        let gguf = self.gguf;
        let tensor = |part: &str| gguf.tensor(&Llama::layer_tensor(layer, part));
        let name = |part: &str| format!("layer.{layer}/{part}");
        // The runtime rotates halves. Files of the llama architecture hold rows in another order, which its rotation of pairs wants.
        let rotary_heads = |heads| if llama.family == Family::Llama { heads } else { 0 };
        let matrices = [
            Matrix { tensor: tensor("attn_q")?, rotary_heads: rotary_heads(llama.heads) },
            Matrix { tensor: tensor("attn_k")?, rotary_heads: rotary_heads(llama.kv_heads) },
            Matrix::plain(tensor("attn_v")?),
        ];
        let qkv = name("qkv");
        if llama.family == Family::Qwen2 {
            let (product, bias) = (name("qkv/product"), name("qkv/bias"));
            self.linear(input, &matrices, &product)?;
            let biases = ["attn_q", "attn_k", "attn_v"].map(|part| gguf.tensor(&Llama::layer_bias(layer, part)).map(Matrix::plain));
            let [q, k, v] = biases;
            self.vector32(&[q?, k?, v?], &bias)?;
            self.graph.node("Add", &[&product, &bias], &[&qkv], &[]);
        } else {
            self.linear(input, &matrices, &qkv)?;
        }
        let [queries, keys, values] = if llama.family == Family::Qwen3 {
            self.normed_heads(llama, layer, &qkv)?
        } else {
            let rows = name("qkv/rows");
            self.graph.node("Reshape", &[&qkv, "unflat"], &[&rows], &[]);
            [rows, String::new(), String::new()]
        };

        let (context, context_flat) = (name("context"), name("context/flat"));
        let (past_key, past_value) = (format!("past_key_values.{layer}.key"), format!("past_key_values.{layer}.value"));
        let (present_key, present_value) = (format!("present.{layer}.key"), format!("present.{layer}.value"));
        let mut attributes = vec![
            ("num_heads", Attribute::Int(llama.heads as i64)),
            ("kv_num_heads", Attribute::Int(llama.kv_heads as i64)),
            ("scale", Attribute::Float((llama.head_dim as f32).sqrt().recip())),
            ("do_rotary", Attribute::Int(1)),
            ("rotary_interleaved", Attribute::Int(0)),
        ];
        attributes.extend(llama.window.map(|window| ("local_window_size", Attribute::Int(window as i64))));
        self.graph.node(
            "GroupQueryAttention",
            &[&queries, &keys, &values, &past_key, &past_value, "seqlens_k", "total_sequence_length", "rotary/cos", "rotary/sin"],
            &[&context, &present_key, &present_value],
            &attributes,
        );
        self.graph.node("Reshape", &[&context, "flat_attention"], &[&context_flat], &[]);
        self.linear(&context_flat, &[Matrix::plain(tensor("attn_output")?)], out)
    }

    /// Queries, keys and values apart, `[batch, sequence, heads * head_dim]`, each head of the first two with an RMS norm.
    fn normed_heads(&mut self, llama: &Llama, layer: usize, qkv: &str) -> Result<[String; 3], ImportError> {
        let gguf = self.gguf;
        let name = |part: &str| format!("layer.{layer}/{part}");
        if self.made.insert("qkv/sizes".to_owned()) {
            let (queries, keys) = ((llama.heads * llama.head_dim) as i64, (llama.kv_heads * llama.head_dim) as i64);
            self.graph.integers("qkv/sizes", &[queries, keys, keys], false);
            self.graph.integers("flat_heads", &[-1, llama.head_dim as i64], false);
        }
        let parts = ["queries", "keys", "values"].map(name);
        let [queries, keys, values] = parts.each_ref().map(|part| format!("{part}/flat"));
        self.graph.node("Split", &[qkv, "qkv/sizes"], &[&queries, &keys, &values], &[("axis", Attribute::Int(-1))]);
        for (part, flat, norm) in [(&parts[0], &queries, "attn_q_norm"), (&parts[1], &keys, "attn_k_norm")] {
            let weight = Llama::layer_tensor(layer, norm);
            let (heads, normed) = (format!("{part}/heads"), format!("{part}/normed"));
            self.vector32(&[Matrix::plain(gguf.tensor(&weight)?)], &weight)?;
            self.graph.node("Reshape", &[flat, "flat_heads"], &[&heads], &[]);
            let attributes =
                [("epsilon", Attribute::Float(llama.epsilon)), ("axis", Attribute::Int(-1)), ("stash_type", Attribute::Int(1))];
            self.graph.node("SimplifiedLayerNormalization", &[&heads, &weight], &[&normed], &attributes);
            self.graph.node("Reshape", &[&normed, "unflat"], &[part], &[]);
        }
        self.graph.node("Reshape", &[&values, "unflat"], &[&parts[2]], &[]);
        Ok(parts)
    }
}
