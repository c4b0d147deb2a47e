//! Lays the weights of a GGUF file out for MLX: the file itself where MLX reads it, else the same values as 16-bit floats.
//!
//! MLX keeps blocks of Q4_0, Q4_1 and Q8_0 as they are. Other blocks it does not know; their values are rounded once, to
//! the 11 bits of such a float, and the file grows. Names of tensors are those of transformers, the container is
//! [safetensors](https://github.com/huggingface/safetensors#format). Tokenizer and configuration are the import's business.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use half::f16;
use serde_json::{Map, Value as Json, json};

use super::gguf::blocks::dequantize;
use super::gguf::{Gguf, Kind, TensorInfo};
use super::import::ImportError;
use super::llama::{Family, Llama};
use super::output::{FileEntry, Output};

/// Name of the imported file itself.
const FILE: &str = "model.gguf";
/// Name of the weights where they are written anew.
const WEIGHTS: &str = "model.safetensors";
/// A rotary frequency may be that much off the plain one, relative to it: files hold the base as a 32-bit float.
const CLOSE: f64 = 1e-6;

const LAYER_NAMES: [(&str, &str); 11] = [
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// Writes the weights of `gguf`, the file at `path`, into a folder. `progress` is told the bytes of each tensor that was written.
///
/// # Errors
/// What the configuration of such a model cannot say (scaled rotation, sliding windows), a weight that is not a finite number, and what the
/// system says.
pub(super) fn write(
    gguf: &Gguf,
    path: &Path,
    llama: &Llama,
    into: &Path,
    source: &FileEntry,
    progress: &mut dyn FnMut(u64),
) -> Result<FileEntry, ImportError> {
    if llama.window.is_some() {
        return Err(unsupported("a sliding window"));
    }
    let plain = (0..llama.frequencies.len()).map(|pair| llama.rope_theta.powf(-2.0 * pair as f64 / llama.head_dim as f64));
    if llama.frequencies.iter().zip(plain).any(|(found, plain)| (found / plain - 1.0).abs() > CLOSE) {
        return Err(unsupported("scaled rotary frequencies"));
    }
    if is_read(gguf, llama) {
        let copy = into.join(FILE);
        // A second name for it where that is possible; what is fetched loses its first one after the import.
        fs::hard_link(path, &copy).or_else(|_| fs::copy(path, &copy).and_then(|_| File::open(&copy)?.sync_all()))?;
        return Ok(FileEntry { name: FILE.to_owned(), ..source.clone() });
    }
    floats(gguf, llama, Output::create(into, WEIGHTS)?, progress)
}

/// Whether MLX reads every tensor of the file, and the engine its architecture.
fn is_read(gguf: &Gguf, llama: &Llama) -> bool {
    let read = |tensor: &TensorInfo| matches!(tensor.kind, Kind::F32 | Kind::F16 | Kind::Q8_0 | Kind::Q4_0 | Kind::Q4_1);
    llama.family == Family::Llama && gguf.tensors().values().all(read)
}

fn floats(gguf: &Gguf, llama: &Llama, mut output: Output, progress: &mut dyn FnMut(u64)) -> Result<FileEntry, ImportError> {
    let tensors: Vec<(&TensorInfo, String)> = gguf.tensors().values().filter_map(|tensor| Some((tensor, name(&tensor.name)?))).collect();
    let mut header = Map::new();
    let mut end = 0;
    for (tensor, name) in &tensors {
        let begin = end;
        end += tensor.rows * tensor.columns * size_of::<f16>();
        let shape = if tensor.rows == 1 { vec![tensor.columns] } else { vec![tensor.rows, tensor.columns] };
        header.insert(name.clone(), json!({ "dtype": "F16", "shape": shape, "data_offsets": [begin, end] }));
    }
    header.insert("__metadata__".to_owned(), json!({ "format": "mlx" }));
    // Padded with spaces, so that the data is aligned.
    let mut header = Json::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(size_of::<u64>()), b' ');
    output.write_all(&(header.len() as u64).to_le_bytes())?;
    output.write_all(&header)?;
    let (mut row, mut bytes) = (Vec::new(), Vec::new());
    for (tensor, _) in tensors {
        let data = gguf.data(tensor);
        let size = data.len() / tensor.rows.max(1);
        for place in 0..tensor.rows {
            let from = source_row(llama, tensor, place) * size;
            row.clear();
            bytes.clear();
            dequantize(tensor.kind, data.get(from..from + size).unwrap_or_default(), &mut row);
            for value in row.iter().map(|value| f16::from_f32(*value)) {
                if !value.is_finite() {
                    return Err(ImportError::NotFinite { tensor: tensor.name.clone() });
                }
                bytes.extend_from_slice(&value.to_le_bytes());
            }
            output.write_all(&bytes)?;
        }
        gguf.release(data);
        progress(tensor.bytes() as u64);
    }
    Ok(output.finish()?)
}

/// The row of the file that is this row of a tensor as transformers has it: the two halves of a head, of which files of the plain family
/// hold one element after the other in turn.
fn source_row(llama: &Llama, tensor: &TensorInfo, row: usize) -> usize {
    let turned = llama.family == Family::Llama && (tensor.name.ends_with("attn_q.weight") || tensor.name.ends_with("attn_k.weight"));
    if !turned {
        return row;
    }
    let (head, within, half) = (row / llama.head_dim, row % llama.head_dim, llama.head_dim / 2);
    head * llama.head_dim + 2 * (within % half) + within / half
}

/// The name that transformers has for a tensor of the file; `None` for one that is no weight.
fn name(of: &str) -> Option<String> {
    match of {
        "token_embd.weight" => return Some("model.embed_tokens.weight".to_owned()),
        "output_norm.weight" => return Some("model.norm.weight".to_owned()),
        "output.weight" => return Some("lm_head.weight".to_owned()),
        _ => {}
    }
    let (layer, rest) = of.strip_prefix("blk.")?.split_once('.')?;
    let (part, kind) = rest.rsplit_once('.')?;
    let (_, name) = LAYER_NAMES.iter().find(|(known, _)| *known == part)?;
    Some(format!("model.layers.{layer}.{name}.{kind}"))
}

fn unsupported(what: &str) -> ImportError {
    ImportError::UnsupportedForMlx { what: what.to_owned() }
}
