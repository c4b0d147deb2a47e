//! Calls as JSON objects with a name and arguments: one, several after each other, or in a list. Hermes, Qwen, Llama 3, Nemotron, Granite, Command R.

use super::scan::{Scan, Verdict, value_end};
use super::{Arguments, Emit, Step, blank, closing, may_become};

/// The keys under which the name of the tool stands.
const NAMES: [&str; 3] = ["name", "tool_name", "function"];
/// The keys under which its arguments stand.
const ARGUMENTS: [&str; 2] = ["arguments", "parameters"];
/// More braces and blanks than this, in bytes, are no slip of the model.
const BRACES: usize = 64;

#[derive(Debug)]
enum At {
    /// Before the first object, or a list of them.
    Start,
    /// Before an object within a list.
    Object,
    Key,
    Colon,
    Value,
    Arguments,
    /// A value that nobody needs.
    Skipped(Scan),
    /// After a value.
    Comma,
    /// After an object.
    After,
    /// After the list.
    Close,
}

#[derive(Debug)]
pub(crate) struct Calls {
    at: At,
    /// What ends the region; nothing where the objects stand alone.
    close: &'static str,
    /// Nothing but its name says that an object is a call: then it must be that of a tool.
    known: bool,
    list: bool,
    key: String,
    name: Option<String>,
    arguments: Arguments,
    /// Whether the object has arguments.
    given: bool,
}

impl Calls {
    pub(super) fn new(close: &'static str, known: bool) -> Self {
        Self { at: At::Start, close, known, list: false, key: String::new(), name: None, arguments: Arguments::new(), given: false }
    }

    pub(super) fn step(&mut self, rest: &str, emit: &mut Emit<'_>) -> Step {
        match &mut self.at {
            At::Arguments => return self.read(rest, emit),
            At::Skipped(scan) => {
                let mut read = 0;
                for byte in rest.bytes() {
                    match scan.feed(byte) {
                        Verdict::Inside => read += 1,
                        Verdict::Last => {
                            self.at = At::Comma;
                            return Step::Took(read + 1);
                        }
                        Verdict::Past => {
                            self.at = At::Comma;
                            return Step::Took(read);
                        }
                        Verdict::Bad => return Step::Broken,
                    }
                }
                return if read > 0 { Step::Took(read) } else { emit.more() };
            }
            At::Close => return closing(rest, self.close, emit),
            At::After => return self.after(rest, emit),
            _ => {}
        }
        let blank = blank(rest);
        if blank > 0 {
            return Step::Took(blank);
        }
        let Some(first) = rest.bytes().next() else { return emit.more() };
        match (&self.at, first) {
            (At::Start, b'[') => {
                self.list = true;
                self.at = At::Object;
            }
            (At::Start | At::Object, b'{') => self.at = At::Key,
            (At::Object, b']') => self.at = At::Close,
            (At::Key, b'}') | (At::Comma, b'}') => return self.object(emit),
            (At::Comma, b',') => self.at = At::Key,
            (At::Colon, b':') => self.at = At::Value,
            (At::Key, b'"') => {
                return self.string(rest, emit, |this, key, _| {
                    this.key = key;
                    this.at = At::Colon;
                    true
                });
            }
            (At::Value, _) => return self.value(rest, first, emit),
            _ => return Step::Broken,
        }
        Step::Took(1)
    }

    /// Reads a whole string and hands it on.
    fn string(&mut self, rest: &str, emit: &mut Emit<'_>, with: impl FnOnce(&mut Self, String, &mut Emit<'_>) -> bool) -> Step {
        match value_end(rest) {
            Ok(Some(end)) => {
                let text = rest.get(..end).and_then(|text| serde_json::from_str(text).ok());
                if text.is_some_and(|text| with(self, text, emit)) { Step::Took(end) } else { Step::Broken }
            }
            Ok(None) => emit.more(),
            Err(()) => Step::Broken,
        }
    }

    fn value(&mut self, rest: &str, first: u8, emit: &mut Emit<'_>) -> Step {
        let key = self.key.as_str();
        let (is_name, are_arguments) = (NAMES.contains(&key), ARGUMENTS.contains(&key));
        if is_name && self.name.is_none() && first == b'"' {
            return self.string(rest, emit, |this, name, emit| {
                let fits = !name.is_empty() && emit.allows(&name) && (!this.known || emit.tools.contains_key(&name));
                this.name = Some(name);
                this.at = At::Comma;
                fits
            });
        }
        if !are_arguments || self.given {
            self.at = At::Skipped(Scan::new());
            return Step::Took(0);
        }
        match first {
            b'{' => {
                self.given = true;
                self.at = At::Arguments;
                Step::Took(0)
            }
            // Some models write the arguments as a text that is JSON.
            b'"' => self.string(rest, emit, |this, text, _| {
                let text = text.trim();
                let text = if text.is_empty() { "{}" } else { text };
                let fits = text.starts_with('{') && value_end(text) == Ok(Some(text.len()));
                this.arguments.keep(text);
                this.given = true;
                this.at = At::Comma;
                fits
            }),
            b'n' => {
                self.at = At::Skipped(Scan::new());
                Step::Took(0)
            }
            _ => Step::Broken,
        }
    }

    fn read(&mut self, rest: &str, emit: &mut Emit<'_>) -> Step {
        match self.arguments.read(rest, self.name.as_deref(), emit) {
            None => Step::Broken,
            Some((read, true)) => {
                self.at = At::Comma;
                Step::Took(read)
            }
            Some((0, false)) => emit.more(),
            Some((read, false)) => Step::Took(read),
        }
    }

    /// An object is over.
    fn object(&mut self, emit: &mut Emit<'_>) -> Step {
        let Some(name) = self.name.take() else { return Step::Broken };
        if self.known && !self.given {
            return Step::Broken;
        }
        if !self.given {
            self.arguments.keep("{}");
        }
        self.arguments.tell(Some(&name), emit);
        emit.end(true);
        self.arguments = Arguments::new();
        self.given = false;
        self.at = At::After;
        Step::Took(1)
    }

    fn after(&mut self, rest: &str, emit: &mut Emit<'_>) -> Step {
        let start = blank(rest);
        match rest.as_bytes().get(start) {
            None if emit.last => Step::Done(0),
            None => Step::More,
            Some(b']') if self.list => {
                self.at = At::Close;
                Step::Took(start + 1)
            }
            Some(b',' | b';') => {
                self.at = At::Object;
                Step::Took(start + 1)
            }
            Some(b'{') => {
                self.at = At::Object;
                Step::Took(start)
            }
            Some(b'}') => self.braces(rest, emit),
            Some(_) => closing(rest, self.close, emit),
        }
    }

    /// Braces too many after an object: passed over before what ends the region or the answer, and text before anything else.
    fn braces(&self, rest: &str, emit: &Emit<'_>) -> Step {
        let past = rest.trim_start_matches(|ch: char| ch == '}' || ch.is_whitespace());
        let read = rest.len() - past.len();
        if read > BRACES {
            return Step::Done(0);
        }
        if self.list && past.starts_with([']', ',', ';', '{']) {
            return Step::Took(read);
        }
        if !self.close.is_empty() && past.starts_with(self.close) {
            return Step::Done(read + self.close.len());
        }
        if past.is_empty() || may_become(past, self.close) { emit.cut(rest) } else { Step::Done(0) }
    }
}
