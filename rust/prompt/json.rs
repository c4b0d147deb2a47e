//! JSON as Python's `json.dumps` writes it, for the `tojson` filter of chat templates, and the same reading of floats for `str()`.
//!
//! Models were trained on prompts that Python wrote: `", "` and `": "` between items, floats in their shortest form with Python's exponent,
//! nothing escaped for HTML. What cannot be serialised in Python (undefined values, generators, functions) is an error here too. Reading JSON
//! is not done here.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::lazy::is_lazy;
use super::python::as_float;

/// How one call of `tojson` wants its text, with the defaults that transformers gives it.
struct Style {
    ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sort: bool,
}

/// The `tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)` filter.
///
/// # Errors
/// When the value, or one inside it, has no JSON form, or an argument is not of its type.
pub(super) fn tojson(value: &Value, positional: &[Value], named: &Kwargs) -> Result<String, Error> {
    const NAMES: [&str; 4] = ["ensure_ascii", "indent", "separators", "sort_keys"];
    if positional.len() > NAMES.len() {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let mut given: [Option<Value>; 4] = [None, None, None, None];
    for (index, slot) in given.iter_mut().enumerate() {
        *slot = match positional.get(index) {
            Some(value) => Some(value.clone()),
            None => named.get(NAMES[index])?,
        };
    }
    named.assert_all_used()?;
    let [ascii, indent, separators, sort] = given;
    let indent = match indent {
        Some(value) if !value.is_none() => Some(match value.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(i64::try_from(value)?.max(0)).unwrap_or(0).min(64)),
        }),
        _ => None,
    };
    let (item, key) = match separators {
        Some(value) if !value.is_none() => {
            let parts: Vec<Value> = value.try_iter()?.collect();
            match parts.as_slice() {
                [item, key] => (item.to_string(), key.to_string()),
                _ => return Err(fault("tojson wants two separators")),
            }
        }
        // Python drops the blank after the comma when it breaks lines itself.
        _ => ((if indent.is_some() { "," } else { ", " }).to_owned(), ": ".to_owned()),
    };
    let style = Style { ascii: ascii.is_some_and(|v| v.is_true()), indent, item, key, sort: sort.is_some_and(|v| v.is_true()) };
    let mut out = String::new();
    write_value(&mut out, value, &style, 0)?;
    Ok(out)
}

/// Deeper than any real schema, and shallow enough for the stack of a worker thread. Python stops near a thousand.
const MAX_DEPTH: usize = 256;

fn fault(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

fn write_value(out: &mut String, value: &Value, style: &Style, depth: usize) -> Result<(), Error> {
    use std::fmt::Write as _;
    if depth > MAX_DEPTH {
        return Err(fault("value is nested too deeply for tojson"));
    }
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => match as_float(value) {
            Some(number) => push_float(out, number, FloatNames::Json),
            None => write!(out, "{value}").map_err(|_| fault("cannot write a number"))?,
        },
        ValueKind::String => push_string(out, value.as_str().unwrap_or_default(), style.ascii),
        ValueKind::Seq | ValueKind::Iterable if !is_lazy(value) => {
            write_list(out, value, style, depth)?;
        }
        ValueKind::Map if value.as_object().is_some() => write_map(out, value, style, depth)?,
        kind => {
            return Err(fault(format!("a value of type {kind} is not JSON serialisable")));
        }
    }
    Ok(())
}

fn write_list(out: &mut String, value: &Value, style: &Style, depth: usize) -> Result<(), Error> {
    out.push('[');
    let mut any = false;
    for item in value.try_iter()? {
        if any {
            out.push_str(&style.item);
        }
        any = true;
        line_break(out, style, depth + 1);
        write_value(out, &item, style, depth + 1)?;
    }
    if any {
        line_break(out, style, depth);
    }
    out.push(']');
    Ok(())
}

fn write_map(out: &mut String, value: &Value, style: &Style, depth: usize) -> Result<(), Error> {
    let mut keys: Vec<Value> = value.try_iter()?.collect();
    if style.sort {
        keys.sort();
    }
    out.push('{');
    for (index, key) in keys.iter().enumerate() {
        if index > 0 {
            out.push_str(&style.item);
        }
        line_break(out, style, depth + 1);
        match key.kind() {
            ValueKind::String => push_string(out, key.as_str().unwrap_or_default(), style.ascii),
            ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                out.push('"');
                write_value(out, key, style, depth + 1)?;
                out.push('"');
            }
            kind => {
                return Err(fault(format!("a key of type {kind} is not JSON serialisable")));
            }
        }
        out.push_str(&style.key);
        write_value(out, &value.get_item(key)?, style, depth + 1)?;
    }
    if !keys.is_empty() {
        line_break(out, style, depth);
    }
    out.push('}');
    Ok(())
}

fn line_break(out: &mut String, style: &Style, depth: usize) {
    if let Some(indent) = &style.indent {
        out.push('\n');
        for _ in 0..depth {
            out.push_str(indent);
        }
    }
}

fn push_string(out: &mut String, text: &str, ascii: bool) {
    use std::fmt::Write as _;
    out.push('"');
    let mut plain = 0;
    for (at, ch) in text.char_indices() {
        let short = match ch {
            '"' => "\\\"",
            '\\' => "\\\\",
            '\n' => "\\n",
            '\r' => "\\r",
            '\t' => "\\t",
            '\u{8}' => "\\b",
            '\u{c}' => "\\f",
            '\u{0}'..='\u{1f}' => "",
            // DEL is escaped only here, as Python does it.
            _ if ascii && !(' '..='~').contains(&ch) => "",
            _ => continue,
        };
        out.push_str(&text[plain..at]);
        plain = at + ch.len_utf8();
        if short.is_empty() {
            for unit in ch.encode_utf16(&mut [0; 2]) {
                // Writing to a String cannot fail.
                let _ = write!(out, "\\u{unit:04x}");
            }
        } else {
            out.push_str(short);
        }
    }
    out.push_str(&text[plain..]);
    out.push('"');
}

/// The names of the values that are no numbers: `json.dumps` and `str()` differ only there.
#[derive(Clone, Copy)]
pub(super) enum FloatNames {
    /// `NaN`, `Infinity`.
    Json,
    /// `nan`, `inf`.
    Python,
}

/// Appends `number` as Python's `repr` writes it: shortest digits that read back equal, `.0` on whole numbers, and an exponent of at least two
/// digits below 1e-4 and from 1e16 on.
pub(super) fn push_float(out: &mut String, number: f64, names: FloatNames) {
    use std::fmt::Write as _;
    let (not_a_number, infinity) = match names {
        FloatNames::Json => ("NaN", "Infinity"),
        FloatNames::Python => ("nan", "inf"),
    };
    if number.is_nan() {
        out.push_str(not_a_number);
        return;
    }
    if number.is_sign_negative() {
        out.push('-');
    }
    let size = number.abs();
    // Writing to a String cannot fail.
    if size.is_infinite() {
        out.push_str(infinity);
    } else if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let text = format!("{size:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let exponent: i32 = exponent.parse().unwrap_or(0);
        let sign = if exponent < 0 { '-' } else { '+' };
        let _ = write!(out, "{digits}e{sign}{:02}", exponent.unsigned_abs());
    } else {
        let _ = write!(out, "{size:?}");
    }
}
