//! What becomes of a conversation on its way to an engine: how it is to be written, and the ids that it is then.
//!
//! Making one of the other is the model's work, in `hosted`.

use std::sync::Arc;

use crate::models::loaded::Model;
use crate::text::decode::Visible;
use crate::text::{Format, Parser, Signatures};

/// How turns become a prompt.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PromptOptions {
    /// The template's own switch; `None` leaves it unset.
    pub enable_thinking: Option<bool>,
    /// Text that the answer is made to begin with: appended as it is to the rendered prompt.
    pub prefill: Option<String>,
    /// How hard the model should think, for templates that ask.
    pub effort: Option<&'static str>,
    /// The tools that the model may call, as templates know them.
    pub tools: Arc<[serde_json::Value]>,
    /// The same, as its calls are read.
    pub signatures: Arc<Signatures>,
}

/// A conversation as token ids.
#[derive(Debug)]
pub struct Prompt {
    /// At least one.
    pub ids: Vec<u32>,
    /// What tells thoughts, words and calls of the answer apart; `None` where there are only words.
    pub(super) parser: Option<Parser>,
    /// The special tokens that it has to see.
    pub(super) visible: Visible,
}

impl Prompt {
    /// Words of the answer are of a form: thoughts and calls come before them, and what is in them is theirs.
    pub fn take_as_leading(&mut self) {
        self.parser = self.parser.take().map(Parser::leading);
    }

    /// All of the answer is words, whatever it looks like.
    pub fn take_as_words(&mut self) {
        self.parser = None;
    }

    /// All of the answer is calls in the form of Hermes, however the model writes them else.
    pub fn take_as_calls(&mut self, model: &Model, tools: &Arc<Signatures>) {
        let format = Format::of("");
        self.parser = Parser::of(format, Arc::clone(tools), "");
        self.visible = model.special(&format.marks());
    }
}
