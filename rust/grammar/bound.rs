//! What a grammar may cost: said before the library, which copies what it merges, is given it.
//!
//! The library has limits of its own on what comes out (`compile::limits`); these are on the way there.

use serde_json::{Map, Value};

use super::refused;
use crate::error::Result;

/// The longest grammar of any kind, in bytes.
pub const TEXT: usize = 64 * 1024;
/// The most that merging may come to, in values of JSON.
const MERGED: u64 = 100_000;
/// The most patterns of one `patternProperties`: each is compared with each.
const PATTERNS: usize = 32;
/// How far `$ref` is followed from one to the next when costs are counted.
const REFS: usize = 64;

/// Keywords whose value is data, in which no schema is.
const DATA: [&str; 4] = ["const", "enum", "default", "examples"];

/// Checks what a schema may cost.
///
/// # Errors
/// `invalid_value` with the reason.
pub(super) fn check(schema: &Map<String, Value>) -> Result<()> {
    let root = Value::Object(schema.clone());
    let mut walk = Walk { root: &root, path: Vec::new() };
    walk.every(&root)
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
#[derive(Clone, Copy)]
struct Merged {
    /// How many alternatives it comes to.
    alternatives: u64,
    /// The size of each.
    size: u64,
}

struct Walk<'v> {
    root: &'v Value,
    /// The references that are being followed.
    path: Vec<&'v str>,
}

impl<'v> Walk<'v> {
    /// Every schema within a value: each is merged on its own.
    fn every(&mut self, value: &'v Value) -> Result<()> {
        match value {
            Value::Object(fields) => {
                if let Some(Value::Object(patterns)) = fields.get("patternProperties")
                    && patterns.len() > PATTERNS
                {
                    let what = format!("the schema has {} patternProperties in one place, above {PATTERNS}", patterns.len());
                    return Err(refused(what).hint("use fewer of them"));
                }
                let Merged { alternatives, size } = self.merged(value);
                if alternatives > 1 && alternatives.saturating_mul(size) > MERGED {
                    let what = format!(
                        "the schema is too complex: merging what must hold together comes to {alternatives} alternatives of {size} values"
                    );
                    return Err(refused(what).hint("use fewer alternatives, or none beside or within allOf"));
                }
                fields.iter().filter(|(key, _)| !DATA.contains(&key.as_str())).try_for_each(|(_, field)| self.every(field))
            }
            Value::Array(items) => items.iter().try_for_each(|item| self.every(item)),
            _ => Ok(()),
        }
    }

    fn merged(&mut self, schema: &'v Value) -> Merged {
        let Value::Object(fields) = schema else { return Merged { alternatives: 1, size: 1 } };
        let mut all = Merged { alternatives: 1, size: 1 };
        let and = |all: &mut Merged, other: Merged| {
            all.alternatives = all.alternatives.saturating_mul(other.alternatives.max(1));
            all.size = all.size.saturating_add(other.size);
        };
        for (key, value) in fields {
            match (key.as_str(), value) {
                ("allOf", Value::Array(parts)) => parts.iter().for_each(|part| {
                    let part = self.merged(part);
                    and(&mut all, part);
                }),
                ("anyOf" | "oneOf", Value::Array(options)) => {
                    let mut either = Merged { alternatives: 0, size: 0 };
                    for option in options {
                        let option = self.merged(option);
                        either.alternatives = either.alternatives.saturating_add(option.alternatives);
                        either.size = either.size.max(option.size);
                    }
                    and(&mut all, either);
                }
                ("$ref", Value::String(name)) => {
                    let target = self.followed(name);
                    and(&mut all, target);
                }
                ("$defs" | "definitions", _) => {}
                _ => all.size = all.size.saturating_add(size(value)),
            }
        }
        all
    }

    /// What a reference stands for; nothing where it leads back to itself, which the library sees too, or to no place in this schema.
    fn followed(&mut self, name: &'v str) -> Merged {
        let nothing = Merged { alternatives: 1, size: 1 };
        let Some(target) = name.strip_prefix('#').and_then(|pointer| self.root.pointer(pointer)) else { return nothing };
        if self.path.len() >= REFS || self.path.contains(&name) {
            return nothing;
        }
        self.path.push(name);
        let merged = self.merged(target);
        self.path.pop();
        merged
    }
}
