//! A loaded model: turns in, text out.
//!
//! How it came to be loaded is `hosted`'s; what its answers are made of is `answer`'s.

use std::sync::Arc;

use crate::engine::port::{Capabilities, Engine, Phase};
use crate::engine::{Client, Constraint, Place, Request, Reuse, Sampling};
use crate::error::{Code, Error, Result};
use crate::grammar::{Compiler, Grammar};
use crate::models::answer::Answer;
use crate::models::prompt::{Prompt, PromptOptions};
use crate::models::sampling::Defaults;
use crate::prompt::{Prompter, Turn, Writing};
use crate::text::decode::Visible;
use crate::text::{Format, Parser};

/// A loaded model.
pub struct Model {
    /// The name it is served under.
    pub id: String,
    /// What its engine can do.
    pub capabilities: Arc<Capabilities>,
    /// Sampling that its makers recommend.
    pub defaults: Defaults,
    /// Its engine.
    pub engine: Engine,
    prompter: Prompter,
    grammars: Arc<Compiler>,
    /// The special tokens that mark thoughts and calls, for requests without and with tools.
    visible: [Visible; 2],
}

/// What is asked of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Ask {
    /// How many tokens may be made, at least one.
    pub max_tokens: u32,
    /// `None`: plain greedy decoding.
    pub sampling: Option<Sampling>,
    /// How many ids ahead the engine may guess: 0 none, `None` as many as it thinks best.
    pub speculation: Option<u32>,
    /// What the answer may say; `None` anything.
    pub constraint: Option<Constraint>,
    /// The answer ends at the earliest of these.
    pub stop: Vec<String>,
    /// Whether the stop string itself is part of the answer.
    pub include_stop: bool,
    /// What is kept of prompts and answers is shared by requests of the same salt alone.
    pub salt: Arc<str>,
}

impl Model {
    pub(super) fn new(id: String, prompter: Prompter, engine: Engine, capabilities: Arc<Capabilities>, defaults: Defaults) -> Self {
        let grammars = Arc::new(Compiler::new(Arc::clone(prompter.tokenizer()), Arc::clone(&capabilities)));
        let detokeniser = prompter.tokenizer().detokeniser();
        let visible = [false, true].map(|tools| detokeniser.specials(&prompter.format(tools).marks()));
        Self { id, capabilities, defaults, engine, prompter, grammars, visible }
    }

    pub(super) fn alive(&self) -> bool {
        matches!(&*self.engine.phase().borrow(), Phase::Ready(_))
    }

    /// The token ids of a conversation, ready for an answer. Costs some 50 µs for a short one and grows with its length.
    ///
    /// # Errors
    /// `invalid_value` when the model's template refuses the conversation; `context_length_exceeded` when its text alone says that it cannot fit, so
    /// that a text of megabytes is not tokenised to be refused.
    pub fn prompt(&self, turns: &[Turn], options: &PromptOptions) -> Result<Prompt> {
        let text = self.text(turns, options)?;
        let PromptOptions { tools, signatures, .. } = options;
        let (least, window) = (self.prompter.tokenizer().at_least(&text), self.capabilities.context_length);
        if least > window as usize {
            return Err(self.too_long(&format!("at least {least}")));
        }
        let ids = self.prompter.tokenizer().encode(&text, false).map_err(|error| Error::new(Code::ServerError, error.to_string()))?;
        let with_tools = !tools.is_empty();
        let parser = Parser::of(self.prompter.format(with_tools), Arc::clone(signatures), &text);
        Ok(Prompt { ids, parser, visible: Arc::clone(&self.visible[usize::from(with_tools)]) })
    }

    /// The text of a conversation, up to where the model is to speak.
    ///
    /// # Errors
    /// `invalid_value` when the model's template refuses the conversation.
    pub fn text(&self, turns: &[Turn], options: &PromptOptions) -> Result<String> {
        let PromptOptions { enable_thinking, prefill, effort, tools, .. } = options;
        let prefill = prefill.as_deref().unwrap_or_default();
        self.prompter.text(turns, &Writing { tools, enable_thinking: *enable_thinking, effort: *effort, prefill })
    }

    /// How it marks thoughts and calls, in requests with or without tools.
    #[must_use]
    pub fn format(&self, with_tools: bool) -> Format {
        self.prompter.format(with_tools)
    }

    /// The special tokens among these marks.
    pub(super) fn special(&self, marks: &[&str]) -> Visible {
        self.prompter.tokenizer().detokeniser().specials(marks)
    }

    /// What an answer may say that keeps to this grammar. The first request under a grammar waits until it is compiled, beside the thread that serves the sockets.
    ///
    /// # Errors
    /// As [`Compiler::constraint`].
    pub async fn constraint(&self, grammar: Grammar) -> Result<Constraint> {
        self.grammars.constraint(grammar).await
    }

    /// What compiles its grammars.
    pub(crate) fn grammars(&self) -> &Arc<Compiler> {
        &self.grammars
    }

    /// How many tokens an answer to a prompt of this length can have.
    ///
    /// # Errors
    /// `context_length_exceeded` when not even one fits.
    pub fn room(&self, prompt_tokens: usize) -> Result<u32> {
        let window = self.capabilities.context_length;
        let left = u32::try_from(prompt_tokens).ok().and_then(|prompt| window.checked_sub(prompt)).unwrap_or(0);
        if left == 0 {
            return Err(self.too_long(&prompt_tokens.to_string()));
        }
        Ok(left)
    }

    fn too_long(&self, tokens: &str) -> Error {
        let window = self.capabilities.context_length;
        let what = format!("the prompt has {tokens} tokens, but the window is {window} for prompt and answer together");
        Error::new(Code::ContextLengthExceeded, what).hint("shorten the input")
    }

    /// Queues a prompt of this client and gives its answer as a stream of text. Dropping the stream cancels it.
    ///
    /// # Errors
    /// As [`Engine::submit`].
    pub fn answer(&self, client: Client, prompt: Vec<u32>, ask: Ask) -> Result<Answer> {
        self.answer_at(self.engine.place(client)?, prompt, ask)
    }

    /// As [`Model::answer`], in a place that has been held for it.
    ///
    /// # Errors
    /// As [`Place::submit`].
    pub fn answer_at(&self, place: Place, prompt: Vec<u32>, ask: Ask) -> Result<Answer> {
        let Ask { max_tokens, sampling, constraint, speculation, stop, include_stop, salt } = ask;
        let reuse = Reuse { salt, ..Reuse::default() };
        let generation = place.submit(Request { prompt, max_tokens, sampling, constraint, speculation, reuse })?;
        Ok(Answer::new(generation, self.prompter.tokenizer(), stop, include_stop))
    }

    /// As [`Model::answer_at`], with thoughts and calls told apart from words. The answer ends after `most_calls` calls.
    ///
    /// # Errors
    /// As [`Place::submit`].
    pub fn converse(&self, place: Place, prompt: Prompt, ask: Ask, most_calls: Option<u32>) -> Result<Answer> {
        let Prompt { ids, parser, visible } = prompt;
        let answer = self.answer_at(place, ids, ask)?;
        Ok(match parser {
            Some(parser) => answer.parsed(parser, visible, most_calls),
            None => answer,
        })
    }
}
