//! Calls of tools in what a model writes: one entry of a table for each family of models, and one file for each way to write a call.
//!
//! A family is recognised from the model's chat template. `parse` looks for a family's openers; from there on a body reads one region of
//! text, tells of names and arguments as they come, and says where the region ends or that it is no call after all.

mod gemma;
mod json;
mod literal;
mod named;
mod python;
mod scan;
mod table;
mod tagged;
mod written;
mod xml;

use std::collections::BTreeMap;

use serde_json::Value;

use super::parsed::{Kind, Parsed};
pub use table::{Family, Start};
pub use written::Written;

/// The tools that may be called: each name with the JSON Schema of its arguments. Under the schema `false` stands a tool that may not be called: a
/// call of it is text.
pub type Signatures = BTreeMap<String, Value>;

/// What a body makes of the text that it has not read yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// So many bytes are read; there may be more to do.
    Took(usize),
    /// It cannot go on before more text comes.
    More,
    /// The region ends after so many bytes.
    Done(usize),
    /// This is no call.
    Broken,
}

/// Where bodies tell what they find.
pub(super) struct Emit<'a> {
    pub(super) out: &'a mut Parsed,
    /// Whether a call has begun and not ended.
    pub(super) open: &'a mut bool,
    /// How many calls have ended.
    pub(super) ended: &'a mut u32,
    pub(super) tools: &'a Signatures,
    /// Whether no more text will come.
    pub(super) last: bool,
}

impl Emit<'_> {
    /// Whether the tool may be called. One that nobody knows may, since whoever asked is told what the model wants; but not where some may not be
    /// called, which says that only the others may.
    pub(super) fn allows(&self, name: &str) -> bool {
        let barred = |schema: &Value| *schema == Value::Bool(false);
        self.tools.get(name).map_or_else(|| !self.tools.values().any(barred), |schema| !barred(schema))
    }

    pub(super) fn begin(&mut self, name: &str) {
        *self.open = true;
        self.out.say(Kind::Call, name);
    }

    pub(super) fn arguments(&mut self, text: &str) {
        self.out.say(Kind::Arguments, text);
    }

    pub(super) fn end(&mut self, whole: bool) {
        *self.open = false;
        *self.ended += 1;
        self.out.say(Kind::End { whole }, "");
    }

    /// What a body says that finds the text at an end: more may come, or it may not.
    fn more(&self) -> Step {
        if self.last { Step::Broken } else { Step::More }
    }

    /// What a body says, all of whose calls are whole, when only the beginning of its last mark has come.
    fn cut(&self, rest: &str) -> Step {
        if self.last { Step::Done(rest.len()) } else { Step::More }
    }
}

/// One way to write calls, on its way through a region.
#[derive(Debug)]
pub(super) enum Body {
    Tagged(tagged::Tagged),
    Json(json::Calls),
    /// JSON, or another way: the first marks tell.
    Either(&'static str, Start),
    Named(named::Named),
    Xml(xml::Xml),
    Python(python::Python),
    Gemma(gemma::Gemma),
}

impl Body {
    pub(super) fn new(start: Start) -> Self {
        match start {
            Start::Tagged => Self::Tagged(tagged::Tagged::default()),
            Start::Json { close } => Self::Json(json::Calls::new(close, false)),
            Start::Bare => Self::Json(json::Calls::new("", true)),
            Start::Named(form) => Self::Named(named::Named::new(form)),
            // Their regions may hold JSON too: it is what some of them are told to write, and what calls are held to.
            Start::Xml(form) => Self::Either(form.region, start),
            Start::Python { close } | Start::Gemma { close, .. } => Self::Either(close, start),
        }
    }

    /// The family's own way.
    fn own(start: Start) -> Self {
        match start {
            Start::Xml(form) => Self::Xml(xml::Xml::new(form)),
            Start::Python { close } => Self::Python(python::Python::new(close)),
            Start::Gemma { quote, close } => Self::Gemma(gemma::Gemma::new(quote, close)),
            other => Self::new(other),
        }
    }

    /// Which of two ways it is: JSON begins with a brace, perhaps in a list.
    fn either(close: &'static str, start: Start, rest: &str, last: bool) -> Option<Self> {
        let mut marks = rest.chars().filter(|ch| !ch.is_whitespace());
        match (marks.next(), marks.next()) {
            (Some('{'), _) | (Some('['), Some('{')) => Some(Self::Json(json::Calls::new(close, false))),
            (None, _) | (Some('['), None) if !last => None,
            _ => Some(Self::own(start)),
        }
    }

