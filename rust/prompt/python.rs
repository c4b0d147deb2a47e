//! The Python that chat templates lean on: methods of strings, dicts and lists that minijinja leaves out or that differ in a corner.
//!
//! Methods not found here are taken from minijinja-contrib's `pycompat`. Methods that change a value in place (`append`, `update`, `pop`) do not
//! exist: transformers renders in an immutable sandbox, where calling one is an error.

use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

use super::lazy::View;

/// The float in `value`, if it is one (and not an integer).
pub(super) fn as_float(value: &Value) -> Option<f64> {
    (value.kind() == ValueKind::Number && !value.is_integer()).then(|| f64::try_from(value.clone()).ok()).flatten()
}

/// Whether Python's `str.isspace` holds: Unicode white space and the four ASCII separators.
pub(super) fn is_space(ch: char) -> bool {
    ch.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&ch)
}

/// Which ends of a string to strip.
#[derive(Clone, Copy)]
pub(super) enum Ends {
    /// `strip`.
    Both,
    /// `lstrip`.
    Start,
    /// `rstrip`.
    End,
}

/// `str.strip` and its one-sided forms: white space, or any of `chars`.
pub(super) fn strip<'a>(text: &'a str, chars: Option<&str>, ends: Ends) -> &'a str {
    let gone = |ch: char| chars.map_or_else(|| is_space(ch), |set| set.contains(ch));
    match ends {
        Ends::Both => text.trim_matches(gone),
        Ends::Start => text.trim_start_matches(gone),
        Ends::End => text.trim_end_matches(gone),
    }
}

/// Called by minijinja for every method it does not know itself.
pub(super) fn method(state: &mut State<'_, '_>, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let own = match value.kind() {
        ValueKind::String => string(value.as_str().unwrap_or_default(), name, args)?,
        ValueKind::Map => map(value, name, args)?,
        ValueKind::Seq | ValueKind::Iterable => list(value, name, args)?,
        _ => None,
    };
    match own {
        Some(found) => Ok(found),
        None => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args),
    }
}

fn fault(message: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

fn string(text: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match name {
        "strip" => stripped(text, args, Ends::Both)?,
        "lstrip" => stripped(text, args, Ends::Start)?,
        "rstrip" => stripped(text, args, Ends::End)?,
        "split" => split(text, args, false)?,
        "rsplit" => split(text, args, true)?,
        "splitlines" => {
            let (keep,): (Option<bool>,) = from_args(args)?;
            lines(text, keep.unwrap_or(false)).into_iter().map(Value::from).collect()
        }
        "join" => {
            let (items,): (&Value,) = from_args(args)?;
            let mut out = String::new();
            for (index, item) in items.try_iter()?.enumerate() {
                if index > 0 {
                    out.push_str(text);
                }
                out.push_str(item.as_str().ok_or_else(|| fault("join wants strings only"))?);
            }
            Value::from(out)
        }
        "startswith" => affix(text, args, |text, part| text.starts_with(part))?,
        "endswith" => affix(text, args, |text, part| text.ends_with(part))?,
        "removeprefix" => {
            let (part,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(part).unwrap_or(text))
        }
        "removesuffix" => {
            let (part,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(part).unwrap_or(text))
        }
        "partition" => {
            let (sep,): (&str,) = from_args(args)?;
            let (head, sep, tail) = text.split_once(sep).map_or((text, "", ""), |(head, tail)| (head, sep, tail));
            Value::from(Tuple::from([Value::from(head), Value::from(sep), Value::from(tail)]))
        }
        "rpartition" => {
            let (sep,): (&str,) = from_args(args)?;
            let (head, sep, tail) = text.rsplit_once(sep).map_or(("", "", text), |(head, tail)| (head, sep, tail));
            Value::from(Tuple::from([Value::from(head), Value::from(sep), Value::from(tail)]))
        }
        "find" | "index" | "rfind" | "rindex" => {
            let found = find(text, args, name.starts_with('r'))?;
            if found < 0 && name.ends_with("index") {
                return Err(fault("substring not found"));
            }
            Value::from(found)
        }
        "count" => {
            let (part, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
            let (_, window) = window(text, start, end);
            // An empty string is found between all characters, also before the first and after the last.
            Value::from(window.matches(part).count())
        }
        "zfill" => {
            let (width,): (usize,) = from_args(args)?;
            let (sign, digits) = if text.starts_with(['+', '-']) { text.split_at(1) } else { ("", text) };
            let zeros = padding(width, text)?;
            Value::from(format!("{sign}{}{digits}", "0".repeat(zeros)))
        }
        "ljust" | "rjust" | "center" => {
            let (width, fill): (usize, Option<char>) = from_args(args)?;
            let (pad, fill) = (padding(width, text)?, fill.unwrap_or(' '));
            let before = match name {
                "ljust" => 0,
                "rjust" => pad,
                // CPython puts the odd blank on the left when the width is odd too.
                _ => pad / 2 + (pad & width & 1),
            };
            let side = |count: usize| std::iter::repeat_n(fill, count);
            Value::from(side(before).chain(text.chars()).chain(side(pad - before)).collect::<String>())
        }
        "swapcase" => Value::from(
            text.chars()
                .flat_map(|ch| if ch.is_uppercase() { ch.to_lowercase().collect::<Vec<_>>() } else { ch.to_uppercase().collect() })
                .collect::<String>(),
        ),
        "isspace" => Value::from(!text.is_empty() && text.chars().all(is_space)),
        "isdecimal" => Value::from(!text.is_empty() && text.chars().all(|ch| ch.is_ascii_digit())),
        "casefold" => Value::from(text.to_lowercase().replace('ß', "ss")),
        _ => return Ok(None),
    }))
}

