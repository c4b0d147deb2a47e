//! Values as programming languages write them (Python's literals, Gemma's own quotes): where one ends, and what it is in JSON.

use serde_json::{Map, Number, Value};

/// Deeper nesting than this is no value but a model gone astray.
const DEEPEST: usize = 64;

/// Looks for the end of a value, however it is cut: a comma or a closing bracket that belongs to what is around it.
#[derive(Debug)]
pub(super) struct Span {
    /// A mark that quotes a text without any escapes, beside the usual quotes.
    quote: &'static str,
    read: usize,
    depth: usize,
    within: Option<&'static str>,
}

/// The quotes of Python, the longer ones first.
const QUOTES: [&str; 4] = ["\"\"\"", "'''", "\"", "'"];

impl Span {
    pub(super) fn new(quote: &'static str) -> Self {
        Self { quote, read: 0, depth: 0, within: None }
    }

    /// Where the value ends in `text`, which begins where the value does and has only grown since the last call.
    pub(super) fn end(&mut self, text: &str) -> Option<usize> {
        while let Some(rest) = text.get(self.read..).filter(|rest| !rest.is_empty()) {
            let first = rest.as_bytes()[0];
            if let Some(quote) = self.within {
                if rest.starts_with(quote) {
                    self.within = None;
                    self.read += quote.len();
                } else if quote.starts_with(rest) {
                    return None; // It may be the closing quote.
                } else if first == b'\\' && quote != self.quote {
                    let next = rest.chars().nth(1)?;
                    self.read += 1 + next.len_utf8();
                } else {
                    self.read += rest.chars().next().map_or(1, char::len_utf8);
                }
                continue;
            }
            if !self.quote.is_empty() && self.quote.as_bytes()[0] == first {
                if rest.starts_with(self.quote) {
                    self.within = Some(self.quote);
                    self.read += self.quote.len();
                    continue;
                }
                if self.quote.starts_with(rest) {
                    return None;
                }
            }
            if matches!(first, b'"' | b'\'') {
                let quote = QUOTES.iter().find(|quote| rest.starts_with(**quote)).copied()?;
                // Two quotes are an empty text, or the first two of three.
                if rest.len() < 3 && rest.bytes().all(|byte| byte == first) {
                    return None;
                }
                self.within = Some(quote);
                self.read += quote.len();
                continue;
            }
            match first {
                b'[' | b'(' | b'{' => self.depth += 1,
                b',' | b']' | b')' | b'}' if self.depth == 0 => return Some(self.read),
                b']' | b')' | b'}' => self.depth -= 1,
                _ => {}
            }
            self.read += rest.chars().next().map_or(1, char::len_utf8);
        }
        None
    }
}

/// The value that a text is, all of it; a text that is none stands for itself.
pub(super) fn value(text: &str, quote: &'static str) -> Value {
    let trimmed = text.trim();
    parse(trimmed, quote).unwrap_or_else(|| Value::from(trimmed))
}

/// The value that a text is, all of it.
pub(super) fn parse(text: &str, quote: &'static str) -> Option<Value> {
    let mut reader = Reader { rest: text.trim(), quote };
    let value = reader.value(0)?;
    reader.rest.trim().is_empty().then_some(value)
}

struct Reader<'a> {
    rest: &'a str,
    quote: &'static str,
}

