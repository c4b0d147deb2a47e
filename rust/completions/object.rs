//! A completion as one object, from the response that it is another form of.
//!
//! A response may have several messages and thoughts; a completion has one message, in which each is one text.

use schemars::JsonSchema;
use serde::Serialize;

use super::{FINISH_REASONS, INDEX, Wanted, finish_reason, id};
use crate::models::TokenLogprob;
use crate::responses::Response;
use crate::responses::input::join;
use crate::responses::item::{Item, Part};

/// A whole completion.
#[derive(Debug, JsonSchema, Serialize)]
#[schemars(rename = "ChatCompletion")]
pub struct Completion<'a> {
    id: String,
    #[schemars(extend("const" = "chat.completion"))]
    object: &'static str,
    /// When the request arrived, in seconds since 1970.
    created: u64,
    model: &'a str,
    choices: [Choice<'a>; 1],
    usage: Option<Usage>,
    /// Null: nothing here is called by it.
    system_fingerprint: (),
}

/// The answer.
#[derive(Debug, JsonSchema, Serialize)]
#[schemars(rename = "ChatChoice")]
struct Choice<'a> {
    #[schemars(extend("const" = INDEX))]
    index: usize,
    message: Message<'a>,
    logprobs: Option<Logprobs<'a>>,
    #[schemars(extend("enum" = FINISH_REASONS))]
    finish_reason: &'static str,
}

/// What the assistant says.
#[derive(Debug, JsonSchema, Serialize)]
#[schemars(rename = "ChatAnswer")]
struct Message<'a> {
    #[schemars(extend("const" = "assistant"))]
    role: &'static str,
    /// Null where the answer has no words.
    content: Option<String>,
    /// Null: what a model says of itself is content.
    refusal: (),
    /// What the model thought.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Call<'a>>,
}

/// A call of a tool.
#[derive(Debug, JsonSchema, Serialize)]
#[schemars(rename = "ChatAnswerCall")]
struct Call<'a> {
    id: &'a str,
    #[serde(flatten)]
    tool: Tool<'a>,
}

/// What is called, and with what.
#[derive(Debug, JsonSchema, Serialize)]
#[schemars(rename = "ChatAnswerTool")]
#[serde(tag = "type", rename_all = "snake_case")]
enum Tool<'a> {
    Function { function: Function<'a> },
    Custom { custom: Custom<'a> },
}

/// A function that the client is to call, with arguments in JSON.
#[derive(Debug, JsonSchema, Serialize)]
#[schemars(rename = "ChatAnswerFunction")]
struct Function<'a> {
    name: &'a str,
    arguments: &'a str,
}

/// A tool of the client's that takes a text.
#[derive(Debug, JsonSchema, Serialize)]
#[schemars(rename = "ChatAnswerCustom")]
struct Custom<'a> {
    name: &'a str,
    input: &'a str,
}

/// The tokens of words.
#[derive(Debug, Clone, JsonSchema, Serialize)]
#[schemars(rename = "ChatLogprobs")]
pub(super) struct Logprobs<'a> {
    pub(super) content: Vec<&'a TokenLogprob>,
    /// Null: see the message.
    pub(super) refusal: (),
}

/// How many tokens there were.
#[derive(Debug, Clone, Copy, JsonSchema, Serialize)]
#[schemars(rename = "ChatUsage")]
pub(super) struct Usage {
    prompt_tokens: usize,
    completion_tokens: u32,
    total_tokens: usize,
    prompt_tokens_details: PromptDetails,
    completion_tokens_details: CompletionDetails,
}

/// Where the prompt's tokens came from.
#[derive(Debug, Clone, Copy, JsonSchema, Serialize)]
#[schemars(rename = "ChatPromptDetails")]
struct PromptDetails {
    cached_tokens: usize,
}

/// What the answer's tokens were for.
#[derive(Debug, Clone, Copy, JsonSchema, Serialize)]
#[schemars(rename = "ChatCompletionDetails")]
struct CompletionDetails {
    reasoning_tokens: u32,
}

impl Usage {
    pub(super) fn of(response: &Response) -> Option<Self> {
        response.usage.as_ref().map(|usage| Self {
            prompt_tokens: usage.input_tokens,
            completion_tokens: usage.output_tokens,
            total_tokens: usage.total_tokens,
            prompt_tokens_details: PromptDetails { cached_tokens: usage.input_tokens_details.cached_tokens },
            completion_tokens_details: CompletionDetails { reasoning_tokens: usage.output_tokens_details.reasoning_tokens },
        })
    }
}

impl<'a> Completion<'a> {
    /// The completion that a finished response is.
    #[must_use]
    pub fn new(response: &'a Response, wanted: Wanted) -> Self {
        let mut message = Message { role: "assistant", content: None, refusal: (), reasoning_content: None, tool_calls: Vec::new() };
        let mut tokens = Vec::new();
        for item in &response.output {
            match item {
                Item::Reasoning(thoughts) => {
                    for part in thoughts.summary.iter().chain(thoughts.content.iter().flatten()) {
                        if let Part::SummaryText(part) | Part::ReasoningText(part) = part {
                            add(&mut message.reasoning_content, &part.text);
                        }
                    }
                }
                Item::Message(words) => {
                    for part in &words.content {
                        if let Part::OutputText(part) = part {
                            add(&mut message.content, &part.text);
                            tokens.extend(&part.logprobs);
                        }
                    }
                }
                Item::FunctionCall(call) => {
                    let function = Function { name: &call.name, arguments: &call.arguments };
                    message.tool_calls.push(Call { id: &call.call_id, tool: Tool::Function { function } });
                }
                Item::CustomToolCall(call) => {
                    let custom = Custom { name: &call.name, input: &call.input };
                    message.tool_calls.push(Call { id: &call.call_id, tool: Tool::Custom { custom } });
                }
            }
        }
        let logprobs = (wanted.logprobs && message.content.is_some()).then_some(Logprobs { content: tokens, refusal: () });
        Self {
            id: id(response),
            object: "chat.completion",
            created: response.created_at,
            model: &response.model,
            choices: [Choice { index: INDEX, message, logprobs, finish_reason: finish_reason(response) }],
            usage: Usage::of(response),
            system_fingerprint: (),
        }
    }
}

/// Adds a text to what there is.
fn add(to: &mut Option<String>, text: &str) {
    match to {
        Some(already) => join(already, text),
        None => *to = Some(text.to_owned()),
    }
}
