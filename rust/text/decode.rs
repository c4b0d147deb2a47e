//! Incremental detokenising: ids come in one by one, text leaves in whole characters, and nothing is decoded twice.
//!
//! The usual decoders are followed token by token: ByteLevel (GPT-2 and its many heirs), and the SentencePiece family (Metaspace, or Replace with
//! ByteFallback, Fuse and Strip). A tokenizer with any other decoder is decoded over a short window of ids instead. In all three, special tokens
//! are skipped, and what is held back is at most the start of one character: bytes that can become none leave as U+FFFD at once.
//!
//! Stop strings are not looked for here; that is `text::stop`.

use std::collections::HashSet;
use std::sync::Arc;

use serde_json::Value;
use tokenizers::Tokenizer;

/// How tokens become text.
#[derive(Debug)]
enum Form {
    /// Every character of a token stands for one byte.
    Bytes,
    /// Tokens are text with a mark for blanks.
    Pieces(Pieces),
    /// Anything else: decode a window of ids.
    Window,
}

#[derive(Debug, Default)]
struct Pieces {
    /// The mark, and what it becomes.
    replace: Option<(String, String)>,
    /// Whether `<0xAB>` is a byte.
    byte_fallback: bool,
    /// A character that is taken off the start of the text, and at most how often.
    strip: Option<(char, usize)>,
    /// Whether the first token loses its marks.
    bare_first: bool,
}

/// What decoding needs to know of a tokenizer. Built once, shared by all streams; it does not change.
#[derive(Debug)]
pub struct Detokeniser {
    tokenizer: Arc<Tokenizer>,
    form: Form,
    special: HashSet<u32>,
}

/// Special tokens whose text is part of a stream's text, though they are otherwise not shown.
pub type Visible = Arc<HashSet<u32>>;

impl Detokeniser {
    /// Reads the tokenizer's decoder and special tokens.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        let form = tokenizer
            .get_decoder()
            .and_then(|decoder| serde_json::to_value(decoder).ok())
            .and_then(|decoder| form_of(&decoder))
            .unwrap_or(Form::Window);
        let added = tokenizer.get_added_tokens_decoder();
        let special = added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
        Self { tokenizer, form, special }
    }

    /// Whether `id` is a special token, which is never shown.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// Whether a text is its tokens' bytes in a row, but for what is taken off its start.
    #[must_use]
    pub fn is_bytewise(&self) -> bool {
        !matches!(self.form, Form::Window)
    }

    /// The bytes that a token alone stands for, special tokens included; none for an id outside the vocabulary. At the start of a text, decoders may
    /// take a blank away that is part of these.
    #[must_use]
    pub fn bytes(&self, id: u32) -> Vec<u8> {
        let Some(token) = self.tokenizer.id_to_token(id) else { return Vec::new() };
        match &self.form {
            _ if self.is_special(id) => token.into_bytes(),
            Form::Bytes => token.chars().map(byte_of).collect::<Option<_>>().unwrap_or_else(|| token.into_bytes()),
            Form::Pieces(pieces) => match (fallback_byte(&token), &pieces.replace) {
                (Some(byte), _) if pieces.byte_fallback => vec![byte],
                (_, Some((mark, content))) => token.replace(mark.as_str(), content).into_bytes(),
                _ => token.into_bytes(),
            },
            Form::Window => self.tokenizer.decode(&[id], false).unwrap_or(token).into_bytes(),
        }
    }

    /// The special tokens that one of these texts is, or that is part of one.
    #[must_use]
    pub fn specials(&self, texts: &[&str]) -> Visible {
        let within = |id: &u32| {
            let token = self.tokenizer.id_to_token(*id);
            token.is_some_and(|token| token.len() > 2 && texts.iter().any(|text| text.contains(token.as_str())))
        };
        Arc::new(self.special.iter().copied().filter(within).collect())
    }

    /// A stream for one generated text.
    #[must_use]
    pub fn stream(self: &Arc<Self>) -> DecodeStream {
        let strip = match &self.form {
            Form::Pieces(pieces) => pieces.strip.map_or(0, |(_, most)| most),
            _ => 0,
        };
        DecodeStream {
            shared: Arc::clone(self),
            visible: Visible::default(),
            pending: Vec::new(),
            first: true,
            strip,
            window: Window::default(),
        }
    }

    /// The text of all `ids` at once, without special tokens.
    #[must_use]
    pub fn decode(self: &Arc<Self>, ids: &[u32]) -> String {
        let mut text = String::new();
        let mut stream = self.stream();
        stream.push_all(ids, &mut text);
        stream.finish(&mut text);
        text
    }
}

