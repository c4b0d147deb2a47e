//! A model folder's tokenizer: text to ids, ids to text, and the chat templates that lie beside it.
//!
//! Read are `tokenizer.json` (required), `tokenizer_config.json` and `special_tokens_map.json` (special tokens, `add_bos_token`), and the chat
//! template from the first place that has one: `chat_template.jinja` with `additional_chat_templates/*.jinja`, `chat_template.json`,
//! `tokenizer_config.json`. Nothing is fetched, and nothing is written.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use tokenizers::ModelWrapper;

use super::template::{ChatTemplate, Specials, TemplateError};
use crate::text::Detokeniser;
use crate::text::decode::byte_symbols;

/// Why a tokenizer cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A file is missing or cannot be read.
    #[error("cannot read {}: {source}\nhint: a model folder needs tokenizer.json; is this the folder of a model?", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is there but is not what its name says.
    #[error("{} is not usable: {message}\nhint: the file may be cut short; fetch the model again", .path.display())]
    Broken {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// A chat template does not compile.
    #[error("in {}: {source}", .path.display())]
    Template {
        /// The file that holds the template.
        path: PathBuf,
        /// What is wrong with it.
        source: TemplateError,
    },
    /// A text cannot be turned into ids, which a sound tokenizer never says.
    #[error("cannot tokenise the prompt: {0}")]
    Encode(String),
}

/// A prompt is never cut or filled up, whatever the tokenizer was trained with.
fn read_tokenizer(data: &[u8], path: &Path) -> Result<tokenizers::Tokenizer, TokenizerError> {
    let broken = |error: tokenizers::Error| TokenizerError::Broken { path: path.to_path_buf(), message: error.to_string() };
    let mut inner = tokenizers::Tokenizer::from_bytes(data).map_err(broken)?;
    inner.with_truncation(None).map_err(broken)?.with_padding(None);
    Ok(inner)
}

/// What says, without encoding a text, how many ids it has at least.
#[derive(Debug)]
struct Bound {
    /// The bytes that are part of some id. The others leave no trace where a tokenizer drops what it does not know.
    shown: [bool; 256],
    /// How many bytes of text one id can stand for at most.
    longest: usize,
}

impl Bound {
    /// `None` where a run of unknown characters may be one id, and where a normaliser shortens texts without a bound.
    fn of(tokenizer: &tokenizers::Tokenizer) -> Option<Self> {
        // A vocabulary shows a byte as one character at least, so no id stands for more bytes than its text has.
        let longest = tokenizer.get_vocab(true).keys().map(String::len).max()?.max(1);
        let shrinks = match tokenizer.get_normalizer().and_then(|normaliser| serde_json::to_value(normaliser).ok()) {
            None => 1,
            Some(normaliser) => shrinks(&normaliser)?,
        };
        let mut shown = [false; 256];
        match tokenizer.get_model() {
            ModelWrapper::BPE(model) if model.byte_fallback => shown = [true; 256],
            ModelWrapper::Unigram(model) if model.byte_fallback() => shown = [true; 256],
            ModelWrapper::BPE(model) if model.unk_token.is_none() => {
                let cut = serde_json::to_string(tokenizer.get_pre_tokenizer()?).ok()?;
                if !cut.contains("\"ByteLevel\"") {
                    return None;
                }
                for (shown, symbol) in shown.iter_mut().zip(byte_symbols()) {
                    *shown = tokenizer.token_to_id(symbol.encode_utf8(&mut [0; 4])).is_some();
                }
            }
            _ => return None,
        }
        Some(Self { shown, longest: longest.saturating_mul(shrinks) })
    }

    fn at_least(&self, text: &str) -> usize {
        text.bytes().filter(|byte| self.shown[usize::from(*byte)]).count() / self.longest
    }
}

/// How many times shorter, in bytes, a normaliser may make a text before it is cut; `None` when there is no bound, as where blanks are taken away.
fn shrinks(normaliser: &Value) -> Option<usize> {
    match normaliser["type"].as_str()? {
        "Sequence" => {
            normaliser["normalizers"].as_array()?.iter().map(shrinks).try_fold(1, |all: usize, one| Some(all.saturating_mul(one?)))
        }
        "Prepend" => Some(1),
        "Replace" => {
            let (pattern, content) = (normaliser["pattern"]["String"].as_str()?, normaliser["content"].as_str()?);
            (content.len() >= pattern.len()).then_some(1)
        }
        // A character of three bytes may become one of one byte, or three characters one.
        "NFC" | "NFD" | "NFKC" | "NFKD" | "Lowercase" => Some(3),
        _ => None,
    }
}

