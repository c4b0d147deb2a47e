//! SentencePiece's tokenizer from a file's scores, against its definition written out: join the best neighbours until none join.

use std::collections::HashMap;
use std::fs;

use emberd::models::import::{Form, import_gguf};
use proptest::prelude::*;
use tokenizers::Tokenizer;

use super::writer::{F32, File, Q8_0, TINY, tiny};

/// Pieces of the vocabulary, the best first.
const PIECES: [&str; 16] = ["▁t", "he", "in", "▁a", "▁the", "er", "▁i", "th", "▁▁", "her", "▁th", "aa", "▁he", "ing", "aaa", "▁▁▁▁"];
/// Single characters, among them one of three bytes.
const CHARACTERS: &str = "▁thernigaé日";

/// A file whose vocabulary has bytes, pieces and characters, with scores as SentencePiece gives them.
fn file() -> (File, HashMap<String, (u32, f32)>) {
    let mut tokens = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
    let mut types = vec![2, 3, 3];
    tokens.extend((0..=255_u8).map(|byte| format!("<0x{byte:02X}>")));
    types.extend([6; 256]);
    let first = tokens.len();
    tokens.extend(PIECES.map(str::to_owned));
    tokens.extend(CHARACTERS.chars().map(String::from));
    types.resize(tokens.len(), 1);
    let (.., vocab) = TINY;
    tokens.extend((tokens.len()..vocab).map(|id| format!("<|spare {id}|>")));
    types.resize(vocab, 3);
    let scores: Vec<f32> = (0..vocab).map(|id| if id < first { 0.0 } else { -((id - first) as f32) }).collect();
    let normal = tokens.iter().zip(&scores).enumerate().filter(|(id, _)| types[*id] == 1);
    let pieces = normal.map(|(id, (token, score))| (token.clone(), (id as u32, *score))).collect();

    let mut file = tiny(Q8_0, F32);
    file.keys.retain(|(key, _)| !key.starts_with("tokenizer.ggml."));
    file.string("tokenizer.ggml.model", "llama").strings("tokenizer.ggml.tokens", &tokens);
    file.integers("tokenizer.ggml.token_type", &types).floats("tokenizer.ggml.scores", &scores);
    file.integer("tokenizer.ggml.unknown_token_id", 0).integer("tokenizer.ggml.bos_token_id", 1).integer("tokenizer.ggml.eos_token_id", 2);
    (file, pieces)
}

fn tokenizer(file: &File) -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("tiny.gguf");
    fs::write(&source, file.bytes()).unwrap();
    import_gguf(&source, folder.path(), Form::Exact, &mut |_, _| {}).unwrap();
    Tokenizer::from_file(folder.path().join("tokenizer.json")).unwrap()
}

/// Ids of `text`: of all neighbours that join to a piece the ones of the highest score, the leftmost of those, and again.
fn joined(pieces: &HashMap<String, (u32, f32)>, text: &str) -> Vec<u32> {
    let mut symbols: Vec<String> = text.replace(' ', "▁").chars().map(String::from).collect();
    loop {
        let mut best: Option<(f32, usize)> = None;
        for at in 0..symbols.len().saturating_sub(1) {
            let Some((_, score)) = pieces.get(&(symbols[at].clone() + &symbols[at + 1])) else { continue };
            if best.is_none_or(|(highest, _)| *score > highest) {
                best = Some((*score, at));
            }
        }
        let Some((_, at)) = best else { break };
        let right = symbols.remove(at + 1);
        symbols[at].push_str(&right);
    }
    let bytes = |symbol: &str| symbol.bytes().map(|byte| 3 + u32::from(byte)).collect();
    symbols.iter().flat_map(|symbol| pieces.get(symbol).map_or_else(|| bytes(symbol), |(id, _)| vec![*id])).collect()
}

#[test]
fn a_text_begins_with_a_space_and_the_first_token_and_comes_back_without() {
    let (mut file, _) = file();
    let tokenizer_of = tokenizer(&file);
    let encoded = tokenizer_of.encode("the ring", true).unwrap();
    assert_eq!(encoded.get_tokens(), ["<s>", "▁the", "▁", "r", "ing"]);
    assert_eq!(tokenizer_of.decode(encoded.get_ids(), true).unwrap(), "the ring");
    let encoded = tokenizer_of.encode("</s>é z", false).unwrap();
    assert_eq!(encoded.get_tokens(), ["</s>", "▁", "é", "▁", "<0x7A>"]);
    // Files of models that want neither say so.
    file.key("tokenizer.ggml.add_space_prefix", 7, &[0]).key("tokenizer.ggml.add_bos_token", 7, &[0]);
    let tokenizer_of = tokenizer(&file);
    let encoded = tokenizer_of.encode(" the", true).unwrap();
    assert_eq!(encoded.get_tokens(), ["▁the"]);
    assert_eq!(tokenizer_of.decode(encoded.get_ids(), true).unwrap(), " the");
}

#[test]
fn a_vocabulary_without_scores_or_with_bad_ones_is_refused() {
    let refused = |change: &dyn Fn(&mut File)| {
        let (mut file, _) = file();
        change(&mut file);
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("tiny.gguf");
        fs::write(&source, file.bytes()).unwrap();
        import_gguf(&source, folder.path(), Form::Exact, &mut |_, _| {}).unwrap_err().to_string()
    };
    assert!(refused(&|file| file.keys.retain(|(key, _)| key != "tokenizer.ggml.scores")).contains("tokenizer.ggml.scores"));
    assert!(refused(&|file| _ = file.floats("tokenizer.ggml.scores", &[0.0])).contains("300 tokens with 1 scores"));
    assert!(refused(&|file| _ = file.floats("tokenizer.ggml.scores", &[f32::NAN; 300])).contains("score NaN"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn ids_are_those_of_joining_by_score(texts in prop::collection::vec("[ thernigaézß日本]{0,24}", 8)) {
        let (mut file, pieces) = file();
        file.key("tokenizer.ggml.add_space_prefix", 7, &[0]);
        let tokenizer = TOKENIZER.get_or_init(|| tokenizer(&file));
        for text in texts {
            let found = tokenizer.encode(text.as_str(), false).unwrap();
            prop_assert_eq!(found.get_ids(), joined(&pieces, &text), "{:?}", text);
            prop_assert_eq!(tokenizer.decode(found.get_ids(), false).unwrap(), text);
        }
    }
}

static TOKENIZER: std::sync::OnceLock<Tokenizer> = std::sync::OnceLock::new();
