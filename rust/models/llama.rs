//! What a GGUF file of the Llama family says about its shape, checked against the tensors that it holds.
//!
//! The family: Llama, Mistral and SmolLM2 (architecture `llama`), Qwen 2 and 2.5 (`qwen2`), Qwen 3 (`qwen3`), dense models only.
//!
//! Source of the keys: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#llm>.

use super::gguf::blocks::dequantize;
use super::gguf::{Gguf, GgufError, Kind, TensorInfo, Value};
use super::import::ImportError;

/// What a model of the family has besides what all have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Nothing. Files hold the rows of queries and keys in the order that a rotation of neighbouring elements wants.
    Llama,
    /// Biases of queries, keys and values.
    Qwen2,
    /// An RMS norm in each head of queries and keys.
    Qwen3,
}

impl Family {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Llama, Self::Qwen2, Self::Qwen3];

    /// The name of the architecture, in files and for transformers.
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }
}

/// The shape of a decoder of the family.
#[derive(Debug, Clone, PartialEq)]
pub struct Llama {
    /// Which member of the family it is.
    pub family: Family,
    /// Number of layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements of the hidden state.
    pub width: usize,
    /// Elements inside the feed-forward layer.
    pub feed_forward: usize,
    /// Token ids.
    pub vocab: usize,
    /// Positions the model was made for.
    pub context: usize,
    /// Epsilon of the RMS norms.
    pub epsilon: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Rotary frequency of each pair of elements, radians a position; `head_dim / 2` of them.
    pub frequencies: Vec<f64>,
    /// Positions that a token attends to, itself included; `None` for all before it.
    pub window: Option<usize>,
    /// Whether the output head is the embedding.
    pub tied: bool,
}

/// Tensors of each layer, with their shape `[rows, columns]` in units that [`Llama::shape`] knows.
const LAYER_TENSORS: [&str; 9] = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"];

/// The most positions that rotary tables are made for; they take 8 bytes for each pair of a head's elements.
const LONGEST_CONTEXT: usize = 1 << 20;

/// Factors that relatives of the family have, with the value that changes nothing; 0 stands for none as well.
const OTHER_FACTORS: [(&str, f64); 8] = [
    ("attention.scale", 0.0),
    ("attention.clamp_kqv", 0.0),
    ("attn_logit_softcapping", 0.0),
    ("final_logit_softcapping", 0.0),
    ("embedding_scale", 1.0),
    ("residual_scale", 1.0),
    ("logit_scale", 1.0),
    ("rope.scaling.attn_factor", 1.0),
];

