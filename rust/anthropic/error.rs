//! Errors in the envelope of the Messages API, which has a kind and a sentence alone: the field at fault is named in the sentence.
//!
//! Statuses and headers are the same at all routes, and the door's business.

use std::collections::BTreeSet;

use schemars::JsonSchema;
use serde::Serialize;

use crate::error::{Code, Error};
use crate::responses::told;

/// What the official clients look for in the sentence to tell a conversation that is too long from other faults.
const TOO_LONG: &str = "prompt is too long";

/// An error, as clients of this API know it.
#[derive(JsonSchema, Serialize)]
#[schemars(rename = "AnthropicError")]
pub(crate) struct Envelope<'a> {
    #[schemars(extend("const" = "error"))]
    r#type: &'static str,
    error: Inner,
    /// As in the header `request-id`.
    request_id: &'a str,
}

#[derive(JsonSchema, Serialize)]
#[schemars(rename = "AnthropicErrorDetail")]
struct Inner {
    #[schemars(extend("enum" = kinds()))]
    r#type: &'static str,
    /// What happened, where, and what to do.
    message: String,
}

impl<'a> Envelope<'a> {
    /// The envelope of an error that belongs to the request with this id.
    pub(crate) fn of(error: &Error, request_id: &'a str) -> Self {
        Self { r#type: "error", error: Inner { r#type: kind(error.code), message: message(error) }, request_id }
    }
}

/// The API's word for a kind of failure.
fn kind(code: Code) -> &'static str {
    match (code, code.row().status) {
        (Code::ModelLoading | Code::ShuttingDown, _) => "overloaded_error",
        (_, 401) => "authentication_error",
        (_, 403) => "permission_error",
        (Code::ModelNotFound | Code::NotFound, _) => "not_found_error",
        (_, 413) => "request_too_large",
        (_, 429) => "rate_limit_error",
        (_, 500..) => "api_error",
        _ => "invalid_request_error",
    }
}

/// All of them, as the document of the API lists them.
fn kinds() -> BTreeSet<&'static str> {
    Code::ALL.into_iter().map(kind).collect()
}

/// What happened and where, under the names that the fields have here.
fn message(error: &Error) -> String {
    let text = told(error);
    if error.code == Code::ContextLengthExceeded {
        return format!("{TOO_LONG}: {text}");
    }
    match error.param.as_deref() {
        Some("input") => format!("messages: {text}"),
        Some(param) if !text.contains(param) => format!("{}: {text}", field(param)),
        _ => text,
    }
}

/// The field here that is checked under another name, once the model is known.
fn field(param: &str) -> String {
    match (param.strip_prefix("text."), param.strip_suffix(".parameters")) {
        (Some(form), _) => format!("output_config.{form}"),
        (_, Some(tool)) => format!("{tool}.input_schema"),
        _ => param.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_failure_has_a_kind_that_goes_with_its_status() {
        for code in Code::ALL {
            let kind = kind(code);
            let expected: &[&str] = match code.row().status {
                400 | 405 | 408 | 415 => &["invalid_request_error"],
                401 => &["authentication_error"],
                403 => &["permission_error"],
                404 => &["not_found_error"],
                413 => &["request_too_large"],
                429 => &["rate_limit_error"],
                500 => &["api_error"],
                _ => &["api_error", "overloaded_error"],
            };
            assert!(expected.contains(&kind), "{code:?}: {kind}");
        }
    }

    #[test]
    fn the_field_at_fault_is_named_as_it_is_called_here() {
        let of = |code, param: &str, text: &'static str| message(&Error::new(code, text).at(param));
        assert_eq!(of(Code::InvalidValue, "tools[2].parameters", "no text"), "tools[2].input_schema: no text");
        assert_eq!(of(Code::InvalidValue, "text.format.schema", "no text"), "output_config.format.schema: no text");
        assert_eq!(of(Code::InvalidValue, "input", "refused"), "messages: refused");
        assert_eq!(of(Code::InvalidValue, "top_k", "`top_k` is odd"), "`top_k` is odd");
        assert_eq!(of(Code::ContextLengthExceeded, "input", "9 of 8"), "prompt is too long: 9 of 8");
    }
}
