//! The message that a response is in this form: its items as blocks, and its usage and end in this form's words.
//!
//! When a block begins and ends in a stream is decided in `stream`.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::responses;
use crate::responses::Response;
use crate::responses::item::{FunctionCall, Item, Part, Reasoning};
use crate::responses::object::Status;
use crate::responses::schema::words;

/// A message of the assistant's, whole or just begun.
#[derive(JsonSchema, Serialize)]
#[schemars(rename = "AnthropicAnswer")]
pub(crate) struct Message<'a> {
    id: String,
    #[schemars(extend("const" = "message"))]
    r#type: &'static str,
    #[schemars(extend("const" = "assistant"))]
    role: &'static str,
    model: &'a str,
    content: Vec<Block<'a>>,
    /// Null where the message has just begun.
    #[schemars(extend("enum" = words(&STOP_REASONS)))]
    stop_reason: Option<&'static str>,
    stop_sequence: Option<&'a str>,
    usage: Usage,
}

impl<'a> Message<'a> {
    /// The message that has come of a response.
    pub(crate) fn of(response: &'a Response) -> Self {
        let Stop { stop_reason, stop_sequence } = Stop::of(response);
        let content = response.output.iter().filter_map(Block::of).collect();
        Self { content, stop_reason: Some(stop_reason), stop_sequence, ..Self::begun(response, response.usage.as_ref()) }
    }

    /// The message that is to come of a response of which so much is known.
    pub(super) fn begun(response: &'a Response, usage: Option<&responses::Usage>) -> Self {
        Self {
            id: renamed(&response.id, "msg_"),
            r#type: "message",
            role: "assistant",
            model: &response.model,
            content: Vec::new(),
            stop_reason: None,
            stop_sequence: None,
            usage: usage.map(Usage::of).unwrap_or_default(),
        }
    }
}

/// An id of the Responses API under the prefix that it has here.
fn renamed(id: &str, prefix: &str) -> String {
    let (_, number) = id.split_once('_').unwrap_or(("", id));
    format!("{prefix}{number}")
}

/// A block of a message: whole, or as it begins.
#[derive(JsonSchema, Serialize)]
#[schemars(rename = "AnthropicBlock")]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum Block<'a> {
    /// What the model thought.
    Thinking { thinking: &'a str, signature: &'a str },
    /// What it says.
    Text { text: &'a str },
    /// A tool that the client is to call, with the arguments as an object.
    ToolUse {
        id: String,
        name: &'a str,
        #[schemars(with = "Map<String, Value>")]
        input: Value,
    },
}

impl<'a> Block<'a> {
    /// What an item is here; nothing where it says nothing.
    fn of(item: &'a Item) -> Option<Self> {
        match item {
            Item::Reasoning(item) => Some(Self::Thinking { thinking: thoughts(item), signature: signature(item) }),
            Item::Message(item) => match item.content.first() {
                Some(Part::OutputText(part)) if !part.text.is_empty() => Some(Self::Text { text: &part.text }),
                _ => None,
            },
            Item::FunctionCall(call) => Some(Self::call(call, input(&call.arguments))),
            // Tools that take a text are none of this API's.
            Item::CustomToolCall(_) => None,
        }
    }

    /// A use of a tool as it begins.
    pub(super) fn called(call: &'a FunctionCall) -> Self {
        Self::call(call, Value::Object(Map::new()))
    }

    fn call(call: &'a FunctionCall, input: Value) -> Self {
        Self::ToolUse { id: renamed(&call.call_id, "toolu_"), name: &call.name, input }
    }
}

/// The text of a thought, wherever it is kept.
fn thoughts(item: &Reasoning) -> &str {
    match item.summary.iter().chain(item.content.iter().flatten()).next() {
        Some(Part::SummaryText(part) | Part::ReasoningText(part)) => &part.text,
        _ => "",
    }
}

/// What clients send back beside a thought. Some send none back that has no signature; this server takes thoughts as they come, so that it need say nothing but
/// which thought it was.
pub(super) fn signature(item: &Reasoning) -> &str {
    &item.id
}

/// Why an answer may end.
const STOP_REASONS: [&str; 4] = ["end_turn", "max_tokens", "stop_sequence", "tool_use"];

