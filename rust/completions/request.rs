//! Reads a request for a completion: each field as its namesake of the Responses API is read, and where that is another, in the place of it.
//!
//! What is not done here is refused by name. Errors that come later are told in the terms of this form by [`in_terms`].

use std::sync::Arc;

use super::{messages, tools};
use crate::error::{Error, Result};
use crate::models::Controls;
use crate::responses::request::{Echo, Reasoning, Truncation, effort, flag, indifferent, metadata, salt, stop, value, verbosity, whole};
use crate::responses::validate::At;
use crate::responses::{Format, Request, controls};

/// The most answers that the API gives to one request.
const MOST_CHOICES: i64 = 128;

/// What of an answer is to be told.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Wanted {
    /// The log probabilities of its tokens.
    pub logprobs: bool,
    /// In a stream, how many tokens there were.
    pub usage: bool,
}

/// Reads the body of a request.
///
/// # Errors
/// `invalid_json` for what is no JSON or cannot be read, or what is wrong with the first field at fault, with its path.
pub fn read(body: &[u8]) -> Result<(Request, Wanted)> {
    let value = value(body)?;
    let root = At::root(&value);
    root.object()?;
    refuse(&root)?;
    let string = |key| root.get(key).map(|at| at.string().map(str::to_owned)).transpose();
    let top_logprobs = top_logprobs(&root)?;
    let wanted = Wanted { logprobs: top_logprobs.is_some(), usage: usage(&root)? };
    let request = Request {
        model: string("model")?,
        turns: messages::turns(&root)?,
        tools: Arc::new(tools::read(&root)?),
        stream: flag(&root, "stream")?.unwrap_or(false),
        max_output_tokens: limit(&root)?,
        most_tokens: None,
        controls: Controls { top_logprobs, ..controls::sampling(&root)? },
        speculation: controls::speculation(&root),
        stop: stop(&root)?,
        salt: salt(&root)?,
        prefill: None,
        truncation: Truncation::Disabled,
        seal: None,
        echo: Echo {
            instructions: None,
            max_tool_calls: None,
            metadata: metadata(&root)?,
            parallel_tool_calls: flag(&root, "parallel_tool_calls")?.unwrap_or(true),
            prompt_cache_key: string("prompt_cache_key")?,
            reasoning: Reasoning { effort: effort(&root, "reasoning_effort")?, summary: None },
            safety_identifier: string("safety_identifier")?,
            // A completion repeats none of these.
            tool_choice: serde_json::Value::Null,
            tools: Vec::new(),
            user: string("user")?,
            format: format(&root)?,
            verbosity: verbosity(&root)?,
        },
    };
    Ok((request, wanted))
}

/// What is not done here: said before anything else is looked at, and never passed over in silence.
fn refuse(root: &At<'_, '_>) -> Result<()> {
    for (key, instead) in [("functions", "tools"), ("function_call", "tool_choice")] {
        if let Some(at) = root.get(key) {
            return Err(at.unsupported(format_args!("is given: it has given way to `{instead}`")).hint(format!("send `{instead}`")));
        }
    }
    if let Some(at) = root.get("n") {
        let choices = at.integer(1..=MOST_CHOICES)?;
        if choices > 1 {
            return Err(at
                .unsupported(format_args!("is {choices}: this server gives one answer to a request"))
                .hint("ask once for each answer"));
        }
    }
    if let Some(at) = root.get("modalities") {
        for each in at.each()? {
            match each.string()? {
                "text" => {}
                kind => {
                    return Err(each.unsupported(format_args!("is {kind:?}: this server answers in text only")).hint("send [\"text\"]"));
                }
            }
        }
    }
    if let Some(at) = root.get("audio") {
        return Err(at.unsupported("is given: this server answers in text only").hint("leave it out"));
    }
    for key in ["prediction", "web_search_options"] {
        if let Some(at) = root.get(key) {
            at.object()?;
            tracing::debug!(key, "this changes no answer here");
        }
    }
    indifferent(root)
}

/// The longest answer. Either of two fields says it, the older one and its successor.
fn limit(root: &At<'_, '_>) -> Result<Option<u32>> {
    const KEY: &str = "max_tokens";
    let (old, new) = (whole(root, KEY, 1)?, whole(root, "max_completion_tokens", 1)?);
    match (old, new, root.get(KEY)) {
        (Some(old), Some(new), Some(at)) if old != new => Err(at.wrong(format_args!("absent, or {new} as `max_completion_tokens` is"))),
        _ => Ok(new.or(old)),
    }
}

/// `None` where no log probabilities are asked for.
fn top_logprobs(root: &At<'_, '_>) -> Result<Option<u32>> {
    let (asked, top) = (flag(root, "logprobs")?.unwrap_or(false), controls::most_likely(root)?);
    match root.get("top_logprobs") {
        Some(at) if !asked && top > 0 => Err(at.wrong("absent, or 0, unless `logprobs` is true")),
        _ => Ok(asked.then_some(top)),
    }
}

fn usage(root: &At<'_, '_>) -> Result<bool> {
    let Some(at) = root.get("stream_options") else { return Ok(false) };
    at.object()?;
    Ok(flag(&at, "include_usage")?.unwrap_or(false))
}

fn format(root: &At<'_, '_>) -> Result<Format> {
    let Some(at) = root.get("response_format") else { return Ok(Format::Text) };
    at.object()?;
    let kind = at.need("type")?;
    match kind.string()? {
        "text" => Ok(Format::Text),
        "json_object" => Ok(Format::JsonObject),
        "json_schema" => {
            let schema = at.need("json_schema")?;
            schema.object()?;
            Format::json_schema(&schema)
        }
        _ => Err(kind.wrong("one of \"text\", \"json_object\", \"json_schema\"")),
    }
}

/// The error with the field at fault by the name that it has in this form.
#[must_use]
pub fn in_terms(error: Error) -> Error {
    const NAMES: [(&str, &str); 3] =
        [("input", "messages"), ("text.format.schema", "response_format.json_schema.schema"), ("text.format", "response_format")];
    let named = error.param.as_deref().and_then(|param| {
        NAMES.into_iter().find_map(|(theirs, ours)| {
            let rest = param.strip_prefix(theirs).filter(|rest| rest.is_empty() || rest.starts_with(['.', '[']))?;
            Some(format!("{ours}{rest}"))
        })
    });
    match named {
        Some(param) => error.at(param),
        None => error,
    }
}
