//! Where a JSON value ends: read byte by byte, however it is cut, and refused at the first byte that JSON does not allow there.
//!
//! Two things that JSON forbids and models write are let through, for the caller to mend: bare control characters within strings, and nothing else.

/// What one byte means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It belongs to the value, which goes on.
    Inside,
    /// It belongs to the value and is its last.
    Last,
    /// The value ended before it.
    Past,
    /// It can stand in no JSON value here.
    Bad,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expect {
    Value,
    FirstKey,
    Key,
    Colon,
    FirstElement,
    Next,
    String { key: bool },
    Escape { key: bool },
    Hex { key: bool, left: u8 },
    Word,
    Done,
}

/// A value as far as it has been read.
#[derive(Debug)]
pub(super) struct Scan {
    /// The brackets that are open.
    open: Vec<u8>,
    expect: Expect,
    /// A number, `true`, `false` or `null`.
    word: String,
}

/// Deeper nesting than this is no arguments but a model gone astray.
const DEEPEST: usize = 128;

impl Scan {
    pub(super) fn new() -> Self {
        Self { open: Vec::new(), expect: Expect::Value, word: String::new() }
    }

    /// Whether the next byte stands within a string.
    pub(super) fn in_string(&self) -> bool {
        matches!(self.expect, Expect::String { .. } | Expect::Escape { .. } | Expect::Hex { .. })
    }

    pub(super) fn feed(&mut self, byte: u8) -> Verdict {
        use Expect::{Colon, Done, Escape, FirstElement, FirstKey, Hex, Key, Next, String, Value, Word};
        match (self.expect, byte) {
            (String { key }, b'"') => return self.ended(key),
            (String { key }, b'\\') => self.expect = Escape { key },
            (String { .. }, _) => {}
            (Escape { key }, b'u') => self.expect = Hex { key, left: 4 },
            (Escape { key }, b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => self.expect = String { key },
            (Hex { key, left }, digit) if digit.is_ascii_hexdigit() => {
                self.expect = if left > 1 { Hex { key, left: left - 1 } } else { String { key } };
            }
            (Word, b'0'..=b'9' | b'a'..=b'z' | b'E' | b'+' | b'-' | b'.') => self.word.push(char::from(byte)),
            (Word, _) => {
                if serde_json::from_str::<serde_json::Value>(&self.word).is_err() {
                    return Verdict::Bad;
                }
                if self.open.is_empty() {
                    return Verdict::Past;
                }
                self.expect = Next;
                return self.feed(byte);
            }
            (Value | FirstKey | Key | Colon | FirstElement | Next, b' ' | b'\t' | b'\n' | b'\r') => {}
            (FirstElement, b']') | (FirstKey, b'}') => return self.closed(byte),
            (FirstKey | Key, b'"') => self.expect = String { key: true },
            (Colon, b':') => self.expect = Value,
            (Next, b',') => self.expect = if self.open.last() == Some(&b'{') { Key } else { Value },
            (Next, b'}' | b']') => return self.closed(byte),
            (Value | FirstElement, b'"') => self.expect = String { key: false },
            (Value | FirstElement, b'{' | b'[') if self.open.len() < DEEPEST => {
                self.open.push(byte);
                self.expect = if byte == b'{' { FirstKey } else { FirstElement };
            }
            (Value | FirstElement, b'0'..=b'9' | b'-' | b't' | b'f' | b'n') => {
                self.word.clear();
                self.word.push(char::from(byte));
                self.expect = Word;
            }
            (Done, _) => return Verdict::Past,
            _ => return Verdict::Bad,
        }
        Verdict::Inside
    }

    /// A string is over.
    fn ended(&mut self, key: bool) -> Verdict {
        self.expect = if key { Expect::Colon } else { Expect::Next };
        self.whole()
    }

    fn closed(&mut self, byte: u8) -> Verdict {
        let fits = matches!((self.open.pop(), byte), (Some(b'{'), b'}') | (Some(b'['), b']'));
        if !fits {
            return Verdict::Bad;
        }
        self.expect = Expect::Next;
        self.whole()
    }

    fn whole(&mut self) -> Verdict {
        if !self.open.is_empty() {
            return Verdict::Inside;
        }
        self.expect = Expect::Done;
        Verdict::Last
    }
}

/// The length of the value that a text begins with, with what ends it; `None` while it goes on, `Err` where it is none.
pub(super) fn value_end(text: &str) -> Result<Option<usize>, ()> {
    let mut scan = Scan::new();
    for (at, byte) in text.bytes().enumerate() {
        match scan.feed(byte) {
            Verdict::Inside => {}
            Verdict::Last => return Ok(Some(at + 1)),
            Verdict::Past => return Ok(Some(at)),
            Verdict::Bad => return Err(()),
        }
    }
    Ok(None)
}

/// The contents of a JSON string as written between its quotes.
pub(super) fn escaped(text: &str) -> String {
    let quoted = serde_json::Value::from(text).to_string();
    quoted.get(1..quoted.len().saturating_sub(1)).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_end_where_json_says() {
        for (text, end) in [
            (r#"{"a": [1, {"b": "}"}], "c": null}x"#, Ok(Some(33))),
            (r#""a\"b" "#, Ok(Some(6))),
            ("[]", Ok(Some(2))),
            ("12,", Ok(Some(2))),
            ("true}", Ok(Some(4))),
            ("12", Ok(None)),
            (r#"{"a": "#, Ok(None)),
            ("{bad}", Err(())),
            (r#"{"a" 1}"#, Err(())),
            (r#"{"a": 1]"#, Err(())),
            (r#"{"a": trve}"#, Err(())),
            (r#"{"a": 1,}"#, Err(())),
            (r#""\x""#, Err(())),
        ] {
            assert_eq!(value_end(text), end, "{text}");
        }
    }
}
