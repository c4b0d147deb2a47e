//! What a grammar may cost: said before the library, which copies what it merges, is given it.
//!
//! The library has limits of its own on what comes out (`compile::limits`); these are on the way there, where it has none.

use std::collections::HashMap;

use percent_encoding::percent_decode_str;
use serde_json::{Deserializer, Map, Value};

use super::refused;
use crate::error::Result;

/// The longest grammar of any kind, in bytes.
pub const TEXT: usize = 64 * 1024;
/// The longest grammar of tool calls, in bytes: several schemas, each of which is bounded by [`TEXT`].
pub const CALLS: usize = 4 * TEXT;
/// The most that merging may come to, in values of JSON.
const MERGED: u64 = 100_000;
/// The most patterns of `patternProperties` in one place: each is compared with each.
const PATTERN_PROPERTIES: u64 = 32;
/// The most expressions that one string may have to match at once: what they have in common can grow as the product of their sizes.
const PATTERNS: u64 = 4;

/// The most `&` of a Lark grammar, for the same reason.
const INTERSECTIONS: usize = 8;

/// Keywords whose value is data, in which no schema is.
pub(super) const DATA: [&str; 4] = ["const", "enum", "default", "examples"];
/// What a Lark grammar writes before a schema.
const JSON: &str = "%json";

/// Checks what a schema may cost.
///
/// # Errors
/// `invalid_value` with the reason.
pub(super) fn check(schema: &Map<String, Value>) -> Result<()> {
    let root = Value::Object(schema.clone());
    let mut walk = Walk { root: &root, known: HashMap::new() };
    walk.every(&root, false)
}

/// Checks a Lark grammar, and the schemas within it.
///
/// # Errors
/// As [`check`].
pub(super) fn check_lark(mut text: &str) -> Result<()> {
    let count = intersections(text);
    if count > INTERSECTIONS {
        let what = format!("the Lark grammar has {count} intersections (&), above {INTERSECTIONS}");
        return Err(refused(what).hint("use one expression that says it all"));
    }
    while let Some((_, rest)) = text.split_once(JSON) {
        let mut values = Deserializer::from_str(rest).into_iter::<Value>();
        // What is no JSON is in a literal or a comment, or the library says so.
        text = match values.next() {
            Some(Ok(value)) => {
                if let Value::Object(schema) = &value {
                    check(schema)?;
                }
                rest.get(values.byte_offset()..).unwrap_or_default()
            }
            _ => rest,
        };
    }
    Ok(())
}

/// How many `&` of a Lark grammar stand outside strings, expressions, names of special tokens and comments.
fn intersections(text: &str) -> usize {
    let mut count = 0;
    let mut chars = text.chars().peekable();
    while let Some(ch) = chars.next() {
        let end = match ch {
            '&' => {
                count += 1;
                continue;
            }
            '#' => '\n',
            '/' if chars.peek() == Some(&'/') => '\n',
            '"' | '/' => ch,
            '<' => '>',
            _ => continue,
        };
        while let Some(ch) = chars.next() {
            if ch == end {
                break;
            }
            if ch == '\\' && (end == '"' || end == '/') {
                chars.next();
            }
        }
    }
    count
}

/// How many values of JSON there are.
fn size(value: &Value) -> u64 {
    match value {
        Value::Array(items) => 1 + items.iter().map(size).sum::<u64>(),
        Value::Object(fields) => 1 + fields.values().map(size).sum::<u64>(),
        _ => 1,
    }
}

/// What a schema is when all that must hold together has been merged.
#[derive(Clone, Default)]
struct Merged<'v> {
    /// How many alternatives it comes to.
    alternatives: u64,
    /// The size of each.
    size: u64,
    /// How many expressions there are.
    expressions: Expressions,
    /// The same for what is within: for each property, and under no name for all others and for items.
    within: HashMap<&'v str, Expressions>,
}

/// How many expressions meet in one place.
#[derive(Clone, Copy, Default)]
struct Expressions {
    /// Those that a string has to match.
    patterns: u64,
    /// Those of `patternProperties`.
    names: u64,
}

impl Expressions {
    fn plus(self, other: Self) -> Self {
        Self { patterns: self.patterns.saturating_add(other.patterns), names: self.names.saturating_add(other.names) }
    }

    fn most(self, other: Self) -> Self {
        Self { patterns: self.patterns.max(other.patterns), names: self.names.max(other.names) }
    }
}

impl<'v> Merged<'v> {
    fn one() -> Self {
        Self { alternatives: 1, size: 1, ..Self::default() }
    }

    /// Adds what must hold too.
    fn and(&mut self, other: &Self) {
        self.alternatives = self.alternatives.saturating_mul(other.alternatives.max(1));
        self.size = self.size.saturating_add(other.size);
        self.expressions = self.expressions.plus(other.expressions);
        for (name, expressions) in &other.within {
            let all = self.within.entry(name).or_default();
            *all = all.plus(*expressions);
        }
    }

    /// Adds what may hold instead.
    fn or(&mut self, other: &Self) {
        self.alternatives = self.alternatives.saturating_add(other.alternatives);
        self.size = self.size.max(other.size);
        self.expressions = self.expressions.most(other.expressions);
        for (name, expressions) in &other.within {
            self.hold(name, *expressions);
        }
    }

    fn hold(&mut self, name: &'v str, expressions: Expressions) {
        let most = self.within.entry(name).or_default();
        *most = expressions.most(*most);
    }

    /// The most expressions that meet in one place, here or within. What holds for other properties may hold for a named one.
    fn meet(&self) -> Expressions {
        let others = self.within.get("").copied().unwrap_or_default();
        let named = self.within.iter().filter(|(name, _)| !name.is_empty()).map(|(_, expressions)| *expressions);
        self.expressions.most(named.fold(Expressions::default(), Expressions::most).plus(others))
    }
}