/// Why an answer ended.
#[derive(JsonSchema, Serialize)]
#[schemars(rename = "AnthropicStop")]
pub(crate) struct Stop<'a> {
    #[schemars(extend("enum" = STOP_REASONS))]
    pub(super) stop_reason: &'static str,
    pub(super) stop_sequence: Option<&'a str>,
}

impl<'a> Stop<'a> {
    pub(super) fn of(response: &'a Response) -> Self {
        let stop_sequence = response.stopped_by.as_deref();
        let calls = response.output.iter().any(|item| matches!(item, Item::FunctionCall(_)));
        let stop_reason = match response.status {
            Status::Incomplete => "max_tokens",
            _ if stop_sequence.is_some() => "stop_sequence",
            _ if calls => "tool_use",
            _ => "end_turn",
        };
        Self { stop_reason, stop_sequence }
    }
}

/// Tokens. Those of the input are counted apart: what had to be read, and what was known already.
#[derive(Default, JsonSchema, Serialize)]
#[schemars(rename = "AnthropicUsage")]
pub(crate) struct Usage {
    input_tokens: usize,
    cache_creation_input_tokens: usize,
    cache_read_input_tokens: usize,
    output_tokens: u32,
    output_tokens_details: Details,
}

/// What the tokens of the output were for.
#[derive(Default, JsonSchema, Serialize)]
#[schemars(rename = "AnthropicUsageDetails")]
struct Details {
    thinking_tokens: u32,
}

impl Usage {
    pub(super) fn of(usage: &responses::Usage) -> Self {
        let details = usage.input_tokens_details;
        let (read, written) = (details.cached_tokens, details.cache_write_tokens);
        Self {
            input_tokens: usage.input_tokens.saturating_sub(read + written),
            cache_creation_input_tokens: written,
            cache_read_input_tokens: read,
            output_tokens: usage.output_tokens,
            output_tokens_details: Details { thinking_tokens: usage.output_tokens_details.reasoning_tokens },
        }
    }
}

/// The arguments of a call; of those that were cut short, as much as can be told.
fn input(arguments: &str) -> Value {
    let read = |text: &str| serde_json::from_str::<Value>(text).ok().filter(Value::is_object);
    let begun = || ends(arguments).into_iter().find_map(|(at, closers)| read(&(arguments.get(..at)?.to_owned() + &closers)));
    read(arguments).or_else(begun).unwrap_or_else(|| Value::Object(Map::new()))
}

/// Where JSON that is cut short can be ended, and with what: after the last string, which may be a name that has no value yet, and after the last value that
/// is surely whole.
fn ends(text: &str) -> [(usize, String); 2] {
    let closers = |open: &[char]| open.iter().rev().collect::<String>();
    let (mut string, mut whole) = ((0, String::new()), (0, String::new()));
    let (mut open, mut quoted, mut escaped) = (Vec::new(), false, false);
    for (at, letter) in text.char_indices() {
        match letter {
            _ if escaped => escaped = false,
            '\\' if quoted => escaped = true,
            '"' => {
                quoted = !quoted;
                if !quoted {
                    string = (at + 1, closers(&open));
                }
            }
            _ if quoted => {}
            '{' | '[' => {
                open.push(if letter == '{' { '}' } else { ']' });
                whole = (at + 1, closers(&open));
            }
            '}' | ']' => {
                open.pop();
                whole = (at + 1, closers(&open));
            }
            ',' => whole = (at, closers(&open)),
            _ => {}
        }
    }
    [string, whole]
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn arguments_that_are_cut_short_say_as_much_as_is_whole() {
        for (text, expected) in [
            (r#"{"a": 1}"#, json!({"a": 1})),
            (r#"{"a": "x", "b": [1, {"c": "d"#, json!({"a": "x", "b": [1, {}]})),
            (r#"{"a": "x", "b": [1, 23"#, json!({"a": "x", "b": [1]})),
            (r#"{"a": "x", "b"#, json!({"a": "x"})),
            (r#"{"a": "x", "b": "#, json!({"a": "x"})),
            (r#"{"a": "x\"}"#, json!({})),
            (r#"{"a": "x\"}", "b": tr"#, json!({"a": "x\"}"})),
            (r#"{"a": "x""#, json!({"a": "x"})),
            (r#"{"a": {"b": {}}"#, json!({"a": {"b": {}}})),
            ("{", json!({})),
            ("", json!({})),
            ("[1]", json!({})),
            ("oops}", json!({})),
        ] {
            assert_eq!(input(text), expected, "{text}");
        }
    }
}
