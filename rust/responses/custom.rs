//! The text that the arguments of a call of a custom tool hold, as they come: a template knows it as the one argument, `{"input": "…"}`.
//!
//! What is no such object is its own text, or has the text elsewhere in it: that is known when the arguments are whole. What a text is part of, and which events
//! tell of it, is not known here.

use serde_json::Value;

use super::tools::INPUT;

/// How many digits a `\u` has.
const DIGITS: usize = 4;

/// Arguments as far as they have come.
#[derive(Debug, Default)]
pub(super) struct Arguments {
    whole: String,
    /// Where the first byte of the text is that has not been read.
    at: Option<usize>,
    /// Whether the text has come to its end, or to what is no text.
    over: bool,
}

/// What stands behind a backslash.
enum Escape {
    /// A character, and the length of what stands for it, the backslash counted.
    Is(char, usize),
    /// It may become one.
    Cut,
    /// It is none.
    Never,
}

impl Arguments {
    /// Adds to them, and to `text` what is now known of it beyond what it holds.
    pub(super) fn more(&mut self, delta: &str, text: &mut String) {
        self.whole.push_str(delta);
        if self.at.is_none() {
            self.at = begun(&self.whole);
        }
        let Some(at) = &mut self.at else { return };
        while !self.over {
            let rest = self.whole.get(*at..).unwrap_or_default();
            let plain = rest.find(['"', '\\']).unwrap_or(rest.len());
            text.push_str(rest.get(..plain).unwrap_or_default());
            *at += plain;
            match rest.as_bytes().get(plain) {
                None => return,
                Some(b'"') => self.over = true,
                Some(_) => match escape(rest.get(plain..).unwrap_or_default()) {
                    Escape::Is(character, length) => {
                        text.push(character);
                        *at += length;
                    }
                    Escape::Cut => return,
                    Escape::Never => self.over = true,
                },
            }
        }
    }

    /// Adds to `text` what is known of it only when no more comes.
    pub(super) fn end(&self, text: &mut String) {
        if self.at.is_some() {
            return;
        }
        match serde_json::from_str::<Value>(&self.whole) {
            Ok(value) => text.push_str(value.get(INPUT).and_then(Value::as_str).unwrap_or(&self.whole)),
            // Cut before the text began.
            Err(_) if self.whole.trim_start().starts_with('{') => {}
            Err(_) => text.push_str(&self.whole),
        }
    }
}

/// Where the text begins: after `{"input": "`. `None` where it has not, or is not what comes first.
fn begun(arguments: &str) -> Option<usize> {
    let key = arguments.trim_start().strip_prefix('{')?.trim_start().strip_prefix('"')?.strip_prefix(INPUT)?;
    let value = key.strip_prefix('"')?.trim_start().strip_prefix(':')?.trim_start().strip_prefix('"')?;
    Some(arguments.len() - value.len())
}

/// Reads the escape that a text begins with.
fn escape(text: &str) -> Escape {
    let bytes = text.as_bytes();
    let is = |character| Escape::Is(character, 2);
    match bytes.get(1) {
        None => Escape::Cut,
        Some(b'"') => is('"'),
        Some(b'\\') => is('\\'),
        Some(b'/') => is('/'),
        Some(b'b') => is('\u{8}'),
        Some(b'f') => is('\u{c}'),
        Some(b'n') => is('\n'),
        Some(b'r') => is('\r'),
        Some(b't') => is('\t'),
        Some(b'u') => unicode(bytes.get(2..).unwrap_or_default()),
        Some(_) => Escape::Never,
    }
}

/// Reads what follows `\u`: a character, or half of one that another escape completes.
fn unicode(rest: &[u8]) -> Escape {
    let first = match unit(rest) {
        Ok(unit) => unit,
        Err(other) => return other,
    };
    if let Some(character) = char::from_u32(first.into()) {
        return Escape::Is(character, 2 + DIGITS);
    }
    let rest = rest.get(DIGITS..).unwrap_or_default();
    let Some(digits) = rest.strip_prefix(b"\\u") else {
        return if b"\\u".starts_with(rest) { Escape::Cut } else { Escape::Never };
    };
    match unit(digits) {
        Ok(second) => match char::decode_utf16([first, second]).next() {
            Some(Ok(character)) => Escape::Is(character, 2 * (2 + DIGITS)),
            _ => Escape::Never,
        },
        Err(other) => other,
    }
}