struct Walk<'v> {
    root: &'v Value,
    /// What references stand for; nothing yet for those that are being followed.
    known: HashMap<&'v str, Option<Merged<'v>>>,
}

impl<'v> Walk<'v> {
    /// Every schema within a value: each is merged on its own. `data`: whether the value may be no schema.
    fn every(&mut self, value: &'v Value, data: bool) -> Result<()> {
        match value {
            Value::Object(fields) => {
                if !data {
                    self.places(value, fields)?;
                }
                let merged = self.merged(value);
                let Merged { alternatives, size, .. } = merged;
                if alternatives.saturating_mul(size) > MERGED {
                    let what = format!(
                        "the schema is too complex: merging what must hold together comes to {alternatives} alternatives of {size} values"
                    );
                    return Err(refused(what).hint("use fewer alternatives, or none beside or within allOf"));
                }
                let Expressions { patterns, names } = merged.meet();
                if names > PATTERN_PROPERTIES {
                    let what = format!("the schema has {names} patternProperties in one place, above {PATTERN_PROPERTIES}");
                    return Err(refused(what).hint("use fewer of them"));
                }
                if patterns > PATTERNS {
                    let what = format!("the schema is too complex: {patterns} of pattern and format hold for one string, above {PATTERNS}");
                    return Err(refused(what).hint("use one pattern that says it all"));
                }
                fields.iter().try_for_each(|(key, field)| self.every(field, data || DATA.contains(&key.as_str())))
            }
            Value::Array(items) => items.iter().try_for_each(|item| self.every(item, data)),
            _ => Ok(()),
        }
    }

    /// References lead to where this reads them: what they cost would not be seen else.
    fn places(&self, value: &Value, fields: &'v Map<String, Value>) -> Result<()> {
        if let Some(Value::String(name)) = fields.get("$ref")
            && self.target(name).is_none()
        {
            return Err(refused(format!("$ref {name:?} leads to no place in the schema")).hint("use \"#/$defs/…\""));
        }
        let old = self.root.get("$schema").and_then(Value::as_str).is_some_and(|draft| draft.contains("draft-04"));
        let names = fields.get("$id").or_else(|| fields.get("id").filter(|_| old)).is_some_and(Value::is_string);
        if names && !std::ptr::eq(value, self.root) && fields.get("$id") != self.root.get("$id") {
            return Err(refused("the schema has another $id within".to_owned()).hint("use $defs, and $ref to \"#/$defs/…\""));
        }
        Ok(())
    }

    fn merged(&mut self, schema: &'v Value) -> Merged<'v> {
        let mut all = Merged::one();
        let Value::Object(fields) = schema else { return all };
        // What holds within this schema alone: one of it for each name.
        let mut here = Merged::default();
        for (key, value) in fields {
            match (key.as_str(), value) {
                ("allOf", Value::Array(parts)) => parts.iter().for_each(|part| {
                    let part = self.merged(part);
                    all.and(&part);
                }),
                ("anyOf" | "oneOf", Value::Array(options)) => {
                    let mut either = Merged::default();
                    for option in options {
                        let option = self.merged(option);
                        either.or(&option);
                    }
                    all.and(&either);
                }
                ("$ref", Value::String(name)) => {
                    let target = self.followed(name);
                    all.and(&target);
                }
                ("$defs" | "definitions", _) => {}
                ("pattern" | "format", Value::String(_)) => here.expressions.patterns += 1,
                ("properties", Value::Object(properties)) => {
                    here.size = here.size.saturating_add(size(value));
                    for (name, property) in properties {
                        let expressions = self.merged(property).meet();
                        here.hold(if name.is_empty() { "\0" } else { name }, expressions);
                    }
                }
                _ => {
                    here.size = here.size.saturating_add(size(value));
                    if !DATA.contains(&key.as_str()) {
                        let expressions = self.others(key, value);
                        here.hold("", expressions);
                    }
                    if let ("patternProperties", Value::Object(names)) = (key.as_str(), value) {
                        here.expressions.names += names.len() as u64;
                    }
                }
            }
        }
        // Its own properties are not merged with what it says of others.
        here.alternatives = 1;
        all.and(&here);
        all
    }

    /// The most expressions that meet in an item, or in a property without a name of its own.
    fn others(&mut self, key: &str, value: &'v Value) -> Expressions {
        let mut most = Expressions::default();
        match value {
            Value::Object(schemas) if key == "patternProperties" => {
                schemas.values().for_each(|schema| most = most.most(self.merged(schema).meet()));
            }
            Value::Object(_) => most = self.merged(value).meet(),
            Value::Array(items) => items.iter().for_each(|item| most = most.most(self.merged(item).meet())),
            _ => {}
        }
        most
    }

    fn target(&self, name: &str) -> Option<&'v Value> {
        let own = self.root.get("$id").and_then(Value::as_str).and_then(|id| name.strip_prefix(id));
        let pointer = own.unwrap_or(name);
        if pointer.is_empty() {
            return Some(self.root);
        }
        let pointer = percent_decode_str(pointer.strip_prefix('#')?).decode_utf8().ok()?;
        self.root.pointer(&pointer)
    }

    /// What a reference stands for; nothing where it leads back to itself, which the library sees too, or to no place in this schema.
    fn followed(&mut self, name: &'v str) -> Merged<'v> {
        let Some(target) = self.target(name) else { return Merged::one() };
        if let Some(known) = self.known.get(name) {
            return known.clone().unwrap_or_else(Merged::one);
        }
        self.known.insert(name, None);
        let merged = self.merged(target);
        self.known.insert(name, Some(merged.clone()));
        merged
    }
}