impl Llama {
    /// Reads and checks the shape.
    ///
    /// # Errors
    /// Another architecture, a missing or absurd value, a tensor that is missing, unknown, of an unsupported type or of
    /// another shape than the metadata says.
    pub fn read(gguf: &Gguf) -> Result<Self, ImportError> {
        let architecture = gguf.text("general.architecture").ok_or_else(|| missing("general.architecture", "a string"))?;
        let Some(family) = Family::ALL.into_iter().find(|family| family.name() == architecture) else {
            return Err(ImportError::Architecture { name: architecture.to_owned() });
        };
        let named = |key: &str| format!("{architecture}.{key}");
        let size = |key: &str| {
            let key = named(key);
            match gguf.integer(&key) {
                Some(value @ 1..=0x7fff_ffff) => Ok(value as usize),
                _ => Err(missing(&key, "a positive integer")),
            }
        };
        let optional = |key: &str, default| match gguf.value(&named(key)) {
            None => Ok(default),
            Some(_) => size(key),
        };
        let width = size("embedding_length")?;
        let heads = size("attention.head_count")?;
        let head_dim = optional("attention.key_length", width / heads)?;
        let kv_heads = optional("attention.head_count_kv", heads)?;
        if optional("attention.value_length", head_dim)? != head_dim || optional("rope.dimension_count", head_dim)? != head_dim {
            return Err(unsupported("key, value and rotary sizes that differ"));
        }
        if heads % kv_heads != 0 || head_dim % 2 != 0 {
            return Err(unsupported(&format!("{heads} heads of {head_dim} over {kv_heads} key heads")));
        }
        if gguf.integer(&named("expert_count")).unwrap_or(0) > 0 {
            return Err(unsupported("a mixture of experts"));
        }
        for (key, none) in OTHER_FACTORS {
            if let Some(factor) = gguf.float(&named(key)).filter(|factor| *factor != 0.0 && *factor != none) {
                return Err(unsupported(&format!("{} of {factor}", named(key))));
            }
        }
        let context = size("context_length")?;
        if context > LONGEST_CONTEXT {
            return Err(unsupported(&format!("a context of {context} positions")));
        }
        let window = match gguf.integer(&named("attention.sliding_window")) {
            Some(0) => None,
            _ => Some(optional("attention.sliding_window", context)?),
        };
        // A window that no context fills is none.
        let window = window.filter(|window| *window < context);
        if window.is_some() && family != Family::Llama {
            // Only some of the layers have it, and files do not say which.
            return Err(unsupported("a sliding window"));
        }
        let epsilon_key = named("attention.layer_norm_rms_epsilon");
        let epsilon = gguf.float(&epsilon_key).filter(|epsilon| epsilon.is_finite() && *epsilon > 0.0);
        let rope_theta = gguf.float(&named("rope.freq_base")).unwrap_or(10_000.0);
        let mut llama = Self {
            family,
            layers: size("block_count")?,
            heads,
            kv_heads,
            head_dim,
            width,
            feed_forward: size("feed_forward_length")?,
            vocab: gguf.tensor("token_embd.weight")?.rows,
            context,
            epsilon: epsilon.ok_or_else(|| missing(&epsilon_key, "a positive float"))? as f32,
            rope_theta,
            frequencies: Vec::new(),
            window,
            tied: !gguf.tensors().contains_key("output.weight"),
        };
        llama.check_tensors(gguf)?;
        // Only now is the size of a head one that the file's tensors have.
        llama.frequencies = frequencies(gguf, architecture, head_dim, rope_theta)?;
        Ok(llama)
    }

    /// Name of a layer's tensor in the file.
    pub fn layer_tensor(layer: usize, part: &str) -> String {
        format!("blk.{layer}.{part}.weight")
    }

    /// Name of the bias that belongs to a layer's tensor.
    pub fn layer_bias(layer: usize, part: &str) -> String {
        format!("blk.{layer}.{part}.bias")
    }

    /// Vectors that each layer of the family has besides, with their ending and number of elements.
    fn layer_vectors(&self) -> Vec<(&'static str, usize)> {
        let (queries, keys) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        match self.family {
            Family::Llama => Vec::new(),
            Family::Qwen2 => vec![("attn_q.bias", queries), ("attn_k.bias", keys), ("attn_v.bias", keys)],
            Family::Qwen3 => vec![("attn_q_norm.weight", self.head_dim), ("attn_k_norm.weight", self.head_dim)],
        }
    }

    /// Rows and columns that a tensor must have; `None` for one that the architecture does not have.
    fn shape(&self, name: &str) -> Option<(usize, usize)> {
        let (queries, keys) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        match name {
            "token_embd.weight" | "output.weight" => return Some((self.vocab, self.width)),
            "output_norm.weight" => return Some((1, self.width)),
            "rope_freqs.weight" => return Some((1, self.head_dim / 2)),
            _ => {}
        }
        let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
        if layer.parse::<usize>().ok()? >= self.layers {
            return None;
        }
        if let Some((_, size)) = self.layer_vectors().into_iter().find(|(vector, _)| *vector == part) {
            return Some((1, size));
        }
        match part.strip_suffix(".weight")? {
            "attn_norm" | "ffn_norm" => Some((1, self.width)),
            "attn_q" => Some((queries, self.width)),
            "attn_k" | "attn_v" => Some((keys, self.width)),
            "attn_output" => Some((self.width, queries)),
            "ffn_gate" | "ffn_up" => Some((self.feed_forward, self.width)),
            "ffn_down" => Some((self.width, self.feed_forward)),
            _ => None,
        }
    }

