//! A conversation as the doors hand it on, and the way from there to token ids.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::{RenderInput, TemplateError, Tokenizer, TokenizerError, messages};
use crate::error::{Code, Error, Result};

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Who the model is to be. A `developer` speaks in this role.
    System,
    /// Whom it answers.
    User,
    /// The model itself.
    Assistant,
}

impl Role {
    /// The role with this name on a wire: `system`, `developer`, `user`, `assistant`.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "system" | "developer" => Some(Self::System),
            "user" => Some(Self::User),
            "assistant" => Some(Self::Assistant),
            _ => None,
        }
    }

    /// The name that templates know.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
        }
    }
}

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    /// Who speaks.
    pub role: Role,
    /// What is said.
    pub text: String,
}

/// A model's way from turns to ids: its chat template and its tokenizer.
#[derive(Debug, Clone)]
pub struct Prompter {
    tokenizer: Arc<Tokenizer>,
}

impl Prompter {
    /// The prompter of a tokenizer that has a chat template.
    ///
    /// # Errors
    /// `model_load_failed` when it has none.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Result<Self> {
        if tokenizer.template(false).is_none() {
            return Err(Error::new(Code::ModelLoadFailed, "the model has no chat template: it continues text, but does not converse")
                .hint("use an instruct model, or put its chat_template.jinja into the model folder"));
        }
        Ok(Self { tokenizer })
    }

    /// The tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The text of a conversation, up to where the model is to speak, with `prefill` appended as it is. `enable_thinking` is the template's own switch;
    /// `None` leaves it as the template has it.
    ///
    /// # Errors
    /// `invalid_value` when the template takes the conversation in no form.
    pub fn text(&self, turns: &[Turn], enable_thinking: Option<bool>, prefill: &str) -> Result<String> {
        let messages: Vec<Value> = turns.iter().map(|turn| json!({"role": turn.role.name(), "content": turn.text})).collect();
        let mut extra = Map::new();
        if let Some(enable) = enable_thinking {
            extra.insert("enable_thinking".to_owned(), Value::from(enable));
        }
        let Some(template) = self.tokenizer.template(false) else {
            return Err(Error::new(Code::ServerError, "the model has no chat template"));
        };
        let input = RenderInput { messages: &messages, tools: None, add_generation_prompt: true, extra: &extra };
        let mut text = messages::render(template, &input).map_err(refused)?;
        text.push_str(prefill);
        Ok(text)
    }
}

fn refused(error: TemplateError) -> Error {
    Error::parse(Code::InvalidValue, &error.to_string())
}

impl From<TokenizerError> for Error {
    fn from(error: TokenizerError) -> Self {
        Self::parse(Code::ModelLoadFailed, &error.to_string())
    }
}
