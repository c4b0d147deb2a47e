//! A conversation as the doors hand it on, and the way from there to token ids.

use std::sync::{Arc, OnceLock};

use serde_json::{Map, Value};

use super::dialect::Dialect;
use super::{ChatTemplate, RenderInput, TemplateError, Tokenizer, TokenizerError, messages};
use crate::error::{Code, Error, Result};
use crate::text::Format;

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Who the model is to be. A `developer` speaks in this role.
    System,
    /// Whom it answers.
    User,
    /// The model itself.
    Assistant,
    /// What came of a call: as many of these follow a turn as it has calls, in their order.
    Tool,
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
            Self::Tool => "tool",
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
    /// What the assistant thought before.
    pub reasoning: String,
    /// What it called for after.
    pub calls: Vec<Call>,
}

/// A call of a tool in a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// The name that the template knows the tool by.
    pub name: String,
    /// JSON, where the model wrote JSON.
    pub arguments: String,
}

impl Turn {
    /// A turn of words alone.
    #[must_use]
    pub fn new(role: Role, text: impl Into<String>) -> Self {
        Self { role, text: text.into(), reasoning: String::new(), calls: Vec::new() }
    }

    /// Whether it is one of words alone, of a role that every template knows.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.role != Role::Tool && self.reasoning.is_empty() && self.calls.is_empty()
    }

    /// How many bytes of text it has, in all its parts.
    #[must_use]
    pub fn len(&self) -> usize {
        let calls: usize = self.calls.iter().map(|call| call.name.len() + call.arguments.len()).sum();
        self.text.len() + self.reasoning.len() + calls
    }

    /// Whether it has no text at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// How a conversation is written, beside its turns.
#[derive(Debug, Clone, Copy, Default)]
pub struct Writing<'a> {
    /// The tools that the model may call, in the form `{"type": "function", "function": {…}}`.
    pub tools: &'a [Value],
    /// The template's own switch; `None` leaves it as the template has it.
    pub enable_thinking: Option<bool>,
    /// How hard the model should think, for templates that ask.
    pub effort: Option<&'a str>,
    /// Text that the answer is made to begin with: appended as it is.
    pub prefill: &'a str,
}

/// A model's way from turns to ids: its chat template and its tokenizer.
#[derive(Debug, Clone)]
pub struct Prompter {
    tokenizer: Arc<Tokenizer>,
    /// How the model marks thoughts and calls, by its templates without and with tools.
    formats: [Format; 2],
    /// How these templates take what is no plain words; found out when it is needed first.
    dialects: Arc<[OnceLock<Dialect>; 2]>,
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
        let formats = [false, true].map(|tools| Format::of(tokenizer.template(tools).map_or("", ChatTemplate::source)));
        Ok(Self { tokenizer, formats, dialects: Arc::default() })
    }

    /// The tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The template for requests with or without tools.
    ///
    /// # Errors
    /// `server_error` when there is none, which [`Prompter::new`] rules out.
    pub fn template(&self, with_tools: bool) -> Result<&ChatTemplate> {
        self.tokenizer.template(with_tools).ok_or_else(|| Error::new(Code::ServerError, "the model has no chat template"))
    }

    /// How the model marks thoughts and calls.
    #[must_use]
    pub fn format(&self, with_tools: bool) -> Format {
        self.formats[usize::from(with_tools)]
    }

    /// The text of a conversation, up to where the model is to speak.
    ///
    /// # Errors
    /// `invalid_value` when the template takes the conversation in no form.
    pub fn text(&self, turns: &[Turn], writing: &Writing<'_>) -> Result<String> {
        let with_tools = !writing.tools.is_empty();
        let template = self.template(with_tools)?;
        let family = self.format(with_tools).family;
        let extra = extra(writing);
        let render = |messages: &[Value], tools: Option<&[Value]>| {
            messages::render(template, &RenderInput { messages, tools, add_generation_prompt: true, extra: &extra })
        };
        // A form that every template takes which takes a conversation at all. Templates for requests with tools may insist on a list of them.
        let plainly = || {
            let messages = Dialect::PLAIN.messages(turns, writing.tools, family);
            render(&messages, None).or_else(|error| render(&messages, Some(&[])).map_err(|_| error))
        };
        let mut text = if !with_tools && turns.iter().all(Turn::is_plain) {
            plainly()
        } else {
            let dialect = self.dialects[usize::from(with_tools)].get_or_init(|| Dialect::of(template, family));
            let tools = Some(writing.tools).filter(|tools| dialect.takes_tools() && !tools.is_empty());
            let first = turns.iter().find(|turn| turn.role != Role::System);
            if first.is_some_and(|turn| turn.role != Role::User) {
                // Templates with tools look for a user's turn at the start, and do not look well.
                plainly()
            } else {
                match render(&dialect.messages(turns, writing.tools, family), tools) {
                    Ok(text) if whole(&text, turns, tools.unwrap_or_default()) => Ok(text),
                    own => plainly().or(own),
                }
            }
        }
        .map_err(refused)?;
        text.push_str(writing.prefill);
        Ok(text)
    }
}

/// Whether a prompt has what templates lose without a word in conversations with tools: the tools (which some show beside a certain turn alone), the
/// system's words, and calls, each after what the user said before it.
fn whole(text: &str, turns: &[Turn], tools: &[Value]) -> bool {
    let mut names = tools.iter().filter_map(|tool| tool["function"]["name"].as_str());
    let mut rest = text;
    let after = |rest: &mut &str, word: &str| match rest.find(word) {
        Some(at) => {
            *rest = rest.get(at + word.len()..).unwrap_or_default();
            true
        }
        None => false,
    };
    names.all(|name| text.contains(name))
        && turns.iter().all(|turn| match turn.role {
            Role::System => text.contains(turn.text.trim()),
            Role::User => {
                // A template may write it differently.
                after(&mut rest, turn.text.trim());
                true
            }
            Role::Assistant => turn.calls.iter().all(|call| after(&mut rest, &call.name)),
            Role::Tool => true,
        })
}

/// The variables by which templates are told of thinking: under the names that they have for it.
fn extra(writing: &Writing<'_>) -> Map<String, Value> {
    let mut extra = Map::new();
    if let Some(enable) = writing.enable_thinking {
        extra.insert("enable_thinking".to_owned(), Value::from(enable));
        extra.insert("thinking".to_owned(), Value::from(enable));
        if !enable {
            extra.insert("thinking_budget".to_owned(), Value::from(0));
        }
    }
    if let Some(effort) = writing.effort {
        extra.insert("reasoning_effort".to_owned(), Value::from(effort));
    }
    extra
}

fn refused(error: TemplateError) -> Error {
    Error::parse(Code::InvalidValue, &error.to_string())
}

impl From<TokenizerError> for Error {
    fn from(error: TokenizerError) -> Self {
        Self::parse(Code::ModelLoadFailed, &error.to_string())
    }
}