    fn check_tensors(&self, gguf: &Gguf) -> Result<(), ImportError> {
        for tensor in gguf.tensors().values() {
            let TensorInfo { name, kind, rows, columns, .. } = tensor;
            if let Kind::Other(_) = kind {
                return Err(ImportError::TensorType { tensor: name.clone(), kind: kind.name() });
            }
            match self.shape(name) {
                Some(shape) if shape == (*rows, *columns) => {}
                Some((expected_rows, expected_columns)) => {
                    return Err(ImportError::Shape {
                        tensor: name.clone(),
                        found: format!("{rows} x {columns}"),
                        expected: format!("{expected_rows} x {expected_columns}"),
                    });
                }
                None => return Err(unsupported(&format!("the tensor {name}"))),
            }
        }
        gguf.tensor("output_norm.weight")?;
        // A layer that is not there is found before `layers` names are made: the file bounds the loop.
        for layer in 0..self.layers {
            for part in LAYER_TENSORS {
                gguf.tensor(&Self::layer_tensor(layer, part))?;
            }
            for (vector, _) in self.layer_vectors() {
                gguf.tensor(&format!("blk.{layer}.{vector}"))?;
            }
        }
        Ok(())
    }
}

/// Rotary frequencies, with the factors (Llama 3.1's long context) or the linear scaling that the file may carry.
fn frequencies(gguf: &Gguf, architecture: &str, head_dim: usize, theta: f64) -> Result<Vec<f64>, ImportError> {
    let named = |key: &str| format!("{architecture}.rope.{key}");
    let linear = match gguf.text(&named("scaling.type")) {
        // The key of old files, which knew the linear one only.
        None => gguf.float(&named("scale_linear")).unwrap_or(1.0),
        Some("none") => 1.0,
        Some("linear") => gguf.float(&named("scaling.factor")).unwrap_or(1.0),
        Some(other) => return Err(unsupported(&format!("rotary scaling of type {other}"))),
    };
    let mut factors = Vec::new();
    if let Some(tensor) = gguf.tensors().get("rope_freqs.weight") {
        dequantize(tensor.kind, gguf.data(tensor), &mut factors);
    }
    let half = head_dim / 2;
    let all: Vec<f64> = (0..half)
        .map(|pair| {
            let factor = factors.get(pair).copied().map_or(1.0, f64::from);
            theta.powf(-((2 * pair) as f64) / head_dim as f64) / (factor * linear)
        })
        .collect();
    match all.iter().all(|frequency| frequency.is_finite()) {
        true => Ok(all),
        false => Err(missing(&named("freq_base"), "a positive float")),
    }
}

fn missing(key: &str, expected: &'static str) -> ImportError {
    GgufError::Key { key: key.to_owned(), expected }.into()
}

fn unsupported(what: &str) -> ImportError {
    ImportError::Unsupported { what: what.to_owned() }
}

/// Token ids that the file names, and those that end a generation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecialIds {
    /// Beginning of the sequence.
    pub bos: Option<u64>,
    /// End of the sequence.
    pub eos: Option<u64>,
    /// Unknown token.
    pub unknown: Option<u64>,
    /// Padding.
    pub padding: Option<u64>,
    /// Every id that ends a generation: end of sequence, of turn, of message.
    pub ends: Vec<u64>,
}

impl SpecialIds {
    /// Reads them; an id that is not below `vocab` counts as absent.
    pub fn read(gguf: &Gguf, vocab: usize) -> Self {
        let id = |name: &str| gguf.integer(&format!("tokenizer.ggml.{name}_token_id")).filter(|id| *id < vocab as u64);
        let mut ends: Vec<u64> = ["eos", "eot", "eom"].into_iter().filter_map(id).collect();
        if let Some(Value::Ints(more)) = gguf.value("tokenizer.ggml.eos_token_ids") {
            ends.extend(more.iter().filter_map(|id| u64::try_from(*id).ok()).filter(|id| *id < vocab as u64));
        }
        let mut seen = Vec::new();
        ends.retain(|id| {
            !seen.contains(id) && {
                seen.push(*id);
                true
            }
        });
        Self { bos: id("bos"), eos: id("eos"), unknown: id("unknown"), padding: id("padding"), ends }
    }
}
