//! What a client may ask for: every field read, checked and, where this server does not do it, refused by its name.
//!
//! Nothing here loads a model or waits for anything; what a model adds (its window, its own sampling) comes later, in `answer`.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

use super::format::Format;
use super::sealed::Seal;
use super::tools::Tools;
use super::validate::{At, NAME};
use super::{controls, input, tools};
use crate::error::{Code, Error, Result};
use crate::json;
use crate::models::Controls;
use crate::prompt::Turn;

/// The most stop strings of one request.
pub(crate) const STOPS: usize = 16;
/// The most metadata pairs, and the longest key and value, in characters.
pub(super) const METADATA: (usize, usize, usize) = (16, 64, 512);
/// `metadata.retention_seconds`: a minute to ninety days.
pub(super) const RETENTION: std::ops::RangeInclusive<i64> = 60..=7_776_000;
/// The longest `cache_salt`, in bytes.
pub(super) const SALT: usize = 256;
/// How much a model says unless told otherwise.
const MEDIUM: &str = "medium";
/// How hard a model may be told to think.
pub(crate) const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];
/// How thoughts may be summed up.
pub(super) const SUMMARIES: [&str; 3] = ["auto", "concise", "detailed"];
/// The additional output that asks for sealed thoughts.
const SEALED: &str = "reasoning.encrypted_content";

/// A request that has been checked from end to end.
#[derive(Debug, Clone)]
pub struct Request {
    /// The model asked for; `None` is the default one.
    pub model: Option<String>,
    /// The conversation.
    pub turns: Vec<Turn>,
    /// Text that the answer is made to begin with; not part of what comes back.
    pub prefill: Option<String>,
    /// The tools that the model may call.
    pub tools: Arc<Tools>,
    /// Whether events are wanted, or one object.
    pub stream: bool,
    /// The longest answer, in tokens.
    pub max_output_tokens: Option<u32>,
    /// The longest answer that the server gives, in tokens, whatever is asked for; the request does not say it.
    pub most_tokens: Option<u32>,
    /// How it is to be sampled.
    pub controls: Controls,
    /// How many ids ahead the engine may guess: 0 none, `None` as many as it thinks best.
    pub speculation: Option<u32>,
    /// Texts that end the answer, without being part of it.
    pub stop: Vec<String>,
    /// What is kept of prompts is shared by requests of the same salt alone; the empty one stands for none.
    pub salt: Arc<str>,
    /// Whether the oldest turns may be left out when the prompt does not fit.
    pub truncation: Truncation,
    /// What seals the thoughts of the answer, where the client asks for that.
    pub seal: Option<Seal>,
    /// What the response repeats.
    pub echo: Echo,
}

/// What happens to a prompt that does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Truncation {
    /// The oldest turns are left out.
    Auto,
    /// It is an error.
    Disabled,
}

/// How hard a model should think, and what of it is shown.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, JsonSchema, Serialize)]
pub struct Reasoning {
    /// `none` is off.
    #[schemars(extend("enum" = super::schema::words(&EFFORTS)))]
    pub effort: Option<&'static str>,
    /// How thoughts are summed up.
    #[schemars(extend("enum" = super::schema::words(&SUMMARIES)))]
    pub summary: Option<&'static str>,
}

impl Reasoning {
    /// The template's own switch: off for `none`, on for every other effort, untouched without one.
    #[must_use]
    pub fn thinking(&self) -> Option<bool> {
        self.effort.map(|effort| effort != "none")
    }
}

/// The fields of a request that its response repeats.
#[derive(Debug, Clone)]
#[allow(missing_docs)] // Each is the field of that name in the request.
pub struct Echo {
    pub instructions: Option<String>,
    pub max_tool_calls: Option<i64>,
    pub metadata: Map<String, Value>,
    pub parallel_tool_calls: bool,
    pub prompt_cache_key: Option<String>,
    pub reasoning: Reasoning,
    pub safety_identifier: Option<String>,
    pub tool_choice: Value,
    pub tools: Vec<Value>,
    pub user: Option<String>,
    pub format: Format,
    pub verbosity: &'static str,
}

impl Request {
    /// Reads the body of a request, by a server that has sealed nothing before.
    ///
    /// # Errors
    /// As [`Request::read`].
    pub fn from_json(body: &[u8]) -> Result<Self> {
        Self::read(body, &Seal::default())
    }

    /// Reads the body of a request. `seal`: what opens the thoughts that it brings back, and seals those of the answer.
    ///
    /// # Errors
    /// `invalid_json` for what is no JSON or cannot be read, or what is wrong with the first field at fault, with its path.
    pub fn read(body: &[u8], seal: &Seal) -> Result<Self> {
        Self::checked(&At::root(&value(body)?), seal, NAME)
    }

