//! Imports a GGUF file into a model folder: the ONNX graph, its weights, the tokenizer, the configuration, and a manifest.
//!
//! The folder is the caller's: it exists, it is empty, and the caller renames it into place once this has returned.
//! Weights are streamed, so memory stays far below the model's size. A failed import leaves its files for the caller to remove.

use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};
use sha2::{Digest, Sha256};
use thiserror::Error;

use super::gguf::{Gguf, GgufError};
use super::llama::{Family, Llama, SpecialIds};
use super::mlx;
use super::onnx::decoder::Builder;
use super::onnx::graph::Graph;
use super::output::{FileEntry, Output, hex, sync_folder};
use super::tokenizer::tokenizer_json;

/// Raised whenever an import of the same file gives another result, so that older folders can be told apart.
pub const IMPORTER_VERSION: u32 = 2;
/// Name of the manifest, the last file to be written.
pub const MANIFEST: &str = "emberd.json";
/// Template variables and files are small; the progress is told in steps of this many bytes while hashing.
const HASH_STEP: usize = 8 << 20;

/// How the weights are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// Quantized as in the file, activations in floats: the answers of the dequantized model at a quarter of its size.
    #[default]
    Exact,
    /// Quantized as in the file, activations rounded to 8 bits in each product: faster, close tokens can flip.
    Fast,
    /// Everything dequantized to 32-bit floats: the reference.
    Fp32,
    /// For MLX: the file itself, or 16-bit floats where it has blocks that MLX does not read.
    Mlx,
}

/// Why an import failed.
#[derive(Debug, Error)]
pub enum ImportError {
    /// The file is not a usable GGUF file.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A file of the new folder could not be written.
    #[error("cannot write the imported model: {0}\nhint: check the free space and the permissions of the model folder")]
    Write(#[from] std::io::Error),
    /// A model of another family.
    #[error(
        "the architecture {name} cannot be imported\nhint: llama (with mistral and smollm2), qwen2 and qwen3 can; convert this model to onnx with its own tools and give that folder"
    )]
    Architecture {
        /// `general.architecture`.
        name: String,
    },
    /// A way of storing weights that the importer does not read.
    #[error(
        "tensor {tensor} is stored as {kind}, which cannot be imported\nhint: take a file of floats (F32, F16, BF16), of Q8_0, Q5_1, Q5_0, Q4_1 or Q4_0, of K-quants, or of IQ4"
    )]
    TensorType {
        /// The tensor.
        tensor: String,
        /// Its type, as ggml spells it.
        kind: String,
    },
    /// Something that a model of the family may have and the importer does not make.
    #[error("the model has {what}, which cannot be imported\nhint: convert it to onnx with its own tools and give that folder")]
    Unsupported {
        /// What it is.
        what: String,
    },
    /// Something that MLX is not told of in the configuration of an imported model.
    #[error("the model has {what}, which is not imported for mlx\nhint: use --engine onnx, or give an mlx-lm folder of this model")]
    UnsupportedForMlx {
        /// What it is.
        what: String,
    },
    /// A tensor that does not fit the metadata.
    #[error(
        "tensor {tensor} is {found}, the metadata says {expected}\nhint: the file is damaged or mixed from two models; download it again"
    )]
    Shape {
        /// The tensor.
        tensor: String,
        /// Rows and columns found.
        found: String,
        /// Rows and columns expected.
        expected: String,
    },
    /// A weight that is infinite or not a number.
    #[error("tensor {tensor} holds values that are not finite numbers\nhint: the file is damaged; download it again")]
    NotFinite {
        /// The tensor.
        tensor: String,
    },
    /// A vocabulary that contradicts itself.
    #[error("the tokenizer in the file is unusable: {what}\nhint: the file is damaged; download it again")]
    Tokenizer {
        /// What is wrong.
        what: String,
    },
}

/// What an import made; this is also the manifest's content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Imported {
    /// [`IMPORTER_VERSION`].
    pub importer: u32,
    /// How the weights are kept.
    pub form: Form,
    /// The architecture, e.g. `llama`.
    pub architecture: String,
    /// `general.name` of the source, when it has one.
    pub name: Option<String>,
    /// The file that was imported (its name without folders).
    pub source: FileEntry,
    /// Every file of the folder except the manifest itself.
    pub files: Vec<FileEntry>,
}

