//! A request of the Messages API becomes one of the Responses API: its fields under the names that they have there, with the same rules for tools, sampling and limits,
//! and its messages as turns. Errors name the fields as the client knows them.
//!
//! What nothing here depends on (`metadata`, `cache_control`, `service_tier`, `context_management`, keys that are unknown) is passed over.

use serde_json::{Map, Value, json};

use super::conversation::{self, Conversation};
use crate::error::{Code, Error, Result};
use crate::prompt::Role;
use crate::responses;
use crate::responses::request::{STOPS, flag, value, whole};
use crate::responses::validate::At;

/// Fields that are called the same there, with the same meaning; those after `top_k` are extensions.
const SAME: [&str; 14] = [
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "generation_mode",
    "mtp_depth",
    "cache_salt",
    "prompt_cache_key",
];
/// The fewest tokens for thinking that the API knows.
pub(super) const LEAST_BUDGET: i64 = 1024;
/// The longest name of a tool: the API takes longer ones than others do, and those of MCP servers are.
const NAME: usize = 128;
/// The same, as a pattern.
pub(super) const TOOL_NAME: &str = "^[a-zA-Z0-9_-]{1,128}$";
/// How hard a model may be told to think.
pub(super) const WORDS_FOR_EFFORT: [&str; 5] = ["low", "medium", "high", "xhigh", "max"];
/// How hard a model thinks that is told to think and not how hard.
const EFFORT: &str = "medium";
/// No thoughts at all.
const OFF: &str = "none";

/// A request that has been checked from end to end.
pub(crate) struct Request {
    /// The same, as it is answered. It is not asked to stream: what can be refused has to be before the first event, which tells of the prompt.
    pub(crate) asked: responses::Request,
    /// Whether events are wanted, or one message.
    pub(crate) stream: bool,
}

impl Request {
    /// Reads the body of a request to create a message.
    ///
    /// # Errors
    /// `invalid_json` for what is no JSON, or what is wrong with the first field at fault, with its path.
    pub(crate) fn create(body: &[u8]) -> Result<Self> {
        let body = value(body)?;
        let root = At::root(&body);
        root.object()?;
        root.need("max_tokens")?;
        read(&root)
    }

    /// Reads the body of a request to count tokens, in which nothing need be said of the answer.
    ///
    /// # Errors
    /// As [`Request::create`].
    pub(crate) fn count(body: &[u8]) -> Result<Self> {
        let body = value(body)?;
        let root = At::root(&body);
        root.object()?;
        read(&root)
    }
}

fn read(root: &At<'_, '_>) -> Result<Request> {
    let stream = flag(root, "stream")?.unwrap_or(false);
    let mut fields = Map::new();
    for key in SAME {
        if let Some(at) = root.get(key) {
            fields.insert(key.to_owned(), at.value.clone());
        }
    }
    if let Some(at) = root.get("temperature") {
        at.number(0.0..=1.0)?;
    }
    if let Some(most) = whole(root, "max_tokens", 1)? {
        fields.insert("max_output_tokens".to_owned(), Value::from(most));
    }
    if let Some(at) = root.get("metadata") {
        at.object()?;
        at.get("user_id").map(|id| id.string().map(drop)).transpose()?;
    }
    fields.insert("stop".to_owned(), stop(root)?);
    tools(root, &mut fields)?;
    let format = format(root)?;
    let (thinking, effort) = (thinking(root)?, effort(root)?);
    let conversation = conversation::read(root)?;
    let thinks = match thinking {
        Thinking::Never => false,
        Thinking::Always => true,
        Thinking::BetweenTools => conversation.turns.last().is_some_and(|turn| turn.role == Role::Tool),
    };
    check_prefill(&conversation, root, thinks, format.is_some())?;
    fields.insert("reasoning".to_owned(), json!({"effort": if thinks { effort } else { OFF }}));
    if let Some(format) = format {
        fields.insert("text".to_owned(), json!({"format": format}));
    }
    // The turns take its place.
    fields.insert("input".to_owned(), Value::from(""));
    let fields = Value::Object(fields);
    let mut asked = responses::Request::checked(&At::root(&fields), &responses::Seal::default(), NAME)?;
    asked.turns = conversation.turns;
    asked.prefill = conversation.prefill;
    Ok(Request { asked, stream })
}

/// What an answer that goes on from a text cannot be besides.
fn check_prefill(conversation: &Conversation, root: &At<'_, '_>, thinks: bool, formed: bool) -> Result<()> {
    let what = match &conversation.prefill {
        Some(_) if thinks => "thinking",
        Some(_) if formed => "output_config.format",
        _ => return Ok(()),
    };
    let messages = root.need("messages")?;
    let what = format!("`{}` ends with a message of the assistant's, which an answer with {what} cannot go on from", messages.path());
    Err(Error::new(Code::InvalidValue, what).hint("end with a message of the user's").at(messages.path()))
}

fn stop(root: &At<'_, '_>) -> Result<Value> {
    let Some(at) = root.get("stop_sequences") else { return Ok(Value::Null) };
    for stop in at.each()? {
        if stop.string()?.is_empty() {
            return Err(stop.wrong("a text of at least one character"));
        }
    }
    if at.value.as_array().is_some_and(|stops| stops.len() > STOPS) {
        return Err(at.wrong(format_args!("at most {STOPS} texts")));
    }
    Ok(at.value.clone())
}

