//! From what a parser told apart to events: the one place where the order of events, their numbers and the state of the response are decided.
//!
//! Both forms of an answer come from here: a client that does not stream gets the object that the last event would have carried. One item is open at a
//! time; it is closed before the next begins, so items close in the order of their indices.

use std::sync::Arc;

use super::custom::Arguments;
use super::event::{Event, Sink};
use super::ids::Ids;
use super::item::{CustomToolCall, FunctionCall, Item, ItemStatus, Message, Part, Reasoning, Text, Thoughts};
use super::object::{Failure, Incomplete, Response, Status, Usage};
use super::sealed::Seal;
use super::told::log;
use super::tools::Tools;
use crate::error::Error;
use crate::models::{Ending, Piece, TokenLogprob};
use crate::text::Kind;

/// The only part of an item.
const INDEX: usize = 0;

/// How thoughts go out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum ReasoningEvents {
    /// As a summary, which every client shows.
    #[default]
    Summary,
    /// As the text that they are.
    Text,
}

/// A response as it comes about.
#[derive(Debug)]
pub struct Stream {
    response: Response,
    ids: Ids,
    thoughts: ReasoningEvents,
    /// What seals thoughts, where that was asked for.
    seal: Option<Seal>,
    tools: Arc<Tools>,
    next: u64,
    /// Whether the last item may still grow.
    open: bool,
    /// The arguments of a call of a tool that takes a text, which is in them.
    arguments: Arguments,
    over: bool,
}

impl Stream {
    /// A response that has not said anything yet.
    #[must_use]
    pub fn new(response: impl Into<Response>, ids: Ids, thoughts: ReasoningEvents, tools: Arc<Tools>) -> Self {
        let response = response.into();
        Self { response, ids, thoughts, seal: None, tools, next: 0, open: false, arguments: Arguments::default(), over: false }
    }

    /// The same, whose thoughts are sealed besides.
    #[must_use]
    pub fn sealing(mut self, seal: Option<Seal>) -> Self {
        self.seal = seal;
        self
    }

    /// Says that the request has been taken.
    pub fn begin(&mut self, sink: &mut impl Sink) {
        // Nothing in a response can fail to be written: its maps have strings for keys.
        let Ok(response) = serde_json::value::to_raw_value(&self.response) else { return };
        let [created, in_progress] = [self.number(), self.number()];
        sink.event(Event::Created { sequence_number: created, response: &response });
        sink.event(Event::InProgress { sequence_number: in_progress, response: &response });
    }

    /// Adds a piece of the answer.
    pub fn piece(&mut self, piece: Piece<'_>, sink: &mut impl Sink) {
        if self.over {
            return;
        }
        match piece.kind {
            Kind::Text => self.text(piece.text, piece.logprobs, sink),
            Kind::Reasoning => self.thought(piece.text, sink),
            Kind::Call => self.call(piece.text, sink),
            Kind::Arguments => self.more(piece.text, sink),
            Kind::End { whole } => self.close(if whole { ItemStatus::Completed } else { ItemStatus::Incomplete }, sink),
        }
    }

    /// Adds text, with its tokens where they were asked for. An empty one says nothing.
    pub fn text(&mut self, delta: &str, logprobs: &[TokenLogprob], sink: &mut impl Sink) {
        if delta.is_empty() || self.over {
            return;
        }
        self.message(sink);
        let sequence_number = self.number();
        let output_index = self.index();
        let Some(Item::Message(message)) = self.response.output.last_mut() else { return };
        if let Some(Part::OutputText(part)) = message.content.get_mut(INDEX) {
            part.text.push_str(delta);
            part.logprobs.extend_from_slice(logprobs);
        }
        sink.event(Event::TextDelta { sequence_number, item_id: &message.id, output_index, content_index: INDEX, delta, logprobs });
    }

    /// Adds to the model's thoughts.
    fn thought(&mut self, delta: &str, sink: &mut impl Sink) {
        if !(self.open && matches!(self.response.output.last(), Some(Item::Reasoning(_)))) {
            self.reasoning(sink);
        }
        let sequence_number = self.number();
        let output_index = self.index();
        let Some(Item::Reasoning(item)) = self.response.output.last_mut() else { return };
        if let Some(Part::SummaryText(part) | Part::ReasoningText(part)) =
            item.summary.iter_mut().chain(item.content.iter_mut().flatten()).next()
        {
            part.text.push_str(delta);
        }
        let item_id = item.id.as_str();
        sink.event(match self.thoughts {
            ReasoningEvents::Summary => Event::SummaryDelta { sequence_number, item_id, output_index, summary_index: INDEX, delta },
            ReasoningEvents::Text => Event::ReasoningDelta { sequence_number, item_id, output_index, content_index: INDEX, delta },
        });
    }