/// A unit of UTF-16, in four digits.
fn unit(rest: &[u8]) -> Result<u16, Escape> {
    let digits = rest.get(..DIGITS.min(rest.len())).unwrap_or_default();
    if !digits.iter().all(u8::is_ascii_hexdigit) {
        return Err(Escape::Never);
    }
    let digits = std::str::from_utf8(digits).ok().filter(|digits| digits.len() == DIGITS).ok_or(Escape::Cut)?;
    u16::from_str_radix(digits, 16).map_err(|_| Escape::Never)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What becomes of arguments that come in these pieces: what was told of the text while they came, and in the end.
    fn read(pieces: &[&str]) -> (String, String) {
        let (mut arguments, mut text) = (Arguments::default(), String::new());
        for piece in pieces {
            arguments.more(piece, &mut text);
        }
        let told = text.clone();
        arguments.end(&mut text);
        (told, text)
    }

    /// The arguments a character at a time.
    fn letters(arguments: &str) -> Vec<&str> {
        arguments.split_inclusive(|_| true).collect()
    }

    /// The text as JSON that escapes what it need not.
    fn escaped(text: &str) -> String {
        text.encode_utf16().map(|unit| format!("\\u{unit:04x}")).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn the_text_is_told_as_it_comes_however_it_is_cut(
            text in "(\\PC|[\"\\\\/\n\t\u{8}\u{c}\u{10000}-\u{10ffff}é]){0,24}",
            blanks in "[ \n]{0,2}",
            all: bool,
            cuts in prop::collection::vec(0_usize..200, 0..8),
        ) {
            let value = if all { format!("\"{}\"", escaped(&text)) } else { Value::from(text.as_str()).to_string() };
            let arguments = format!("{blanks}{{{blanks}\"input\"{blanks}:{blanks}{value}{blanks}}}");
            let mut places: Vec<usize> = cuts.into_iter().map(|at| at.min(arguments.len())).filter(|at| arguments.is_char_boundary(*at)).collect();
            places.extend([0, arguments.len()]);
            places.sort_unstable();
            let pieces: Vec<&str> = places.windows(2).map(|pair| &arguments[pair[0]..pair[1]]).collect();
            prop_assert_eq!(read(&pieces), (text.clone(), text.clone()));
            prop_assert_eq!(read(&letters(&arguments)), (text.clone(), text));
        }

        #[test]
        fn whatever_comes_is_the_same_however_it_is_cut(arguments in "(\\{\"input\": \")?([\"\\\\u0-9dD8cC\\{\\} é]|\\PC){0,16}") {
            prop_assert_eq!(read(&letters(&arguments)), read(&[&arguments]));
        }
    }

    #[test]
    fn what_is_no_text_in_its_place_is_known_in_the_end() {
        for (arguments, told, text) in [
            ("go on", "", "go on"),
            ("{\"note\": 1, \"input\": \"a\"}", "", "a"),
            ("{\"input\": 5}", "", "{\"input\": 5}"),
            ("{\"other\": \"a\"}", "", "{\"other\": \"a\"}"),
            ("[1]", "", "[1]"),
            ("{\"inp", "", ""),
            ("{\"input\": \"", "", ""),
            ("{\"input\": \"a\\u00", "a", "a"),
            ("{\"input\": \"a\\ud83d\\ude0", "a", "a"),
            ("{\"input\": \"a\\ud83d\\ude00", "a😀", "a😀"),
            // What is no escape ends it.
            ("{\"input\": \"a\\qb\"}", "a", "a"),
            ("{\"input\": \"a\\ud83dx\"}", "a", "a"),
            ("{\"input\": \"a\\ude00\"}", "a", "a"),
            ("{\"input\": \"a\\u+123\"}", "a", "a"),
            ("{\"input\": \"a\", \"more\": \"b\"}", "a", "a"),
        ] {
            assert_eq!(read(&letters(arguments)), (told.to_owned(), text.to_owned()), "{arguments}");
        }
    }
}