/// Tools, and the choice among them. Those of Anthropic's own, which it runs or has trained its models for, stay what they are there: of another kind, and left
/// out of the prompt.
fn tools(root: &At<'_, '_>, fields: &mut Map<String, Value>) -> Result<()> {
    if let Some(list) = root.get("tools") {
        let tools = list.each()?.map(|tool| self::tool(&tool)).collect::<Result<Vec<_>>>()?;
        fields.insert("tools".to_owned(), Value::from(tools));
    }
    let Some(at) = root.get("tool_choice") else { return Ok(()) };
    at.object()?;
    let kind = at.need("type")?.one_of(&[("auto", "auto"), ("any", "required"), ("tool", "tool"), ("none", "none")])?;
    let choice = match kind {
        "tool" => json!({"type": "function", "name": at.need("name")?.string()?}),
        word => Value::from(word),
    };
    fields.insert("tool_choice".to_owned(), choice);
    let alone = flag(&at, "disable_parallel_tool_use")?.unwrap_or(false);
    fields.insert("parallel_tool_calls".to_owned(), Value::from(!alone));
    Ok(())
}

fn tool(at: &At<'_, '_>) -> Result<Value> {
    at.object()?;
    match at.get("type").map(|kind| kind.string()).transpose()? {
        None | Some("custom") => {
            let name = at.need("name")?.name_of(NAME)?;
            let described = at.get("description").map(|field| field.string()).transpose()?;
            let strict = flag(at, "strict")?;
            let schema = at.need("input_schema")?.object()?;
            Ok(json!({"type": "function", "name": name, "description": described, "parameters": schema, "strict": strict}))
        }
        Some("function" | "namespace") => Err(at
            .need("type")?
            .wrong("\"custom\" for a tool of the client's, or the type of one that Anthropic has")
            .hint("send name and input_schema")),
        Some(kind) => Ok(json!({"type": kind})),
    }
}

/// When a model is to think.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Thinking {
    Never,
    Always,
    /// Where it goes on from the results of tools.
    BetweenTools,
}

/// Without `thinking` a model does not think, as in the API; how many tokens it may take for it is not held to.
fn thinking(root: &At<'_, '_>) -> Result<Thinking> {
    let Some(at) = root.get("thinking") else { return Ok(Thinking::Never) };
    at.object()?;
    let kinds = [("enabled", true), ("disabled", false), ("adaptive", false), ("between_tools", false)];
    let kind = at.need("type")?;
    if kind.one_of(&kinds)? {
        at.need("budget_tokens")?.integer(LEAST_BUDGET..=i64::from(i32::MAX))?;
    }
    Ok(match kind.string()? {
        "disabled" => Thinking::Never,
        "between_tools" => Thinking::BetweenTools,
        _ => Thinking::Always,
    })
}

/// How hard it is to think where it does.
fn effort(root: &At<'_, '_>) -> Result<&'static str> {
    let Some(config) = root.get("output_config") else { return Ok(EFFORT) };
    config.object()?;
    let words = WORDS_FOR_EFFORT.map(|word| (word, word));
    Ok(config.get("effort").map(|effort| effort.one_of(&words)).transpose()?.unwrap_or(EFFORT))
}

/// The form of the answer, in the place that it has now or in the one that it had; both are checked.
fn format(root: &At<'_, '_>) -> Result<Option<Value>> {
    let config = root.get("output_config");
    let now = config.as_ref().and_then(|config| config.get("format")).map(form).transpose()?;
    let before = root.get("output_format").map(form).transpose()?;
    Ok(now.or(before))
}

fn form(at: At<'_, '_>) -> Result<Value> {
    at.object()?;
    at.need("type")?.one_of(&[("json_schema", ())])?;
    let schema = at.need("schema")?.object()?;
    Ok(json!({"type": "json_schema", "name": "answer", "schema": schema, "strict": true}))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(more: &Value, messages: Value) -> responses::Request {
        let mut body = more.clone();
        body["max_tokens"] = json!(5);
        body["messages"] = messages;
        Request::create(body.to_string().as_bytes()).unwrap_or_else(|error| panic!("{body}: {error}")).asked
    }

    #[test]
    fn a_model_thinks_when_it_is_told_to() {
        let user = json!({"role": "user", "content": "hi"});
        let used = json!({"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]});
        let result = json!({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]});
        let (first, later) = (json!([user]), json!([user, used, result]));
        let enabled = json!({"type": "enabled", "budget_tokens": 1024});
        for (more, messages, effort) in [
            (json!({}), &first, "none"),
            (json!({"output_config": {"effort": "high"}}), &first, "none"),
            (json!({"thinking": null}), &first, "none"),
            (json!({"thinking": {"type": "disabled"}}), &first, "none"),
            (json!({"thinking": {"type": "adaptive"}}), &first, "medium"),
            (json!({"thinking": enabled}), &first, "medium"),
            (json!({"thinking": enabled, "output_config": {"effort": "xhigh"}}), &later, "xhigh"),
            (json!({"thinking": {"type": "between_tools"}}), &first, "none"),
            (json!({"thinking": {"type": "between_tools"}}), &later, "medium"),
        ] {
            let reasoning = asked(&more, messages.clone()).echo.reasoning;
            assert_eq!((reasoning.effort, reasoning.thinking()), (Some(effort), Some(effort != "none")), "{more}");
        }
    }

    #[test]
    fn calls_are_one_at_a_time_where_that_is_asked_for() {
        let messages = json!([{"role": "user", "content": "hi"}]);
        for (choice, parallel) in [
            (json!(null), true),
            (json!({"type": "auto"}), true),
            (json!({"type": "auto", "disable_parallel_tool_use": false}), true),
            (json!({"type": "auto", "disable_parallel_tool_use": true}), false),
        ] {
            let asked = asked(&json!({ "tool_choice": choice }), messages.clone());
            assert_eq!(asked.echo.parallel_tool_calls, parallel, "{choice}");
        }
    }
}
