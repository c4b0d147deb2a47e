//! Items: those of the input become turns of the conversation, those of the output are made here.
//!
//! How a template writes the turns is the prompt's business.

use serde::Serialize;

use super::validate::At;
use crate::error::Result;
use crate::models::TokenLogprob;
use crate::prompt::{Role, Turn};

/// What stands between system texts, and between neighbouring texts of the assistant, that become one turn.
const BETWEEN_TURNS: &str = "\n\n";
/// What stands between the text parts of one message.
const BETWEEN_PARTS: &str = "\n";

/// The conversation of a request: its instructions, then its input in order. Leading system and developer texts become one system turn;
/// neighbouring messages of the assistant become one turn.
pub(crate) fn turns(instructions: Option<&str>, input: Option<At<'_, '_>>, root: &At<'_, '_>) -> Result<Vec<Turn>> {
    let mut turns = Vec::new();
    if let Some(text) = instructions {
        add(&mut turns, Role::System, text.to_owned());
    }
    match input {
        // An empty text is what some clients warm a model up with.
        Some(input) if input.value.is_string() => add(&mut turns, Role::User, input.string()?.to_owned()),
        Some(input) if input.value.is_array() => {
            for item in input.each()? {
                let (role, text) = message(&item)?;
                add(&mut turns, role, text);
            }
            if turns.is_empty() {
                return Err(input.wrong("a text or at least one item when there are no instructions"));
            }
        }
        Some(input) => return Err(input.not("a string or an array of items")),
        None if turns.is_empty() => return Err(root.missing("input")),
        None => {}
    }
    // Many templates refuse a conversation in which nobody has spoken yet.
    if turns.iter().all(|turn| turn.role == Role::System) {
        add(&mut turns, Role::User, String::new());
    }
    Ok(turns)
}

fn add(turns: &mut Vec<Turn>, role: Role, text: String) {
    match turns.last_mut() {
        Some(last) if last.role == role && role != Role::User => {
            if !last.text.is_empty() && !text.is_empty() {
                last.text.push_str(BETWEEN_TURNS);
            }
            last.text.push_str(&text);
        }
        _ => turns.push(Turn { role, text }),
    }
}

/// Reads one item. Only messages are understood; the other kinds are refused by their name.
fn message(item: &At<'_, '_>) -> Result<(Role, String)> {
    item.object()?;
    if let Some(kind) = item.get("type") {
        match kind.string()? {
            "message" => {}
            "function_call"
            | "function_call_output"
            | "custom_tool_call"
            | "custom_tool_call_output"
            | "reasoning"
            | "compaction"
            | "compaction_trigger"
            | "item_reference"
            | "web_search_call"
            | "file_search_call"
            | "computer_call"
            | "computer_call_output"
            | "image_generation_call"
            | "code_interpreter_call"
            | "local_shell_call"
            | "local_shell_call_output"
            | "shell_call"
            | "shell_call_output"
            | "apply_patch_call"
            | "apply_patch_call_output"
            | "mcp_list_tools"
            | "mcp_approval_request"
            | "mcp_approval_response"
            | "mcp_call" => {
                return Err(kind
                    .unsupported(format_args!("is \"{}\": this server takes messages only", kind.string()?))
                    .hint("send the conversation as items of type message"));
            }
            _ => return Err(kind.wrong("the name of an item type, such as \"message\"")),
        }
    }
    let role = item.need("role")?.one_of(&[
        ("user", Role::User),
        ("assistant", Role::Assistant),
        ("system", Role::System),
        ("developer", Role::System),
    ])?;
    for key in ["id", "status"] {
        if let Some(field) = item.get(key) {
            field.string()?;
        }
    }
    let content = item.need("content")?;
    if content.value.is_string() {
        return Ok((role, content.string()?.to_owned()));
    }
    if !content.value.is_array() {
        return Err(content.not("a string or an array of parts"));
    }
    let mut text = String::new();
    for (index, part) in content.each()?.enumerate() {
        if index > 0 {
            text.push_str(BETWEEN_PARTS);
        }
        text.push_str(part_text(&part)?);
    }
    Ok((role, text))
}

fn part_text<'v>(part: &At<'v, '_>) -> Result<&'v str> {
    part.object()?;
    let kind = part.need("type")?;
    match kind.string()? {
        "input_text" | "output_text" | "text" => part.need("text")?.string(),
        "refusal" => part.need("refusal")?.string(),
        name @ ("input_image" | "image_url" | "input_file" | "input_audio" | "input_video") => {
            Err(kind.unsupported(format_args!("is \"{name}\": this server takes text only")).hint("send parts of type input_text"))
        }
        _ => Err(kind.wrong("one of \"input_text\", \"output_text\", \"text\", \"refusal\"")),
    }
}

/// How far an output item is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ItemStatus {
    /// It grows.
    InProgress,
    /// It is whole.
    Completed,
    /// It was cut short.
    Incomplete,
}

/// An item of the output.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Item {
    /// What the assistant says.
    Message(Message),
}

/// A message of the assistant: at most one part of text.
#[derive(Debug, Clone, Serialize)]
pub struct Message {
    /// `msg_…`, the same in every event and in the response.
    pub id: String,
    /// How far it is.
    pub status: ItemStatus,
    /// Always `assistant`.
    pub role: &'static str,
    /// Its parts: none when it is announced, one from the moment that is announced.
    pub content: Vec<Part>,
}

/// A part of a message.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Part {
    /// Text.
    OutputText(Text),
}

/// A part of text.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Text {
    /// Always empty: nothing is cited.
    pub annotations: [(); 0],
    /// The tokens of the text, where they were asked for.
    pub logprobs: Vec<TokenLogprob>,
    /// The text so far.
    pub text: String,
}
