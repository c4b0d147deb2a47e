//! The events of a streamed response, each exactly as it goes out.
//!
//! Which event follows which, and its number, is decided in `stream`; how the bytes are framed is the door's business.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::value::RawValue;

use super::item::{Item, Part};
use super::object::Response;
use crate::models::TokenLogprob;

/// An event. Everything in it is borrowed: the text of an answer is never copied to be announced. The first two carry the same response, which
/// is written once for both: they are what a client waits for.
#[derive(Debug, Clone, Copy, JsonSchema, Serialize)]
#[serde(tag = "type")]
#[allow(missing_docs)] // The names and the fields are those of the API.
pub enum Event<'a> {
    #[serde(rename = "response.created")]
    Created {
        sequence_number: u64,
        #[schemars(with = "Response")]
        response: &'a RawValue,
    },
    #[serde(rename = "response.in_progress")]
    InProgress {
        sequence_number: u64,
        #[schemars(with = "Response")]
        response: &'a RawValue,
    },
    #[serde(rename = "response.completed")]
    Completed { sequence_number: u64, response: &'a Response },
    #[serde(rename = "response.incomplete")]
    Incomplete { sequence_number: u64, response: &'a Response },
    #[serde(rename = "response.failed")]
    Failed { sequence_number: u64, response: &'a Response },
    #[serde(rename = "response.output_item.added")]
    ItemAdded { sequence_number: u64, output_index: usize, item: &'a Item },
    #[serde(rename = "response.output_item.done")]
    ItemDone { sequence_number: u64, output_index: usize, item: &'a Item },
    #[serde(rename = "response.content_part.added")]
    PartAdded { sequence_number: u64, item_id: &'a str, output_index: usize, content_index: usize, part: &'a Part },
    #[serde(rename = "response.content_part.done")]
    PartDone { sequence_number: u64, item_id: &'a str, output_index: usize, content_index: usize, part: &'a Part },
    #[serde(rename = "response.output_text.delta")]
    TextDelta {
        sequence_number: u64,
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        delta: &'a str,
        logprobs: &'a [TokenLogprob],
    },
    #[serde(rename = "response.output_text.done")]
    TextDone {
        sequence_number: u64,
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        text: &'a str,
        logprobs: &'a [TokenLogprob],
    },
    #[serde(rename = "response.reasoning_summary_part.added")]
    SummaryAdded { sequence_number: u64, item_id: &'a str, output_index: usize, summary_index: usize, part: &'a Part },
    #[serde(rename = "response.reasoning_summary_part.done")]
    SummaryPartDone { sequence_number: u64, item_id: &'a str, output_index: usize, summary_index: usize, part: &'a Part },
    #[serde(rename = "response.reasoning_summary_text.delta")]
    SummaryDelta { sequence_number: u64, item_id: &'a str, output_index: usize, summary_index: usize, delta: &'a str },
    #[serde(rename = "response.reasoning_summary_text.done")]
    SummaryDone { sequence_number: u64, item_id: &'a str, output_index: usize, summary_index: usize, text: &'a str },
    #[serde(rename = "response.reasoning_text.delta")]
    ReasoningDelta { sequence_number: u64, item_id: &'a str, output_index: usize, content_index: usize, delta: &'a str },
    #[serde(rename = "response.reasoning_text.done")]
    ReasoningDone { sequence_number: u64, item_id: &'a str, output_index: usize, content_index: usize, text: &'a str },
    #[serde(rename = "response.function_call_arguments.delta")]
    ArgumentsDelta { sequence_number: u64, item_id: &'a str, output_index: usize, delta: &'a str },
    #[serde(rename = "response.function_call_arguments.done")]
    ArgumentsDone { sequence_number: u64, item_id: &'a str, output_index: usize, name: &'a str, arguments: &'a str },
    #[serde(rename = "response.custom_tool_call_input.delta")]
    InputDelta { sequence_number: u64, item_id: &'a str, output_index: usize, delta: &'a str },
    #[serde(rename = "response.custom_tool_call_input.done")]
    InputDone { sequence_number: u64, item_id: &'a str, output_index: usize, input: &'a str },
}

impl Event<'_> {
    /// Its `type`.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Created { .. } => "response.created",
            Self::InProgress { .. } => "response.in_progress",
            Self::Completed { .. } => "response.completed",
            Self::Incomplete { .. } => "response.incomplete",
            Self::Failed { .. } => "response.failed",
            Self::ItemAdded { .. } => "response.output_item.added",
            Self::ItemDone { .. } => "response.output_item.done",
            Self::PartAdded { .. } => "response.content_part.added",
            Self::PartDone { .. } => "response.content_part.done",
            Self::TextDelta { .. } => "response.output_text.delta",
            Self::TextDone { .. } => "response.output_text.done",
            Self::SummaryAdded { .. } => "response.reasoning_summary_part.added",
            Self::SummaryPartDone { .. } => "response.reasoning_summary_part.done",
            Self::SummaryDelta { .. } => "response.reasoning_summary_text.delta",
            Self::SummaryDone { .. } => "response.reasoning_summary_text.done",
            Self::ReasoningDelta { .. } => "response.reasoning_text.delta",
            Self::ReasoningDone { .. } => "response.reasoning_text.done",
            Self::ArgumentsDelta { .. } => "response.function_call_arguments.delta",
            Self::ArgumentsDone { .. } => "response.function_call_arguments.done",
            Self::InputDelta { .. } => "response.custom_tool_call_input.delta",
            Self::InputDone { .. } => "response.custom_tool_call_input.done",
        }
    }

    /// Whether nothing follows it.
    #[must_use]
    pub const fn terminal(&self) -> bool {
        matches!(self, Self::Completed { .. } | Self::Incomplete { .. } | Self::Failed { .. })
    }
}

/// Takes the events of one response in order.
pub trait Sink {
    /// Takes one event.
    fn event(&mut self, event: Event<'_>);
}

/// Nobody follows the events: only the finished response is wanted.
#[derive(Debug, Clone, Copy)]
pub struct Unheard;

impl Sink for Unheard {
    fn event(&mut self, _: Event<'_>) {}
}
