//! The events of a response become those of a message: which follows which is decided in [`crate::responses::stream`], and only what they are called, and
//! what they carry, is different here.
//!
//! How the bytes are framed is the door's business.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::value::RawValue;

use super::error::Envelope;
use super::message::{Block, Message, Stop, Usage, signature};
use crate::error::{Code, Error, Result};
use crate::responses;
use crate::responses::Running;
use crate::responses::item::Item;

/// An event, as it goes out.
#[derive(JsonSchema, Serialize)]
#[schemars(rename = "AnthropicEvent")]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum Event<'a> {
    MessageStart {
        #[schemars(with = "Message<'_>")]
        message: &'a RawValue,
    },
    ContentBlockStart {
        index: usize,
        content_block: Block<'a>,
    },
    ContentBlockDelta {
        index: usize,
        delta: Delta<'a>,
    },
    ContentBlockStop {
        index: usize,
    },
    Ping,
    MessageDelta {
        delta: Stop<'a>,
        usage: Usage,
    },
    MessageStop,
    // The envelope says itself what it is.
    #[serde(untagged)]
    Error(Envelope<'a>),
}

/// What a block has more of.
#[derive(JsonSchema, Serialize)]
#[schemars(rename = "AnthropicDelta")]
#[serde(tag = "type")]
pub(crate) enum Delta<'a> {
    #[serde(rename = "text_delta")]
    Text { text: &'a str },
    #[serde(rename = "input_json_delta")]
    Input { partial_json: &'a str },
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: &'a str },
    #[serde(rename = "signature_delta")]
    Signature { signature: &'a str },
}

impl Event<'_> {
    /// Its `type`.
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::MessageStart { .. } => "message_start",
            Self::ContentBlockStart { .. } => "content_block_start",
            Self::ContentBlockDelta { .. } => "content_block_delta",
            Self::ContentBlockStop { .. } => "content_block_stop",
            Self::Ping => "ping",
            Self::MessageDelta { .. } => "message_delta",
            Self::MessageStop => "message_stop",
            Self::Error(_) => "error",
        }
    }
}

/// The message that an answer becomes, as far as it has been told.
pub(crate) struct Stream {
    start: Box<RawValue>,
    request_id: String,
    /// The block that is told of, or the next one.
    index: usize,
    /// Whether it has begun.
    open: bool,
    /// Whether clients have been shown that there are pings.
    pinged: bool,
}

impl Stream {
    /// The message of an answer that has not said anything yet.
    ///
    /// # Errors
    /// `server_error` when its beginning cannot be written, which nothing in it can bring about.
    pub(crate) fn new(running: &Running, request_id: String) -> Result<Self> {
        let message = Message::begun(running.response(), running.usage().as_ref());
        let start = serde_json::value::to_raw_value(&message)
            .map_err(|error| Error::new(Code::ServerError, "the message could not be written").detail(error.to_string()))?;
        Ok(Self { start, request_id, index: 0, open: false, pinged: false })
    }

    /// Tells what an event of the response is here: none, one or several.
    pub(crate) fn event(&mut self, event: responses::Event<'_>, mut tell: impl FnMut(Event<'_>)) {
        use responses::Event as Of;
        match event {
            Of::Created { .. } => tell(Event::MessageStart { message: &self.start }),
            Of::ItemAdded { item: Item::Reasoning(_), .. } => self.begin(Block::Thinking { thinking: "", signature: "" }, &mut tell),
            Of::ItemAdded { item: Item::FunctionCall(call), .. } => self.begin(Block::called(call), &mut tell),
            Of::TextDelta { delta, .. } => {
                // A message that says nothing is no block, so one begins with its first word.
                if !self.open {
                    self.begin(Block::Text { text: "" }, &mut tell);
                }
                self.more(Delta::Text { text: delta }, &mut tell);
            }
            Of::SummaryDelta { delta, .. } | Of::ReasoningDelta { delta, .. } => {
                self.more(Delta::Thinking { thinking: delta }, &mut tell);
            }
            Of::ArgumentsDelta { delta, .. } => self.more(Delta::Input { partial_json: delta }, &mut tell),
            Of::ItemDone { item, .. } if self.open => {
                if let Item::Reasoning(item) = item {
                    self.more(Delta::Signature { signature: signature(item) }, &mut tell);
                }
                tell(Event::ContentBlockStop { index: self.index });
                self.open = false;
                self.index += 1;
            }
            Of::Completed { response, .. } | Of::Incomplete { response, .. } => {
                let usage = response.usage.as_ref().map(Usage::of).unwrap_or_default();
                tell(Event::MessageDelta { delta: Stop::of(response), usage });
                tell(Event::MessageStop);
            }
            Of::Failed { response, .. } => {
                if let Some(failure) = &response.error {
                    tell(Event::Error(Envelope::of(&failure.cause, &self.request_id)));
                }
            }
            // What these say has been said, or is said by the end of the block.
            _ => {}
        }
    }

    fn begin(&mut self, block: Block<'_>, tell: &mut impl FnMut(Event<'_>)) {
        self.open = true;
        tell(Event::ContentBlockStart { index: self.index, content_block: block });
        if !std::mem::replace(&mut self.pinged, true) {
            tell(Event::Ping);
        }
    }

    fn more(&self, delta: Delta<'_>, tell: &mut impl FnMut(Event<'_>)) {
        tell(Event::ContentBlockDelta { index: self.index, delta });
    }
}
