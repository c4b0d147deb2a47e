//! The items of a request's input become turns of the conversation.
//!
//! What the assistant said, thought and called for next to each other is one turn. Every call is answered exactly once, right after its turn; the
//! answers may come in any order, and are put in that of the calls; what the system says between them comes after them. How a template writes the turns is the prompt's business.

use std::borrow::Cow;

use serde_json::Value;

use super::file;
use super::sealed::Seal;
use super::tools::{INPUT, flat};
use super::validate::At;
use crate::error::{Code, Error, Result};
use crate::prompt::{Call, Role, Turn};

/// What stands between system texts, and between neighbouring texts of the assistant, that become one turn.
pub(crate) const BETWEEN_TURNS: &str = "\n\n";
/// What is wrong with an item that does not answer the calls before it.
pub(crate) const BETWEEN_CALLS: &str = "comes before the outputs of these calls";
/// What is wrong with a conversation whose last calls nothing answers.
pub(crate) const LEFT_OPEN: &str = "ends without the outputs of these calls";
/// What stands between the text parts of one message.
pub(crate) const BETWEEN_PARTS: &str = "\n";

/// The conversation of a request: its instructions, then its input in order. Leading system and developer texts become one system turn.
/// `seal`: what opens thoughts that were sealed.
pub(crate) fn turns(instructions: Option<&str>, input: Option<At<'_, '_>>, root: &At<'_, '_>, seal: &Seal) -> Result<Vec<Turn>> {
    let mut history = History::new(seal);
    if let Some(text) = instructions {
        history.say(Role::System, text);
    }
    match input {
        // An empty text is what some clients warm a model up with.
        Some(input) if input.value.is_string() => history.say(Role::User, input.string()?),
        Some(input) if input.value.is_array() => {
            for item in input.each()? {
                history.item(&item)?;
            }
            history.answered(&input, LEFT_OPEN)?;
            if history.turns.is_empty() {
                return Err(input.wrong("a text or at least one item when there are no instructions"));
            }
        }
        Some(input) => return Err(input.not("a string or an array of items")),
        None if history.turns.is_empty() => return Err(root.missing("input")),
        None => {}
    }
    Ok(history.into_turns())
}

/// A conversation as far as it has been read.
pub(crate) struct History<'s> {
    turns: Vec<Turn>,
    /// The last turn's calls.
    pending: Vec<Pending>,
    /// What the system has said since, which is put behind what comes of them.
    aside: Vec<String>,
    seal: &'s Seal,
}

/// A call, with what came of it.
struct Pending {
    id: String,
    /// The id of its item.
    item: Option<String>,
    output: Option<String>,
}

impl<'s> History<'s> {
    /// An empty one. `seal`: what opens thoughts that were sealed.
    pub(crate) fn new(seal: &'s Seal) -> Self {
        Self { turns: Vec::new(), pending: Vec::new(), aside: Vec::new(), seal }
    }

    /// The turns of the whole conversation.
    pub(crate) fn into_turns(self) -> Vec<Turn> {
        let mut turns = self.turns;
        // Many templates refuse a conversation in which nobody has spoken yet.
        if turns.iter().all(|turn| turn.role == Role::System) {
            turns.push(Turn::new(Role::User, ""));
        }
        turns
    }

    /// Takes the last turn away.
    pub(crate) fn take_last(&mut self) -> Option<Turn> {
        self.turns.pop()
    }

    /// Words, which go on where the same role has spoken last, unless it is the user.
    fn say(&mut self, role: Role, text: &str) {
        match self.turns.last_mut() {
            Some(last) if last.role == role && matches!(role, Role::System | Role::Assistant) => join(&mut last.text, text),
            _ => self.turns.push(Turn::new(role, text)),
        }
    }

    /// The turn of the assistant that is not over yet.
    pub(crate) fn assistant(&mut self, at: &At<'_, '_>) -> Result<&mut Turn> {
        if self.pending.iter().any(|call| call.output.is_some()) {
            self.answered(at, BETWEEN_CALLS)?;
        }
        if self.turns.last().is_none_or(|last| last.role != Role::Assistant) {
            self.turns.push(Turn::new(Role::Assistant, ""));
        }
        let last = self.turns.len() - 1;
        Ok(&mut self.turns[last])
    }

    fn call(&mut self, at: &At<'_, '_>, name: String, arguments: String) -> Result<()> {
        let item = at.get("id").and_then(|at| at.value.as_str()).map(str::to_owned);
        self.called(at, &at.need("call_id")?, item, Call { name, arguments })
    }

    /// A call with this id, said at `at`; `item` is the id of the item that it is.
    pub(crate) fn called(&mut self, at: &At<'_, '_>, field: &At<'_, '_>, item: Option<String>, call: Call) -> Result<()> {
        let id = id(field)?;
        self.assistant(at)?.calls.push(call);
        if self.pending.iter().any(|call| call.id == id) {
            return Err(misplaced(field, format_args!("is the id of an earlier call: {id:?}"), "give every call an id of its own"));
        }
        self.pending.push(Pending { id: id.to_owned(), item, output: None });
        Ok(())
    }

