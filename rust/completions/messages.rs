//! The messages of a request become turns of the conversation, by the rules that the items of the Responses API follow.
//!
//! Every call is answered exactly once, by a `tool` message right after the message that has it, in any order.

use std::borrow::Cow;

use serde_json::json;

use crate::error::Result;
use crate::prompt::{Call, Role, Turn};
use crate::responses::Seal;
use crate::responses::input::{BETWEEN_CALLS, History, LEFT_OPEN, join, text_of};
use crate::responses::tools::INPUT;
use crate::responses::validate::At;

/// The conversation of a request.
pub(super) fn turns(root: &At<'_, '_>) -> Result<Vec<Turn>> {
    let messages = root.need("messages")?;
    let seal = Seal::default();
    let mut history = History::new(&seal);
    let mut any = false;
    for message in messages.each()? {
        any = true;
        message.object()?;
        read(&mut history, &message)?;
    }
    if !any {
        return Err(messages.wrong("an array of at least one message"));
    }
    history.answered(&messages, LEFT_OPEN)?;
    Ok(history.into_turns())
}

fn read(history: &mut History<'_>, message: &At<'_, '_>) -> Result<()> {
    // Templates know no names of participants.
    message.get("name").map(|at| at.string()).transpose()?;
    let role = message.need("role")?;
    match role.string()? {
        "system" | "developer" => history.words(message, Role::System, text(&message.need("content")?)?),
        "user" => history.words(message, Role::User, text(&message.need("content")?)?),
        "assistant" => assistant(history, message),
        "tool" => {
            let id = message.need("tool_call_id")?;
            history.came(&id, false, text(&message.need("content")?)?)
        }
        "function" => {
            Err(role.unsupported("is \"function\": it has given way to \"tool\"").hint("send tool_calls, and messages of the role tool"))
        }
        _ => Err(role.wrong("one of \"system\", \"developer\", \"user\", \"assistant\", \"tool\"")),
    }
}

/// What the assistant thought, said, and called for.
fn assistant(history: &mut History<'_>, message: &At<'_, '_>) -> Result<()> {
    if let Some(at) = message.get("function_call") {
        return Err(at.unsupported("is given: it has given way to `tool_calls`").hint("send tool_calls, and messages of the role tool"));
    }
    if let Some(at) = message.get("audio") {
        return Err(at.unsupported("is given: this server takes text only").hint("send the text as content"));
    }
    // Calls are answered before the assistant goes on.
    history.answered(message, BETWEEN_CALLS)?;
    let turn = history.assistant(message)?;
    // The field's name for thoughts, under which they went out.
    if let Some(at) = message.get("reasoning_content") {
        join(&mut turn.reasoning, at.string()?);
    }
    // Of an answer that only called tools some clients send no content.
    if let Some(at) = message.get("content") {
        join(&mut turn.text, &text(&at)?);
    }
    if let Some(at) = message.get("refusal") {
        join(&mut turn.text, at.string()?);
    }
    let Some(calls) = message.get("tool_calls") else { return Ok(()) };
    for at in calls.each()? {
        at.object()?;
        let id = at.need("id")?;
        let kind = at.get("type").map(|kind| kind.one_of(&[("function", false), ("custom", true)])).transpose()?;
        let custom = kind.unwrap_or(false);
        let tool = at.need(if custom { "custom" } else { "function" })?;
        tool.object()?;
        let name = tool.need("name")?.string()?.to_owned();
        let arguments =
            if custom { json!({INPUT: tool.need("input")?.string()?}).to_string() } else { tool.need("arguments")?.string()?.to_owned() };
        history.called(&at, &id, None, Call { name, arguments })?;
    }
    Ok(())
}

/// A text, or parts of text.
fn text(content: &At<'_, '_>) -> Result<String> {
    text_of(content, part_text)
}

fn part_text<'v>(part: &At<'v, '_>) -> Result<Cow<'v, str>> {
    part.object()?;
    let kind = part.need("type")?;
    match kind.string()? {
        "text" => part.need("text")?.string().map(Cow::Borrowed),
        "refusal" => part.need("refusal")?.string().map(Cow::Borrowed),
        name @ ("image_url" | "input_audio" | "file" | "video_url") => {
            Err(kind.unsupported(format_args!("is {name:?}: this server takes text only")).hint("send parts of type text"))
        }
        _ => Err(kind.wrong("one of \"text\", \"refusal\"")),
    }
}
