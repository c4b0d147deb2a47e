//! What a request may hold, as types from which the OpenAPI document is made.
//!
//! Requests are read and checked by hand (`request` and what it calls), so that every complaint names its field and a null is as good as an absent
//! field; nothing is ever read into these types. That the two agree is tested (`described`): every field and word that one of them knows, the other knows; what is
//! at a bound passes while what is beyond it does not; a field may be absent in both or in neither. Bounds and words are written once, where they are checked, wherever both can use them.
#![allow(dead_code)] // The derive alone reads the fields.

pub(crate) mod controls;
#[cfg(test)]
pub(crate) mod described;
mod items;
#[cfg(test)]
mod tests;
pub(crate) mod tools;

use schemars::JsonSchema;
use serde_json::{Map, Value};

use self::controls::{Metadata, Sampling, Stop};
use self::items::Input;
use self::tools::{Tool, ToolChoice};
use super::controls::TOP_LOGPROBS;
use super::request::{EFFORTS, SUMMARIES};

/// Words of which one may stand in a field, or null.
pub(crate) fn words(words: &[&str]) -> Value {
    words.iter().map(|word| Value::from(*word)).chain([Value::Null]).collect()
}

/// The body of `POST /v1/responses`. Fields that are not listed are ignored, and null is as good as absent.
#[derive(JsonSchema)]
pub struct CreateResponse {
    /// The name of the model; the server's first model when absent.
    model: Option<String>,
    /// The conversation: a text of the user's, or items. It may be absent where there are instructions.
    input: Option<Input>,
    /// What the system says before everything else.
    instructions: Option<String>,
    /// What the model may call.
    tools: Option<Vec<Tool>>,
    /// Whether and what it has to call.
    tool_choice: Option<ToolChoice>,
    /// False: at most one call.
    parallel_tool_calls: Option<bool>,
    /// Told again in the response.
    #[schemars(range(min = 1, max = i32::MAX))]
    max_tool_calls: Option<i64>,
    /// Server-sent events in the place of one object.
    stream: Option<bool>,
    /// How the stream is to be.
    stream_options: Option<StreamOptions>,
    /// The longest answer in tokens; up to the end of the window when absent.
    #[schemars(range(min = 1, max = i32::MAX))]
    max_output_tokens: Option<i64>,
    /// 0 takes the likeliest token.
    #[schemars(range(min = 0, max = 2))]
    temperature: Option<f64>,
    #[schemars(flatten)]
    sampling: Sampling,
    /// How many of the likeliest tokens are told beside each one.
    #[schemars(range(min = 0, max = TOP_LOGPROBS))]
    top_logprobs: Option<i64>,
    /// Texts that end the answer, without being part of it.
    stop: Option<Stop>,
    /// The form of the answer.
    text: Option<TextOptions>,
    /// How hard the model thinks, and what is shown of it.
    reasoning: Option<ReasoningOptions>,
    /// `auto` leaves the oldest turns out of a prompt that does not fit; else that is an error.
    #[schemars(extend("enum" = words(&["auto", "disabled"])))]
    truncation: Option<String>,
    /// What the response should hold besides.
    include: Option<Vec<Include>>,
    /// Up to 16 pairs that are told again in the response; `retention_seconds` is a number.
    metadata: Option<Metadata>,
    /// Told again in the response.
    prompt_cache_key: Option<String>,
    /// Has no effect.
    prompt_cache_retention: Option<String>,
    /// Has no effect.
    prompt_cache_options: Option<Map<String, Value>>,
    /// Has no effect.
    client_metadata: Option<Map<String, Value>>,
    /// Told again in the response.
    safety_identifier: Option<String>,
    /// Told again in the response.
    user: Option<String>,
    /// Has no effect.
    service_tier: Option<String>,
    /// Has no effect: nothing is kept.
    store: Option<bool>,
    /// Only false: the server answers while the client waits.
    #[schemars(extend("enum" = [false, null]))]
    background: Option<bool>,
    /// Not supported: the server keeps no responses.
    previous_response_id: Option<()>,
    /// Not supported: the server keeps no conversations.
    conversation: Option<()>,
    /// Not supported: the server keeps no prompt templates.
    prompt: Option<()>,
    /// `generation_mode` and `mtp_depth`, for clients that send them so; anything else in it has no effect.
    extra_body: Option<Value>,
}

/// How a stream is to be.
#[derive(JsonSchema)]
struct StreamOptions {
    /// Has no effect: nothing is padded.
    include_obfuscation: Option<bool>,
}

/// The form of the answer.
#[derive(JsonSchema)]
struct TextOptions {
    /// What the answer is held to.
    format: Option<FormatOptions>,
    /// Told again in the response.
    #[schemars(extend("enum" = words(&["low", "medium", "high"])))]
    verbosity: Option<String>,
}

/// What an answer is held to.
#[derive(JsonSchema)]
#[schemars(tag = "type", rename_all = "snake_case")]
enum FormatOptions {
    /// Nothing: plain text.
    Text,
    /// Any JSON object.
    JsonObject,
    /// JSON of a schema.
    JsonSchema {
        /// What the client calls it.
        #[schemars(regex(pattern = r"^[a-zA-Z0-9_-]{1,64}$"))]
        name: String,
        /// What it is for.
        description: Option<String>,
        /// A JSON schema.
        schema: Map<String, Value>,
        /// Told again in the response: every answer is held to its schema.
        strict: Option<bool>,
    },
    /// What a grammar allows.
    Grammar {
        /// What the grammar is written in.
        #[schemars(extend("enum" = ["regex", "lark"]))]
        syntax: String,
        /// The grammar.
        definition: String,
    },
}

/// How hard the model thinks.
#[derive(JsonSchema)]
struct ReasoningOptions {
    /// `none` turns thinking off; of the others, templates that have such a switch are told.
    #[schemars(extend("enum" = words(&EFFORTS)))]
    effort: Option<String>,
    /// Told again in the response.
    #[schemars(extend("enum" = words(&SUMMARIES)))]
    summary: Option<String>,
    /// The older name of `summary`.
    #[schemars(extend("enum" = words(&SUMMARIES)))]
    generate_summary: Option<String>,
}

/// What a response may hold besides; only the first two have an effect.
#[derive(JsonSchema)]
enum Include {
    /// Log probabilities of the answer's tokens.
    #[schemars(rename = "message.output_text.logprobs")]
    Logprobs,
    /// Thoughts, sealed.
    #[schemars(rename = "reasoning.encrypted_content")]
    Sealed,
    /// Of a hosted tool.
    #[schemars(rename = "file_search_call.results")]
    FileSearch,
    /// Of a hosted tool.
    #[schemars(rename = "web_search_call.results")]
    WebSearch,
    /// Of a hosted tool.
    #[schemars(rename = "web_search_call.action.sources")]
    WebSources,
    /// Of images in the input.
    #[schemars(rename = "message.input_image.image_url")]
    Images,
    /// Of a hosted tool.
    #[schemars(rename = "computer_call_output.output.image_url")]
    Screens,
    /// Of a hosted tool.
    #[schemars(rename = "code_interpreter_call.outputs")]
    CodeOutputs,
}