    fn output(&mut self, at: &At<'_, '_>, text: String) -> Result<()> {
        // That of a local shell has no other id than its own, which is that of the call.
        let local = at.need("type")?.string()? == "local_shell_call_output" && at.get("call_id").is_none() && at.get("id").is_some();
        self.came(&at.need(if local { "id" } else { "call_id" })?, local, text)
    }

    /// What came of the call with this id, which may be that of its item where it is `local`.
    pub(crate) fn came(&mut self, field: &At<'_, '_>, local: bool, text: String) -> Result<()> {
        let id = id(field)?;
        let answers = |call: &Pending| call.id == id || (local && call.item.as_deref() == Some(id));
        match self.pending.iter_mut().find(|call| answers(call)) {
            Some(Pending { output: output @ None, .. }) => *output = Some(text),
            Some(_) => {
                return Err(misplaced(field, format_args!("is answered a second time: {id:?}"), "send one output for each call"));
            }
            None => {
                let what = format_args!("is the id of no call that waits for its output: {id:?}");
                return Err(misplaced(field, what, "send the call right before its output"));
            }
        }
        if self.pending.iter().all(|call| call.output.is_some()) {
            // In the order of the calls.
            let outputs = self.pending.drain(..).filter_map(|call| call.output);
            self.turns.extend(outputs.map(|text| Turn::new(Role::Tool, text)));
            for text in std::mem::take(&mut self.aside) {
                self.say(Role::System, &text);
            }
        }
        Ok(())
    }

    /// Nothing may come between calls and their outputs, and nothing may be left open at the end.
    pub(crate) fn answered(&self, at: &At<'_, '_>, complaint: &str) -> Result<()> {
        let open: Vec<String> = self.pending.iter().filter(|call| call.output.is_none()).map(|call| format!("{:?}", call.id)).collect();
        if open.is_empty() {
            return Ok(());
        }
        let what = format!("`{}` {complaint}: {}", at.path(), open.join(", "));
        Err(Error::new(Code::InvalidValue, what).hint("send an output for every call, right after the calls").at(at.path()))
    }

    /// Reads one item.
    fn item(&mut self, item: &At<'_, '_>) -> Result<()> {
        item.object()?;
        for key in ["id", "status"] {
            if let Some(field) = item.get(key) {
                field.string()?;
            }
        }
        let Some(kind) = item.get("type") else {
            // A reference may leave its type out.
            let bare = item.get("id").is_some() && item.get("role").is_none() && item.get("content").is_none();
            return if bare { Err(unknown_reference(&item.need("id")?)) } else { self.message(item) };
        };
        match kind.string()? {
            "message" => self.message(item),
            "reasoning" => {
                let text = reasoning(item, self.seal)?;
                join(&mut self.assistant(item)?.reasoning, &text);
                Ok(())
            }
            "function_call" => {
                let name = item.need("name")?.string()?;
                let namespace = item.get("namespace").map(|at| at.string()).transpose()?;
                let arguments = item.need("arguments")?.string()?;
                self.call(item, flat(namespace, name), arguments.to_owned())
            }
            "custom_tool_call" => {
                let name = item.need("name")?.string()?;
                let namespace = item.get("namespace").map(|at| at.string()).transpose()?;
                let input = item.need("input")?.string()?;
                self.call(item, flat(namespace, name), serde_json::json!({INPUT: input}).to_string())
            }
            name @ ("local_shell_call" | "shell_call" | "apply_patch_call" | "computer_call") => {
                let what = ["action", "operation"].iter().find_map(|key| item.value.get(key)).cloned().unwrap_or(Value::Null);
                let arguments = if what.is_object() { what } else { serde_json::json!({"action": what}) };
                self.call(item, name.trim_end_matches("_call").to_owned(), arguments.to_string())
            }
            "function_call_output"
            | "custom_tool_call_output"
            | "local_shell_call_output"
            | "shell_call_output"
            | "apply_patch_call_output"
            | "computer_call_output" => {
                let text = output(item)?;
                self.output(item, text)
            }
            // What a provider ran itself has been answered by itself: the model is told that it happened.
            name @ ("web_search_call"
            | "file_search_call"
            | "image_generation_call"
            | "code_interpreter_call"
            | "mcp_list_tools"
            | "mcp_approval_request"
            | "mcp_call") => {
                let mut fields = item.object()?.clone();
                // An image is no text.
                fields.retain(|key, value| !matches!(key.as_str(), "id" | "type" | "status") && !value.is_null());
                if name == "image_generation_call" {
                    fields.remove("result");
                }
                let text = format!("[{name}: {}]", Value::Object(fields));
                join(&mut self.assistant(item)?.text, &text);
                Ok(())
            }
            "item_reference" => Err(unknown_reference(&kind)),
            name @ ("compaction" | "compaction_trigger" | "mcp_approval_response") => Err(kind
                .unsupported(format_args!("is \"{name}\": this server makes nothing that this could belong to"))
                .hint("send the conversation itself")),
            _ => Err(kind.wrong("the name of an item type, such as \"message\"")),
        }
    }

