//! The wire types: one JSON object a line, told apart by `type`.
//!
//! Requests are read leniently where clients differ (`id` may be anything and comes back as it came; unknown fields are ignored) and strictly where a
//! guess would be wrong.

use std::borrow::Cow;

use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::error::{Code, Error};
use crate::json;
use crate::models::progress::{Part, Progress, Stage};
use crate::prompt::{Role, Turn};

/// What a client asks for.
#[derive(Debug, Clone, PartialEq)]
pub enum Request {
    /// Who are you?
    Ping,
    /// What are you doing?
    Status,
    /// Fetch and load the model.
    Load,
    /// One answer.
    Chat(Chat),
    /// Go.
    Shutdown,
}

/// One answer: greedy, without thinking.
#[derive(Debug, Clone, PartialEq)]
pub struct Chat {
    /// The conversation, perhaps empty.
    pub turns: Vec<Turn>,
    /// Text that the answer is made to begin with; not part of what comes back.
    pub prefill: Option<String>,
    /// The answer ends with this.
    pub stop: Option<String>,
    /// The longest answer in tokens, at least one.
    pub max_new_tokens: u32,
}

/// The answer's length when a client gives none, as transformers.js has it.
const DEFAULT_NEW_TOKENS: u32 = 256;

/// A request and the `id` to answer it under; a line that is no request has the `id` it can be answered under, if any.
pub type Parsed<'a> = (Option<Id<'a>>, Result<Request, Error>);

/// An `id` as it stood in the line: any JSON value.
pub type Id<'a> = &'a RawValue;

/// The envelope alone: what every line has. Borrowed from the line, since a ping is nothing more.
#[derive(Deserialize)]
struct Envelope<'a> {
    #[serde(rename = "type", borrow, default)]
    kind: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "as_it_stands")]
    id: Option<&'a RawValue>,
    /// With a ping: whoever cannot tell whether this is a worker that knows `status` asks in this way, since a worker that does not answers it as the
    /// ping that it is. (One of them loads its model for any type that it does not know.)
    #[serde(borrow, default)]
    status: Option<&'a RawValue>,
}

/// Keeps a `null` apart from an absent field: it is echoed.
fn as_it_stands<'de: 'a, 'a, D: serde::Deserializer<'de>>(from: D) -> Result<Option<&'a RawValue>, D::Error> {
    <&RawValue>::deserialize(from).map(Some)
}

/// Reads one line.
pub fn parse(line: &[u8]) -> Parsed<'_> {
    let text = match std::str::from_utf8(line) {
        Ok(text) => text,
        Err(error) => return (None, Err(Error::new(Code::InvalidJson, format!("the line is not UTF-8 (byte {})", error.valid_up_to())))),
    };
    let envelope: Envelope<'_> = match serde_json::from_str(text) {
        // A list would do for the fields of a struct, in order; not on this wire.
        Ok(envelope) if text.trim_start().starts_with('{') => envelope,
        Err(error) if !error.is_data() => return (None, Err(not_json(&error))),
        Err(error) if text.trim_start().starts_with('{') => {
            return (None, Err(Error::new(Code::InvalidType, format!("the line is not a request: {error}")).hint(FORM)));
        }
        _ => return (None, Err(Error::new(Code::InvalidType, "a request is a JSON object, one a line").hint(FORM))),
    };
    let id = envelope.id;
    let kind = envelope.kind.map(plain);
    let request = match kind.as_deref() {
        Some("\"ping\"") if envelope.status.is_some_and(|asked| asked.get() == "true") => Ok(Request::Status),
        Some("\"ping\"") => Ok(Request::Ping),
        Some("\"status\"") => Ok(Request::Status),
        Some("\"load\"") => Ok(Request::Load),
        Some("\"shutdown\"") => Ok(Request::Shutdown),
        Some("\"chat\"") => chat(text),
        Some(other) => Err(Error::new(Code::InvalidValue, format!("unknown request type: {}", shortened(other))).at("type").hint(TYPES)),
        None => Err(Error::new(Code::MissingRequiredParameter, "the request has no type").at("type").hint(TYPES)),
    };
    (id, request)
}

/// A type as it stands in the line, but with letters for the escapes that JSON allows in their place. Without any, nothing is allocated.
fn plain(kind: &RawValue) -> Cow<'_, str> {
    let raw = kind.get();
    if !raw.contains('\\') {
        return Cow::Borrowed(raw);
    }
    serde_json::from_str::<String>(raw).map_or(Cow::Borrowed(raw), |text| Cow::Owned(format!("\"{text}\"")))
}

