//! Requests as they are read off the wire: leniently where clients differ (`id` may be anything and comes back as it came; unknown fields are ignored,
//! and of a field that stands twice the last one counts) and strictly where a guess would be wrong.
//!
//! Nothing is made of a line but what is asked for: a chat of millions of turns takes no more than its text.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Number;
use serde_json::value::RawValue;

use crate::error::{Code, Error};
use crate::json;
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
pub type Parsed<'a> = (Option<Cow<'a, RawValue>>, Result<Request, Error>);

/// An `id` as it stood in the line: any JSON value.
pub type Id<'a> = &'a RawValue;

/// The envelope alone: what every line has. Borrowed from the line, since a ping is nothing more.
#[derive(Default)]
struct Envelope<'a> {
    kind: Option<&'a RawValue>,
    id: Option<&'a RawValue>,
    /// With a ping: whoever cannot tell whether this is a worker that knows `status` asks in this way, since a worker that does not answers it as the
    /// ping that it is. (One of them loads its model for any type that it does not know.)
    status: Option<&'a RawValue>,
}

/// Fills an envelope in, as far as the line goes.
struct Fill<'a, 'e>(&'e mut Envelope<'a>);

impl<'de: 'a, 'a> DeserializeSeed<'de> for Fill<'a, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de: 'a, 'a> Visitor<'de> for Fill<'a, '_> {
    type Value = ();

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("an object")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<(), M::Error> {
        while let Some(Key(key)) = map.next_key()? {
            let field = match &*key {
                "type" => &mut self.0.kind,
                "id" => &mut self.0.id,
                "status" => &mut self.0.status,
                _ => {
                    map.next_value::<IgnoredAny>()?;
                    continue;
                }
            };
            *field = Some(map.next_value()?);
        }
        Ok(())
    }
}

/// A field's name, borrowed where it has no escapes.
#[derive(Deserialize)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

fn fill<'a>(text: &'a str, envelope: &mut Envelope<'a>) -> serde_json::Result<()> {
    let mut line = serde_json::Deserializer::from_str(text);
    Fill(envelope).deserialize(&mut line)?;
    line.end()
}

/// Reads one line.
pub fn parse(line: &[u8]) -> Parsed<'_> {
    match std::str::from_utf8(line) {
        Ok(text) => {
            let (id, request) = read(text);
            (id.map(Cow::Borrowed), request)
        }
        Err(error) => {
            let error = Error::new(Code::InvalidJson, format!("the line is not UTF-8 (byte {})", error.valid_up_to()));
            (head_id(line).map(Cow::Owned), Err(error))
        }
    }
}

/// The `id` at the top of a line that cannot be read to its end: too long, or not text. Whoever sent it waits for an answer under it.
#[must_use]
pub fn head_id(line: &[u8]) -> Option<Box<RawValue>> {
    let text = String::from_utf8_lossy(line);
    let mut envelope = Envelope::default();
    // It ends in an error, at the line's end; what came before has been kept.
    _ = fill(&text, &mut envelope);
    envelope.id.map(ToOwned::to_owned)
}

fn read(text: &str) -> (Option<Id<'_>>, Result<Request, Error>) {
    let mut envelope = Envelope::default();
    match fill(text, &mut envelope) {
        Ok(()) => {}
        Err(error) if error.is_data() => {
            let json = serde_json::from_str::<IgnoredAny>(text).map_err(|error| not_json(&error));
            let other =
                json.map_or_else(|error| error, |_| Error::new(Code::InvalidType, "a request is a JSON object, one a line").hint(FORM));
            return (None, Err(other));
        }
        // What has come of it before the fault may say whom it is from.
        Err(error) => return (envelope.id, Err(not_json(&error))),
    }
    let id = envelope.id;
    let kind = envelope.kind.filter(|kind| kind.get() != "null").map(plain);
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
    let Body { messages, prefill, stop, max_new_tokens } = json::read(text).map_err(|error| not_json(&error))?;
    let messages = match messages {
        Messages::List(messages) => messages,
        Messages::Other(Field::Null) => {
            return Err(Error::new(Code::MissingRequiredParameter, "a chat needs messages")
                .at("messages")
                .hint("give a list of {\"role\":…,\"content\":…}, perhaps empty"));
        }
        Messages::Other(other) => return Err(wrong("messages".to_owned(), "a list", &other)),
    };
    let turns = messages.into_iter().enumerate().map(|(at, message)| turn(at, message)).collect::<Result<_, _>>()?;
    let max_new_tokens = match max_new_tokens {
        Field::Null => DEFAULT_NEW_TOKENS,
        Field::Number(number) => match number.as_f64() {
            Some(count) if count >= 1.0 => {
                #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Saturates, and is at least one.
                let count = count as u32;
                count
            }
            _ => return Err(Error::new(Code::InvalidValue, format!("maxNewTokens is {number}, below 1")).at("maxNewTokens")),
        },
        other => return Err(wrong("maxNewTokens".to_owned(), "a number", &other)),
    };
    Ok(Request::Chat(Chat { turns, prefill: words("prefill", prefill)?, stop: words("stop", stop)?, max_new_tokens }))
}

fn turn(at: usize, message: Message) -> Result<Turn, Error> {
    let role = match message.role {
        Speaker::Known(role) => role,
        Speaker::Unknown(role) => {
            return Err(Error::new(Code::InvalidValue, format!("messages[{at}].role is {:?}", shortened(&role)))
                .at(format!("messages[{at}].role"))
                .hint("the roles are system, developer, user and assistant"));
        }
        Speaker::Other(other) => return Err(wrong(format!("messages[{at}].role"), "a string", &other)),
    };
    match message.content {
        Field::Text(text) => Ok(Turn::new(role, text)),
        other => Err(wrong(format!("messages[{at}].content"), "a string", &other)),
    }
}

