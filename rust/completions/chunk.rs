//! A completion as chunks, from the events of the response that it is another form of.
//!
//! The first chunk says who speaks, the last one with a choice why it ended; in between each says what an event of the response adds.

use schemars::JsonSchema;
use serde::Serialize;

use super::object::{Logprobs, Usage};
use super::{FINISH_REASONS, INDEX, Wanted, finish_reason, id, in_terms};
use crate::error::Error;
use crate::models::TokenLogprob;
use crate::responses::input::BETWEEN_TURNS;
use crate::responses::item::Item;
use crate::responses::schema::words;
use crate::responses::{Event, Response};

/// The head that all chunks of a completion have, and how far it is.
#[derive(Debug)]
pub struct Chunks {
    id: String,
    created: u64,
    model: String,
    wanted: Wanted,
    /// Whether there have been words, and thoughts.
    words: bool,
    thoughts: bool,
    /// The calls so far.
    calls: usize,
}

/// What is said next.
#[derive(Debug)]
pub enum Said<'a> {
    /// A chunk.
    Chunk(&'a Chunk<'a>),
    /// It failed, and nothing follows.
    Failed(&'a Error),
    /// It is whole, and nothing follows.
    Done,
}

/// A chunk of a completion.
#[derive(Debug, JsonSchema, Serialize)]
#[schemars(rename = "ChatCompletionChunk")]
pub struct Chunk<'a> {
    id: &'a str,
    #[schemars(extend("const" = "chat.completion.chunk"))]
    object: &'static str,
    /// When the request arrived, in seconds since 1970.
    created: u64,
    model: &'a str,
    system_fingerprint: (),
    /// None beside the usage.
    choices: &'a [Choice<'a>],
    /// Absent unless it was asked for; then null until the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
}

/// The answer, as far as this chunk has it.
#[derive(Debug, JsonSchema, Serialize)]
#[schemars(rename = "ChatChunkChoice")]
struct Choice<'a> {
    #[schemars(extend("const" = INDEX))]
    index: usize,
    delta: Delta<'a>,
    logprobs: Option<Logprobs<'a>>,
    /// Null until the last.
    #[schemars(extend("enum" = words(&FINISH_REASONS)))]
    finish_reason: Option<&'static str>,
}

/// What a chunk adds to the message.
#[derive(Debug, Default, JsonSchema, Serialize)]
#[schemars(rename = "ChatDelta")]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("const" = "assistant"))]
    role: Option<&'static str>,
    /// Null beside the role: whether there will be words is not known yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<Option<&'a str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[CallDelta<'a>; 1]>,
}

/// What a chunk adds to one call. Its id, type and name come with the first.
#[derive(Debug, Default, JsonSchema, Serialize)]
#[schemars(rename = "ChatCallDelta")]
struct CallDelta<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["function", "custom"]))]
    r#type: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    function: Option<FunctionDelta<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    custom: Option<CustomDelta<'a>>,
}

/// More of a call of a function.
#[derive(Debug, JsonSchema, Serialize)]
#[schemars(rename = "ChatFunctionDelta")]
struct FunctionDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

/// More of a call of a tool that takes a text.
#[derive(Debug, JsonSchema, Serialize)]
#[schemars(rename = "ChatCustomDelta")]
struct CustomDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    input: &'a str,
}

impl Chunks {
    /// The chunks of the completion that this response, which has not begun, becomes.
    #[must_use]
    pub fn new(response: &Response, wanted: Wanted) -> Self {
        Self {
            id: id(response),
            created: response.created_at,
            model: response.model.clone(),
            wanted,
            words: false,
            thoughts: false,
            calls: 0,
        }
    }

