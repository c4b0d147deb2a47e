//! A whole answer: thoughts, then words or calls, each held to what is asked of it and to nothing else.
//!
//! Words are free, or of a form; a call is of its schema from the mark that sets it off. Free words have none of the marks that would begin a call in another way,
//! so that what a reader takes for a call is one of these. How a family of models marks thoughts and calls is known to those who ask.

use std::fmt::Write as _;
use std::sync::Arc;

use super::tagged::{Tag, pattern, quoted};
use super::{Grammar, refused, schema};
use crate::error::Result;

/// The name under which the form of the words stands beside the rest.
pub(super) const FORM: &str = "form";
/// Any text.
const ANY: &str = "(.|\\n)*";

/// An answer with thoughts, words and calls in it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Whole {
    /// How thoughts are marked; `None` where there are none.
    pub thoughts: Option<Thoughts>,
    /// What the words are held to; `None` is anything, and calls may then stand between them. Words of a form are all of the answer, or calls are.
    pub form: Option<Box<Grammar>>,
    /// The calls that there may be.
    pub calls: Option<Calls>,
    /// Whether thoughts, words and calls are messages, each in a channel (`<|channel|>`).
    pub channels: bool,
}

/// How thoughts are marked.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Thoughts {
    /// Begins one.
    pub open: Arc<str>,
    /// Ends it.
    pub close: Arc<str>,
    /// Whether the answer begins within one.
    pub inside: bool,
}

/// The calls of an answer.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Calls {
    /// What sets a call off: every tag begins with it.
    pub trigger: Arc<str>,
    /// The calls there are, at least one.
    pub tags: Vec<Tag>,
    /// Calls without the trigger, as which the whole answer may begin. An answer that begins like one and is none has none of the `names` in it.
    pub bare: Vec<Tag>,
    /// The names of what `bare` calls, in quotes.
    pub names: Vec<Arc<str>>,
    /// Marks that stand in no words: they would begin a call in another way.
    pub barred: Vec<Arc<str>>,
    /// Marks that mean nothing and may stand among words.
    pub passed: Vec<Arc<str>>,
    /// Whether the answer ends with the first.
    pub once: bool,
}

/// A text as tokens of their own kind and the rest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Piece {
    /// A text that is spelt.
    Text(String),
    /// A special token's id.
    Special(u32),
}

/// The rules, as they are written.
struct Rules<'a> {
    text: String,
    cut: &'a dyn Fn(&str) -> Vec<Piece>,
}

/// The grammar in Lark; the form is referred to as `@form`. `cut`: a text as the model's special tokens and the rest.
///
/// # Errors
/// `invalid_value` for tags that do not begin with the trigger, and schemas that cannot be used.
pub(super) fn lark(whole: &Whole, cut: &dyn Fn(&str) -> Vec<Piece>) -> Result<String> {
    let mut rules = Rules { text: String::from("%llguidance {}\n"), cut };
    if whole.channels {
        rules.channels(whole)?;
    } else if whole.form.is_some() {
        rules.formed(whole)?;
    } else {
        rules.free(whole)?;
    }
    Ok(rules.text)
}