/// A text that need not be there; an empty one is none.
fn words(name: &str, field: Field) -> Result<Option<String>, Error> {
    match field {
        Field::Null => Ok(None),
        Field::Text(text) => Ok(Some(text).filter(|text| !text.is_empty())),
        other => Err(wrong(name.to_owned(), "a string", &other)),
    }
}

fn wrong(field: String, wanted: &str, got: &Field) -> Error {
    Error::new(Code::InvalidType, format!("{field} must be {wanted}, not {}", got.kind())).at(field)
}

/// A value, as far as anybody looks into it.
#[derive(Default)]
enum Field {
    #[default]
    Null,
    Boolean,
    Number(Number),
    Text(String),
    List,
    Object,
}

impl Field {
    fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null or absent",
            Self::Boolean => "a boolean",
            Self::Number(_) => "a number",
            Self::Text(_) => "a string",
            Self::List => "a list",
            Self::Object => "an object",
        }
    }
}

/// Who says something.
enum Speaker {
    Known(Role),
    Unknown(String),
    Other(Field),
}

impl Default for Speaker {
    fn default() -> Self {
        Self::Other(Field::Null)
    }
}

#[derive(Default)]
struct Message {
    role: Speaker,
    content: Field,
}

enum Messages {
    List(Vec<Message>),
    Other(Field),
}

impl Default for Messages {
    fn default() -> Self {
        Self::Other(Field::Null)
    }
}

#[derive(Default)]
struct Body {
    messages: Messages,
    prefill: Field,
    stop: Field,
    max_new_tokens: Field,
}

/// What becomes of a value of any kind. Whatever is not said otherwise is told by its kind alone, and not kept.
trait Read: Sized {
    fn other(field: Field) -> Self;

    fn text(text: &str) -> Self {
        Self::other(Field::Text(text.to_owned()))
    }

    fn list<'de, S: SeqAccess<'de>>(mut list: S) -> Result<Self, S::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Self::other(Field::List))
    }

    fn object<'de, M: MapAccess<'de>>(mut map: M) -> Result<Self, M::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Self::other(Field::Object))
    }
}

impl Read for Field {
    fn other(field: Field) -> Self {
        field
    }
}

impl Read for Speaker {
    fn other(field: Field) -> Self {
        Self::Other(field)
    }

    fn text(text: &str) -> Self {
        Role::named(text).map_or_else(|| Self::Unknown(text.to_owned()), Self::Known)
    }
}

impl Read for Message {
    fn other(_: Field) -> Self {
        Self::default()
    }

    fn object<'de, M: MapAccess<'de>>(mut map: M) -> Result<Self, M::Error> {
        let mut message = Self::default();
        while let Some(Key(key)) = map.next_key()? {
            match &*key {
                "role" => message.role = map.next_value::<As<_>>()?.0,
                "content" => message.content = map.next_value::<As<_>>()?.0,
                _ => _ = map.next_value::<IgnoredAny>()?,
            }
        }
        Ok(message)
    }
}

impl Read for Messages {
    fn other(field: Field) -> Self {
        Self::Other(field)
    }

    fn list<'de, S: SeqAccess<'de>>(mut list: S) -> Result<Self, S::Error> {
        let mut messages = Vec::new();
        while let Some(As(message)) = list.next_element()? {
            messages.push(message);
        }
        Ok(Self::List(messages))
    }
}

impl Read for Body {
    fn other(_: Field) -> Self {
        Self::default()
    }

    fn object<'de, M: MapAccess<'de>>(mut map: M) -> Result<Self, M::Error> {
        let mut body = Self::default();
        while let Some(Key(key)) = map.next_key()? {
            match &*key {
                "messages" => body.messages = map.next_value::<As<_>>()?.0,
                "prefill" => body.prefill = map.next_value::<As<_>>()?.0,
                "stop" => body.stop = map.next_value::<As<_>>()?.0,
                "maxNewTokens" => body.max_new_tokens = map.next_value::<As<_>>()?.0,
                _ => _ = map.next_value::<IgnoredAny>()?,
            }
        }
        Ok(body)
    }
}

impl<'de> Deserialize<'de> for Body {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        As::deserialize(from).map(|As(body)| body)
    }
}

/// Reads a value of any kind as `T` wants it.
struct As<T>(T);

impl<'de, T: Read> Deserialize<'de> for As<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Any(std::marker::PhantomData)).map(Self)
    }
}

struct Any<T>(std::marker::PhantomData<T>);

impl<'de, T: Read> Visitor<'de> for Any<T> {
    type Value = T;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("any value")
    }

    fn visit_unit<E>(self) -> Result<T, E> {
        Ok(T::other(Field::Null))
    }

    fn visit_bool<E>(self, _: bool) -> Result<T, E> {
        Ok(T::other(Field::Boolean))
    }

    fn visit_i64<E>(self, number: i64) -> Result<T, E> {
        Ok(T::other(Field::Number(number.into())))
    }

    fn visit_u64<E>(self, number: u64) -> Result<T, E> {
        Ok(T::other(Field::Number(number.into())))
    }

    fn visit_f64<E>(self, number: f64) -> Result<T, E> {
        Ok(T::other(Number::from_f64(number).map_or(Field::Null, Field::Number)))
    }

    fn visit_str<E>(self, text: &str) -> Result<T, E> {
        Ok(T::text(text))
    }

    fn visit_seq<S: SeqAccess<'de>>(self, list: S) -> Result<T, S::Error> {
        T::list(list)
    }

    fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<T, M::Error> {
        T::object(map)
    }
}