    fn message(&mut self, item: &At<'_, '_>) -> Result<()> {
        let role = item.need("role")?.one_of(&[
            ("user", Role::User),
            ("assistant", Role::Assistant),
            ("system", Role::System),
            ("developer", Role::System),
        ])?;
        if role == Role::Assistant {
            // Of an answer that only called tools some clients send no content.
            let text = item.get("content").map(|content| text(&content)).transpose()?.unwrap_or_default();
            join(&mut self.assistant(item)?.text, &text);
            return Ok(());
        }
        let text = text(&item.need("content")?)?;
        self.words(item, role, text)
    }

    /// Words of the system or the user.
    pub(crate) fn words(&mut self, at: &At<'_, '_>, role: Role, text: String) -> Result<()> {
        if role == Role::System && !self.pending.is_empty() {
            self.aside.push(text);
        } else {
            self.answered(at, BETWEEN_CALLS)?;
            self.say(role, &text);
        }
        Ok(())
    }
}

/// Adds a text to another, a blank line between where both say something.
pub(crate) fn join(to: &mut String, text: &str) {
    if !to.is_empty() && !text.is_empty() {
        to.push_str(BETWEEN_TURNS);
    }
    to.push_str(text);
}

fn id<'v>(id: &At<'v, '_>) -> Result<&'v str> {
    match id.string()? {
        "" => Err(id.wrong("the id of a call")),
        text => Ok(text),
    }
}

fn misplaced(at: &At<'_, '_>, what: std::fmt::Arguments<'_>, hint: &'static str) -> Error {
    Error::new(Code::InvalidValue, format!("`{}` {what}", at.path())).hint(hint).at(at.path())
}

fn unknown_reference(at: &At<'_, '_>) -> Error {
    at.unsupported("refers to an item by its id: this server keeps no items").hint("send the item itself")
}

/// A text, or parts of text.
fn text(content: &At<'_, '_>) -> Result<String> {
    text_of(content, part_text)
}

/// A text, or parts of text, each of which is read so.
pub(crate) fn text_of<'v>(content: &At<'v, '_>, read: impl Fn(&At<'v, '_>) -> Result<Cow<'v, str>>) -> Result<String> {
    if content.value.is_string() {
        return Ok(content.string()?.to_owned());
    }
    if !content.value.is_array() {
        return Err(content.not("a string or an array of parts"));
    }
    let mut text = String::new();
    for (index, part) in content.each()?.enumerate() {
        if index > 0 {
            text.push_str(BETWEEN_PARTS);
        }
        text.push_str(&read(&part)?);
    }
    Ok(text)
}

fn part_text<'v>(part: &At<'v, '_>) -> Result<Cow<'v, str>> {
    part.object()?;
    let kind = part.need("type")?;
    match kind.string()? {
        "input_text" | "output_text" | "text" | "summary_text" | "reasoning_text" => part.need("text")?.string().map(Cow::Borrowed),
        "refusal" => part.need("refusal")?.string().map(Cow::Borrowed),
        "input_file" => file::text(part).map(Cow::Owned),
        name @ ("input_image" | "image_url" | "input_audio" | "input_video" | "computer_screenshot") => {
            Err(kind.unsupported(format_args!("is \"{name}\": this server takes text only")).hint("send parts of type input_text"))
        }
        _ => Err(kind.wrong("one of \"input_text\", \"output_text\", \"text\", \"refusal\", \"summary_text\", \"reasoning_text\"")),
    }
}

/// What came of a call: a text, parts of text, or (of calls whose outputs have a form of their own) the JSON that it is.
fn output(item: &At<'_, '_>) -> Result<String> {
    let output = item.need("output")?;
    let known = item.need("type")?.string()?;
    if matches!(known, "function_call_output" | "custom_tool_call_output") {
        return text(&output);
    }
    match output.value {
        Value::String(text) => Ok(text.clone()),
        other if other["type"] == "computer_screenshot" => part_text(&output).map(Cow::into_owned),
        other => Ok(other.to_string()),
    }
}

/// The thoughts of a reasoning item: as they were sealed, else as they were told, else as a summary.
fn reasoning(item: &At<'_, '_>, seal: &Seal) -> Result<String> {
    if let Some(sealed) = item.get("encrypted_content")
        && !sealed.string()?.is_empty()
    {
        return seal.open(sealed.string()?).ok_or_else(|| {
            let what = format!("`{}` cannot be opened: this server has not sealed it, or it has been changed since", sealed.path());
            Error::new(Code::InvalidEncryptedContent, what)
                .hint("leave encrypted_content out, or send it to where it came from")
                .at(sealed.path())
        });
    }
    let mut found = String::new();
    for key in ["content", "summary"] {
        let parts = item.get(key).map(|at| text(&at)).transpose()?.unwrap_or_default();
        if found.is_empty() {
            found = parts;
        }
    }
    Ok(found)
}
