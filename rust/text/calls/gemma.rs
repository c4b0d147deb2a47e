//! Calls as `call:NAME{key:value,…}`, with quotes of their own: Gemma 4 and FunctionGemma.

use super::literal::{self, Span};
use super::scan::escaped;
use super::{Emit, Step, blank, closing, is_name, may_become};

const OPEN: &str = "call:";
/// A name or key that is longer than this is none.
const LONGEST: usize = 256;

#[derive(Debug)]
enum At {
    Start,
    Name,
    /// Before a key or the end of the call.
    Key,
    Value(Span),
    Close,
}

#[derive(Debug)]
pub(crate) struct Gemma {
    at: At,
    quote: &'static str,
    close: &'static str,
    name: String,
    key: String,
    count: usize,
}

impl Gemma {
    pub(super) fn new(quote: &'static str, close: &'static str) -> Self {
        Self { at: At::Start, quote, close, name: String::new(), key: String::new(), count: 0 }
    }

    pub(super) fn step(&mut self, rest: &str, emit: &mut Emit<'_>) -> Step {
        let start = blank(rest);
        let after = rest.get(start..).unwrap_or_default();
        match &mut self.at {
            At::Start if after.starts_with(OPEN) => {
                self.at = At::Name;
                Step::Took(start + OPEN.len())
            }
            At::Start if may_become(after, OPEN) => emit.more(),
            At::Start => Step::Broken,
            At::Name => match after.find('{') {
                Some(end) if end <= LONGEST => {
                    let name = after.get(..end).unwrap_or_default().trim();
                    if !is_name(name) || !emit.allows(name) {
                        return Step::Broken;
                    }
                    name.clone_into(&mut self.name);
                    self.at = At::Key;
                    Step::Took(start + end + 1)
                }
                None if after.len() <= LONGEST => emit.more(),
                _ => Step::Broken,
            },
            At::Key => self.key(start, after, emit),
            At::Value(span) => match span.end(rest) {
                None => emit.more(),
                Some(end) => {
                    let value = literal::value(rest.get(..end).unwrap_or_default(), self.quote);
                    if self.count == 0 {
                        emit.begin(&self.name);
                    }
                    let before = if self.count == 0 { "{" } else { ", " };
                    emit.arguments(&format!("{before}\"{}\": {value}", escaped(&self.key)));
                    self.count += 1;
                    self.at = At::Key;
                    Step::Took(end)
                }
            },
            At::Close => closing(rest, self.close, emit),
        }
    }

    fn key(&mut self, start: usize, after: &str, emit: &mut Emit<'_>) -> Step {
        match after.bytes().next() {
            None => return emit.more(),
            Some(b'}') => {
                if self.count == 0 {
                    emit.begin(&self.name);
                    emit.arguments("{");
                }
                emit.arguments("}");
                emit.end(true);
                self.at = At::Close;
                return Step::Took(start + 1);
            }
            Some(b',') if self.count > 0 => return Step::Took(start + 1),
            Some(_) => {}
        }
        match after.find(':') {
            Some(end) if end <= LONGEST => {
                let key = after.get(..end).unwrap_or_default().trim();
                let key = key.strip_prefix(self.quote).and_then(|key| key.strip_suffix(self.quote)).unwrap_or(key).trim_matches('"');
                if key.is_empty() || key.contains(['{', '}', '\n']) {
                    return Step::Broken;
                }
                key.clone_into(&mut self.key);
                self.at = At::Value(Span::new(self.quote));
                Step::Took(start + end + 1)
            }
            None if after.len() <= LONGEST => emit.more(),
            _ => Step::Broken,
        }
    }
}