    /// Reads on at `rest`, which begins where it stopped the last time.
    pub(super) fn step(&mut self, rest: &str, emit: &mut Emit<'_>) -> Step {
        if let Self::Either(close, start) = *self {
            let Some(body) = Self::either(close, start, rest, emit.last) else { return Step::More };
            *self = body;
        }
        match self {
            Self::Either(..) => Step::Broken,
            Self::Tagged(body) => body.step(rest, emit),
            Self::Json(body) => body.step(rest, emit),
            Self::Named(body) => body.step(rest, emit),
            Self::Xml(body) => body.step(rest, emit),
            Self::Python(body) => body.step(rest, emit),
            Self::Gemma(body) => body.step(rest, emit),
        }
    }
}

/// Arguments that are a JSON object in the text itself: passed on as they come.
#[derive(Debug)]
struct Arguments {
    scan: scan::Scan,
    /// What has not been told yet: the name may still be missing.
    waiting: String,
    begun: bool,
}

impl Arguments {
    fn new() -> Self {
        Self { scan: scan::Scan::new(), waiting: String::new(), begun: false }
    }

    /// Reads as much of `rest` as belongs to the object. The call begins once there is a name and the object's first two marks are sound, so that
    /// what is not even JSON remains text. Gives how much was read, and whether that was all (`None`: it is no object).
    fn read(&mut self, rest: &str, name: Option<&str>, emit: &mut Emit<'_>) -> Option<(usize, bool)> {
        let (mut read, mut whole) = (0, false);
        for byte in rest.bytes() {
            let within = self.scan.in_string();
            match self.scan.feed(byte) {
                scan::Verdict::Bad | scan::Verdict::Past => {
                    self.keep(rest.get(..read).unwrap_or_default());
                    self.tell_sound(name, emit);
                    return None;
                }
                // A line break within a string, which JSON has only in its escaped form.
                _ if within && byte < b' ' => {
                    self.keep(rest.get(..read).unwrap_or_default());
                    self.waiting.push_str(&scan::escaped(char::from(byte).encode_utf8(&mut [0; 4])));
                    self.tell(name, emit);
                    return Some((read + 1, false));
                }
                verdict => {
                    read += 1;
                    whole = verdict == scan::Verdict::Last;
                    if whole {
                        break;
                    }
                }
            }
        }
        self.keep(rest.get(..read).unwrap_or_default());
        self.tell_sound(name, emit);
        Some((read, whole))
    }

    /// Tells what is known, unless it is so little that it may be no object at all.
    fn tell_sound(&mut self, name: Option<&str>, emit: &mut Emit<'_>) {
        if self.begun || self.waiting.trim_end().len() > 1 {
            self.tell(name, emit);
        }
    }

    fn keep(&mut self, text: &str) {
        self.waiting.push_str(text);
    }

    /// Tells what is known, if there is a name to tell it under.
    fn tell(&mut self, name: Option<&str>, emit: &mut Emit<'_>) {
        let Some(name) = name else { return };
        if !self.begun {
            self.begun = true;
            emit.begin(name);
        }
        emit.arguments(&self.waiting);
        self.waiting.clear();
    }
}

/// Whether a text may be the name of a tool.
pub(super) fn is_name(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|ch| ch.is_alphanumeric() || matches!(ch, '_' | '-' | '.' | ':' | '/'))
}

/// How much blank a text begins with.
fn blank(text: &str) -> usize {
    text.len() - text.trim_start().len()
}

/// Whether `text` may yet become one that begins with `mark`.
fn may_become(text: &str, mark: &str) -> bool {
    text.len() < mark.len() && mark.starts_with(text)
}

/// How many bytes at the end of a text may be the beginning of `mark`.
pub(super) fn overlap(text: &str, mark: &str) -> usize {
    let longest = mark.len().saturating_sub(1).min(text.len());
    (1..=longest).rev().find(|length| mark.is_char_boundary(*length) && text.ends_with(&mark[..*length])).unwrap_or(0)
}

/// What of a region's end has come: `close` behind blanks, which may be missing. Where the answer is cut within it, what came of it belongs to it.
fn closing(rest: &str, close: &str, emit: &Emit<'_>) -> Step {
    let start = blank(rest);
    let after = rest.get(start..).unwrap_or_default();
    if close.is_empty() {
        return Step::Done(0);
    }
    if after.starts_with(close) {
        return Step::Done(start + close.len());
    }
    if may_become(after, close) { emit.cut(rest) } else { Step::Done(0) }
}
