//! Grammars: what an answer may be, as a client says it, and how that becomes a constraint on token ids.
//!
//! [`tagged`] writes the grammar of tool calls, [`whole`] that of an answer with thoughts, words and calls, [`bound`] refuses what would cost too much before it is tried, `vocabulary` shows a model's tokens to the library
//! that does the work (llguidance), and [`compile`] compiles, checks and keeps. Nothing here runs while an answer is made: that is `engine::constraint`.

pub mod bound;
pub mod compile;
mod place;
mod relax;
pub mod tagged;
mod vocabulary;
pub mod whole;

use std::sync::Arc;

use serde_json::{Map, Value, json};

pub use compile::{Compiler, compile};
pub use tagged::{Tag, Tagged};
pub use whole::{Calls, Thoughts, Whole};

use crate::error::{Code, Error, Result};

/// What an answer may be.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Grammar {
    /// JSON that validates against this schema, itself JSON (draft 2020-12, or the one that it names).
    JsonSchema(Arc<str>),
    /// Any JSON object.
    JsonObject,
    /// A text that matches this regular expression as a whole (the syntax of Rust's `regex`).
    Regex(Arc<str>),
    /// A text of this grammar, in llguidance's dialect of Lark.
    Lark(Arc<str>),
    /// Text and calls between tags.
    Tagged(Tagged),
    /// A whole answer: thoughts, then words or calls.
    Whole(Whole),
}

impl Grammar {
    /// A grammar by the name of its syntax (`json_schema`, `json_object`, `regex`, `lark`) and its text.
    ///
    /// # Errors
    /// `invalid_value` for another name.
    pub fn named(syntax: &str, definition: &str) -> Result<Self> {
        match syntax {
            "json_schema" => Ok(Self::JsonSchema(definition.into())),
            "json_object" => Ok(Self::JsonObject),
            "regex" => Ok(Self::Regex(definition.into())),
            "lark" => Ok(Self::Lark(definition.into())),
            _ => Err(refused(format!("there is no grammar syntax {syntax:?}")).hint("use json_schema, json_object, regex or lark")),
        }
    }

    /// What it is called in a message.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::JsonSchema(_) => "JSON schema",
            Self::JsonObject => "JSON object",
            Self::Regex(_) => "regular expression",
            Self::Lark(_) => "Lark grammar",
            Self::Tagged(_) | Self::Whole(_) => "tool grammar",
        }
    }
}

/// A grammar that cannot be used.
fn refused(what: String) -> Error {
    Error::new(Code::InvalidValue, what)
}

/// How JSON is written: on one line, with one blank after commas and colons, as Python writes it and as models have read it most. One form, where JSON has many, keeps
/// a model from writing blanks for ever, and makes what lies between two values certain.
fn written(mut schema: Map<String, Value>) -> Value {
    // The library reads its options from the schema; a client has no say in them.
    let form = json!({ "item_separator": ", ", "key_separator": ": ", "whitespace_flexible": false });
    schema.insert("x-guidance".to_owned(), form);
    Value::Object(schema)
}

/// The schema that the library is given.
///
/// # Errors
/// `invalid_value` for what is no JSON, no schema, or a schema that allows nothing or would cost too much.
fn schema(text: &str) -> Result<Value> {
    let (length, most) = (text.len(), bound::TEXT);
    if length > most {
        return Err(refused(format!("the JSON schema has {length} bytes, above {most}")).hint("make it shorter"));
    }
    let value: Value = serde_json::from_str(text)
        .map_err(|error| refused(format!("the schema is not JSON: {error}")).hint("send a JSON schema, an object"))?;
    match value {
        Value::Object(map) => {
            bound::check(&map)?;
            Ok(written(relax::relaxed(map)?))
        }
        Value::Bool(true) => Ok(written(Map::new())),
        Value::Bool(false) => Err(refused("the schema is false, which no JSON satisfies".to_owned()).hint("send a JSON schema, an object")),
        _ => Err(refused("the schema is no JSON object".to_owned()).hint("send a JSON schema, an object")),
    }
}
