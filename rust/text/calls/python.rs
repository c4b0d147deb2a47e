//! Calls as Python would write them, alone or in a list: LFM2, and Gemma's `tool_code`.

use serde_json::Value;

use super::literal::{self, Span};
use super::scan::escaped;
use super::{Emit, Step, blank, closing, may_become};

/// A name that is longer than this is none.
const LONGEST: usize = 256;
/// What stands before a name without being part of it.
const PREFIXES: [&str; 2] = ["default_api.", "functions."];

#[derive(Debug)]
enum At {
    Start,
    Name,
    /// Before an argument or the end of the call.
    Argument,
    /// In an argument: first its key, if it has one, then its value.
    Value(Span),
    After,
    Close,
}

#[derive(Debug)]
pub(crate) struct Python {
    at: At,
    close: &'static str,
    list: bool,
    /// How many `print(` are open around the call.
    wrapped: usize,
    name: String,
    count: usize,
}

impl Python {
    pub(super) fn new(close: &'static str) -> Self {
        Self { at: At::Start, close, list: false, wrapped: 0, name: String::new(), count: 0 }
    }

    pub(super) fn step(&mut self, rest: &str, emit: &mut Emit<'_>) -> Step {
        let start = blank(rest);
        let after = rest.get(start..).unwrap_or_default();
        let Some(first) = after.bytes().next() else {
            return match self.at {
                At::After | At::Close if emit.last => Step::Done(0),
                At::After | At::Close => Step::More,
                _ => emit.more(),
            };
        };
        match &mut self.at {
            At::Start => {
                self.list = first == b'[';
                self.at = At::Name;
                Step::Took(start + usize::from(self.list))
            }
            At::Name => self.name(start, after, emit),
            At::Argument => match first {
                b')' => {
                    if self.count == 0 {
                        emit.begin(&self.name);
                        emit.arguments("{");
                    }
                    emit.arguments("}");
                    emit.end(true);
                    self.at = At::After;
                    Step::Took(start + 1)
                }
                b',' if self.count > 0 => Step::Took(start + 1),
                _ => {
                    self.at = At::Value(Span::new(""));
                    Step::Took(start)
                }
            },
            At::Value(span) => match span.end(rest) {
                None => emit.more(),
                Some(end) => self.argument(rest.get(..end).unwrap_or_default(), emit),
            },
            At::After => match first {
                b')' if self.wrapped > 0 => {
                    self.wrapped -= 1;
                    Step::Took(start + 1)
                }
                b']' if self.list => {
                    self.at = At::Close;
                    Step::Took(start + 1)
                }
                b',' | b';' => {
                    self.at = At::Name;
                    Step::Took(start + 1)
                }
                _ if after.starts_with(self.close) => Step::Done(start + self.close.len()),
                _ if may_become(after, self.close) => emit.cut(rest),
                // The next line is the next call.
                first if first.is_ascii_alphabetic() && !self.list => {
                    self.at = At::Name;
                    Step::Took(start)
                }
                _ => Step::Done(0),
            },
            At::Close => closing(rest, self.close, emit),
        }
    }

    fn name(&mut self, start: usize, after: &str, emit: &mut Emit<'_>) -> Step {
        let part = |ch: char| ch.is_alphanumeric() || matches!(ch, '_' | '.' | '-');
        let end = after.find(|ch| !part(ch)).unwrap_or(after.len());
        if end > LONGEST {
            return Step::Broken;
        }
        let (name, rest) = after.split_at(end);
        match rest.bytes().next() {
            None => return emit.more(),
            Some(b'(') if !name.is_empty() => {}
            Some(_) => return Step::Broken,
        }
        if name == "print" && !emit.tools.contains_key(name) {
            self.wrapped += 1;
        } else {
            let name = PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name);
            if !emit.allows(name) {
                return Step::Broken;
            }
            name.clone_into(&mut self.name);
            self.count = 0;
            self.at = At::Argument;
        }
        Step::Took(start + end + 1)
    }

    /// An argument is whole: `key=value`, or a value in the place that the schema gives it.
    fn argument(&mut self, text: &str, emit: &mut Emit<'_>) -> Step {
        let named = text.split_once('=').filter(|(key, _)| {
            let key = key.trim();
            !key.is_empty() && key.chars().all(|ch| ch.is_alphanumeric() || ch == '_')
        });
        let (key, value) = match named {
            Some((key, value)) => (key.trim().to_owned(), value),
            None => match place(emit.tools.get(&self.name), self.count) {
                Some(key) => (key, text),
                None => return Step::Broken,
            },
        };
        if value.trim().is_empty() {
            return Step::Broken;
        }
        if self.count == 0 {
            emit.begin(&self.name);
        }
        let before = if self.count == 0 { "{" } else { ", " };
        emit.arguments(&format!("{before}\"{}\": {}", escaped(&key), literal::value(value, "")));
        self.count += 1;
        self.at = At::Argument;
        Step::Took(text.len())
    }
}

/// The key of an argument that is told by its place alone.
fn place(schema: Option<&Value>, index: usize) -> Option<String> {
    schema?.get("properties")?.as_object()?.keys().nth(index).cloned()
}
