//! The tokenizer of `tokenizer.ggml.model = "llama"`: SentencePiece's byte-pair encoding, whose pieces have scores and no merges.
//!
//! SentencePiece joins, again and again, the two neighbours whose joint piece has the highest score. Joining by a list of pairs
//! does the same when the list holds every pair that makes a piece, the highest score first. Where neighbours overlap that make the
//! same piece (`a`, `aa`, `a`), SentencePiece takes the left pair and the list the first of its two; the order of the list is that
//! of the pairs which occur in practice. Text without a piece becomes bytes.
//!
//! Source: <https://github.com/google/sentencepiece>, `bpe_model.cc`.

use std::cmp::Reverse;
use std::collections::HashMap;

use serde_json::{Value as Json, json};

use super::{Bpe, Parts, broken, key};
use crate::models::gguf::{Gguf, Value};
use crate::models::import::ImportError;

/// Token types that are parts of ordinary text; those of control and unknown tokens never come from joining.
const NORMAL: i64 = 1;

/// Bytes of the longest piece that is taken for one. SentencePiece's own bound is 16 characters unless it is raised.
const LONGEST: usize = 1024;

/// What stands for a space in a piece.
const SPACE: &str = "▁";

/// Normalizer, decoder and model, as `tokenizer.json` holds them.
pub(super) fn parts<'a>(gguf: &'a Gguf, tokens: &'a [String], types: &[i64]) -> Result<Parts<'a>, ImportError> {
    let scores = match gguf.value("tokenizer.ggml.scores") {
        Some(Value::Floats(scores)) => scores,
        _ => return Err(key("tokenizer.ggml.scores", "an array of floats")),
    };
    if scores.len() != tokens.len() || types.len() != tokens.len() {
        return Err(broken(format!("{} tokens with {} scores and {} types", tokens.len(), scores.len(), types.len())));
    }
    let unknown = gguf.integer("tokenizer.ggml.unknown_token_id").unwrap_or(0);
    let prefix = gguf.integer("tokenizer.ggml.add_space_prefix") != Some(0);
    let spaces = |from: &str, to: &str| json!({ "type": "Replace", "pattern": { "String": from }, "content": to });
    let prepend = json!({ "type": "Prepend", "prepend": SPACE });
    let strip = json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 });
    let normalizers: Vec<Json> = prefix.then_some(prepend).into_iter().chain([spaces(" ", SPACE)]).collect();
    let decoders = [spaces(SPACE, " "), json!({ "type": "ByteFallback" }), json!({ "type": "Fuse" })];
    let decoders: Vec<Json> = decoders.into_iter().chain(prefix.then_some(strip)).collect();
    let bpe = Bpe {
        r#type: "BPE",
        dropout: (),
        unk_token: tokens.get(unknown as usize).map(String::as_str),
        continuing_subword_prefix: (),
        end_of_word_suffix: (),
        fuse_unk: true,
        byte_fallback: true,
        ignore_merges: false,
        vocab: tokens,
        merges: merges(tokens, types, scores)?,
    };
    let normalizer = json!({ "type": "Sequence", "normalizers": normalizers });
    Ok(Parts { normalizer, decoder: json!({ "type": "Sequence", "decoders": decoders }), bpe })
}

/// Every pair of pieces that makes a piece; those of the highest score first, then those of the first id, then the longest left part.
fn merges<'t>(tokens: &'t [String], types: &[i64], scores: &[f64]) -> Result<Vec<[&'t str; 2]>, ImportError> {
    let mut pieces = HashMap::new();
    for (id, ((token, kind), score)) in tokens.iter().zip(types).zip(scores).enumerate() {
        if *kind != NORMAL {
            continue;
        }
        if score.is_nan() || token.len() > LONGEST {
            return Err(broken(format!("token {id} has the score {score} and {} bytes", token.len())));
        }
        pieces.insert(token.as_str(), (id, *score));
    }
    let mut pairs = Vec::new();
    for (piece, (id, score)) in &pieces {
        for (at, _) in piece.char_indices().skip(1) {
            let (left, right) = piece.split_at(at);
            if pieces.contains_key(left) && pieces.contains_key(right) {
                pairs.push((*score, *id, left, right));
            }
        }
    }
    pairs.sort_by(|one, other| {
        other.0.total_cmp(&one.0).then_with(|| (one.1, Reverse(one.2.len())).cmp(&(other.1, Reverse(other.2.len()))))
    });
    Ok(pairs.into_iter().map(|(_, _, left, right)| [left, right]).collect())
}