    /// Begins a call of the tool that the template knows under this name.
    fn call(&mut self, flat: &str, sink: &mut impl Sink) {
        let (id, call_id) = (self.ids.next(""), self.ids.next("call_"));
        let (name, namespace, custom) = self.tools.named(flat);
        let (name, namespace) = (name.to_owned(), namespace.map(str::to_owned));
        let status = ItemStatus::InProgress;
        self.arguments = Arguments::default();
        self.add(
            if custom {
                Item::CustomToolCall(CustomToolCall { id: format!("ctc_{id}"), status, call_id, name, namespace, input: String::new() })
            } else {
                Item::FunctionCall(FunctionCall { id: format!("fc_{id}"), status, call_id, name, namespace, arguments: String::new() })
            },
            sink,
        );
    }

    /// Adds to the arguments of a call.
    fn more(&mut self, delta: &str, sink: &mut impl Sink) {
        let output_index = self.index();
        match self.response.output.last_mut() {
            Some(Item::FunctionCall(call)) => {
                let sequence_number = self.next;
                self.next += 1;
                call.arguments.push_str(delta);
                sink.event(Event::ArgumentsDelta { sequence_number, item_id: &call.id, output_index, delta });
            }
            Some(Item::CustomToolCall(call)) => {
                let told = call.input.len();
                self.arguments.more(delta, &mut call.input);
                if let Some(delta) = call.input.get(told..).filter(|delta| !delta.is_empty()) {
                    let sequence_number = self.next;
                    self.next += 1;
                    sink.event(Event::InputDelta { sequence_number, item_id: &call.id, output_index, delta });
                }
            }
            _ => {}
        }
    }

    /// Says which stop string is about to end the response.
    pub fn stopped_by(&mut self, stop: Option<&str>) {
        self.response.stopped_by = stop.map(str::to_owned);
    }

    /// Ends the response as the answer ended, at `now` seconds since 1970. An answer without anything has a message all the same.
    pub fn end(&mut self, ending: Ending, usage: Option<Usage>, now: u64, sink: &mut impl Sink) {
        if self.over {
            return;
        }
        if self.response.output.is_empty() {
            self.message(sink);
        }
        self.response.usage = usage;
        match ending {
            Ending::Stop | Ending::StopString => {
                self.close(ItemStatus::Completed, sink);
                self.response.status = Status::Completed;
                self.response.completed_at = Some(now);
            }
            Ending::Length => {
                self.close(ItemStatus::Incomplete, sink);
                self.response.status = Status::Incomplete;
                self.response.incomplete_details = Some(Incomplete { reason: "max_output_tokens" });
            }
        }
        self.terminate(sink);
    }

    /// Ends the response with an error. What has been said so far stays in it.
    pub fn fail(&mut self, error: &Error, usage: Option<Usage>, sink: &mut impl Sink) {
        if self.over {
            return;
        }
        self.response.usage = usage;
        self.close(ItemStatus::Incomplete, sink);
        self.response.status = Status::Failed;
        self.response.error = Some(Failure::from(error));
        self.terminate(sink);
    }

    /// Whether the last event has gone out.
    #[must_use]
    pub fn over(&self) -> bool {
        self.over
    }

    /// The response as it is now.
    #[must_use]
    pub fn response(&self) -> &Response {
        &self.response
    }

    /// The next sequence number: dense, from 0, over all events of the response.
    fn number(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        number
    }

    /// The index of the last item.
    fn index(&self) -> usize {
        self.response.output.len().saturating_sub(1)
    }

    /// Closes the open item and announces another.
    fn add(&mut self, item: Item, sink: &mut impl Sink) {
        self.close(ItemStatus::Completed, sink);
        let sequence_number = self.number();
        self.response.output.push(item);
        self.open = true;
        let output_index = self.index();
        let Some(item) = self.response.output.last() else { return };
        sink.event(Event::ItemAdded { sequence_number, output_index, item });
    }

    /// Announces a message and its part, unless one is open.
    fn message(&mut self, sink: &mut impl Sink) {
        if self.open && matches!(self.response.output.last(), Some(Item::Message(_))) {
            return;
        }
        let id = self.ids.next("msg_");
        self.add(Item::Message(Message { id, status: ItemStatus::InProgress, role: "assistant", content: Vec::new() }), sink);
        let sequence_number = self.number();
        let output_index = self.index();
        let Some(Item::Message(message)) = self.response.output.last_mut() else { return };
        message.content.push(Part::OutputText(Text::default()));
        if let Some(part) = message.content.get(INDEX) {
            let (item_id, content_index) = (message.id.as_str(), INDEX);
            sink.event(Event::PartAdded { sequence_number, item_id, output_index, content_index, part });
        }
    }

