//! Turns made to fit a template: some models take one system turn, or none, and want user and assistant in strict turn.
//!
//! [`render`] gives a template the turns as they are, and only when it refuses them a form with merged turns, and then one without a system turn. No
//! text is ever left out. What the roles of a door mean is decided there; here are only `system`, `developer`, `user`, `assistant`, `tool`.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::template::{ChatTemplate, RenderInput, TemplateError};

/// Renders turns in the most faithful form that the template takes: as they are (see [`normalise`]), then [`merged`], then [`without_system`].
///
/// # Errors
/// What the template said to the most faithful form, when it takes none of them.
pub fn render(template: &ChatTemplate, input: &RenderInput<'_>) -> Result<String, TemplateError> {
    let with = |messages: &[Value]| template.render(&RenderInput { messages, ..*input });
    let faithful = normalise(input.messages);
    let error = match with(&faithful) {
        Ok(prompt) => {
            // Where system turns come late, some templates pass over them, or over the others, without a word.
            let lost = late(&faithful) && systems(&faithful).any(|text| !prompt.contains(text.trim()));
            let kept = if lost { with(&merged(&faithful)).ok() } else { None };
            return Ok(kept.unwrap_or(prompt));
        }
        Err(error) => error,
    };
    let merged = merged(&faithful);
    with(&merged).or_else(|_| with(&without_system(&merged))).map_err(|_| error)
}

/// Whether a system turn comes after others.
fn late(turns: &[Value]) -> bool {
    turns.iter().skip_while(|turn| role(turn) == "system").any(|turn| role(turn) == "system")
}

/// The texts of system turns.
fn systems(turns: &[Value]) -> impl Iterator<Item = &str> {
    turns.iter().filter(|turn| role(turn) == "system").filter_map(|turn| turn["content"].as_str())
}

/// The turns with `developer` called `system`, which is the name that templates know, and one empty user turn if there is none at all.
#[must_use]
pub fn normalise(turns: &[Value]) -> Cow<'_, [Value]> {
    if turns.is_empty() {
        return Cow::Owned(vec![turn("user", "")]);
    }
    if turns.iter().all(|turn| role(turn) != "developer") {
        return Cow::Borrowed(turns);
    }
    let mut turns = turns.to_vec();
    for turn in &mut turns {
        if role(turn) == "developer" {
            turn["role"] = Value::from("system");
        }
    }
    Cow::Owned(turns)
}

/// The turns in the form that strict templates want: at most one system turn, first, then user and assistant in turn, a user first. System turns at
/// the start become one; a later one becomes part of the user's next words. Neighbours of one role become one turn, with a blank line between;
/// turns with tool calls, and results of tools, stay as they are.
#[must_use]
pub fn merged(turns: &[Value]) -> Vec<Value> {
    let mut found: Vec<Value> = Vec::with_capacity(turns.len() + 1);
    for turn in turns {
        let mut turn = turn.clone();
        flatten(&mut turn);
        let leading = found.iter().all(|turn| role(turn) == "system");
        if role(&turn) == "system" && !leading {
            turn["role"] = Value::from("user");
        }
        if leading && role(&turn) == "assistant" {
            found.push(self::turn("user", ""));
        }
        match found.last_mut() {
            Some(last) if role(last) == role(&turn) && is_plain(last) && is_plain(&turn) => append(last, &turn["content"]),
            _ => found.push(turn),
        }
    }
    if found.iter().all(|turn| role(turn) == "system") {
        found.push(turn("user", ""));
    }
    found
}

/// The turns with the system turn's text at the start of the first user turn, for models that have no system role.
#[must_use]
pub fn without_system(turns: &[Value]) -> Vec<Value> {
    let (system, rest): (Vec<&Value>, Vec<&Value>) = turns.iter().partition(|turn| role(turn) == "system");
    let mut found: Vec<Value> = rest.into_iter().cloned().collect();
    for system in system.into_iter().rev() {
        match found.first_mut() {
            Some(first) if role(first) == "user" && is_plain(first) => {
                let words = std::mem::replace(&mut first["content"], system["content"].clone());
                append(first, &words);
            }
            _ => {
                let mut first = system.clone();
                first["role"] = Value::from("user");
                found.insert(0, first);
            }
        }
    }
    found
}

fn role(turn: &Value) -> &str {
    turn["role"].as_str().unwrap_or_default()
}

fn turn(role: &str, content: &str) -> Value {
    Value::Object(Map::from_iter([("role".to_owned(), Value::from(role)), ("content".to_owned(), Value::from(content))]))
}

/// Whether a turn is one of words alone: a role that speaks, and nothing but its content.
fn is_plain(turn: &Value) -> bool {
    matches!(role(turn), "system" | "user" | "assistant")
        && turn.as_object().is_some_and(|fields| fields.keys().all(|name| name == "role" || name == "content"))
        && matches!(turn["content"], Value::String(_) | Value::Array(_))
}

/// Makes content that is only text, or none, a plain string.
fn flatten(turn: &mut Value) {
    let Some(fields) = turn.as_object_mut() else {
        return;
    };
    let text = match fields.get("content") {
        None | Some(Value::Null) => Some(String::new()),
        Some(Value::Array(parts)) => parts.iter().map(|part| part["text"].as_str().filter(|_| part["type"] == "text")).collect(),
        Some(_) => None,
    };
    if let Some(text) = text {
        fields.insert("content".to_owned(), Value::from(text));
    }
}

/// Adds `more` to a turn's content, a blank line between; an empty side adds no line. Content in parts stays in parts.
fn append(turn: &mut Value, more: &Value) {
    let content = turn["content"].take();
    turn["content"] = match (content, more) {
        (Value::String(first), Value::String(second)) if first.is_empty() || second.is_empty() => Value::from(first + second),
        (Value::String(first), Value::String(second)) => Value::from(first + "\n\n" + second),
        (first, second) => {
            let parts = |content: &Value| match content {
                Value::Array(parts) => parts.clone(),
                text => vec![serde_json::json!({"type": "text", "text": text})],
            };
            Value::from([parts(&first), parts(second)].concat())
        }
    };
}
