//! Tool calls: free text, then one of some tags, what its schema allows, and the end tag; as often as there are calls.
//!
//! Which tags a model writes, and what is made of a call, is decided by those who ask.

use std::fmt::Write as _;
use std::sync::Arc;

use serde_json::Value;

use super::{refused, schema};
use crate::error::Result;

/// One kind of call: `begin`, JSON of this schema, `end`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Tag {
    /// What it begins with, the trigger included: `<tool_call>\n{"name": "weather", "arguments": `.
    pub begin: Arc<str>,
    /// The JSON schema of what is inside.
    pub schema: Arc<str>,
    /// What it ends with: `}\n</tool_call>`.
    pub end: Arc<str>,
}

/// An answer that is text with calls in it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Tagged {
    /// What sets a call off: every tag begins with it, and it stands in no free text. `<tool_call>`
    pub trigger: Arc<str>,
    /// The calls there are, at least one.
    pub tags: Vec<Tag>,
    /// Whether text may come before, between and after calls.
    pub text: bool,
    /// The fewest calls.
    pub least: u32,
    /// The most calls; `None` is no limit.
    pub most: Option<u32>,
}

/// The grammar in Lark. `special`: whether a text is a token of its own in the model, which is then named and not spelt.
///
/// # Errors
/// `invalid_value` for tags that do not begin with the trigger, limits that cannot be, and schemas that cannot be used.
pub(super) fn lark(tagged: &Tagged, special: impl Fn(&str) -> bool) -> Result<String> {
    let Tagged { trigger, tags, text, least, most } = tagged;
    if trigger.is_empty() || tags.is_empty() {
        return Err(refused("there are no tags to call with".to_owned()).hint("give a trigger and at least one tag"));
    }
    let most = most.unwrap_or(u32::MAX).max(*least);
    let range = match (*least, most) {
        (0, u32::MAX) => "*".to_owned(),
        (1, u32::MAX) => "+".to_owned(),
        (least, u32::MAX) => format!("{{{least},}}"),
        (least, most) => format!("{{{least},{most}}}"),
    };
    let mut grammar = String::from("%llguidance {}\n");
    // Writing to a string cannot fail.
    if *text {
        _ = writeln!(grammar, "start: call{range} after\nafter: TEXT\nTEXT: /(.|\\n)*/");
    } else {
        _ = writeln!(grammar, "start: call{range}");
    }
    let name = special(trigger);
    match (text, name) {
        // The shortest text that ends with the trigger: it is in no free text.
        (true, false) => {
            _ = writeln!(grammar, "call: before (tags)\nbefore[lazy]: /(.|\\n)*{}/", pattern(trigger));
        }
        (true, true) => _ = writeln!(grammar, "call: TEXT {trigger} (tags)"),
        (false, false) => _ = writeln!(grammar, "call: {} (tags)", quoted(trigger)),
        (false, true) => _ = writeln!(grammar, "call: {trigger} (tags)"),
    }
    let names: Vec<String> = (0..tags.len()).map(|at| format!("tag{at}")).collect();
    _ = writeln!(grammar, "tags: {}", names.join(" | "));
    for (tag, name) in tags.iter().zip(&names) {
        let Some(begin) = tag.begin.strip_prefix(&**trigger) else {
            return Err(
                refused(format!("the tag {:?} does not begin with {trigger:?}", tag.begin)).hint("begin every tag with the trigger")
            );
        };
        let schema: Value = schema(&tag.schema)?;
        _ = writeln!(grammar, "{name}: {} body{name} {}\nbody{name}: %json {schema}", spelt(begin, &special), spelt(&tag.end, &special));
    }
    Ok(grammar)
}

/// A text that may end in, or begin with, a special token.
fn spelt(text: &str, special: impl Fn(&str) -> bool) -> String {
    if text.is_empty() {
        return "\"\"".to_owned();
    }
    match text.rfind('<') {
        Some(at) if special(&text[at..]) => format!("{} {}", quoted(&text[..at]), &text[at..]),
        _ => quoted(text),
    }
}

/// A text as a literal.
pub(super) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// A text as part of a regular expression between slashes.
pub(super) fn pattern(text: &str) -> String {
    let mut pattern = String::new();
    for ch in text.chars() {
        match ch {
            '\n' => pattern.push_str("\\n"),
            // Others mean something else with a backslash: `\<` is where a word begins.
            ch if r"\.+*?()|[]{}^$#&-~/".contains(ch) => pattern.extend(['\\', ch]),
            ch => pattern.push(ch),
        }
    }
    pattern
}
