//! Python's `str()` and `repr()` of template values: what printing a list or a dict gives.
//!
//! minijinja prints nearly the same; what differs is the exponent of floats (`1e-05`) and characters that Python does not hold printable.
//! The `~` operator prints with minijinja's own rules, which cannot be changed from outside.

use minijinja::value::ValueKind;
use minijinja::{Error, Value};

use super::json::{FloatNames, push_float};
use super::lazy::is_lazy;
use super::python::as_float;
use super::template::to_value;

/// Deeper values than any template prints; below it minijinja's own printing goes on.
const MAX_DEPTH: usize = 64;

/// `str(value)`.
pub(super) fn string(value: &Value) -> Result<Value, Error> {
    if value.kind() == ValueKind::String {
        return Ok(value.clone());
    }
    if value.is_undefined() {
        return Ok(Value::from(""));
    }
    let mut text = String::new();
    push_repr(&mut text, value, 0)?;
    Ok(Value::from(text))
}

/// `repr(value)` of a JSON value.
pub(super) fn python(value: &serde_json::Value) -> String {
    let mut text = String::new();
    match push_repr(&mut text, &to_value(value), 0) {
        Ok(()) => text,
        Err(_) => value.to_string(),
    }
}

fn push_repr(out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
    use std::fmt::Write as _;
    match value.kind() {
        ValueKind::String => push_quoted(out, value.as_str().unwrap_or_default()),
        ValueKind::Number if let Some(number) = as_float(value) => push_float(out, number, FloatNames::Python),
        ValueKind::Seq | ValueKind::Iterable if !is_lazy(value) && depth < MAX_DEPTH => {
            let (open, close) = if value.is_tuple() { ('(', ')') } else { ('[', ']') };
            out.push(open);
            let mut count = 0;
            for item in value.try_iter()? {
                out.push_str(if count > 0 { ", " } else { "" });
                push_repr(out, &item, depth + 1)?;
                count += 1;
            }
            out.push_str(if value.is_tuple() && count == 1 { "," } else { "" });
            out.push(close);
        }
        ValueKind::Map if value.as_object().is_some() && depth < MAX_DEPTH => {
            out.push('{');
            for (index, key) in value.try_iter()?.enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                push_repr(out, &key, depth + 1)?;
                out.push_str(": ");
                push_repr(out, &value.get_item(&key)?, depth + 1)?;
            }
            out.push('}');
        }
        // Writing to a String cannot fail.
        _ => write!(out, "{value}").unwrap_or_default(),
    }
    Ok(())
}

fn push_quoted(out: &mut String, text: &str) {
    use std::fmt::Write as _;
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for ch in text.chars() {
        match ch {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            _ if ch == quote => out.extend(['\\', ch]),
            _ if is_printable(ch) => out.push(ch),
            // Writing to a String cannot fail.
            _ => match u32::from(ch) {
                code @ ..=0xff => write!(out, "\\x{code:02x}"),
                code @ ..=0xffff => write!(out, "\\u{code:04x}"),
                code => write!(out, "\\U{code:08x}"),
            }
            .unwrap_or_default(),
        }
    }
    out.push(quote);
}

/// Python's `str.isprintable`, by the table behind Rust's own debug printing, which follows the same rule: no control, format, surrogate, private,
/// unassigned or separator character but the blank. A letter goes before, since a mark that starts a string is escaped there for another reason.
fn is_printable(ch: char) -> bool {
    if ch.is_ascii() {
        return !ch.is_ascii_control();
    }
    let mut buffer = [b'a'; 5];
    let length = ch.encode_utf8(&mut buffer[1..]).len();
    std::str::from_utf8(&buffer[..=length]).is_ok_and(|text| text.escape_debug().nth(1) == Some(ch))
}