/// Imports `gguf` into the existing, empty folder `into`. `progress` is told bytes done and bytes in all.
/// All files are on the disk when this returns; the manifest ([`MANIFEST`]) is written last.
///
/// # Errors
/// See [`ImportError`]. The folder then holds an unfinished import, recognisable by its missing manifest.
pub fn import_gguf(gguf: &Path, into: &Path, form: Form, progress: &mut dyn FnMut(u64, u64)) -> Result<Imported, ImportError> {
    let source = gguf.file_name().map(PathBuf::from).unwrap_or_default().display().to_string();
    let path = gguf;
    let gguf = Gguf::open(gguf)?;
    let llama = Llama::read(&gguf)?;
    let ids = SpecialIds::read(&gguf, llama.vocab);
    let tokenizer = tokenizer_json(&gguf, &ids)?;
    let vocabulary = gguf.texts("tokenizer.ggml.tokens").unwrap_or_default();
    if vocabulary.len() > llama.vocab {
        let what = format!("{} tokens for {} rows of the embedding", vocabulary.len(), llama.vocab);
        return Err(ImportError::Tokenizer { what });
    }

    let weights: u64 = gguf.tensors().values().map(|tensor| tensor.bytes() as u64).sum();
    let total = weights + gguf.file_bytes().len() as u64;
    progress(0, total);
    let mut done = 0;
    let mut advance = |bytes: u64| {
        done += bytes;
        progress(done.min(total), total);
    };

    let mut files = Vec::new();
    if form != Form::Mlx {
        let graph = Graph::new("decoder", Output::create(into, "model.onnx.data")?, "model.onnx.data");
        let graph = Builder::new(&gguf, graph, form, &mut advance).build(&llama)?;
        files.extend(graph.finish(Output::create(into, "model.onnx")?)?);
        files.push(write_json(into, "genai_config.json", &genai_config(&llama, &ids))?);
    }
    files.push(write(into, "tokenizer.json", tokenizer.as_bytes())?);
    let template = gguf.text("tokenizer.chat_template");
    let documents = [
        ("config.json", config(&llama, &ids)),
        ("generation_config.json", generation_config(&ids)),
        ("tokenizer_config.json", tokenizer_config(&llama, &ids, vocabulary, template)),
    ];
    for (name, document) in documents {
        files.push(write_json(into, name, &document)?);
    }

    let mut hash = Sha256::new();
    for part in gguf.file_bytes().chunks(HASH_STEP) {
        hash.update(part);
        gguf.release(part);
        advance(part.len() as u64);
    }
    let source = FileEntry { name: source, bytes: gguf.file_bytes().len() as u64, sha256: hex(&hash.finalize()) };
    if form == Form::Mlx {
        files.push(mlx::write(&gguf, path, &llama, into, &source, &mut advance)?);
    }
    let imported = Imported {
        importer: IMPORTER_VERSION,
        form,
        architecture: llama.family.name().to_owned(),
        name: gguf.text("general.name").map(str::to_owned),
        source,
        files,
    };
    write_json(into, MANIFEST, &json!(imported))?;
    sync_folder(into)?;
    progress(total, total);
    Ok(imported)
}

fn write(into: &Path, name: &str, content: &[u8]) -> std::io::Result<FileEntry> {
    let mut output = Output::create(into, name)?;
    output.write_all(content)?;
    output.finish()
}

fn write_json(into: &Path, name: &str, document: &Json) -> std::io::Result<FileEntry> {
    write(into, name, format!("{document:#}\n").as_bytes())
}

/// `config.json`, as transformers writes it for this family.
fn config(llama: &Llama, ids: &SpecialIds) -> Json {
    let (class, model) = match (llama.family, llama.window) {
        (Family::Llama, None) => ("LlamaForCausalLM", "llama"),
        (Family::Llama, Some(_)) => ("MistralForCausalLM", "mistral"),
        (Family::Qwen2, _) => ("Qwen2ForCausalLM", "qwen2"),
        (Family::Qwen3, _) => ("Qwen3ForCausalLM", "qwen3"),
    };
    let mut document = json!({
        "architectures": [class],
        "model_type": model,
        "hidden_size": llama.width,
        "intermediate_size": llama.feed_forward,
        "num_hidden_layers": llama.layers,
        "num_attention_heads": llama.heads,
        "num_key_value_heads": llama.kv_heads,
        "head_dim": llama.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": llama.context,
        "rms_norm_eps": f64::from(llama.epsilon),
        "rope_theta": llama.rope_theta,
        "tie_word_embeddings": llama.tied,
        "vocab_size": llama.vocab,
        "bos_token_id": ids.bos,
        "eos_token_id": ids.eos,
        "pad_token_id": ids.padding,
    });
    if let (Some(window), Some(fields)) = (llama.window, document.as_object_mut()) {
        fields.insert("sliding_window".to_owned(), window.into());
    }
    document
}

fn generation_config(ids: &SpecialIds) -> Json {
    json!({ "bos_token_id": ids.bos, "eos_token_id": ids.ends, "pad_token_id": ids.padding })
}

fn tokenizer_config(llama: &Llama, ids: &SpecialIds, vocabulary: &[String], template: Option<&str>) -> Json {
    let token = |id: Option<u64>| id.and_then(|id| vocabulary.get(id as usize));
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": llama.context,
        "clean_up_tokenization_spaces": false,
        "bos_token": token(ids.bos),
        "eos_token": token(ids.eos),
        "unk_token": token(ids.unknown),
        "pad_token": token(ids.padding),
        "chat_template": template,
    })
}

/// `genai_config.json`, so that onnxruntime-genai runs the folder too.
fn genai_config(llama: &Llama, ids: &SpecialIds) -> Json {
    json!({
        "model": {
            "type": llama.family.name(),
            "vocab_size": llama.vocab,
            "context_length": llama.context,
            "bos_token_id": ids.bos,
            "eos_token_id": ids.ends,
            "pad_token_id": ids.padding.or(ids.eos),
            "decoder": {
                "filename": "model.onnx",
                "head_size": llama.head_dim,
                "hidden_size": llama.width,
                "num_attention_heads": llama.heads,
                "num_hidden_layers": llama.layers,
                "num_key_value_heads": llama.kv_heads,
                "session_options": { "provider_options": [] },
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": { "max_length": llama.context, "past_present_share_buffer": true, "do_sample": false },
    })
}