const FORM: &str = "send {\"type\":\"ping\",\"id\":\"1\"} and a newline, for example";
const TYPES: &str = "the types are ping, status, load, chat and shutdown";

fn not_json(error: &serde_json::Error) -> Error {
    Error::new(Code::InvalidJson, format!("the line is not JSON: {error}")).hint(FORM)
}

/// A value of the client's for a message: as it came, but not as long as it came.
fn shortened(text: &str) -> String {
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

fn chat(text: &str) -> Result<Request, Error> {
    let value = json::value(text).map_err(|error| not_json(&error))?;
    let wrong = |field: &str, wanted: &str, got: &Value| {
        Error::new(Code::InvalidType, format!("{field} must be {wanted}, not {}", kind_of(got))).at(field.to_owned())
    };
    let text_field = |field: &str| match value.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone()).filter(|text| !text.is_empty())),
        Some(other) => Err(wrong(field, "a string", other)),
    };
    let messages = match value.get("messages") {
        Some(Value::Array(messages)) => messages,
        None | Some(Value::Null) => {
            return Err(Error::new(Code::MissingRequiredParameter, "a chat needs messages")
                .at("messages")
                .hint("give a list of {\"role\":…,\"content\":…}, perhaps empty"));
        }
        Some(other) => return Err(wrong("messages", "a list", other)),
    };
    let mut turns = Vec::with_capacity(messages.len());
    for (at, message) in messages.iter().enumerate() {
        let role = match message.get("role") {
            Some(Value::String(role)) => Role::named(role).ok_or_else(|| {
                Error::new(Code::InvalidValue, format!("messages[{at}].role is {:?}", shortened(role)))
                    .at(format!("messages[{at}].role"))
                    .hint("the roles are system, developer, user and assistant")
            })?,
            other => return Err(wrong(&format!("messages[{at}].role"), "a string", other.unwrap_or(&Value::Null))),
        };
        let content = match message.get("content") {
            Some(Value::String(content)) => content.clone(),
            other => return Err(wrong(&format!("messages[{at}].content"), "a string", other.unwrap_or(&Value::Null))),
        };
        turns.push(Turn { role, text: content });
    }
    let max_new_tokens = match value.get("maxNewTokens") {
        None | Some(Value::Null) => DEFAULT_NEW_TOKENS,
        Some(Value::Number(number)) => match number.as_f64() {
            Some(count) if count >= 1.0 => {
                #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Saturates, and is at least one.
                let count = count as u32;
                count
            }
            _ => return Err(Error::new(Code::InvalidValue, format!("maxNewTokens is {number}, below 1")).at("maxNewTokens")),
        },
        Some(other) => return Err(wrong("maxNewTokens", "a number", other)),
    };
    Ok(Request::Chat(Chat { turns, prefill: text_field("prefill")?, stop: text_field("stop")?, max_new_tokens }))
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null or absent",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// What a worker says. `id` is the request's own; left out when the line had none.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum Reply<'a> {
    /// Here I am, with the tag I was started with.
    Pong {
        /// The request's.
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<Id<'a>>,
        /// The launch tag.
        tag: &'a str,
    },
    /// This is what I am doing.
    Status {
        /// The request's.
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<Id<'a>>,
        /// What is going on.
        #[serde(flatten)]
        status: Status<'a>,
    },
    /// News of a load.
    Progress {
        /// The request's.
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<Id<'a>>,
        /// The news.
        event: Event<'a>,
    },
    /// The model is loaded.
    Loaded {
        /// The request's.
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<Id<'a>>,
    },
    /// An answer.
    Text {
        /// The request's.
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<Id<'a>>,
        /// What the model said, the stop string included.
        text: &'a str,
    },
    /// It did not work.
    Error {
        /// The request's.
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<Id<'a>>,
        /// Why, on one line.
        error: &'a str,
    },
}

impl Reply<'_> {
    /// Adds the reply's line, with its newline, to what goes out.
    pub fn write(&self, out: &mut Vec<u8>) {
        // A vector takes everything, and no reply holds what JSON cannot say.
        if serde_json::to_writer(&mut *out, self).is_ok() {
            out.push(b'\n');
        }
    }

    /// The reply's line, with its newline.
    #[must_use]
    pub fn line(&self) -> Vec<u8> {
        let mut line = Vec::with_capacity(128);
        self.write(&mut line);
        line
    }
}

