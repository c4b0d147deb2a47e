//! Walks a JSON value and remembers the path, so that every complaint names the field it is about.
//!
//! What the fields mean is said in `request` and `item`; here is only how a wrong one is told.

use std::fmt;
use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::error::{Code, Error, Result};

/// A message shows this many characters of what came; a value may be a whole book.
const SHOWN: usize = 48;
/// The longest name that a client may give, in characters.
pub(crate) const NAME: usize = 64;

/// Decimal numbers from here on are whole.
const TWO_TO_63: f64 = 9_223_372_036_854_775_808.0;

#[derive(Clone, Copy)]
enum Step<'p> {
    Root,
    Key(&'p str),
    Index(usize),
}

/// A value and the way to it. Nothing is allocated until something is wrong.
#[derive(Clone, Copy)]
pub(crate) struct At<'v, 'p> {
    pub(crate) value: &'v Value,
    parent: Option<&'p At<'v, 'p>>,
    step: Step<'p>,
}

impl<'v> At<'v, '_> {
    pub(crate) fn root(value: &'v Value) -> Self {
        Self { value, parent: None, step: Step::Root }
    }

    /// The field of that name; `None` where it is absent or null, which mean the same.
    pub(crate) fn get<'b>(&'b self, key: &'b str) -> Option<At<'v, 'b>> {
        #[cfg(test)]
        looked::at(self, key);
        let value = self.value.get(key).filter(|value| !value.is_null())?;
        Some(At { value, parent: Some(self), step: Step::Key(key) })
    }

    /// The field of that name.
    ///
    /// # Errors
    /// `missing_required_parameter` where it is absent or null.
    pub(crate) fn need<'b>(&'b self, key: &'b str) -> Result<At<'v, 'b>> {
        self.get(key).ok_or_else(|| self.missing(key))
    }

    /// The complaint that a field is absent.
    pub(crate) fn missing(&self, key: &str) -> Error {
        let path = match self.path() {
            path if path.is_empty() => key.to_owned(),
            path => format!("{path}.{key}"),
        };
        Error::new(Code::MissingRequiredParameter, format!("`{path}` is required")).hint(format!("add `{path}`")).at(path)
    }

    /// The elements of an array, each with its index.
    ///
    /// # Errors
    /// `invalid_type` where it is no array.
    pub(crate) fn each<'b>(&'b self) -> Result<impl Iterator<Item = At<'v, 'b>>> {
        let elements = self.value.as_array().ok_or_else(|| self.not("an array"))?;
        Ok(elements.iter().enumerate().map(|(index, value)| At { value, parent: Some(self), step: Step::Index(index) }))
    }

    /// # Errors
    /// `invalid_type` where it is no object.
    pub(crate) fn object(&self) -> Result<&'v Map<String, Value>> {
        self.value.as_object().ok_or_else(|| self.not("an object"))
    }

    /// # Errors
    /// `invalid_type` where it is no string.
    pub(crate) fn string(&self) -> Result<&'v str> {
        self.value.as_str().ok_or_else(|| self.not("a string"))
    }

    /// What a client calls a tool or a schema by.
    ///
    /// # Errors
    /// `invalid_type` where it is no string, `invalid_value` where it is empty, too long, or holds anything but ASCII letters, digits, `_` and `-`.
    pub(crate) fn name(&self) -> Result<&'v str> {
        self.name_of(NAME)
    }

    /// As [`At::name`], of at most this many characters.
    ///
    /// # Errors
    /// As [`At::name`].
    pub(crate) fn name_of(&self, most: usize) -> Result<&'v str> {
        let name = self.string()?;
        let plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'));
        if name.is_empty() || name.len() > most || !plain {
            return Err(self.wrong(format_args!("1 to {most} letters, digits, underscores or dashes")));
        }
        Ok(name)
    }

    /// # Errors
    /// `invalid_type` where it is no boolean.
    pub(crate) fn boolean(&self) -> Result<bool> {
        self.value.as_bool().ok_or_else(|| self.not("a boolean"))
    }

    /// A whole number within a range.
    ///
    /// # Errors
    /// `invalid_type` where it is no whole number, `invalid_value` where it is out of range.
    pub(crate) fn integer(&self, range: RangeInclusive<i64>) -> Result<i64> {
        if !self.is_whole() {
            return Err(self.not("an integer"));
        }
        match self.value.as_i64() {
            Some(number) if range.contains(&number) => Ok(number),
            _ => Err(self.wrong(format_args!("an integer from {} to {}", range.start(), range.end()))),
        }
    }

    /// Whether it is an integer; one that is too large for 64 bits has been read as a decimal number.
    pub(crate) fn is_whole(&self) -> bool {
        let huge = |number: f64| number.abs() >= TWO_TO_63;
        self.value.is_i64() || self.value.is_u64() || self.value.as_f64().is_some_and(huge)
    }

    /// A number within a range.
    ///
    /// # Errors
    /// `invalid_type` where it is no number, `invalid_value` where it is out of range.
    pub(crate) fn number(&self, range: RangeInclusive<f64>) -> Result<f64> {
        let number = self.value.as_f64().ok_or_else(|| self.not("a number"))?;
        if range.contains(&number) { Ok(number) } else { Err(self.wrong(format_args!("from {} to {}", range.start(), range.end()))) }
    }

    /// One of a few words.
    ///
    /// # Errors
    /// `invalid_type` where it is no string, `invalid_value` where it is another word.
    pub(crate) fn one_of<T: Copy>(&self, words: &[(&str, T)]) -> Result<T> {
        let word = self.string()?;
        let found = words.iter().find(|(known, _)| *known == word);
        found.map(|(_, meaning)| *meaning).ok_or_else(|| {
            let words = words.iter().map(|(word, _)| format!("\"{word}\"")).collect::<Vec<_>>().join(", ");
            self.wrong(format_args!("one of {words}"))
        })
    }

    /// The complaint that the JSON type is wrong.
    pub(crate) fn not(&self, expected: &str) -> Error {
        let path = self.path();
        let what = match self.value {
            Value::Null => "null".to_owned(),
            Value::Bool(_) => format!("the boolean {}", self.shown()),
            Value::Number(number) if number.is_f64() => format!("the decimal number {number}"),
            Value::Number(number) => format!("the integer {number}"),
            Value::String(_) => format!("the string {}", self.shown()),
            Value::Array(array) => format!("an array of {}", array.len()),
            Value::Object(_) => "an object".to_owned(),
        };
        let name = if path.is_empty() { "the body".to_owned() } else { format!("`{path}`") };
        // A client that writes numbers or booleans as texts.
        let unquoted = self.value.as_str().and_then(|text| serde_json::from_str::<Value>(text).ok()).is_some_and(|value| match expected {
            "an integer" | "a number" => value.is_number(),
            "a boolean" => value.is_boolean(),
            _ => false,
        });
        let hint = if unquoted { "send it without the quotes".to_owned() } else { format!("send {expected}") };
        let error = Error::new(Code::InvalidType, format!("{name} must be {expected}, not {what}")).hint(hint);
        if path.is_empty() { error } else { error.at(path) }
    }

    /// The complaint that the value is impossible.
    pub(crate) fn wrong(&self, expected: impl fmt::Display) -> Error {
        let path = self.path();
        Error::new(Code::InvalidValue, format!("`{path}` must be {expected}, not {}", self.shown()))
            .hint(format!("correct `{path}`"))
            .at(path)
    }

    /// The complaint that this server does not do what the field asks for. `what` goes on after the path.
    pub(crate) fn unsupported(&self, what: impl fmt::Display) -> Error {
        let path = self.path();
        Error::new(Code::UnsupportedParameter, format!("`{path}` {what}")).at(path)
    }

    /// The way to the value: `input[2].content[0].type`; empty for the body itself.
    pub(crate) fn path(&self) -> String {
        use fmt::Write as _;
        let mut path = self.parent.map(|parent| parent.path()).unwrap_or_default();
        match self.step {
            Step::Root => {}
            Step::Key(key) if path.is_empty() => path.push_str(key),
            // Writing to a string cannot fail.
            Step::Key(key) => _ = write!(path, ".{key}"),
            Step::Index(index) => _ = write!(path, "[{index}]"),
        }
        path
    }

    fn shown(&self) -> String {
        let whole = match self.value {
            Value::Array(array) => return format!("an array of {}", array.len()),
            Value::Object(_) => return "an object".to_owned(),
            Value::String(text) => format!("\"{text}\""),
            other => other.to_string(),
        };
        match whole.char_indices().nth(SHOWN) {
            Some((end, _)) => format!("{}…", whole.get(..end).unwrap_or_default()),
            None => whole,
        }
    }
}

/// Which fields are looked at, so that the description of requests can be held to it.
#[cfg(test)]
pub(super) mod looked {
    use std::cell::RefCell;
    use std::collections::BTreeSet;

    use super::At;

    thread_local! {
        static FIELDS: RefCell<BTreeSet<String>> = RefCell::default();
    }

    pub(super) fn at(at: &At<'_, '_>, key: &str) {
        let path: String = at.path().chars().filter(|letter| !letter.is_ascii_digit()).collect();
        let dot = if path.is_empty() { "" } else { "." };
        FIELDS.with_borrow_mut(|fields| fields.insert(format!("{path}{dot}{key}")));
    }

    /// The fields that this thread has looked at since it was last asked: `input[].role`.
    pub(crate) fn take() -> BTreeSet<String> {
        FIELDS.take()
    }
}
