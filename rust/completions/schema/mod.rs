//! What a request for a completion may hold, as types from which the OpenAPI document is made.
//!
//! As in [`crate::responses::schema`], nothing is ever read into these types: `request`, `messages` and `tools` read, and the tests hold the two together.
#![allow(dead_code)] // The derive alone reads the fields.

mod messages;
#[cfg(test)]
mod tests;
mod tools;

use schemars::JsonSchema;
use serde_json::{Map, Value};

use self::messages::ChatMessage;
use self::tools::{ChatTool, ChatToolChoice};
use crate::responses::controls::TOP_LOGPROBS;
use crate::responses::request::EFFORTS;
use crate::responses::schema::controls::{Metadata, Sampling, Stop};
use crate::responses::schema::words;

/// The body of `POST /v1/chat/completions`. Fields that are not listed are ignored, and null is as good as absent.
#[derive(JsonSchema)]
pub(crate) struct CreateChatCompletion {
    /// The name of the model; the server's first model when absent.
    model: Option<String>,
    /// The conversation. Every call in it is answered exactly once, by a message of the role `tool` right after the message that has it.
    #[schemars(length(min = 1))]
    messages: Vec<ChatMessage>,
    /// What the model may call.
    tools: Option<Vec<ChatTool>>,
    /// Whether and what it has to call.
    tool_choice: Option<ChatToolChoice>,
    /// False: at most one call.
    parallel_tool_calls: Option<bool>,
    /// Server-sent events in the place of one object.
    stream: Option<bool>,
    /// How the stream is to be.
    stream_options: Option<ChatStreamOptions>,
    /// Only 1: a request has one answer.
    #[schemars(extend("enum" = [1, null]))]
    n: Option<i64>,
    /// The longest answer in tokens; up to the end of the window when absent.
    #[schemars(range(min = 1, max = i32::MAX))]
    max_completion_tokens: Option<i64>,
    /// The older name of `max_completion_tokens`: the same, where both are given.
    #[schemars(range(min = 1, max = i32::MAX))]
    max_tokens: Option<i64>,
    /// 0 takes the likeliest token.
    #[schemars(range(min = 0, max = 2))]
    temperature: Option<f64>,
    #[schemars(flatten)]
    sampling: Sampling,
    /// Whether the log probabilities of the answer's tokens are told.
    logprobs: Option<bool>,
    /// How many of the likeliest tokens are told beside each one; more than 0 only where `logprobs` is true.
    #[schemars(range(min = 0, max = TOP_LOGPROBS))]
    top_logprobs: Option<i64>,
    /// Texts that end the answer, without being part of it.
    stop: Option<Stop>,
    /// The form of the answer.
    response_format: Option<ChatFormat>,
    /// How hard the model thinks: `none` turns thinking off; of the others, templates that have such a switch are told.
    #[schemars(extend("enum" = words(&EFFORTS)))]
    reasoning_effort: Option<String>,
    /// Has no effect.
    #[schemars(extend("enum" = words(&["low", "medium", "high"])))]
    verbosity: Option<String>,
    /// Only text.
    modalities: Option<Vec<Modality>>,
    /// Up to 16 pairs, which have no effect; `retention_seconds` is a number.
    metadata: Option<Metadata>,
    /// Has no effect: the first turns of a prompt are found again by what they are.
    prompt_cache_key: Option<String>,
    /// Has no effect.
    prompt_cache_retention: Option<String>,
    /// Has no effect.
    prompt_cache_options: Option<Map<String, Value>>,
    /// Has no effect.
    client_metadata: Option<Map<String, Value>>,
    /// Has no effect.
    safety_identifier: Option<String>,
    /// Has no effect.
    user: Option<String>,
    /// Has no effect.
    service_tier: Option<String>,
    /// Has no effect: nothing is kept.
    store: Option<bool>,
    /// Has no effect.
    prediction: Option<Map<String, Value>>,
    /// Has no effect: the server runs no tools.
    web_search_options: Option<Map<String, Value>>,
    /// Not supported: the server answers in text only.
    audio: Option<()>,
    /// Not supported: it has given way to `tools`.
    functions: Option<()>,
    /// Not supported: it has given way to `tool_choice`.
    function_call: Option<()>,
    /// `generation_mode` and `mtp_depth`, for clients that send them so; anything else in it has no effect.
    extra_body: Option<Value>,
}

/// How a stream is to be.
#[derive(JsonSchema)]
struct ChatStreamOptions {
    /// Whether a last chunk tells how many tokens there were.
    include_usage: Option<bool>,
    /// Has no effect: nothing is padded.
    include_obfuscation: Option<bool>,
}

/// What an answer may be.
#[derive(JsonSchema)]
#[schemars(rename_all = "snake_case")]
enum Modality {
    /// Text.
    Text,
}

/// What an answer is held to.
#[derive(JsonSchema)]
#[schemars(tag = "type", rename_all = "snake_case")]
enum ChatFormat {
    /// Nothing: plain text.
    Text,
    /// Any JSON object.
    JsonObject,
    /// JSON of a schema.
    JsonSchema {
        /// The schema, with its name.
        json_schema: ChatSchema,
    },
}

/// A schema that an answer is held to.
#[derive(JsonSchema)]
struct ChatSchema {
    /// What the client calls it.
    #[schemars(regex(pattern = r"^[a-zA-Z0-9_-]{1,64}$"))]
    name: String,
    /// What it is for.
    description: Option<String>,
    /// A JSON schema.
    schema: Map<String, Value>,
    /// Has no effect: every answer is held to its schema.
    strict: Option<bool>,
}
