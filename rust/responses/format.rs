//! The form of an answer (`text.format`): plain text, JSON, or what a grammar allows.
//!
//! Whether a schema or a grammar can be used is known once the model is loaded; here they are read, and told again in the response.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

use super::validate::At;
use crate::error::{Code, Error, Result};
use crate::grammar::Grammar;

/// The form of an answer, as the response repeats it.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[allow(missing_docs)] // The names and meanings are those of the API.
pub enum Format {
    /// Plain text.
    #[default]
    Text,
    /// Any JSON object.
    JsonObject,
    /// JSON of a schema, strict or not: an answer that may be held to the schema is.
    JsonSchema { name: String, description: Option<String>, schema: Map<String, Value>, strict: bool },
    /// A text that a grammar allows, as custom tools of the API name it.
    Grammar { syntax: Syntax, definition: String },
}

/// What a grammar is written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Syntax {
    /// A regular expression, which the whole answer matches.
    Regex,
    /// Lark, in llguidance's dialect.
    Lark,
}

impl Format {
    /// Reads `text.format`.
    ///
    /// # Errors
    /// What is wrong with the first field at fault.
    pub(super) fn read(at: &At<'_, '_>) -> Result<Self> {
        at.object()?;
        let kind = at.need("type")?;
        match kind.string()? {
            "text" => Ok(Self::Text),
            "json_object" => Ok(Self::JsonObject),
            "json_schema" => Self::json_schema(at),
            "grammar" => Ok(Self::Grammar {
                syntax: at.need("syntax")?.one_of(&[("regex", Syntax::Regex), ("lark", Syntax::Lark)])?,
                definition: at.need("definition")?.string()?.to_owned(),
            }),
            _ => Err(kind.wrong("one of \"text\", \"json_object\", \"json_schema\", \"grammar\"")),
        }
    }

    /// Reads a schema, with its name and what is said of it.
    ///
    /// # Errors
    /// What is wrong with the first field at fault.
    pub(crate) fn json_schema(at: &At<'_, '_>) -> Result<Self> {
        Ok(Self::JsonSchema {
            name: at.need("name")?.name()?.to_owned(),
            description: at.get("description").map(|field| field.string().map(str::to_owned)).transpose()?,
            schema: at.need("schema")?.object()?.clone(),
            strict: at.get("strict").map(|field| field.boolean()).transpose()?.unwrap_or(false),
        })
    }

    /// What the answer is held to; `None` for plain text.
    #[must_use]
    pub fn grammar(&self) -> Option<Grammar> {
        match self {
            Self::Text => None,
            Self::JsonObject => Some(Grammar::JsonObject),
            Self::JsonSchema { schema, .. } => Some(Grammar::JsonSchema(Value::Object(schema.clone()).to_string().into())),
            Self::Grammar { syntax: Syntax::Regex, definition } => Some(Grammar::Regex(definition.as_str().into())),
            Self::Grammar { syntax: Syntax::Lark, definition } => Some(Grammar::Lark(definition.as_str().into())),
        }
    }

    /// The complaint that the grammar cannot be used, with the field that it stands in.
    #[must_use]
    pub fn at_fault(&self, error: Error) -> Error {
        if error.code == Code::UnsupportedParameter {
            return error.at("text.format.type");
        }
        error.at_fault(match self {
            Self::JsonSchema { .. } => "text.format.schema",
            Self::Grammar { .. } => "text.format.definition",
            Self::Text | Self::JsonObject => "text.format",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_named_where_it_is_at_fault() {
        for (code, param) in [
            (Code::InvalidValue, Some("text.format")),
            (Code::UnsupportedParameter, Some("text.format.type")),
            (Code::QueueFull, None),
            (Code::ServerError, None),
        ] {
            assert_eq!(Format::JsonObject.at_fault(Error::new(code, "went wrong")).param.as_deref(), param, "{code:?}");
        }
    }
}