    /// Reads what would be the body of a request. `longest`: the most characters of a function's name.
    pub(crate) fn checked(root: &At<'_, '_>, seal: &Seal, longest: usize) -> Result<Self> {
        root.object()?;
        refuse(root)?;
        let string = |key| root.get(key).map(|at| at.string().map(str::to_owned)).transpose();
        let instructions = string("instructions")?;
        let turns = input::turns(instructions.as_deref(), root.get("input"), root, seal)?;
        let tools::Read { tools, echo, choice } = tools::read(root, longest)?;
        let (format, verbosity) = text(root)?;
        Ok(Self {
            model: string("model")?,
            turns,
            prefill: None,
            tools: Arc::new(tools),
            stream: flag(root, "stream")?.unwrap_or(false),
            max_output_tokens: whole(root, "max_output_tokens", 1)?,
            most_tokens: None,
            controls: controls::read(root)?,
            speculation: controls::speculation(root),
            stop: stop(root)?,
            salt: salt(root)?,
            truncation: match root.get("truncation") {
                Some(at) => at.one_of(&[("auto", Truncation::Auto), ("disabled", Truncation::Disabled)])?,
                None => Truncation::Disabled,
            },
            seal: includes(root, SEALED).then(|| seal.clone()),
            echo: Echo {
                instructions,
                max_tool_calls: root.get("max_tool_calls").map(|at| at.integer(1..=i64::from(i32::MAX))).transpose()?,
                metadata: metadata(root)?,
                parallel_tool_calls: flag(root, "parallel_tool_calls")?.unwrap_or(true),
                prompt_cache_key: string("prompt_cache_key")?,
                reasoning: reasoning(root)?,
                safety_identifier: string("safety_identifier")?,
                tool_choice: choice,
                tools: echo,
                user: string("user")?,
                format,
                verbosity,
            },
        })
    }
}

/// The body of a request as JSON.
///
/// # Errors
/// `invalid_json` for what is none, or cannot be read.
pub(crate) fn value(body: &[u8]) -> Result<Value> {
    let refused = |what: String| Error::new(Code::InvalidJson, format!("the body is not JSON: {what}")).hint("send one JSON object");
    let text = std::str::from_utf8(body).map_err(|error| refused(error.to_string()))?;
    json::value(text).map_err(|error| unreadable(&error).unwrap_or_else(|| refused(error.to_string())))
}

/// What is wrong with a text that is JSON, and still cannot be read. serde tells it in words alone.
fn unreadable(error: &serde_json::Error) -> Option<Error> {
    let text = error.to_string();
    let (what, hint) = if text.starts_with("recursion limit exceeded") {
        ("is nested deeper than 128 levels", "send JSON that is less deep")
    } else if text.starts_with("number out of range") {
        ("has a number out of range", "send a number that 64 bits can hold")
    } else {
        return None;
    };
    let (line, column) = (error.line(), error.column());
    Some(Error::new(Code::InvalidJson, format!("the body {what}, at line {line}, column {column}")).hint(hint))
}

pub(crate) fn flag(root: &At<'_, '_>, key: &str) -> Result<Option<bool>> {
    root.get(key).map(|at| at.boolean()).transpose()
}

pub(crate) fn whole(root: &At<'_, '_>, key: &str, least: i64) -> Result<Option<u32>> {
    let Some(at) = root.get(key) else { return Ok(None) };
    let number = at.integer(least..=i64::from(i32::MAX))?;
    u32::try_from(number).map(Some).map_err(|_| at.wrong(format_args!("at least {least}")))
}

/// What is not done here: said before anything else is looked at, and never passed over in silence.
fn refuse(root: &At<'_, '_>) -> Result<()> {
    if let Some(at) = root.get("previous_response_id") {
        at.string()?;
        return Err(at.unsupported("is given: this server keeps no responses").hint("send the whole conversation as input"));
    }
    if let Some(at) = root.get("conversation") {
        return Err(at.unsupported("is given: this server keeps no conversations").hint("send the whole conversation as input"));
    }
    if let Some(at) = root.get("prompt") {
        return Err(at.unsupported("is given: this server keeps no prompt templates").hint("send the text as instructions and input"));
    }
    if let Some(at) = root.get("background")
        && at.boolean()?
    {
        return Err(at.unsupported("is true: this server answers while the client waits").hint("use stream instead"));
    }
    indifferent(root)?;
    include(root)
}

/// What needs no more than to be of its type: nothing here depends on it.
pub(crate) fn indifferent(root: &At<'_, '_>) -> Result<()> {
    flag(root, "store")?;
    for key in ["service_tier", "prompt_cache_retention"] {
        root.get(key).map(|at| at.string()).transpose()?;
    }
    for key in ["client_metadata", "prompt_cache_options"] {
        root.get(key).map(|at| at.object()).transpose()?;
    }
    if let Some(at) = root.get("stream_options") {
        at.object()?;
        flag(&at, "include_obfuscation")?;
    }
    Ok(())
}