fn stripped(text: &str, args: &[Value], ends: Ends) -> Result<Value, Error> {
    let (chars,): (Option<&str>,) = from_args(args)?;
    Ok(Value::from(strip(text, chars, ends)))
}

/// How many characters `text` lacks to be `width` wide. The limit keeps a template from asking for gigabytes in one call.
fn padding(width: usize, text: &str) -> Result<usize, Error> {
    const WIDEST: usize = 1 << 16;
    if width > WIDEST {
        return Err(fault("the width is too large"));
    }
    Ok(width.saturating_sub(text.chars().count()))
}

fn split(text: &str, args: &[Value], from_end: bool) -> Result<Value, Error> {
    let (sep, limit, named): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
    let sep = match sep {
        None => named.get::<Option<Value>>("sep")?,
        given => given,
    };
    let limit = match limit {
        None => named.get::<Option<i64>>("maxsplit")?,
        given => given,
    };
    named.assert_all_used()?;
    // A negative limit is none.
    let limit = limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
    let pieces: Vec<&str> = match sep.as_ref().filter(|sep| !sep.is_none()) {
        Some(sep) => {
            let sep = sep.as_str().ok_or_else(|| fault("the separator must be a string"))?;
            if sep.is_empty() {
                return Err(fault("the separator is empty"));
            }
            match from_end {
                false => text.splitn(limit.saturating_add(1), sep).collect(),
                true => {
                    let mut pieces: Vec<&str> = text.rsplitn(limit.saturating_add(1), sep).collect();
                    pieces.reverse();
                    pieces
                }
            }
        }
        None => split_at_space(text, limit, from_end),
    };
    Ok(pieces.into_iter().map(Value::from).collect())
}

/// Words between runs of white space; once `limit` words have been cut off, the rest is one piece, stripped on the side of the cut.
fn split_at_space(text: &str, limit: usize, from_end: bool) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut rest = if from_end { strip(text, None, Ends::End) } else { strip(text, None, Ends::Start) };
    while !rest.is_empty() {
        let cut = if pieces.len() >= limit {
            None
        } else if from_end {
            rest.rfind(is_space)
        } else {
            rest.find(is_space)
        };
        let Some(at) = cut else {
            pieces.push(rest);
            break;
        };
        if from_end {
            let after = at + rest[at..].chars().next().map_or(0, char::len_utf8);
            pieces.push(&rest[after..]);
            rest = strip(&rest[..at], None, Ends::End);
        } else {
            pieces.push(&rest[..at]);
            rest = strip(&rest[at..], None, Ends::Start);
        }
    }
    if from_end {
        pieces.reverse();
    }
    pieces
}

