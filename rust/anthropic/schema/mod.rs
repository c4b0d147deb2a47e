//! What a request for a message may hold, as types from which the OpenAPI document is made.
//!
//! As in [`crate::responses::schema`], nothing is ever read into these types: `request`, `conversation` and `blocks` read, and the tests hold the two
//! together.
#![allow(dead_code)] // The derive alone reads the fields.

mod blocks;
#[cfg(test)]
mod tests;

use schemars::JsonSchema;
use serde_json::{Map, Value};

use self::blocks::{AnthropicMessage, AnthropicText};
use super::request::{LEAST_BUDGET, TOOL_NAME, WORDS_FOR_EFFORT};
use crate::responses::request::STOPS;
use crate::responses::schema::controls::Sampling;
use crate::responses::schema::words;

/// The body of `POST /v1/messages`. Fields that are not listed are ignored, and null is as good as absent.
#[derive(JsonSchema)]
pub(crate) struct CreateMessage {
    /// The longest answer in tokens.
    #[schemars(range(min = 1, max = i32::MAX))]
    max_tokens: i64,
    #[schemars(flatten)]
    asked: Asked,
}

/// The body of `POST /v1/messages/count_tokens`. Fields that are not listed are ignored, and null is as good as absent.
#[derive(JsonSchema)]
pub(crate) struct CountMessageTokens {
    /// Has no effect on the count.
    #[schemars(range(min = 1, max = i32::MAX))]
    max_tokens: Option<i64>,
    #[schemars(flatten)]
    asked: Asked,
}

/// What both have.
#[derive(JsonSchema)]
struct Asked {
    /// The name of the model; the server's first model when absent.
    model: Option<String>,
    /// What the system says before everything else.
    system: Option<AnthropicText>,
    /// The conversation. Every use of a tool has exactly one result, in the message after it. From a last message of the assistant's the answer goes on; it
    /// must not end with a blank.
    #[schemars(length(min = 1))]
    messages: Vec<AnthropicMessage>,
    /// Server-sent events in the place of one message.
    stream: Option<bool>,
    /// 0 takes the likeliest token.
    #[schemars(range(min = 0, max = 1))]
    temperature: Option<f64>,
    #[schemars(flatten)]
    sampling: Sampling,
    /// Texts that end the answer, without being part of it.
    #[schemars(length(max = STOPS), inner(length(min = 1)))]
    stop_sequences: Option<Vec<String>>,
    /// What the model may call.
    tools: Option<Vec<AnthropicTool>>,
    /// Whether and what it has to call.
    tool_choice: Option<AnthropicToolChoice>,
    /// Whether the model thinks; it does not when this is absent.
    thinking: Option<AnthropicThinking>,
    /// How hard it thinks where it does, and the form of the answer.
    output_config: Option<AnthropicOutput>,
    /// The older place of `output_config.format`.
    output_format: Option<AnthropicFormat>,
    /// Has no effect.
    metadata: Option<AnthropicMetadata>,
    /// Has no effect: the first turns of a prompt are found again by what they are.
    prompt_cache_key: Option<String>,
}

/// What the client says of the request.
#[derive(JsonSchema)]
struct AnthropicMetadata {
    user_id: Option<String>,
}

/// Something that the model may call.
#[derive(JsonSchema)]
#[schemars(untagged)]
enum AnthropicTool {
    Own(AnthropicOwnTool),
    Other(AnthropicOtherTool),
}

/// A tool of the client's.
#[derive(JsonSchema)]
struct AnthropicOwnTool {
    #[schemars(extend("enum" = ["custom", null]))]
    r#type: Option<String>,
    #[schemars(regex(pattern = TOOL_NAME))]
    name: String,
    description: Option<String>,
    /// A JSON schema of its arguments.
    input_schema: Map<String, Value>,
    /// Whether arguments have to be of that schema.
    strict: Option<bool>,
}

/// A tool of a kind that is left out of the prompt, such as `web_search_20250305`, whatever else it holds.
#[derive(JsonSchema)]
struct AnthropicOtherTool {
    #[schemars(extend("not" = { "enum": ["custom", "function", "namespace"] }))]
    r#type: String,
}

/// Whether and what the model has to call.
#[derive(JsonSchema)]
#[schemars(untagged)]
enum AnthropicToolChoice {
    Mode(AnthropicMode),
    Named(AnthropicNamed),
}

/// It may call what it likes, or has to call one of the tools (`any`), or none.
#[derive(JsonSchema)]
struct AnthropicMode {
    #[schemars(extend("enum" = ["auto", "any", "none"]))]
    r#type: String,
    /// True: at most one use.
    disable_parallel_tool_use: Option<bool>,
}

/// This one, once.
#[derive(JsonSchema)]
struct AnthropicNamed {
    #[schemars(extend("const" = "tool"))]
    r#type: String,
    name: String,
    /// Has no effect.
    disable_parallel_tool_use: Option<bool>,
}

/// When the model thinks.
#[derive(JsonSchema)]
#[schemars(tag = "type", rename_all = "snake_case")]
enum AnthropicThinking {
    /// Always.
    Enabled {
        /// Has no effect: how many tokens it takes is not held to.
        #[schemars(range(min = LEAST_BUDGET, max = i32::MAX))]
        budget_tokens: i64,
    },
    /// Always: nothing is decided from case to case.
    Adaptive,
    /// Where it goes on from the results of tools.
    BetweenTools,
    /// Never.
    Disabled,
}

/// How hard the model thinks, and the form of the answer.
#[derive(JsonSchema)]
struct AnthropicOutput {
    /// Templates that have such a switch are told.
    #[schemars(extend("enum" = words(&WORDS_FOR_EFFORT)))]
    effort: Option<String>,
    /// What the answer is held to.
    format: Option<AnthropicFormat>,
}

/// What an answer is held to.
#[derive(JsonSchema)]
#[schemars(tag = "type", rename_all = "snake_case")]
enum AnthropicFormat {
    /// JSON of a schema.
    JsonSchema {
        /// A JSON schema.
        schema: Map<String, Value>,
    },
}