/// What sets requests apart in what is kept of prompts; the empty salt where they say nothing.
pub(crate) fn salt(root: &At<'_, '_>) -> Result<Arc<str>> {
    let Some(at) = root.get("cache_salt") else { return Ok(Arc::default()) };
    let salt = at.string()?;
    if salt.is_empty() || salt.len() > SALT {
        return Err(at.wrong(format_args!("a string of 1 to {SALT} bytes")));
    }
    Ok(salt.into())
}

fn include(root: &At<'_, '_>) -> Result<()> {
    let Some(include) = root.get("include") else { return Ok(()) };
    for at in include.each()? {
        match at.string()? {
            // Read with the controls, and with what is sealed.
            "message.output_text.logprobs"
            | SEALED
            // What comes of these is nothing: there are no hosted calls to tell of.
            | "file_search_call.results"
            | "web_search_call.results"
            | "web_search_call.action.sources"
            | "message.input_image.image_url"
            | "computer_call_output.output.image_url"
            | "code_interpreter_call.outputs" => {}
            _ => return Err(at.wrong("a known kind of additional output, such as \"reasoning.encrypted_content\"")),
        }
    }
    Ok(())
}

/// One of these words, where the field is there.
fn word(at: &At<'_, '_>, key: &str, words: &[&'static str]) -> Result<Option<&'static str>> {
    let pairs: Vec<_> = words.iter().map(|word| (*word, *word)).collect();
    at.get(key).map(|field| field.one_of(&pairs)).transpose()
}

/// How hard the model should think, from a field of this name.
pub(crate) fn effort(at: &At<'_, '_>, key: &str) -> Result<Option<&'static str>> {
    word(at, key, &EFFORTS)
}

/// How much the model should say.
pub(crate) fn verbosity(at: &At<'_, '_>) -> Result<&'static str> {
    Ok(word(at, "verbosity", &["low", MEDIUM, "high"])?.unwrap_or(MEDIUM))
}

/// Whether an additional output is asked for.
fn includes(root: &At<'_, '_>, what: &str) -> bool {
    root.value.get("include").and_then(Value::as_array).is_some_and(|include| include.iter().any(|each| each == what))
}

fn reasoning(root: &At<'_, '_>) -> Result<Reasoning> {
    let Some(at) = root.get("reasoning") else { return Ok(Reasoning::default()) };
    at.object()?;
    Ok(Reasoning {
        effort: effort(&at, "effort")?,
        summary: word(&at, "summary", &SUMMARIES)?.or(word(&at, "generate_summary", &SUMMARIES)?),
    })
}

/// The form of the output, and the verbosity.
fn text(root: &At<'_, '_>) -> Result<(Format, &'static str)> {
    let Some(text) = root.get("text") else { return Ok((Format::Text, MEDIUM)) };
    text.object()?;
    let format = text.get("format").map(|at| Format::read(&at)).transpose()?.unwrap_or_default();
    Ok((format, verbosity(&text)?))
}

pub(crate) fn metadata(root: &At<'_, '_>) -> Result<Map<String, Value>> {
    let (pairs, longest_key, longest_value) = METADATA;
    let Some(at) = root.get("metadata") else { return Ok(Map::new()) };
    let mut kept = Map::new();
    for key in at.object()?.keys() {
        let Some(field) = at.get(key) else {
            continue; // A null is as good as absent here too.
        };
        if key == "retention_seconds" {
            field.integer(RETENTION)?;
            continue;
        }
        let value = field.string()?;
        if key.chars().count() > longest_key {
            return Err(field.wrong(format_args!("under a key of at most {longest_key} characters")));
        }
        if value.chars().count() > longest_value {
            return Err(field.wrong(format_args!("at most {longest_value} characters long")));
        }
        kept.insert(key.clone(), field.value.clone());
    }
    if kept.len() > pairs {
        return Err(at.wrong(format_args!("at most {pairs} pairs, and there are {}", kept.len())));
    }
    Ok(kept)
}

pub(crate) fn stop(root: &At<'_, '_>) -> Result<Vec<String>> {
    let Some(at) = root.get("stop") else { return Ok(Vec::new()) };
    let nonempty = |at: &At<'_, '_>| match at.string()? {
        "" => Err(at.wrong("a text of at least one character")),
        text => Ok(text.to_owned()),
    };
    match at.value {
        Value::String(_) => Ok(vec![nonempty(&at)?]),
        Value::Array(stops) if stops.len() > STOPS => Err(at.wrong(format_args!("at most {STOPS} texts"))),
        Value::Array(_) => at.each()?.map(|stop| nonempty(&stop)).collect(),
        _ => Err(at.not("a string or an array of strings")),
    }
}