/// `str.splitlines`: more line ends than `\n`, and no empty line after the last.
pub(super) fn lines(text: &str, keep: bool) -> Vec<&str> {
    let mut found = Vec::new();
    let mut start = 0;
    let mut chars = text.char_indices().peekable();
    while let Some((at, ch)) = chars.next() {
        if !matches!(ch, '\n'..='\r' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}') {
            continue;
        }
        let mut end = at + ch.len_utf8();
        if ch == '\r' && chars.next_if(|&(_, next)| next == '\n').is_some() {
            end += 1;
        }
        found.push(&text[start..if keep { end } else { at }]);
        start = end;
    }
    if start < text.len() {
        found.push(&text[start..]);
    }
    found
}

/// The part of `text` between two character positions, negative ones counted from the end, and the first position.
fn window(text: &str, start: Option<i64>, end: Option<i64>) -> (usize, &str) {
    if start.is_none() && end.is_none() {
        return (0, text);
    }
    let length = text.chars().count();
    let place = |position: i64| {
        let from_end = usize::try_from(position.unsigned_abs()).unwrap_or(usize::MAX);
        if position < 0 { length.saturating_sub(from_end) } else { from_end }
    };
    let (start, end) = (start.map_or(0, place), end.map_or(length, place).min(length));
    if start > end {
        return (start, "");
    }
    let byte = |position: usize| text.char_indices().nth(position).map_or(text.len(), |(at, _)| at);
    (start, &text[byte(start)..byte(end)])
}

fn find(text: &str, args: &[Value], last: bool) -> Result<i64, Error> {
    let (part, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
    let (offset, window) = window(text, start, end);
    if offset > 0 && window.is_empty() && offset > text.chars().count() {
        return Ok(-1);
    }
    let found = if last { window.rfind(part) } else { window.find(part) };
    Ok(found.map_or(-1, |at| i64::try_from(offset + window[..at].chars().count()).unwrap_or(i64::MAX)))
}

fn affix(text: &str, args: &[Value], holds: fn(&str, &str) -> bool) -> Result<Value, Error> {
    let (part, start, end): (&Value, Option<i64>, Option<i64>) = from_args(args)?;
    let (_, text) = window(text, start, end);
    if let Some(part) = part.as_str() {
        return Ok(Value::from(holds(text, part)));
    }
    if !part.is_tuple() {
        return Err(fault("a prefix or suffix must be a string or a tuple of strings"));
    }
    for part in part.try_iter()? {
        if holds(text, part.as_str().ok_or_else(|| fault("a prefix or suffix must be a string"))?) {
            return Ok(Value::from(true));
        }
    }
    Ok(Value::from(false))
}

fn map(value: &Value, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let name = match name {
        "copy" => {
            let () = from_args(args)?;
            return Ok(Some(value.clone()));
        }
        "items" => "dict_items",
        "keys" => "dict_keys",
        "values" => "dict_values",
        _ => return Ok(None),
    };
    if value.as_object().is_none() {
        return Ok(None);
    }
    let () = from_args(args)?;
    let mut items = Vec::new();
    for key in value.try_iter()? {
        items.push(match name {
            "dict_keys" => key,
            "dict_values" => value.get_item(&key)?,
            _ => {
                let item = value.get_item(&key)?;
                Value::from(Tuple::from([key, item]))
            }
        });
    }
    Ok(Some(View::wrap(name, items)))
}

fn list(value: &Value, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(match name {
        "copy" if value.kind() == ValueKind::Seq => {
            let () = from_args(args)?;
            Some(value.clone())
        }
        "index" => {
            let (wanted, _): (&Value, Rest<Value>) = from_args(args)?;
            let at = value.try_iter()?.position(|item| item == *wanted);
            Some(Value::from(at.ok_or_else(|| fault("value is not in the list"))?))
        }
        "count" => {
            let (wanted,): (&Value,) = from_args(args)?;
            Some(Value::from(value.try_iter()?.filter(|item| item == wanted).count()))
        }
        _ => None,
    })
}
