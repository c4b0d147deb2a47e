//! Makes a `tokenizer.json` from the vocabulary and merges that a GGUF file carries.
//!
//! Byte-level BPE, with the ways of cutting text before merging that are listed in `pre_tokenizer`: how each one cuts follows
//! the tokenizers published with the models; the names are llama.cpp's (`tokenizer.ggml.pre`). SentencePiece's is in `pieces`.

mod pieces;

use std::collections::HashSet;

use serde::{Serialize, Serializer};
use serde_json::{Value as Json, json};

use super::gguf::{Gguf, GgufError};
use super::import::ImportError;
use super::llama::SpecialIds;

/// Token types of `tokenizer.ggml.token_type` that become tokens of their own, whatever the text around them.
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

/// Names of Llama 3's way of cutting.
const LLAMA3: [&str; 3] = ["llama-bpe", "llama3", "llama-v3"];
/// Names of that of Qwen 2, 2.5 and 3.
const QWEN2: [&str; 1] = ["qwen2"];

/// Cuts words with their leading space, numbers of one to three digits, punctuation and line ends apart (Llama 3).
const LLAMA3_WORDS: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The same with digits one by one (Qwen 2).
const QWEN2_WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// `tokenizer.json`. A vocabulary has some hundred thousand tokens and merges, so these are written from where they lie.
#[derive(Serialize)]
struct File<'a> {
    version: &'static str,
    truncation: (),
    padding: (),
    added_tokens: Vec<Json>,
    normalizer: Json,
    pre_tokenizer: Json,
    post_processor: Json,
    decoder: Json,
    model: Bpe<'a>,
}

/// What the two kinds of tokenizer do in ways of their own.
struct Parts<'a> {
    normalizer: Json,
    decoder: Json,
    bpe: Bpe<'a>,
}

/// The model: which neighbours are joined, the first pairs first.
#[derive(Serialize)]
struct Bpe<'a> {
    r#type: &'static str,
    dropout: (),
    unk_token: Option<&'a str>,
    continuing_subword_prefix: (),
    end_of_word_suffix: (),
    fuse_unk: bool,
    byte_fallback: bool,
    ignore_merges: bool,
    #[serde(serialize_with = "by_token")]
    vocab: &'a [String],
    merges: Vec<[&'a str; 2]>,
}

fn by_token<S: Serializer>(tokens: &&[String], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(tokens.iter().zip(0_usize..))
}

/// The tokenizer as `tokenizer.json` holds it.
///
/// # Errors
/// Another tokenizer model or pre-tokenizer, a vocabulary that is missing or contradicts itself.
pub fn tokenizer_json(gguf: &Gguf, ids: &SpecialIds) -> Result<String, ImportError> {
    let model = gguf.text("tokenizer.ggml.model").ok_or_else(|| key("tokenizer.ggml.model", "a string"))?;
    if !["gpt2", "llama"].contains(&model) {
        return Err(ImportError::Unsupported { what: format!("a tokenizer of model {model}") });
    }
    let tokens = gguf.texts("tokenizer.ggml.tokens").ok_or_else(|| key("tokenizer.ggml.tokens", "an array of strings"))?;
    let types = gguf.integers("tokenizer.ggml.token_type").unwrap_or_default();
    let pre = gguf.text("tokenizer.ggml.pre").unwrap_or("default");

    let mut seen = HashSet::with_capacity(tokens.len());
    if let Some(twice) = tokens.iter().find(|token| !seen.insert(token.as_str())) {
        return Err(broken(format!("token {twice:?} is in the vocabulary twice")));
    }
    let added = tokens.iter().zip(types).enumerate().filter(|(_, (_, kind))| [CONTROL, USER_DEFINED].contains(kind));
    let added: Vec<Json> = added
        .map(|(id, (content, kind))| {
            json!({ "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": *kind == CONTROL })
        })
        .collect();
    let (Parts { normalizer, decoder, bpe }, pre_tokenizer) = if model == "llama" {
        (pieces::parts(gguf, tokens, types)?, Json::Null)
    } else {
        (byte_level(gguf, pre, tokens)?, pre_tokenizer(pre)?)
    };
    let post_processor = post_processor(gguf, ids, tokens, model == "llama" || LLAMA3.contains(&pre));
    let file = File {
        version: "1.0",
        truncation: (),
        padding: (),
        added_tokens: added,
        normalizer,
        pre_tokenizer,
        post_processor,
        decoder,
        model: bpe,
    };
    let text = serde_json::to_string(&file).map_err(|error| broken(error.to_string()))?;
    drop(file);
    match text.parse::<tokenizers::Tokenizer>() {
        Ok(_) => Ok(text),
        Err(error) => Err(broken(error.to_string())),
    }
}