/// Reads a decoder's JSON. `None` for a decoder, or an order of decoders, that is not followed token by token.
fn form_of(decoder: &Value) -> Option<Form> {
    let kind = |step: &Value| step.get("type").and_then(Value::as_str).map(str::to_owned);
    let steps = match kind(decoder)?.as_str() {
        "Sequence" => decoder.get("decoders")?.as_array()?.as_slice(),
        _ => std::slice::from_ref(decoder),
    };
    let names: Vec<String> = steps.iter().map(kind).collect::<Option<_>>()?;
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    if names == ["ByteLevel"] {
        return Some(Form::Bytes);
    }
    let mut pieces = Pieces::default();
    let mut fused = false;
    for (index, (step, name)) in steps.iter().zip(&names).enumerate() {
        match *name {
            "Replace" if index == 0 => {
                let text = |value: &Value| value.as_str().map(str::to_owned);
                let mark = text(step.pointer("/pattern/String")?).filter(|mark| !mark.is_empty())?;
                pieces.replace = Some((mark, text(step.get("content")?)?));
            }
            "Metaspace" if index == 0 => {
                let never = step.get("prepend_scheme").and_then(Value::as_str) == Some("never");
                pieces.bare_first = !never;
                pieces.replace = Some((step.get("replacement")?.as_str()?.to_owned(), " ".to_owned()));
            }
            "ByteFallback" if !fused && !pieces.byte_fallback => pieces.byte_fallback = true,
            "Fuse" => fused = true,
            "Strip" if fused && pieces.strip.is_none() && step.get("stop")?.as_u64() == Some(0) => {
                let content = step.get("content")?.as_str()?.chars().next()?;
                pieces.strip = Some((content, usize::try_from(step.get("start")?.as_u64()?).ok()?));
            }
            _ => return None,
        }
    }
    Some(Form::Pieces(pieces))
}

/// The detokeniser of one text. Ids go in, characters come out; see the module's first lines.
#[derive(Debug)]
pub struct DecodeStream {
    shared: Arc<Detokeniser>,
    visible: Visible,
    /// The bytes of a character whose end has not come yet: at most three.
    pending: Vec<u8>,
    /// Whether no token has come yet.
    first: bool,
    /// How many characters may still be stripped off the start of the text.
    strip: usize,
    window: Window,
}

impl DecodeStream {
    /// The same stream, in which these special tokens are text.
    #[must_use]
    pub fn showing(mut self, visible: Visible) -> Self {
        self.visible = visible;
        self
    }

    /// Takes the next id and appends to `out` the characters that are now whole. Special tokens (but those that are [shown](Self::showing)) and ids
    /// outside the vocabulary add nothing.
    pub fn push(&mut self, id: u32, out: &mut String) {
        let shared = Arc::clone(&self.shared);
        if shared.is_special(id) {
            if self.visible.contains(&id)
                && let Some(token) = shared.tokenizer.id_to_token(id)
            {
                // A character that has not ended by now does not end.
                self.finish(out);
                out.push_str(&token);
            }
            return;
        }
        let Some(token) = shared.tokenizer.id_to_token(id) else {
            return;
        };
        let first = std::mem::take(&mut self.first);
        match &shared.form {
            Form::Window => self.window.push(&shared.tokenizer, id, out),
            Form::Pieces(pieces) => self.push_piece(pieces, &token, first, out),
            Form::Bytes => {
                let length = self.pending.len();
                for ch in token.chars() {
                    let Some(byte) = byte_of(ch) else {
                        // A token added later may be plain text, which is then meant as it stands.
                        self.pending.truncate(length);
                        self.pending.extend_from_slice(token.as_bytes());
                        break;
                    };
                    self.pending.push(byte);
                }
                drain(&mut self.pending, 1, out);
            }
        }
    }

    /// Takes several ids in order.
    pub fn push_all(&mut self, ids: &[u32], out: &mut String) {
        for &id in ids {
            self.push(id, out);
        }
    }

    /// Says that no more ids come: appends to `out` what was held back, as U+FFFD where it is no character.
    pub fn finish(&mut self, out: &mut String) {
        self.window.finish(out);
        match &self.shared.form {
            Form::Pieces(_) => self.end_bytes(out),
            _ if self.pending.is_empty() => {}
            _ => {
                self.pending.clear();
                out.push(char::REPLACEMENT_CHARACTER);
            }
        }
    }