impl Rules<'_> {
    // Writing to a string cannot fail.
    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        _ = self.text.write_fmt(line);
        self.text.push('\n');
    }

    /// A text as a row of literals and special tokens.
    fn spelt(&self, text: &str) -> String {
        let each = |piece: &Piece| match piece {
            Piece::Text(text) => quoted(text),
            Piece::Special(id) => format!("<[{id}]>"),
        };
        let pieces: Vec<String> = (self.cut)(text).iter().map(each).collect();
        if pieces.is_empty() { "\"\"".to_owned() } else { pieces.join(" ") }
    }

    /// A text as what of it is spelt before its first special token, and the rest from there on; no rest where it has none.
    fn split(&self, text: &str) -> (String, Option<String>) {
        let pieces = (self.cut)(text);
        match pieces.as_slice() {
            [Piece::Special(_), ..] => (String::new(), Some(self.spelt(text))),
            [Piece::Text(first), rest @ ..] if !rest.is_empty() => {
                let rest = text.strip_prefix(first.as_str()).unwrap_or_default();
                (first.clone(), Some(self.spelt(rest)))
            }
            _ => (text.to_owned(), None),
        }
    }

    /// The conditions that none of these marks is in a text. Those with special tokens stand in none as it is.
    fn without<'m>(&self, marks: impl Iterator<Item = &'m Arc<str>>) -> String {
        let spelt = marks.filter(|mark| self.split(mark).1.is_none());
        spelt.map(|mark| format!(" & ~/{ANY}{}{ANY}/", pattern(mark))).collect()
    }

    /// The rule `name`: any text, with these conditions (` & …`), up to and with `mark`. It ends with the first of these.
    fn until(&mut self, name: &str, before: &str, mark: &str, conditions: &str) {
        let terminal = name.to_uppercase();
        match self.split(mark) {
            (spelt, None) => {
                self.line(format_args!("{name}[lazy]: /{before}{ANY}{}/{conditions}", pattern(&spelt)));
            }
            (spelt, Some(rest)) => {
                self.line(format_args!("{name}: {terminal} {rest}\n{terminal}: /{before}{ANY}{}/{conditions}", pattern(&spelt)));
            }
        }
    }

    /// The rules `thought`, a whole one behind `blank`, `unended`, one within which the answer ends, and `rest`, the end of one that the prompt began. What is not a
    /// thought begins otherwise, which is told as a condition.
    fn thoughts(&mut self, thoughts: &Thoughts, blank: &str) -> String {
        let Thoughts { open, close, .. } = thoughts;
        self.until("rest", "", close, "");
        match self.split(open) {
            (spelt, None) => {
                let open = pattern(&spelt);
                self.until("thought", &format!("{blank}{open}"), close, "");
                self.line(format_args!("unended: /{blank}{open}{ANY}/"));
                format!(" & ~/{blank}{open}{ANY}/")
            }
            (spelt, Some(rest)) => {
                let open = format!("{blank}{}", pattern(&spelt));
                let before = if open.is_empty() { "" } else { "OPEN " };
                self.line(format_args!("thought: {before}{rest} rest\nunended: {before}{rest} ANY"));
                if !open.is_empty() {
                    self.line(format_args!("OPEN: /{open}/"));
                }
                String::new()
            }
        }
    }

    /// The rules `NAME0 | NAME1 …` of the calls after their trigger, or of those without one.
    fn tags(&mut self, name: &str, trigger: &str, tags: &[Tag]) -> Result<()> {
        if tags.is_empty() {
            return Err(refused("there are no tags to call with".to_owned()).hint("give a trigger and at least one tag"));
        }
        let names: Vec<String> = (0..tags.len()).map(|at| format!("{name}{at}")).collect();
        self.line(format_args!("{name}: {}", names.join(" | ")));
        for (tag, name) in tags.iter().zip(&names) {
            let Some(begin) = tag.begin.strip_prefix(trigger) else {
                let what = format!("the tag {:?} does not begin with {trigger:?}", tag.begin);
                return Err(refused(what).hint("begin every tag with the trigger"));
            };
            let schema = schema(&tag.schema)?;
            let (begin, end) = (self.spelt(begin), self.spelt(&tag.end));
            self.line(format_args!("{name}: {begin} body{name} {end}\nbody{name}: %json {schema}"));
        }
        Ok(())
    }

    /// Words are free, and calls stand between them.
    fn free(&mut self, whole: &Whole) -> Result<()> {
        let Whole { thoughts, calls, .. } = whole;
        let inside = thoughts.as_ref().is_some_and(|thoughts| thoughts.inside);
        self.line(format_args!("ANY: /{ANY}/"));
        let mut conditions = thoughts.as_ref().map(|thoughts| self.thoughts(thoughts, "\\s*")).unwrap_or_default();
        let (lead, unended) = if thoughts.is_some() { ("thought* ", " | thought* unended") } else { ("", "") };
        let mut last = String::from("words");
        let mut bare = String::new();
        let mut segments = String::new();
        let mut passed = Vec::new();
        if let Some(calls) = calls {
            conditions.push_str(&self.without(calls.barred.iter()));
            if !calls.bare.is_empty() {
                conditions.push_str(" & ~/\\s*\\{(.|\\n)*/");
                let mut object = format!("OBJECT: /\\s*\\{{{ANY}/ & ~/{ANY}\\\\u{ANY}/");
                for name in &calls.names {
                    _ = write!(object, " & ~/{ANY}{}{ANY}/", pattern(name));
                }
                let without = self.without(calls.barred.iter().chain([&calls.trigger]));
                self.line(format_args!("{object}{without}"));
                self.tags("bare", "", &calls.bare)?;
                last.push_str(" | OBJECT");
                bare = format!(" | {}", if calls.once { "bare" } else { "bare (\"; \" bare)*" });
            }
            passed = calls.passed.iter().filter(|mark| self.split(mark).1.is_some()).map(|mark| self.spelt(mark)).collect();
            self.until("before", "", &calls.trigger, &conditions);
            self.tags("call", &calls.trigger, &calls.tags)?;
            segments = format!("{lead}{}before call", if passed.is_empty() { "" } else { "(WORDS passed)* " });
        }
        self.line(format_args!("WORDS: /{ANY}/{conditions}"));
        if passed.is_empty() {
            self.line(format_args!("words: WORDS"));
        } else {
            self.line(format_args!("passed: {}\nwords: (WORDS passed)* WORDS", passed.join(" | ")));
        }
        let once = calls.as_ref().is_some_and(|calls| calls.once);
        self.line(format_args!("last: {lead}({last}){unended}"));
        let said = match (segments.is_empty(), once) {
            (true, _) => "last".to_owned(),
            (false, true) => format!("last | {segments}"),
            (false, false) => format!("({segments})* last"),
        };
        if inside {
            self.line(format_args!("start: rest ({said}) | ANY"));
        } else {
            self.line(format_args!("start: {said}{bare}"));
        }
        Ok(())
    }

    /// Words are of a form, or there are calls in their place.
    fn formed(&mut self, whole: &Whole) -> Result<()> {
        let Whole { thoughts, calls, .. } = whole;
        self.line(format_args!("ANY: /{ANY}/\nBLANK: /[ \\t\\r\\n]{{1,8}}/"));
        let mut said = format!("@{FORM}");
        if let Some(calls) = calls {
            match self.split(&calls.trigger) {
                // It ends with its last character, whatever a form would make of more.
                (spelt, None) => self.line(format_args!("trigger[lazy]: /{}/", pattern(&spelt))),
                _ => {
                    let trigger = self.spelt(&calls.trigger);
                    self.line(format_args!("trigger: {trigger}"));
                }
            }
            let passed: Vec<String> = calls.passed.iter().map(|mark| self.spelt(mark)).collect();
            let between = if passed.is_empty() {
                "BLANK?".to_owned()
            } else {
                self.line(format_args!("passed: {}", passed.join(" | ")));
                "(BLANK | passed)*".to_owned()
            };
            self.tags("call", &calls.trigger, &calls.tags)?;
            let before = if passed.is_empty() { "" } else { "passed* " };
            let more = if calls.once {
                String::new()
            } else {
                format!(" ({between} trigger call)* {}", if passed.is_empty() { "" } else { "passed*" })
            };
            _ = write!(said, " | {before}trigger call{more}");
        }
        self.line(format_args!("said: {said}"));
        let said = match thoughts {
            None => "said",
            // A thought has to end, or there would be an answer without the form.
            Some(thoughts) => {
                self.thoughts(thoughts, "");
                if thoughts.inside { "rest (BLANK? thought)* BLANK? said" } else { "said | (BLANK? thought)+ BLANK? said" }
            }
        };
        self.line(format_args!("start: {said}"));
        Ok(())
    }

    /// Messages in channels. A call ends the answer.
    fn channels(&mut self, whole: &Whole) -> Result<()> {
        let marks = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>"];
        if marks.iter().any(|mark| !matches!((self.cut)(mark).as_slice(), [Piece::Special(_)])) {
            return Err(refused("the model has no tokens for channels".to_owned()).hint("use another model"));
        }
        let [channel, message, end, begin] = marks.map(|mark| self.spelt(mark));
        self.line(format_args!("ANY: /{ANY}/"));
        self.line(format_args!("side: {channel} (\"analysis\" | \"commentary\") {message} ANY"));
        let (form, side) = if whole.form.is_some() { ("@form", "") } else { ("ANY", " | side") };
        self.line(format_args!("last: {channel} \"final\" {message} {form}"));
        let mut said = format!("last{side}");
        if let Some(calls) = &whole.calls {
            self.tags("tool", &calls.trigger, &calls.tags)?;
            self.line(format_args!("call: {channel} tool"));
            said.push_str(" | call");
        }
        self.line(format_args!("start: (side {end} {begin} \"assistant\")* ({said})"));
        Ok(())
    }
}
