//! The messages of a request become turns, by the rules that hold for the items of the Responses API: what the assistant says, thinks and calls for next to
//! each other is one turn, and every use of a tool has exactly one result, right after it, in any order.
//!
//! What the user says in the message that brings results comes after them. A last message of the assistant's is no turn: the answer goes on from it.

use std::borrow::Cow;

use super::blocks::{self, kind, words};
use crate::error::{Code, Error, Result};
use crate::prompt::{Call, Role, Turn};
use crate::responses::Seal;
use crate::responses::input::{BETWEEN_CALLS, History, LEFT_OPEN, join};
use crate::responses::validate::At;

/// How a block of the system's text begins that Claude Code sends for Anthropic's accounts. It is different in every request, so that nothing that
/// follows it could be found again in the prefix cache, and it says nothing to a model.
const BILLING: &str = "x-anthropic-billing-header:";

/// What has been said so far, and what the answer goes on from.
pub(super) struct Conversation {
    pub(super) turns: Vec<Turn>,
    pub(super) prefill: Option<String>,
}

/// Reads `system` and `messages`.
pub(super) fn read(root: &At<'_, '_>) -> Result<Conversation> {
    let seal = Seal::default();
    let mut history = History::new(&seal);
    if let Some(at) = root.get("system") {
        system(&at, &mut history)?;
    }
    let messages = root.need("messages")?;
    let mut last = None;
    for message in messages.each()? {
        last = Some(self::message(&message, &mut history)?);
    }
    let Some(last) = last else { return Err(messages.wrong("an array of at least one message")) };
    history.answered(&messages, LEFT_OPEN)?;
    let prefill = if last == Role::Assistant { history.take_last() } else { None };
    let prefill = prefill.map(|turn| turn.text).filter(|text| !text.is_empty());
    if prefill.as_ref().is_some_and(|text| text.ends_with(char::is_whitespace)) {
        let what = format!("`{}` ends with a message of the assistant's that ends with a blank", messages.path());
        return Err(Error::new(Code::InvalidValue, what).hint("take the blanks at its end away").at(messages.path()));
    }
    Ok(Conversation { turns: history.into_turns(), prefill })
}

/// The system's text, or its blocks of text.
fn system(at: &At<'_, '_>, history: &mut History<'_>) -> Result<()> {
    if at.value.is_string() {
        return history.words(at, Role::System, at.string()?.to_owned());
    }
    if !at.value.is_array() {
        return Err(at.not("a string or an array of blocks"));
    }
    for block in at.each()? {
        let text = words(&block)?;
        if text.starts_with(BILLING) {
            tracing::debug!("a system block that changes with every request is left out of the prompt");
        } else {
            history.words(&block, Role::System, text.into_owned())?;
        }
    }
    Ok(())
}

/// Reads one message, and says whose it is.
fn message(message: &At<'_, '_>, history: &mut History<'_>) -> Result<Role> {
    message.object()?;
    let roles = [("user", Role::User), ("assistant", Role::Assistant), ("system", Role::System)];
    let role = message.need("role")?.one_of(&roles)?;
    let content = message.need("content")?;
    match role {
        Role::User => user(message, &content, history)?,
        Role::Assistant => assistant(message, &content, history)?,
        Role::System | Role::Tool => history.words(message, Role::System, blocks::text(&content)?.into_owned())?,
    }
    Ok(role)
}

/// Results of tools, and words.
fn user(message: &At<'_, '_>, content: &At<'_, '_>, history: &mut History<'_>) -> Result<()> {
    if !content.value.is_array() {
        return history.words(message, Role::User, blocks::text(content)?.into_owned());
    }
    let mut texts: Vec<Cow<'_, str>> = Vec::new();
    let mut results = false;
    for block in content.each()? {
        if kind(&block)? == "tool_result" {
            history.came(&block.need("tool_use_id")?, false, result(&block)?)?;
            results = true;
        } else {
            texts.push(words(&block)?);
        }
    }
    if results && texts.is_empty() {
        return Ok(());
    }
    history.words(message, Role::User, blocks::together(&texts).into_owned())
}

/// What came of a use of a tool. That it failed can be said in words alone.
fn result(block: &At<'_, '_>) -> Result<String> {
    let text = block.get("content").map(|content| blocks::text(&content).map(Cow::into_owned)).transpose()?.unwrap_or_default();
    let failed = block.get("is_error").map(|at| at.boolean()).transpose()?.unwrap_or(false);
    Ok(if failed { format!("Error: {text}") } else { text })
}

/// What the assistant said, thought, and called for.
fn assistant(message: &At<'_, '_>, content: &At<'_, '_>, history: &mut History<'_>) -> Result<()> {
    history.answered(message, BETWEEN_CALLS)?;
    if !content.value.is_array() {
        let text = blocks::text(content)?;
        join(&mut history.assistant(message)?.text, &text);
        return Ok(());
    }
    history.assistant(message)?;
    for block in content.each()? {
        match kind(&block)? {
            "tool_use" => {
                let name = block.need("name")?.string()?.to_owned();
                let input = block.need("input")?;
                let arguments = serde_json::Value::Object(input.object()?.clone()).to_string();
                history.called(&block, &block.need("id")?, None, Call { name, arguments })?;
            }
            // They are taken as they are: a signature of this server says nothing, and no other could be checked.
            "thinking" => join(&mut history.assistant(&block)?.reasoning, block.need("thinking")?.string()?),
            "redacted_thinking" => tracing::debug!("thoughts that another server has sealed are left out of the prompt"),
            name if name == "server_tool_use" || name == "mcp_tool_use" || name.ends_with("_tool_result") => {
                let text = blocks::told(name, &block)?;
                join(&mut history.assistant(&block)?.text, &text);
            }
            _ => {
                let text = words(&block)?;
                join(&mut history.assistant(&block)?.text, &text);
            }
        }
    }
    Ok(())
}