/// The tokenizer of one model.
///
/// All methods take `&self`, and all threads may call them at once: the tokenizer and the templates are never changed after loading, and the merge
/// cache inside is shared under a lock that is skipped when contended. Encoding is plain work on the calling thread, some microseconds for a
/// short prompt and some milliseconds for a long one, so a server calls it where blocking is allowed.
#[derive(Debug)]
pub struct Tokenizer {
    inner: Arc<tokenizers::Tokenizer>,
    detokeniser: Arc<Detokeniser>,
    specials: Specials,
    bos: Option<u32>,
    eos: Option<u32>,
    add_bos: Option<bool>,
    templates: BTreeMap<String, ChatTemplate>,
    bound: Option<Bound>,
}

impl Tokenizer {
    /// Loads the tokenizer of a model folder.
    ///
    /// # Errors
    /// When `tokenizer.json` is missing, when a file that is there cannot be read or understood, or when a chat template does not compile.
    pub fn load(folder: &Path) -> Result<Self, TokenizerError> {
        let path = folder.join("tokenizer.json");
        let data = std::fs::read(&path).map_err(|source| TokenizerError::Read { path: path.clone(), source })?;
        let inner = read_tokenizer(&data, &path)?;
        let config_path = folder.join("tokenizer_config.json");
        let config = read_json(&config_path)?.unwrap_or_default();
        let map = read_json(&folder.join("special_tokens_map.json"))?.unwrap_or_default();
        let token = |name: &str| token_text(&config[name]).or_else(|| token_text(&map[name]));
        let specials = Specials {
            bos_token: token("bos_token"),
            eos_token: token("eos_token"),
            pad_token: token("pad_token"),
            unk_token: token("unk_token"),
        };
        let id = |token: &Option<String>| token.as_deref().and_then(|token| inner.token_to_id(token));
        let (bos, eos) = (id(&specials.bos_token), id(&specials.eos_token));
        let mut templates = BTreeMap::new();
        for (name, source, path) in find_templates(folder, &config, &config_path)? {
            let template = ChatTemplate::new(source, specials.clone()).map_err(|source| TokenizerError::Template { path, source })?;
            templates.insert(name, template);
        }
        let inner = Arc::new(inner);
        let detokeniser = Arc::new(Detokeniser::new(Arc::clone(&inner)));
        let bound = Bound::of(&inner);
        Ok(Self { inner, detokeniser, specials, bos, eos, add_bos: config["add_bos_token"].as_bool(), templates, bound })
    }

    /// A tokenizer from the text of a `tokenizer.json` and one chat template, without a folder. It has no beginning-of-text token.
    ///
    /// # Errors
    /// When one of them cannot be understood.
    pub fn from_parts(tokenizer: &[u8], template: &str) -> Result<Self, TokenizerError> {
        let path = PathBuf::from("tokenizer.json");
        let inner = Arc::new(read_tokenizer(tokenizer, &path)?);
        let template = ChatTemplate::new(template, Specials::default()).map_err(|source| TokenizerError::Template { path, source })?;
        let detokeniser = Arc::new(Detokeniser::new(Arc::clone(&inner)));
        let bound = Bound::of(&inner);
        let templates = BTreeMap::from([("default".to_owned(), template)]);
        Ok(Self { inner, detokeniser, specials: Specials::default(), bos: None, eos: None, add_bos: None, templates, bound })
    }

    /// The chat template: with tools, the one named `tool_use` if the model has it, else `default`. `None` for a model that has no template.
    #[must_use]
    pub fn template(&self, with_tools: bool) -> Option<&ChatTemplate> {
        let tool_use = if with_tools { self.templates.get("tool_use") } else { None };
        tool_use.or_else(|| self.templates.get("default"))
    }

    /// Turns a prompt into ids.
    ///
    /// A prompt that a chat template rendered has its special tokens in its text: pass `add_special = false`, as transformers does. For bare text
    /// `add_special = true` adds what the model expects around it; a prompt that already starts with the beginning-of-text token gets nothing
    /// added, so that the token is never doubled. Special tokens written in the text become their ids either way.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`] when the tokenizer's model fails.
    pub fn encode(&self, prompt: &str, add_special: bool) -> Result<Vec<u32>, TokenizerError> {
        let bos_text = self.specials.bos_token.as_deref().filter(|token| !token.is_empty());
        let add = add_special && !bos_text.is_some_and(|token| prompt.starts_with(token));
        let encoding = self.inner.encode_fast(prompt, add).map_err(|error| TokenizerError::Encode(error.to_string()))?;
        let mut ids = encoding.get_ids().to_vec();
        if add && let Some(bos) = self.bos {
            // The setting of tokenizer_config.json wins over the post-processor, which older files do not keep in step with it.
            match (self.add_bos, ids.first() == Some(&bos)) {
                (Some(true), false) => ids.insert(0, bos),
                (Some(false), true) => {
                    ids.remove(0);
                }
                _ => {}
            }
        }
        Ok(ids)
    }