impl Reader<'_> {
    fn takes(&mut self, mark: &str) -> bool {
        self.rest = self.rest.trim_start();
        match self.rest.strip_prefix(mark) {
            Some(rest) if !mark.is_empty() => {
                self.rest = rest;
                true
            }
            _ => false,
        }
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > DEEPEST {
            return None;
        }
        self.rest = self.rest.trim_start();
        if let Some(text) = self.text() {
            return Some(Value::from(text));
        }
        for (open, close) in [("[", "]"), ("(", ")")] {
            if self.takes(open) {
                return self.list(close, depth);
            }
        }
        if self.takes("{") { self.object(depth) } else { self.word() }
    }

    fn list(&mut self, close: &str, depth: usize) -> Option<Value> {
        let mut found = Vec::new();
        while !self.takes(close) {
            found.push(self.value(depth + 1)?);
            if !self.takes(",") {
                return self.takes(close).then_some(Value::from(found));
            }
        }
        Some(Value::from(found))
    }

    fn object(&mut self, depth: usize) -> Option<Value> {
        let mut found = Map::new();
        while !self.takes("}") {
            self.rest = self.rest.trim_start();
            let key = match self.text() {
                Some(key) => key,
                None => {
                    let (key, rest) = self.rest.split_at(self.rest.find(':')?);
                    self.rest = rest;
                    key.trim().to_owned()
                }
            };
            if !self.takes(":") {
                return None;
            }
            let value = self.value(depth + 1)?;
            found.insert(key, value);
            if !self.takes(",") {
                return self.takes("}").then_some(Value::from(found));
            }
        }
        Some(Value::from(found))
    }

    /// A quoted text, if one stands here.
    fn text(&mut self) -> Option<String> {
        if !self.quote.is_empty()
            && let Some(rest) = self.rest.strip_prefix(self.quote)
        {
            let (text, rest) = rest.split_once(self.quote)?;
            self.rest = rest;
            return Some(text.to_owned());
        }
        let quote = QUOTES.iter().find(|quote| self.rest.starts_with(**quote))?;
        let mut text = String::new();
        let mut rest = self.rest.get(quote.len()..)?;
        while !rest.starts_with(quote) {
            let mut chars = rest.chars();
            let next = chars.next()?;
            rest = chars.as_str();
            if next == '\\' {
                let (meant, after) = escape(rest)?;
                text.extend(meant);
                rest = after;
            } else {
                text.push(next);
            }
        }
        self.rest = rest.get(quote.len()..)?;
        Some(text)
    }

    /// A number or a constant.
    fn word(&mut self) -> Option<Value> {
        let end = self.rest.find([',', ']', ')', '}', ':']).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        match word.trim() {
            "True" | "true" => Some(Value::from(true)),
            "False" | "false" => Some(Value::from(false)),
            "None" | "null" => Some(Value::Null),
            number => {
                let whole = number.parse::<i64>().ok().map(Value::from);
                whole.or_else(|| Number::from_f64(number.parse().ok()?).map(Value::from))
            }
        }
    }
}

/// What stands behind a backslash: what it means, and the text after it. An escape that is none stands for itself.
fn escape(rest: &str) -> Option<(Vec<char>, &str)> {
    let mut chars = rest.chars();
    let kind = chars.next()?;
    let after = chars.as_str();
    let simple = |meant| Some((vec![meant], after));
    let digits = match kind {
        'n' => return simple('\n'),
        't' => return simple('\t'),
        'r' => return simple('\r'),
        '\\' | '\'' | '"' | '/' => return simple(kind),
        '\n' => return Some((Vec::new(), after)),
        'x' => 2,
        'u' => 4,
        'U' => 8,
        other => return Some((vec!['\\', other], after)),
    };
    let code = after.get(..digits).and_then(|code| u32::from_str_radix(code, 16).ok());
    match code.and_then(char::from_u32) {
        Some(meant) => Some((vec![meant], after.get(digits..)?)),
        None => Some((vec!['\\', kind], after)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn literals_become_json() {
        for (text, expected) in [
            ("'it\\'s'", json!("it's")),
            (r#""a\nb\u00e9\q""#, json!("a\nbé\\q")),
            ("'''a 'b' c'''", json!("a 'b' c")),
            ("[1, -2.5, True, None, ('x',)]", json!([1, -2.5, true, null, ["x"]])),
            ("{'a': {\"b\": []}, c: false}", json!({"a": {"b": []}, "c": false})),
            ("<q>say \"hi\", ok<q>", json!("say \"hi\", ok")),
            ("bare words", json!("bare words")),
            ("[1, 2", json!("[1, 2")),
        ] {
            assert_eq!(value(text, "<q>"), expected, "{text}");
        }
    }

    #[test]
    fn a_value_ends_at_its_own_comma_or_bracket_however_it_is_cut() {
        for (text, end) in
            [("'a, b)', x", 7), ("[1, (2)]) ", 8), ("''', ''', x", 8), ("<q>a}'<q>}", 9), ("\"\\\",\" , 1", 6), ("'', 1", 2), ("12)", 2)]
        {
            assert_eq!(Span::new("<q>").end(text), Some(end), "{text}");
            let mut span = Span::new("<q>");
            let found = (1..=text.len()).find_map(|cut| span.end(&text[..cut]));
            assert_eq!(found, Some(end), "{text}");
        }
    }
}
