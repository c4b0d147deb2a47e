//! JSON as clients send it: serde's, and beside it the one thing that JavaScript writes and serde does not take.

use serde::de::DeserializeOwned;
use serde_json::Value;

/// Reads one value of any kind.
///
/// # Errors
/// As [`read`].
pub(crate) fn value(text: &str) -> serde_json::Result<Value> {
    read(text)
}

/// Reads one value. Halves of surrogate pairs, which JavaScript escapes where a text was cut in the middle of a character, become U+FFFD.
///
/// # Errors
/// What serde says of a text that is no JSON.
pub(crate) fn read<T: DeserializeOwned>(text: &str) -> serde_json::Result<T> {
    serde_json::from_str(text).or_else(|error| if error.is_syntax() { serde_json::from_str(&whole_characters(text)) } else { Err(error) })
}

/// The text with the replacement character in place of every escaped half of a surrogate pair.
fn whole_characters(text: &str) -> String {
    let mut whole = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        let (before, escape) = rest.split_at(at);
        whole.push_str(before);
        let (length, kept) = match (surrogate(escape), escape.get(6..).and_then(surrogate)) {
            (Some(0xD800..0xDC00), Some(0xDC00..)) => (12, true),
            (Some(_), _) => (6, false),
            (None, _) => (escape.char_indices().nth(2).map_or(escape.len(), |(at, _)| at), true),
        };
        let (escape, after) = escape.split_at(length);
        whole.push_str(if kept { escape } else { "\\ufffd" });
        rest = after;
    }
    whole + rest
}

/// The value of an escaped half of a surrogate pair that the text begins with.
fn surrogate(text: &str) -> Option<u16> {
    let digits = text.strip_prefix("\\u")?.get(..4)?;
    u16::from_str_radix(digits, 16).ok().filter(|unit| (0xD800..0xE000).contains(unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_of_pairs_become_replacement_characters_and_pairs_stay() {
        let of = |text: &str| value(text).unwrap();
        assert_eq!(of(r#""a\ud83d""#), "a\u{fffd}");
        assert_eq!(of(r#""\ude00b\ud83d\ude00\ud83d""#), "\u{fffd}b😀\u{fffd}");
        assert_eq!(of(r#""\\ud83d""#), r"\ud83d");
        assert!(value(r#""\ud8""#).is_err());
        assert!(value("{").is_err());
    }
}
