//! The items of an output: thoughts, messages, and calls of tools, each as it stands in events and in the response.
//!
//! When they come about and change is decided in `stream`.

use schemars::JsonSchema;
use serde::Serialize;

use crate::models::TokenLogprob;

/// How far an output item is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ItemStatus {
    /// It grows.
    InProgress,
    /// It is whole.
    Completed,
    /// It was cut short.
    Incomplete,
}

/// An item of the output.
#[derive(Debug, Clone, JsonSchema, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Item {
    /// What the model thought.
    Reasoning(Reasoning),
    /// What the assistant says.
    Message(Message),
    /// A function that the client is to call.
    FunctionCall(FunctionCall),
    /// A tool of the client's that takes a text.
    CustomToolCall(CustomToolCall),
}

impl Item {
    /// Its id.
    #[must_use]
    pub fn id(&self) -> &str {
        match self {
            Self::Reasoning(item) => &item.id,
            Self::Message(item) => &item.id,
            Self::FunctionCall(item) => &item.id,
            Self::CustomToolCall(item) => &item.id,
        }
    }

    pub(crate) fn settle(&mut self, status: ItemStatus) {
        *match self {
            Self::Reasoning(item) => &mut item.status,
            Self::Message(item) => &mut item.status,
            Self::FunctionCall(item) => &mut item.status,
            Self::CustomToolCall(item) => &mut item.status,
        } = status;
    }
}

/// A message of the assistant: at most one part of text.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Message {
    /// `msg_…`, the same in every event and in the response.
    pub id: String,
    /// How far it is.
    pub status: ItemStatus,
    /// Always the assistant's.
    #[schemars(extend("const" = "assistant"))]
    pub role: &'static str,
    /// Its parts: none when it is announced, one from the moment that is announced.
    pub content: Vec<Part>,
}

/// What the model thought, as a summary or as content.
#[derive(Debug, Clone, JsonSchema, Serialize)]
#[schemars(rename = "ReasoningItem")]
pub struct Reasoning {
    /// `rs_…`.
    pub id: String,
    /// How far it is.
    pub status: ItemStatus,
    /// The thoughts, where they go out as a summary.
    pub summary: Vec<Part>,
    /// The thoughts, where they go out as they are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<Vec<Part>>,
    /// The thoughts, sealed: once they are whole, where that was asked for. Where it was not, the field must not be there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encrypted_content: Option<String>,
}

impl Reasoning {
    /// The thoughts so far.
    #[must_use]
    pub fn text(&self) -> &str {
        match self.summary.iter().chain(self.content.iter().flatten()).next() {
            Some(Part::SummaryText(part) | Part::ReasoningText(part)) => &part.text,
            _ => "",
        }
    }
}

/// A call of a function.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct FunctionCall {
    /// `fc_…`.
    pub id: String,
    /// How far it is.
    pub status: ItemStatus,
    /// `call_…`, by which its output will name it.
    pub call_id: String,
    /// The function.
    pub name: String,
    /// The namespace that it is in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// JSON, so far.
    pub arguments: String,
}

/// A call of a tool that takes a text.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct CustomToolCall {
    /// `ctc_…`.
    pub id: String,
    /// How far it is.
    pub status: ItemStatus,
    /// `call_…`, by which its output will name it.
    pub call_id: String,
    /// The tool.
    pub name: String,
    /// The namespace that it is in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The text.
    pub input: String,
}

/// A part of a message or of thoughts.
#[derive(Debug, Clone, JsonSchema, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Part {
    /// Text.
    OutputText(Text),
    /// Thoughts as a summary.
    SummaryText(Thoughts),
    /// Thoughts as they are.
    ReasoningText(Thoughts),
}

/// A part of text.
#[derive(Debug, Clone, Default, JsonSchema, Serialize)]
#[schemars(rename = "OutputText")]
pub struct Text {
    /// Always empty: nothing is cited.
    pub annotations: [(); 0],
    /// The tokens of the text, where they were asked for.
    pub logprobs: Vec<TokenLogprob>,
    /// The text so far.
    pub text: String,
}

/// A part of thoughts.
#[derive(Debug, Clone, Default, JsonSchema, Serialize)]
pub struct Thoughts {
    /// The thoughts so far.
    pub text: String,
}