    /// How many ids a text has at least; 0 where nothing can be said. A look at its bytes, a hundred times faster than encoding.
    #[must_use]
    pub fn at_least(&self, text: &str) -> usize {
        self.bound.as_ref().map_or(0, |bound| bound.at_least(text))
    }

    /// What turns generated ids into text, one stream for each generation.
    #[must_use]
    pub fn detokeniser(&self) -> &Arc<Detokeniser> {
        &self.detokeniser
    }

    /// Whether `id` is a special token, which is not part of a generated text.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.detokeniser.is_special(id)
    }

    /// How many ids there are, added tokens included. A model's logits may be wider.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// The id of a token, given as it stands in the vocabulary.
    #[must_use]
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The token with an id, as it stands in the vocabulary.
    #[must_use]
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The texts of the special tokens that templates may name.
    #[must_use]
    pub fn specials(&self) -> &Specials {
        &self.specials
    }

    /// The id of the beginning-of-text token.
    #[must_use]
    pub fn bos_id(&self) -> Option<u32> {
        self.bos
    }

    /// The id of the end-of-text token. A model may end its turns with further ids, which its `generation_config.json` lists.
    #[must_use]
    pub fn eos_id(&self) -> Option<u32> {
        self.eos
    }
}

/// A file's text; `None` if there is no such file.
fn read_text(path: &Path) -> Result<Option<String>, TokenizerError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TokenizerError::Read { path: path.to_owned(), source }),
    }
}

fn read_json(path: &Path) -> Result<Option<Value>, TokenizerError> {
    let Some(text) = read_text(path)? else {
        return Ok(None);
    };
    serde_json::from_str(&text).map(Some).map_err(|error| TokenizerError::Broken { path: path.to_owned(), message: error.to_string() })
}

/// A special token's text: it is written either plainly or as an object with more about it.
fn token_text(token: &Value) -> Option<String> {
    token.as_str().or_else(|| token.get("content")?.as_str()).map(str::to_owned)
}

type Source = (String, String, PathBuf);

/// The named templates of a folder: name, source, and the file it was found in.
fn find_templates(folder: &Path, config: &Value, config_path: &Path) -> Result<Vec<Source>, TokenizerError> {
    let mut found = Vec::new();
    let path = folder.join("chat_template.jinja");
    if let Some(source) = read_text(&path)? {
        found.push(("default".to_owned(), source, path));
    }
    let more = folder.join("additional_chat_templates");
    if more.is_dir() {
        let entries = std::fs::read_dir(&more).map_err(|source| TokenizerError::Read { path: more.clone(), source })?;
        for path in entries.flatten().map(|entry| entry.path()) {
            let name = path.file_stem().and_then(|name| name.to_str()).map(str::to_owned);
            if let Some(name) = name.filter(|_| path.extension().is_some_and(|kind| kind == "jinja"))
                && let Some(source) = read_text(&path)?
            {
                found.push((name, source, path));
            }
        }
    }
    if !found.is_empty() {
        return Ok(found);
    }
    let path = folder.join("chat_template.json");
    if let Some(file) = read_json(&path)? {
        found = named(&file["chat_template"], &path);
    }
    if found.is_empty() {
        found = named(&config["chat_template"], config_path);
    }
    Ok(found)
}

/// The templates in a `chat_template` field: one text, a list of `{"name": …, "template": …}`, or an object of texts by name.
fn named(field: &Value, path: &Path) -> Vec<Source> {
    let entry = |name: &str, source: &str| (name.to_owned(), source.to_owned(), path.to_owned());
    match field {
        Value::String(source) => vec![entry("default", source)],
        Value::Array(list) => {
            list.iter().filter_map(|item| Some(entry(item.get("name")?.as_str()?, item.get("template")?.as_str()?))).collect()
        }
        Value::Object(texts) => texts.iter().filter_map(|(name, source)| Some(entry(name, source.as_str()?))).collect(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_normaliser_shrinks_a_text_by_a_bound_or_is_said_to_have_none() {
        let blanks = json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
        let sequence = json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u{2581}"}, blanks, {"type": "NFC"}]});
        assert_eq!(shrinks(&sequence), Some(3));
        assert_eq!(shrinks(&json!({"type": "Replace", "pattern": {"String": "  "}, "content": ""})), None);
        assert_eq!(shrinks(&json!({"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Strip"}]})), None);
    }
}
