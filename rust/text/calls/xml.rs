//! Calls as tags, with each argument's value as plain text: Qwen-coder, Seed, GLM, MiniMax, DeepSeek V3.2.
//!
//! The values have no types of their own: the tool's schema says which are texts, and the others are read as JSON.

use serde_json::Value;

use super::literal;
use super::scan::escaped;
use super::{Arguments, Emit, Signatures, Step, blank, is_name, may_become, overlap};

/// How one family writes them.
#[derive(Debug)]
pub struct Form {
    /// Begins a call, before its name; empty where only the region's own opener does.
    pub open: &'static str,
    /// What may end the name: with `true` it is read over.
    pub name_ends: &'static [(&'static str, bool)],
    /// Begins an argument, before its key.
    pub key_open: &'static str,
    /// Ends the key.
    pub key_close: &'static str,
    /// Begins the value, where that is not at once.
    pub value_open: &'static str,
    /// Ends the value.
    pub value_close: &'static str,
    /// Whether the value stands on lines of its own.
    pub lines: bool,
    /// Ends the call.
    pub close: &'static str,
    /// Ends the region, where that is another mark; it may be missing.
    pub region: &'static str,
}

/// Qwen-coder, Qwen 3.5, Nemotron 3.
pub(super) const CODER: Form = Form {
    open: "<function=",
    name_ends: &[(">", true)],
    key_open: "<parameter=",
    key_close: ">",
    value_open: "",
    value_close: "</parameter>",
    lines: true,
    close: "</function>",
    region: "</tool_call>",
};

/// Seed writes the same between tags of its own.
pub(super) const SEED: Form = Form { region: "</seed:tool_call>", ..CODER };

/// GLM 4.
pub(super) const GLM: Form = Form {
    open: "",
    name_ends: &[("\n", true), ("<arg_key>", false), ("</tool_call>", false)],
    key_open: "<arg_key>",
    key_close: "</arg_key>",
    value_open: "<arg_value>",
    value_close: "</arg_value>",
    lines: false,
    close: "</tool_call>",
    region: "",
};

/// MiniMax M2.
pub(super) const INVOKE: Form = Form {
    open: "<invoke name=\"",
    name_ends: &[("\">", true)],
    key_open: "<parameter name=\"",
    key_close: ">",
    value_open: "",
    value_close: "</parameter>",
    lines: false,
    close: "</invoke>",
    region: "</minimax:tool_call>",
};

/// DeepSeek V3.2 and V4.
pub(super) const DSML: Form = Form {
    open: "<｜DSML｜invoke name=\"",
    name_ends: &[("\">", true)],
    key_open: "<｜DSML｜parameter name=\"",
    key_close: ">",
    value_open: "",
    value_close: "</｜DSML｜parameter>",
    lines: false,
    close: "</｜DSML｜invoke>",
    region: "",
};

/// A name or key that is longer than this is none.
const LONGEST: usize = 256;
/// No mark is longer than this, in bytes.
const MARK: usize = 64;

#[derive(Debug)]
enum At {
    /// Before the mark that begins a call.
    Open,
    Name,
    /// Before an argument or the end of the call.
    Next,
    Key,
    /// Before the value.
    Value,
    /// In a value: whether it is told as it comes (a text), or kept until it is whole.
    Within {
        text: bool,
        begun: bool,
    },
    /// The arguments are one JSON object after all.
    Json(Arguments),
    /// After the object, before the end of the call.
    Ended,
    /// After a call.
    After,
}

#[derive(Debug)]
pub(crate) struct Xml {
    form: &'static Form,
    at: At,
    name: String,
    key: String,
    /// Arguments so far.
    count: usize,
}

impl Xml {
    pub(super) fn new(form: &'static Form) -> Self {
        let at = if form.open.is_empty() { At::Name } else { At::Open };
        Self { form, at, name: String::new(), key: String::new(), count: 0 }
    }

    /// The mark that begins a call has been read, by whoever made this.
    pub(super) fn opened(&mut self, read: usize) -> Step {
        self.at = At::Name;
        Step::Took(read)
    }

    pub(super) fn step(&mut self, rest: &str, emit: &mut Emit<'_>) -> Step {
        let start = blank(rest);
        let after = rest.get(start..).unwrap_or_default();
        match &mut self.at {
            At::Open if after.starts_with(self.form.open) => self.opened(start + self.form.open.len()),
            At::Open if may_become(after, self.form.open) => emit.more(),
            At::Open => Step::Broken,
            At::Name => self.name(rest, emit),
            At::Next => self.next(start, after, emit),
            At::Key => self.key(rest, emit),
            At::Value => self.value(start, rest, after, emit),
            At::Within { .. } => self.within(rest, emit),
            At::Json(arguments) => match arguments.read(rest, Some(&self.name), emit) {
                None => Step::Broken,
                Some((read, true)) => {
                    self.at = At::Ended;
                    Step::Took(read)
                }
                Some((0, false)) => emit.more(),
                Some((read, false)) => Step::Took(read),
            },
            At::Ended if after.starts_with(self.form.close) => {
                emit.end(true);
                self.at = At::After;
                Step::Took(start + self.form.close.len())
            }
            At::Ended if may_become(after, self.form.close) => {
                if emit.last {
                    emit.end(true);
                }
                emit.cut(rest)
            }
            At::Ended => {
                emit.end(true);
                Step::Done(0)
            }
            At::After => {
                let form = self.form;
                if !form.open.is_empty() && after.starts_with(form.open) {
                    return self.opened(start + form.open.len());
                }
                if !form.region.is_empty() && after.starts_with(form.region) {
                    return Step::Done(start + form.region.len());
                }
                let waits = may_become(after, form.open) || may_become(after, form.region);
                if waits { emit.cut(rest) } else { Step::Done(0) }
            }
        }
    }

