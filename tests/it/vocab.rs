//! Small tokenizers for tests, as the `tokenizer.json` that a model folder would hold.

use std::str::FromStr;

use serde_json::{Map, Value, json};
use tokenizers::Tokenizer;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

fn added(id: usize, content: &str, special: bool) -> Value {
    json!({"id": id, "content": content, "special": special, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false})
}

fn numbered(tokens: Vec<String>) -> Map<String, Value> {
    tokens.into_iter().enumerate().map(|(id, token)| (token, json!(id))).collect()
}

/// ByteLevel BPE with a few merges, two special tokens and two plain added ones (one of them not of the byte alphabet).
pub(crate) fn byte_level() -> Value {
    let mut tokens: Vec<String> = ByteLevel::alphabet().into_iter().map(String::from).collect();
    tokens.sort();
    let merges = [["h", "e"], ["l", "l"], ["he", "ll"], ["Ġ", "w"], ["ð", "Ł"], ["Ã", "©"]];
    tokens.extend(merges.iter().map(|[left, right]| format!("{left}{right}")));
    let next = tokens.len();
    json!({
        "version": "1.0",
        "added_tokens": [
            added(next, "<|im_start|>", true),
            added(next + 1, "<|im_end|>", true),
            added(next + 2, "<tool_call>", false),
            added(next + 3, "été 🙂", false),
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": numbered(tokens), "merges": merges},
    })
}

/// BPE as SentencePiece exports it: blanks are `▁`, unknown characters are bytes, and a template adds `<s>`.
pub(crate) fn byte_fallback() -> Value {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
    tokens.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    tokens.extend(['▁'].into_iter().chain('a'..='z').map(String::from));
    let merges = [["h", "e"], ["▁", "t"], ["▁t", "he"], ["▁", "▁"]];
    tokens.extend(merges.iter().map(|[left, right]| format!("{left}{right}")));
    json!({
        "version": "1.0",
        "added_tokens": [added(0, "<unk>", true), added(1, "<s>", true), added(2, "</s>", true)],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {"type": "BPE", "vocab": numbered(tokens), "merges": merges, "byte_fallback": true, "unk_token": "<unk>", "fuse_unk": true},
    })
}

fn words(tokens: &[&str], model: &str, decoder: &Value) -> Value {
    let mut all = vec!["<unk>".to_owned()];
    all.extend(tokens.iter().map(|&token| token.to_owned()));
    let model = if model == "WordPiece" {
        json!({"type": model, "vocab": numbered(all), "unk_token": "<unk>", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100})
    } else {
        json!({"type": model, "vocab": numbered(all), "unk_token": "<unk>"})
    };
    json!({"version": "1.0", "added_tokens": [added(0, "<unk>", true)], "decoder": decoder, "model": model})
}

/// Words with a Metaspace decoder.
pub(crate) fn metaspace() -> Value {
    let decoder = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    words(&["▁the", "▁cat", "s", "▁", "▁▁", "é", "🙂"], "WordLevel", &decoder)
}

/// Words with a decoder that looks at neighbours.
pub(crate) fn word_piece() -> Value {
    let decoder = json!({"type": "WordPiece", "prefix": "##", "cleanup": true});
    words(&["the", "cat", "##s", "don", "'", "t", ".", ",", "é", "##🙂"], "WordPiece", &decoder)
}

/// Words without any decoder.
pub(crate) fn bare() -> Value {
    words(&["the", "cat", "é"], "WordLevel", &Value::Null)
}

/// The tokenizer of such a file.
pub(crate) fn load(file: &Value) -> Tokenizer {
    Tokenizer::from_str(&file.to_string()).unwrap()
}