    fn push_piece(&mut self, pieces: &Pieces, token: &str, first: bool, out: &mut String) {
        if pieces.byte_fallback
            && let Some(byte) = fallback_byte(token)
        {
            self.pending.push(byte);
            let mut text = String::new();
            // One mark for each byte, as tokenizers gives, since each byte is a token.
            drain(&mut self.pending, usize::MAX, &mut text);
            return self.emit(pieces, &text, out);
        }
        self.end_bytes(out);
        match &pieces.replace {
            Some((mark, content)) => {
                let content = if first && pieces.bare_first { "" } else { content };
                self.emit(pieces, &token.replace(mark.as_str(), content), out);
            }
            None => self.emit(pieces, token, out),
        }
    }

    /// A run of byte tokens is over: what is left of it can become no character.
    fn end_bytes(&mut self, out: &mut String) {
        if !self.pending.is_empty() {
            self.strip = 0;
            out.extend(std::iter::repeat_n(char::REPLACEMENT_CHARACTER, self.pending.len()));
            self.pending.clear();
        }
    }

    fn emit(&mut self, pieces: &Pieces, mut text: &str, out: &mut String) {
        while self.strip > 0 && !text.is_empty() {
            match pieces.strip.and_then(|(content, _)| text.strip_prefix(content)) {
                Some(rest) => {
                    self.strip -= 1;
                    text = rest;
                }
                None => self.strip = 0,
            }
        }
        out.push_str(text);
    }
}

/// Moves whole characters from `bytes` to `out`, and leaves the start of one more. A sequence that is no character becomes U+FFFD, as often as it
/// has bytes but at most `most` times.
fn drain(bytes: &mut Vec<u8>, most: usize, out: &mut String) {
    let mut rest = bytes.as_slice();
    loop {
        match std::str::from_utf8(rest) {
            Ok(text) => {
                out.push_str(text);
                return bytes.clear();
            }
            Err(error) => {
                let (valid, after) = rest.split_at(error.valid_up_to());
                out.push_str(std::str::from_utf8(valid).unwrap_or_default());
                let Some(broken) = error.error_len() else {
                    let gone = bytes.len() - after.len();
                    bytes.drain(..gone);
                    return;
                };
                out.extend(std::iter::repeat_n(char::REPLACEMENT_CHARACTER, broken.min(most)));
                rest = &after[broken..];
            }
        }
    }
}

/// The byte that a `<0xAB>` token stands for.
fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

/// The byte that a character of a ByteLevel vocabulary stands for (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019): the
/// printable characters of Latin-1 are themselves, the other bytes follow in order from U+0100 on.
fn byte_of(ch: char) -> Option<u8> {
    let code = u32::from(ch);
    match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => u8::try_from(code).ok(),
        0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        0x121..=0x142 => u8::try_from(code - 0x121 + 0x7f).ok(),
        0x143 => Some(0xad),
        _ => None,
    }
}

/// The printable character that byte-level BPE (as GPT-2 introduced it) shows each byte as, in byte order.
pub(crate) fn byte_symbols() -> impl Iterator<Item = char> {
    let mut unprintable = 0x100_u32..;
    (0..=255_u8).map(move |byte| match byte {
        b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
        _ => unprintable.next().and_then(char::from_u32).unwrap_or(char::REPLACEMENT_CHARACTER),
    })
}

/// Decoding over a window, for decoders that look at neighbours: the window is decoded with and without the newest ids, and the difference is
/// shown. The window starts at the ids shown last, so its length stays that of one character.
#[derive(Debug, Default)]
struct Window {
    ids: Vec<u32>,
    /// How many of `ids` have been shown; they are there for their successors' sake.
    shown: usize,
    /// What the shown ids decode to.
    prefix: String,
    /// Text held back because it ends in U+FFFD, which the next ids may turn into a character.
    held: String,
}

/// More byte tokens than one character can have.
const MAX_HELD_IDS: usize = 4;

impl Window {
    fn push(&mut self, tokenizer: &Tokenizer, id: u32, out: &mut String) {
        let text_of = |ids: &[u32]| tokenizer.decode(ids, true).unwrap_or_default();
        self.ids.push(id);
        let text = text_of(&self.ids);
        self.held.clear();
        self.held.push_str(text.strip_prefix(self.prefix.as_str()).unwrap_or_default());
        if self.held.ends_with(char::REPLACEMENT_CHARACTER) && self.ids.len() - self.shown < MAX_HELD_IDS {
            return;
        }
        out.push_str(&self.held);
        self.held.clear();
        let tail = text_of(&self.ids[self.shown..]);
        // Ids without text tell their successors nothing; the ones before them stay.
        if tail.is_empty() {
            self.prefix = text;
        } else {
            self.ids.drain(..self.shown);
            self.prefix = tail;
        }
        self.shown = self.ids.len();
    }

    fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }
}
