//! Chat templates: a Jinja source compiled once, and rendered for every request to the very text that transformers' `apply_chat_template` gives.
//!
//! The environment is Jinja2's immutable sandbox with `trim_blocks` and `lstrip_blocks`; `prompt::builtins` and `prompt::python` hold what a
//! template can call. Rendering is bounded: a template that loops or recurses without end runs out of fuel. Which template a model has is
//! decided in `prompt::tokenizer`; making turns fit a strict template is done in `prompt::messages`.

use jiff::ZonedDateTime;
use jiff::civil::DateTime;
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};
use serde_json::Map;

use super::builtins::{self, Raised};

/// Instructions, or units of 64 bytes of text, that one render may cost: some seconds of work and 1 GB of text at the very most. A turn costs a real
/// template some hundred; one that grows its prompt by concatenation copies it for every turn, which for 600 turns of 1,300 bytes needs 8 to 16
/// million.
const FUEL: u64 = 16_000_000;

/// The longest accepted template source, in bytes. Real ones end near 30 kB.
const MAX_SOURCE: usize = 4 << 20;

/// Why a template gave no prompt.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The source is not a template: a syntax error.
    #[error("chat template does not compile: {0}\nhint: the model's chat_template is broken, or uses a tag that Jinja2 does not have")]
    Compile(String),
    /// The template itself refused the conversation with `raise_exception(message)`.
    #[error("chat template refuses the conversation: {0}")]
    Raised(String),
    /// Rendering failed: an undefined value, a wrong type, an endless loop.
    #[error("chat template failed while rendering: {0}\nhint: the conversation has a form that this model's template does not expect")]
    Render(String),
}

/// The tokens a template may name. A token that the model lacks is undefined in the template, as in transformers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Specials {
    /// `bos_token`.
    pub bos_token: Option<String>,
    /// `eos_token`.
    pub eos_token: Option<String>,
    /// `pad_token`.
    pub pad_token: Option<String>,
    /// `unk_token`.
    pub unk_token: Option<String>,
}

/// One conversation to render.
#[derive(Clone, Copy, Debug)]
pub struct RenderInput<'a> {
    /// The turns, each an object with at least `role` and `content`.
    pub messages: &'a [serde_json::Value],
    /// Tool definitions in the form `{"type": "function", "function": {…}}`. `None` is Python's `None`, as when no tools are given.
    pub tools: Option<&'a [serde_json::Value]>,
    /// Whether the prompt ends with the opening of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Further variables, such as `enable_thinking`. They win over the special tokens and over `documents`, not over the fields above.
    pub extra: &'a Map<String, serde_json::Value>,
}

/// A compiled chat template. Rendering takes `&self` and keeps nothing, so one template serves all threads at once.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    specials: Vec<(&'static str, Value)>,
    source: String,
}

const NAME: &str = "chat_template";

impl ChatTemplate {
    /// Compiles `source`. `strftime_now` gives local time.
    ///
    /// # Errors
    /// [`TemplateError::Compile`] when `source` is not a template or is larger than 4 MiB.
    pub fn new(source: impl Into<String>, specials: Specials) -> Result<Self, TemplateError> {
        let source = source.into();
        if source.len() > MAX_SOURCE {
            return Err(TemplateError::Compile(format!("the source is {} bytes long, over {MAX_SOURCE}", source.len())));
        }
        let mut env = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        env.set_syntax(syntax.map_err(|error| compile_error(&error))?);
        env.set_auto_escape_callback(|_| AutoEscape::None);
        env.set_fuel(Some(FUEL));
        // Line numbers are kept without it; what it adds is a copy of all variables in each error.
        env.set_debug(false);
        builtins::install(&mut env);
        builtins::install_clock(&mut env, || ZonedDateTime::now().datetime());
        env.add_template_owned(NAME, super::source::rewrite(&source)).map_err(|error| compile_error(&error))?;
        let Specials { bos_token, eos_token, pad_token, unk_token } = specials;
        let specials = [("bos_token", bos_token), ("eos_token", eos_token), ("pad_token", pad_token), ("unk_token", unk_token)]
            .into_iter()
            .filter_map(|(name, token)| token.map(|token| (name, Value::from(token))))
            .collect();
        Ok(Self { env, specials, source })
    }

    /// The same template with a clock that stands at `now`: `strftime_now` then always gives the same text.
    #[must_use]
    pub fn with_fixed_time(mut self, now: DateTime) -> Self {
        builtins::install_clock(&mut self.env, move || now);
        self
    }

    /// The source, as it was given.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders one conversation.
    ///
    /// # Errors
    /// [`TemplateError::Raised`] when the template calls `raise_exception`, [`TemplateError::Render`] when it fails in any other way or takes
    /// too long.
    pub fn render(&self, input: &RenderInput<'_>) -> Result<String, TemplateError> {
        let list = |items: &[serde_json::Value]| Value::from(items.iter().map(to_value).collect::<Vec<_>>());
        let own = [
            ("messages", list(input.messages)),
            ("tools", input.tools.map_or_else(|| Value::from(()), list)),
            ("add_generation_prompt", Value::from(input.add_generation_prompt)),
        ];
        let specials = self.specials.iter().map(|(name, token)| (*name, token.clone()));
        let extra = input.extra.iter().map(|(name, value)| (name.as_str(), to_value(value)));
        let context = Value::from_pairs([("documents", Value::from(()))].into_iter().chain(specials).chain(extra).chain(own));
        let template = self.env.get_template(NAME).map_err(|error| compile_error(&error))?;
        template.render(context).map_err(|error| render_error(&error))
    }
}

/// A JSON value as a template sees it: objects keep their order, numbers stay integers or floats, `null` is `None`.
pub(super) fn to_value(value: &serde_json::Value) -> Value {
    match value {
        serde_json::Value::Null => Value::from(()),
        serde_json::Value::Bool(value) => Value::from(*value),
        serde_json::Value::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(value), _) => Value::from(value),
            (None, Some(value)) => Value::from(value),
            (None, None) => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        serde_json::Value::String(text) => Value::from(text.as_str()),
        serde_json::Value::Array(items) => Value::from(items.iter().map(to_value).collect::<Vec<_>>()),
        serde_json::Value::Object(fields) => Value::from_pairs(fields.iter().map(|(name, value)| (name.as_str(), to_value(value)))),
    }
}

fn compile_error(error: &Error) -> TemplateError {
    TemplateError::Compile(one_line(error))
}

fn render_error(error: &Error) -> TemplateError {
    // A refusal inside a macro or an include comes wrapped in further errors.
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(found) = cause {
        if let Some(Raised(message)) = found.downcast_ref() {
            return TemplateError::Raised(message.clone());
        }
        cause = found.source();
    }
    if error.kind() == ErrorKind::OutOfFuel {
        return TemplateError::Render("it does not come to an end".to_owned());
    }
    TemplateError::Render(one_line(error))
}

/// The innermost cause and the line it happened in.
fn one_line(error: &Error) -> String {
    let line = error.line().map_or_else(String::new, |line| format!(" (line {line})"));
    let detail = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    format!("{detail}{line}")
}
