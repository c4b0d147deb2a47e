//! Loading a model folder's tokenizer and templates, and encoding.

use std::path::Path;

use emberd::prompt::{RenderInput, Tokenizer, TokenizerError};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

use crate::vocab;

/// A folder with these files.
fn folder(files: &[(&str, String)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    folder
}

fn load(files: &[(&str, String)]) -> Tokenizer {
    Tokenizer::load(folder(files).path()).unwrap()
}

fn llama(config: &Value) -> Tokenizer {
    load(&[("tokenizer.json", vocab::byte_fallback().to_string()), ("tokenizer_config.json", config.to_string())])
}

fn rendered(tokenizer: &Tokenizer, with_tools: bool) -> Option<String> {
    let messages = [json!({"role": "user", "content": "hi"})];
    let input = RenderInput { messages: &messages, tools: None, add_generation_prompt: true, extra: &Map::new() };
    Some(tokenizer.template(with_tools)?.render(&input).unwrap())
}

#[test]
fn special_tokens_are_read_as_text_or_as_objects() {
    let tokenizer = llama(&json!({"bos_token": {"content": "<s>", "lstrip": false}, "eos_token": "</s>", "pad_token": null}));
    assert_eq!((tokenizer.bos_id(), tokenizer.eos_id()), (Some(1), Some(2)));
    assert_eq!(tokenizer.specials().pad_token, None);
    assert!(tokenizer.is_special(2) && !tokenizer.is_special(50));
    assert_eq!(tokenizer.vocab_size(), 290);
    assert_eq!(tokenizer.id_to_token(tokenizer.token_to_id("▁the").unwrap()).unwrap(), "▁the");
}

#[test]
fn special_tokens_may_lie_in_their_own_file() {
    let map = json!({"bos_token": "<s>", "eos_token": {"content": "</s>"}});
    let files = [("tokenizer.json", vocab::byte_fallback().to_string()), ("special_tokens_map.json", map.to_string())];
    assert_eq!(load(&files).eos_id(), Some(2));
}

#[test]
fn the_first_token_is_added_once_and_only_when_asked() {
    let tokenizer = llama(&json!({"bos_token": "<s>"}));
    let plain = tokenizer.encode("the hat", false).unwrap();
    assert_ne!(plain[0], 1);
    assert_eq!(tokenizer.encode("the hat", true).unwrap(), [&[1], plain.as_slice()].concat());
    let rendered = tokenizer.encode("<s>the hat", true).unwrap();
    assert_eq!(rendered.iter().filter(|&&id| id == 1).count(), 1);
    assert_eq!(rendered, tokenizer.encode("<s>the hat", false).unwrap());
}

#[test]
fn add_bos_token_wins_over_the_post_processor() {
    let tokenizer = llama(&json!({"bos_token": "<s>", "add_bos_token": false}));
    assert_ne!(tokenizer.encode("the", true).unwrap()[0], 1);
    let mut file = vocab::byte_fallback();
    file["post_processor"] = Value::Null;
    let config = json!({"bos_token": "<s>", "add_bos_token": true});
    let tokenizer = load(&[("tokenizer.json", file.to_string()), ("tokenizer_config.json", config.to_string())]);
    assert_eq!(tokenizer.encode("the", true).unwrap()[0], 1);
    assert_ne!(tokenizer.encode("the", false).unwrap()[0], 1);
}

#[test]
fn long_prompts_are_neither_cut_nor_padded() {
    let mut file = vocab::byte_level();
    file["truncation"] = json!({"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0});
    file["padding"] = json!({"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "!"});
    let tokenizer = load(&[("tokenizer.json", file.to_string())]);
    assert_eq!(tokenizer.encode("hello hello hello", false).unwrap().len(), 8);
    assert_eq!(tokenizer.encode("hell", false).unwrap().len(), 1);
}

#[test]
fn templates_are_taken_from_the_first_place_that_has_one() {
    let tokenizer = ("tokenizer.json", vocab::byte_level().to_string());
    let config = ("tokenizer_config.json", json!({"chat_template": "config"}).to_string());
    let beside = ("chat_template.json", json!({"chat_template": "json"}).to_string());
    let jinja = ("chat_template.jinja", "jinja".to_owned());
    let more = ("additional_chat_templates/tool_use.jinja", "tools".to_owned());
    assert!(load(std::slice::from_ref(&tokenizer)).template(false).is_none());
    let both = |files: &[(&str, String)]| {
        let tokenizer = load(files);
        (rendered(&tokenizer, false).unwrap(), rendered(&tokenizer, true).unwrap())
    };
    let same = |text: &str| (text.to_owned(), text.to_owned());
    assert_eq!(both(&[tokenizer.clone(), config.clone()]), same("config"));
    assert_eq!(both(&[tokenizer.clone(), config.clone(), beside.clone()]), same("json"));
    assert_eq!(both(&[tokenizer.clone(), config.clone(), beside.clone(), jinja.clone()]), same("jinja"));
    assert_eq!(both(&[tokenizer, config, beside, jinja, more]), ("jinja".to_owned(), "tools".to_owned()));
}

#[test]
fn named_templates_are_chosen_by_the_presence_of_tools() {
    let list = json!([{"name": "default", "template": "plain {{ bos_token }}"}, {"name": "tool_use", "template": "tools"}]);
    let tokenizer = llama(&json!({"bos_token": "<s>", "chat_template": list}));
    assert_eq!(rendered(&tokenizer, false).unwrap(), "plain <s>");
    assert_eq!(rendered(&tokenizer, true).unwrap(), "tools");
}

#[test]
fn broken_files_are_named_with_what_to_do() {
    let missing = Tokenizer::load(Path::new("/nowhere")).unwrap_err();
    assert!(matches!(missing, TokenizerError::Read { .. }));
    assert!(missing.to_string().contains("/nowhere/tokenizer.json") && missing.to_string().contains("hint:"));
    let cut = folder(&[("tokenizer.json", "{\"version\":".to_owned())]);
    assert!(matches!(Tokenizer::load(cut.path()), Err(TokenizerError::Broken { .. })));
    let bad = folder(&[("tokenizer.json", vocab::byte_level().to_string()), ("chat_template.jinja", "{% if %}".to_owned())]);
    let error = Tokenizer::load(bad.path()).unwrap_err().to_string();
    assert!(error.contains("chat_template.jinja") && error.contains("hint:"), "{error}");
}

#[test]
fn one_tokenizer_serves_many_threads() {
    let tokenizer = llama(&json!({"bos_token": "<s>", "chat_template": "{{ bos_token }}{{ messages[0].content }}"}));
    let expected = tokenizer.encode("<s>hi", false).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let prompt = rendered(&tokenizer, false).unwrap();
                    assert_eq!(tokenizer.encode(&prompt, false).unwrap(), expected);
                }
            });
        }
    });
}

proptest! {
    /// The bound that spares tokenising what cannot fit is never above the truth.
    #[test]
    fn a_text_never_has_fewer_ids_than_is_said_before(text in "(\\PC|\\s|the hat){0,200}") {
        for tokenizer in [vocab::byte_level(), vocab::byte_fallback()] {
            let tokenizer = load(&[("tokenizer.json", tokenizer.to_string())]);
            prop_assert!(tokenizer.at_least(&text) <= tokenizer.encode(&text, false).unwrap().len());
            prop_assert!(tokenizer.at_least(&"the hat".repeat(10_000)) > 1000);
        }
    }
}