    /// Says in chunks what an event says.
    pub fn tell(&mut self, event: Event<'_>, mut tell: impl FnMut(Said<'_>)) {
        match event {
            Event::Created { .. } => {
                self.delta(Delta { role: Some("assistant"), content: Some(None), ..Delta::default() }, &mut tell);
            }
            Event::ItemAdded { item, .. } => self.item(item, &mut tell),
            Event::TextDelta { delta, logprobs, .. } => self.text(delta, logprobs, &mut tell),
            // An answer without anything has words all the same: none.
            Event::TextDone { text: "", logprobs, .. } if !self.words => self.text("", logprobs, &mut tell),
            Event::SummaryDelta { delta, .. } | Event::ReasoningDelta { delta, .. } => {
                self.thoughts = true;
                self.delta(Delta { reasoning_content: Some(delta), ..Delta::default() }, &mut tell);
            }
            Event::ArgumentsDelta { delta, .. } => {
                let function = Some(FunctionDelta { name: None, arguments: delta });
                self.call(CallDelta { function, ..CallDelta::default() }, &mut tell);
            }
            Event::InputDelta { delta, .. } => {
                let custom = Some(CustomDelta { name: None, input: delta });
                self.call(CallDelta { custom, ..CallDelta::default() }, &mut tell);
            }
            Event::Completed { response, .. } | Event::Incomplete { response, .. } => self.end(response, &mut tell),
            Event::Failed { response, .. } => {
                if let Some(failure) = &response.error {
                    tell(Said::Failed(&in_terms(failure.cause.clone())));
                }
            }
            _ => {}
        }
    }

    /// What a new item adds by itself: the beginning of a call, and what parts its text from that of an earlier one.
    fn item(&mut self, item: &Item, tell: &mut impl FnMut(Said<'_>)) {
        match item {
            Item::Message(_) if self.words => {
                self.delta(Delta { content: Some(Some(BETWEEN_TURNS)), ..Delta::default() }, tell);
            }
            Item::Reasoning(_) if self.thoughts => {
                self.delta(Delta { reasoning_content: Some(BETWEEN_TURNS), ..Delta::default() }, tell);
            }
            Item::FunctionCall(call) => {
                self.calls += 1;
                let function = Some(FunctionDelta { name: Some(&call.name), arguments: "" });
                let begun = CallDelta { id: Some(&call.call_id), r#type: Some("function"), function, ..CallDelta::default() };
                self.call(begun, tell);
            }
            Item::CustomToolCall(call) => {
                self.calls += 1;
                let custom = Some(CustomDelta { name: Some(&call.name), input: "" });
                let begun = CallDelta { id: Some(&call.call_id), r#type: Some("custom"), custom, ..CallDelta::default() };
                self.call(begun, tell);
            }
            Item::Message(_) | Item::Reasoning(_) => {}
        }
    }

    fn text(&mut self, delta: &str, logprobs: &[TokenLogprob], tell: &mut impl FnMut(Said<'_>)) {
        self.words = true;
        let logprobs = self.wanted.logprobs.then(|| Logprobs { content: logprobs.iter().collect(), refusal: () });
        self.choice(Delta { content: Some(Some(delta)), ..Delta::default() }, logprobs, None, tell);
    }

    /// Adds to the last call.
    fn call(&self, call: CallDelta<'_>, tell: &mut impl FnMut(Said<'_>)) {
        let call = CallDelta { index: self.calls.saturating_sub(1), ..call };
        self.delta(Delta { tool_calls: Some([call]), ..Delta::default() }, tell);
    }

    fn delta(&self, delta: Delta<'_>, tell: &mut impl FnMut(Said<'_>)) {
        self.choice(delta, None, None, tell);
    }

    fn choice(
        &self,
        delta: Delta<'_>,
        logprobs: Option<Logprobs<'_>>,
        finish_reason: Option<&'static str>,
        tell: &mut impl FnMut(Said<'_>),
    ) {
        self.chunk(&[Choice { index: INDEX, delta, logprobs, finish_reason }], None, tell);
    }

    fn chunk(&self, choices: &[Choice<'_>], usage: Option<Usage>, tell: &mut impl FnMut(Said<'_>)) {
        tell(Said::Chunk(&Chunk {
            id: &self.id,
            object: "chat.completion.chunk",
            created: self.created,
            model: &self.model,
            system_fingerprint: (),
            choices,
            usage: self.wanted.usage.then_some(usage),
        }));
    }

    fn end(&self, response: &Response, tell: &mut impl FnMut(Said<'_>)) {
        self.choice(Delta::default(), None, Some(finish_reason(response)), tell);
        if self.wanted.usage
            && let Some(usage) = Usage::of(response)
        {
            self.chunk(&[], Some(usage), tell);
        }
        tell(Said::Done);
    }
}