    /// Announces thoughts and their part.
    fn reasoning(&mut self, sink: &mut impl Sink) {
        let id = self.ids.next("rs_");
        let content = (self.thoughts == ReasoningEvents::Text).then(Vec::new);
        let status = ItemStatus::InProgress;
        self.add(Item::Reasoning(Reasoning { id, status, summary: Vec::new(), content, encrypted_content: None }), sink);
        let sequence_number = self.number();
        let output_index = self.index();
        let Some(Item::Reasoning(item)) = self.response.output.last_mut() else { return };
        let item_id = item.id.as_str();
        match &mut item.content {
            None => {
                item.summary.push(Part::SummaryText(Thoughts::default()));
                let Some(part) = item.summary.last() else { return };
                sink.event(Event::SummaryAdded { sequence_number, item_id, output_index, summary_index: INDEX, part });
            }
            Some(content) => {
                content.push(Part::ReasoningText(Thoughts::default()));
                let Some(part) = content.last() else { return };
                sink.event(Event::PartAdded { sequence_number, item_id, output_index, content_index: INDEX, part });
            }
        }
    }

    /// Closes what is open, from the inside out.
    fn close(&mut self, status: ItemStatus, sink: &mut impl Sink) {
        if !std::mem::take(&mut self.open) {
            return;
        }
        let output_index = self.index();
        let next = &mut self.next;
        let mut number = || {
            let number = *next;
            *next += 1;
            number
        };
        let Some(item) = self.response.output.last_mut() else { return };
        item.settle(status);
        let mut told = 0;
        match item {
            Item::CustomToolCall(call) => {
                told = call.input.len();
                self.arguments.end(&mut call.input);
            }
            Item::Reasoning(thoughts) => thoughts.encrypted_content = sealed(self.seal.as_ref(), thoughts.text()),
            _ => {}
        }
        let item = &*item;
        let item_id = item.id();
        match item {
            Item::Message(message) => {
                if let Some(part @ Part::OutputText(Text { text, logprobs, .. })) = message.content.get(INDEX) {
                    let content_index = INDEX;
                    sink.event(Event::TextDone { sequence_number: number(), item_id, output_index, content_index, text, logprobs });
                    sink.event(Event::PartDone { sequence_number: number(), item_id, output_index, content_index, part });
                }
            }
            Item::Reasoning(thoughts) => {
                let part = thoughts.summary.iter().chain(thoughts.content.iter().flatten()).next();
                match part {
                    Some(part @ Part::SummaryText(Thoughts { text })) => {
                        let summary_index = INDEX;
                        sink.event(Event::SummaryDone { sequence_number: number(), item_id, output_index, summary_index, text });
                        sink.event(Event::SummaryPartDone { sequence_number: number(), item_id, output_index, summary_index, part });
                    }
                    Some(part @ Part::ReasoningText(Thoughts { text })) => {
                        let content_index = INDEX;
                        sink.event(Event::ReasoningDone { sequence_number: number(), item_id, output_index, content_index, text });
                        sink.event(Event::PartDone { sequence_number: number(), item_id, output_index, content_index, part });
                    }
                    _ => {}
                }
            }
            Item::FunctionCall(FunctionCall { name, arguments, .. }) => {
                sink.event(Event::ArgumentsDone { sequence_number: number(), item_id, output_index, name, arguments });
            }
            Item::CustomToolCall(CustomToolCall { input, .. }) => {
                if let Some(delta) = input.get(told..).filter(|delta| !delta.is_empty()) {
                    sink.event(Event::InputDelta { sequence_number: number(), item_id, output_index, delta });
                }
                sink.event(Event::InputDone { sequence_number: number(), item_id, output_index, input });
            }
        }
        sink.event(Event::ItemDone { sequence_number: number(), output_index, item });
    }

    fn terminate(&mut self, sink: &mut impl Sink) {
        self.over = true;
        let sequence_number = self.number();
        let response = &self.response;
        sink.event(match response.status {
            Status::Completed => Event::Completed { sequence_number, response },
            Status::Incomplete => Event::Incomplete { sequence_number, response },
            Status::InProgress | Status::Failed => Event::Failed { sequence_number, response },
        });
    }
}

/// Thoughts, sealed where that was asked for. Where it cannot be done the client has them unsealed alone, and the log says so.
fn sealed(seal: Option<&Seal>, text: &str) -> Option<String> {
    seal?.seal(text).inspect_err(log).ok()
}