    fn name(&mut self, rest: &str, emit: &mut Emit<'_>) -> Step {
        let start = blank(rest);
        let after = rest.get(start..).unwrap_or_default();
        let found = self.form.name_ends.iter().filter_map(|(mark, over)| Some((after.find(mark)?, mark.len() * usize::from(*over)))).min();
        let Some((end, over)) = found else {
            return if after.len() > LONGEST + MARK || after.contains('{') { Step::Broken } else { emit.more() };
        };
        let name = after.get(..end).unwrap_or_default().trim();
        if !is_name(name) || !emit.allows(name) || end > LONGEST {
            return Step::Broken;
        }
        name.clone_into(&mut self.name);
        self.count = 0;
        self.at = At::Next;
        Step::Took(start + end + over)
    }

    fn next(&mut self, start: usize, after: &str, emit: &mut Emit<'_>) -> Step {
        if after.starts_with(self.form.key_open) {
            if self.count == 0 {
                emit.begin(&self.name);
                emit.arguments("{");
            }
            self.at = At::Key;
            return Step::Took(start + self.form.key_open.len());
        }
        if after.starts_with(self.form.close) {
            if self.count == 0 {
                emit.begin(&self.name);
                emit.arguments("{");
            }
            emit.arguments("}");
            emit.end(true);
            self.at = At::After;
            return Step::Took(start + self.form.close.len());
        }
        if after.starts_with('{') && self.count == 0 {
            self.at = At::Json(Arguments::new());
            return Step::Took(start);
        }
        if may_become(after, self.form.key_open) || may_become(after, self.form.close) { emit.more() } else { Step::Broken }
    }

    fn key(&mut self, rest: &str, emit: &mut Emit<'_>) -> Step {
        let Some(end) = rest.find(self.form.key_close) else {
            return if rest.len() > LONGEST + MARK { Step::Broken } else { emit.more() };
        };
        // Where keys stand in quotes, attributes may follow.
        let key = rest.get(..end).unwrap_or_default();
        let key = key.split('"').next().unwrap_or_default().trim();
        if key.is_empty() || end > LONGEST {
            return Step::Broken;
        }
        key.clone_into(&mut self.key);
        let comma = if self.count > 0 { ", " } else { "" };
        emit.arguments(&format!("{comma}\"{}\": ", escaped(key)));
        self.count += 1;
        self.at = At::Value;
        Step::Took(end + self.form.key_close.len())
    }

    fn value(&mut self, start: usize, rest: &str, after: &str, emit: &mut Emit<'_>) -> Step {
        let open = self.form.value_open;
        let text = is_text(emit.tools, &self.name, &self.key);
        if open.is_empty() {
            // A value on lines of its own begins after the line's end.
            let Some(first) = rest.bytes().next() else { return emit.more() };
            self.at = At::Within { text, begun: false };
            return Step::Took(usize::from(self.form.lines && first == b'\n'));
        }
        if after.starts_with(open) {
            self.at = At::Within { text, begun: false };
            return Step::Took(start + open.len());
        }
        if may_become(after, open) { emit.more() } else { Step::Broken }
    }

    fn within(&mut self, rest: &str, emit: &mut Emit<'_>) -> Step {
        let At::Within { text, begun } = &mut self.at else { return Step::Broken };
        let end = rest.find(self.form.value_close);
        let safe = end.unwrap_or_else(|| rest.len() - overlap(rest, self.form.value_close));
        let value = rest.get(..safe).unwrap_or_default();
        // The last line's end belongs to the mark after it.
        let value = if self.form.lines { value.strip_suffix('\n').unwrap_or(value) } else { value };
        if *text && !*begun {
            *begun = true;
            emit.arguments("\"");
        }
        match end {
            Some(end) => {
                if *text {
                    emit.arguments(&escaped(value));
                    emit.arguments("\"");
                } else {
                    emit.arguments(&typed(value));
                }
                self.at = At::Next;
                Step::Took(end + self.form.value_close.len())
            }
            None if *text && !value.is_empty() && !emit.last => {
                emit.arguments(&escaped(value));
                Step::Took(value.len())
            }
            None => {
                if *text {
                    emit.arguments(&escaped(rest.get(..if emit.last { rest.len() } else { 0 }).unwrap_or_default()));
                }
                emit.more()
            }
        }
    }
}

/// Whether the schema says that an argument is a text, or says nothing of it.
fn is_text(tools: &Signatures, name: &str, key: &str) -> bool {
    let Some(schema) = tools.get(name).and_then(|schema| schema.get("properties")?.get(key)) else { return false };
    match schema.get("type") {
        Some(Value::String(kind)) => kind == "string",
        // One of several types, or none: as JSON if it is that.
        Some(_) => false,
        None => schema.get("enum").and_then(Value::as_array).is_some_and(|values| values.iter().all(Value::is_string)),
    }
}

/// A value that is no text: JSON as it stands where it is that, Python's constants, and a text otherwise.
pub(super) fn typed(value: &str) -> String {
    let trimmed = value.trim();
    match trimmed {
        "True" => "true".to_owned(),
        "False" => "false".to_owned(),
        "None" => "null".to_owned(),
        _ if serde_json::from_str::<Value>(trimmed).is_ok() => trimmed.to_owned(),
        _ => match literal::parse(trimmed, "") {
            Some(value @ (Value::Array(_) | Value::Object(_))) => value.to_string(),
            _ => Value::from(value).to_string(),
        },
    }
}