/// Normalizer, decoder and model of a byte-level BPE.
fn byte_level<'a>(gguf: &'a Gguf, pre: &str, tokens: &'a [String]) -> Result<Parts<'a>, ImportError> {
    let merges = gguf.texts("tokenizer.ggml.merges").ok_or_else(|| key("tokenizer.ggml.merges", "an array of strings"))?;
    let pairs = merges.iter().map(|merge| match merge.split_once(' ') {
        Some((left, right)) => Ok([left, right]),
        None => Err(broken(format!("{merge:?} is no merge"))),
    });
    let bpe = Bpe {
        r#type: "BPE",
        dropout: (),
        unk_token: None,
        continuing_subword_prefix: (),
        end_of_word_suffix: (),
        fuse_unk: false,
        byte_fallback: false,
        ignore_merges: LLAMA3.contains(&pre),
        vocab: tokens,
        merges: pairs.collect::<Result<Vec<_>, _>>()?,
    };
    let normalizer = if QWEN2.contains(&pre) { json!({ "type": "NFC" }) } else { Json::Null };
    let decoder = json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true });
    Ok(Parts { normalizer, decoder, bpe })
}

/// How text is cut before merging.
fn pre_tokenizer(pre: &str) -> Result<Json, ImportError> {
    let byte_level =
        |use_regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex });
    let split = |pattern: &str| json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false });
    let sequence = |steps: Vec<Json>| json!({ "type": "Sequence", "pretokenizers": steps });
    Ok(match pre {
        "gpt-2" => byte_level(true),
        "smollm" => sequence(vec![json!({ "type": "Digits", "individual_digits": true }), byte_level(true)]),
        pre if LLAMA3.contains(&pre) => sequence(vec![split(LLAMA3_WORDS), byte_level(false)]),
        pre if QWEN2.contains(&pre) => sequence(vec![split(QWEN2_WORDS), byte_level(false)]),
        "default" => sequence(vec![
            split(r"[\p{P}\$\+<=>\^~\|]+"),
            split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
            split(r"\p{N}+"),
            split("[0-9][0-9][0-9]"),
            byte_level(false),
        ]),
        other => {
            return Err(ImportError::Unsupported { what: format!("the pre-tokenizer {other}") });
        }
    })
}

/// Puts the first token in front of a text, for models that are made so; templates encode without it. `usual` tells whether a file
/// that says nothing of it wants it.
fn post_processor(gguf: &Gguf, ids: &SpecialIds, tokens: &[String], usual: bool) -> Json {
    let wanted = gguf.integer("tokenizer.ggml.add_bos_token").map_or(usual, |flag| flag != 0);
    let bos = ids.bos.and_then(|id| tokens.get(id as usize).map(|token| (id, token)));
    let Some((id, token)) = bos.filter(|_| wanted) else {
        return Json::Null;
    };
    let special = json!({ "SpecialToken": { "id": token, "type_id": 0 } });
    let sequence = |id: &str, type_id: u8| json!({ "Sequence": { "id": id, "type_id": type_id } });
    json!({
        "type": "TemplateProcessing",
        "single": [special, sequence("A", 0)],
        "pair": [special, sequence("A", 0), special, sequence("B", 1)],
        "special_tokens": { token.clone(): { "id": token, "ids": [id], "tokens": [token] } },
    })
}

fn key(key: &str, expected: &'static str) -> ImportError {
    GgufError::Key { key: key.to_owned(), expected }.into()
}

fn broken(what: String) -> ImportError {
    ImportError::Tokenizer { what }
}
