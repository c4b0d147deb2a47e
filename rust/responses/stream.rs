//! From text to events: the one place where the order of events, their numbers and the state of the response are decided.
//!
//! Both forms of an answer come from here: a client that does not stream gets the object that the last event would have carried.

use super::event::{Event, Sink};
use super::item::{Item, ItemStatus, Message, Part, Text};
use super::object::{Failure, Incomplete, Response, Status, Usage};
use crate::error::Error;
use crate::models::{Ending, TokenLogprob};

/// The only item of an answer in text, and its only part.
const INDEX: usize = 0;

/// A response as it comes about.
#[derive(Debug)]
pub struct Stream {
    response: Response,
    message_id: String,
    next: u64,
    over: bool,
}

impl Stream {
    /// A response that has not said anything yet. `message_id` is the id its message will have.
    #[must_use]
    pub fn new(response: impl Into<Response>, message_id: String) -> Self {
        Self { response: response.into(), message_id, next: 0, over: false }
    }

    /// Says that the request has been taken.
    pub fn begin(&mut self, sink: &mut impl Sink) {
        // Nothing in a response can fail to be written: its maps have strings for keys.
        let Ok(response) = serde_json::value::to_raw_value(&self.response) else { return };
        let [created, in_progress] = [self.number(), self.number()];
        sink.event(Event::Created { sequence_number: created, response: &response });
        sink.event(Event::InProgress { sequence_number: in_progress, response: &response });
    }

    /// Adds text, with its tokens where they were asked for. An empty one says nothing.
    pub fn text(&mut self, delta: &str, logprobs: &[TokenLogprob], sink: &mut impl Sink) {
        if delta.is_empty() || self.over {
            return;
        }
        self.open(sink);
        let sequence_number = self.number();
        let Some(Item::Message(message)) = self.response.output.get_mut(INDEX) else { return };
        if let Some(Part::OutputText(part)) = message.content.get_mut(INDEX) {
            part.text.push_str(delta);
            part.logprobs.extend_from_slice(logprobs);
        }
        sink.event(Event::TextDelta { sequence_number, item_id: &message.id, output_index: INDEX, content_index: INDEX, delta, logprobs });
    }

    /// Ends the response as the answer ended, at `now` seconds since 1970. An answer without text has a message all the same.
    pub fn end(&mut self, ending: Ending, usage: Option<Usage>, now: u64, sink: &mut impl Sink) {
        if self.over {
            return;
        }
        self.open(sink);
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

    /// Announces the message and its part, unless that is done.
    fn open(&mut self, sink: &mut impl Sink) {
        if !self.response.output.is_empty() {
            return;
        }
        let [item, part] = [self.number(), self.number()];
        let id = std::mem::take(&mut self.message_id);
        let message = Message { id, status: ItemStatus::InProgress, role: "assistant", content: Vec::new() };
        self.response.output.push(Item::Message(message));
        let Some(added) = self.response.output.get(INDEX) else { return };
        sink.event(Event::ItemAdded { sequence_number: item, output_index: INDEX, item: added });
        let Some(Item::Message(message)) = self.response.output.get_mut(INDEX) else { return };
        message.content.push(Part::OutputText(Text::default()));
        if let Some(added) = message.content.get(INDEX) {
            sink.event(Event::PartAdded {
                sequence_number: part,
                item_id: &message.id,
                output_index: INDEX,
                content_index: INDEX,
                part: added,
            });
        }
    }

    /// Closes what is open, from the inside out.
    fn close(&mut self, status: ItemStatus, sink: &mut impl Sink) {
        let Some(Item::Message(message)) = self.response.output.get_mut(INDEX) else { return };
        message.status = status;
        let [text_done, part_done, item_done] = [self.number(), self.number(), self.number()];
        let Some(item @ Item::Message(message)) = self.response.output.get(INDEX) else { return };
        if let Some(part @ Part::OutputText(Text { text, logprobs, .. })) = message.content.get(INDEX) {
            let (item_id, output_index, content_index) = (message.id.as_str(), INDEX, INDEX);
            sink.event(Event::TextDone { sequence_number: text_done, item_id, output_index, content_index, text, logprobs });
            sink.event(Event::PartDone { sequence_number: part_done, item_id, output_index, content_index, part });
        }
        sink.event(Event::ItemDone { sequence_number: item_done, output_index: INDEX, item });
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