/// What a worker is doing. Told at once, whatever it does; asking counts as no work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status<'a> {
    /// The key under which clients know the model.
    pub key: Cow<'a, str>,
    /// The launch tag.
    pub tag: Cow<'a, str>,
    /// The worker's process id.
    pub pid: u32,
    /// How long it has been listening, in milliseconds.
    pub uptime_ms: u64,
    /// The model behind the key.
    pub model: Cow<'a, str>,
    /// `absent`, `loading`, `ready` or `failed`.
    pub state: Cow<'a, str>,
    /// Loads and chats of all connections that have not been answered.
    pub in_flight: usize,
    /// Open connections, the one that asks included.
    pub connections: usize,
    /// The process's resident memory in bytes; `null` where the system does not tell.
    pub memory_bytes: Option<u64>,
}

/// News of a load, as clients of transformers.js know it.
#[derive(Debug, PartialEq, Serialize)]
pub struct Event<'a> {
    /// The key under which the client knows the model.
    #[serde(rename = "modelKey")]
    pub model_key: &'a str,
    /// `initiate`, `download`, `progress`, `progress_total`, `done` or `ready`.
    pub status: &'static str,
    /// What the files belong to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<&'a str>,
    /// The file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<&'a str>,
    /// 0 to 100.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress: Option<f64>,
    /// Bytes so far.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loaded: Option<u64>,
    /// Bytes in all: of the file, and with `progress_total` of all files together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total: Option<u64>,
    /// Each file with its bytes so far and in all, with `progress_total`.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "by_name")]
    pub files: Option<&'a [Part]>,
    /// What the model is for, with `ready`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task: Option<&'static str>,
    /// The model, with `ready`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<&'a str>,
}

/// A map from a file's name to `{"loaded","total"}`.
fn by_name<S: Serializer>(parts: &Option<&[Part]>, to: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Bytes {
        loaded: u64,
        total: u64,
    }
    let parts = parts.unwrap_or_default();
    let mut map = to.serialize_map(Some(parts.len()))?;
    for Part { file, done, total } in parts {
        map.serialize_entry(file, &Bytes { loaded: *done, total: *total })?;
    }
    map.end()
}

/// A percentage.
#[allow(clippy::cast_precision_loss)]
fn percent(done: u64, total: u64) -> f64 {
    if total == 0 { 100.0 } else { (done as f64) * 100.0 / (total as f64) }
}

impl<'a> Event<'a> {
    fn bare(model_key: &'a str, status: &'static str) -> Self {
        Self { model_key, status, name: None, file: None, progress: None, loaded: None, total: None, files: None, task: None, model: None }
    }

    /// The model answers from now on.
    #[must_use]
    pub fn ready(model_key: &'a str, model: &'a str) -> Self {
        Self { task: Some("text-generation"), model: Some(model), ..Self::bare(model_key, "ready") }
    }

    /// A piece of news as events, in order. Bytes count while they are downloaded; what follows (verifying, importing) has no event of its own, as the
    /// bytes are all here.
    #[must_use]
    pub fn of(model_key: &'a str, news: &'a Progress) -> [Option<Self>; 2] {
        match news {
            Progress::Initiate { model, file } => {
                let event = |status| Self { name: Some(model), file: Some(file), ..Self::bare(model_key, status) };
                [Some(event("initiate")), Some(event("download"))]
            }
            Progress::Advance { model, file, stage: Stage::Download, done, total } => {
                let event = Self {
                    name: Some(model),
                    file: Some(file),
                    progress: Some(percent(*done, *total)),
                    loaded: Some(*done),
                    total: Some(*total),
                    ..Self::bare(model_key, "progress")
                };
                [Some(event), None]
            }
            Progress::Whole { model, parts } => {
                let (done, total) = parts.iter().fold((0, 0), |(done, total), part| (done + part.done, total + part.total));
                let event = Self {
                    name: Some(model),
                    progress: Some(percent(done, total)),
                    loaded: Some(done),
                    total: Some(total),
                    files: Some(parts),
                    ..Self::bare(model_key, "progress_total")
                };
                [Some(event), None]
            }
            Progress::Advance { .. } => [None, None],
            Progress::Done { model, file } => [Some(Self { name: Some(model), file: Some(file), ..Self::bare(model_key, "done") }), None],
        }
    }
}
