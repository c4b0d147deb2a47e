//! How a template takes tools, calls and their results: found out by giving it some, since templates do not say. What it has no form for is
//! written as text, so that no conversation is lost on a template that knows nothing of tools.
//!
//! Whether turns are in an order that the template takes is `messages`' business.

use serde_json::{Map, Value, json};

use super::template::{ChatTemplate, RenderInput};
use super::turn::{Call, Role, Turn};
use crate::text::Family;

/// In which form a template takes the arguments of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arguments {
    Object,
    Text,
}

/// What a template takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Dialect {
    /// Whether it shows tools.
    tools: bool,
    /// How it shows calls, if it does; and whether a turn without words has an empty text or none.
    calls: Option<(Arguments, bool)>,
    /// Whether it shows the results of calls in a role of their own.
    results: bool,
    /// Whether it shows no more than one call of a turn.
    single: bool,
    /// Whether it shows calls or words of a turn, but not both.
    apart: bool,
}

/// Words that stand in no template.
const TOOL: [&str; 2] = ["probed_tool_one", "probed_tool_two"];
const KEY: &str = "probed_key";
const VALUE: [&str; 2] = ["probed-value-one", "probed-value-two"];
const SAID: &str = "probed-words";
const RESULT: [&str; 2] = ["probed-result-one", "probed-result-two"];

impl Dialect {
    /// That of a template that knows words alone.
    pub(super) const PLAIN: Self = Self { tools: false, calls: None, results: false, single: false, apart: false };

    /// That of a template.
    pub(super) fn of(template: &ChatTemplate, family: &'static Family) -> Self {
        let tools =
            TOOL.map(|name| definition(name, "", json!({"type": "object", "properties": {KEY: {"type": "string", "description": ""}}})));
        let none = Map::new();
        let render = |messages: &[Value], tools: Option<&[Value]>| {
            template.render(&RenderInput { messages, tools, add_generation_prompt: true, extra: &none }).unwrap_or_default()
        };
        let plain = [Turn::new(Role::User, "hi")];
        let shows_tools = render(&Self::PLAIN.messages(&plain, &[], family), Some(&tools)).contains(TOOL[0]);
        let given = Some(&tools[..]).filter(|_| shows_tools);
        let called = |count: usize| {
            let call = |at: usize| Call { name: TOOL[at].to_owned(), arguments: json!({KEY: VALUE[at]}).to_string() };
            let mut turns = vec![plain[0].clone(), Turn { calls: (0..count).map(call).collect(), ..Turn::new(Role::Assistant, "") }];
            turns.extend(RESULT.iter().take(count).map(|result| Turn::new(Role::Tool, *result)));
            turns
        };
        let forms = [Arguments::Object, Arguments::Text].into_iter().flat_map(|form| [false, true].map(|empty| (form, empty)));
        let one = called(1);
        let calls = forms.into_iter().find(|form| {
            let text = render(
                &Self { tools: shows_tools, calls: Some(*form), results: true, single: false, apart: false }.messages(&one, &[], family),
                given,
            );
            // Not as Python shows a dictionary, nor as a text within a text.
            let sound = !text.contains(&format!("'{KEY}'")) && !text.contains(&format!("\\\"{KEY}"));
            sound && [TOOL[0], VALUE[0], RESULT[0]].iter().all(|word| text.contains(word))
        });
        // A template that knows nothing of tools may print any role, which tells its model nothing.
        let results = calls.is_some()
            || shows_tools && {
                let answered = [plain[0].clone(), Turn::new(Role::Assistant, "I see."), Turn::new(Role::Tool, RESULT[0])];
                render(
                    &Self { tools: shows_tools, calls, results: true, single: false, apart: false }.messages(&answered, &[], family),
                    given,
                )
                .contains(RESULT[0])
            };
        let found = Self { tools: shows_tools, calls, results, single: false, apart: false };
        let text = render(&found.messages(&called(2), &[], family), given);
        let both = VALUE.iter().chain(&RESULT).all(|word| text.contains(word));
        let mut spoken = called(1);
        spoken[1].text = SAID.to_owned();
        let text = render(&found.messages(&spoken, &[], family), given);
        let apart = calls.is_some() && !(text.contains(SAID) && text.contains(VALUE[0]));
        Self { single: calls.is_some() && !both, apart, ..found }
    }

    /// Whether the template shows tools.
    pub(super) fn takes_tools(&self) -> bool {
        self.tools
    }

    /// The turns as the template takes them. `tools` are described at the start where it does not show any; `family` says how the model writes calls.
    pub(super) fn messages(&self, turns: &[Turn], tools: &[Value], family: &'static Family) -> Vec<Value> {
        let mut messages = Vec::with_capacity(turns.len() + 1);
        let described = if self.tools || tools.is_empty() { None } else { Some(description(tools)) };
        let mut turns = turns;
        if let Some(description) = described {
            let text = match turns.split_first() {
                Some((first, rest)) if first.role == Role::System => {
                    turns = rest;
                    format!("{}\n\n{description}", first.text)
                }
                _ => description,
            };
            messages.push(json!({"role": "system", "content": text}));
        }
        let mut turns = turns.iter();
        let mut number = 0;
        while let Some(turn) = turns.next() {
            let results = turns.as_slice().iter().take(turn.calls.len()).take_while(|turn| turn.role == Role::Tool).count();
            if self.single && turn.calls.len() > 1 && results == turn.calls.len() {
                for at in 0..results {
                    let first = at == 0;
                    let part = Turn {
                        text: if first { turn.text.clone() } else { String::new() },
                        reasoning: if first { turn.reasoning.clone() } else { String::new() },
                        calls: turn.calls[at..=at].to_vec(),
                        ..Turn::new(Role::Assistant, "")
                    };
                    self.speak(&part, &mut number, &mut messages, family);
                    let id = identifier(number - 1, &turn.calls[at], family);
                    messages.extend(turns.next().map(|result| self.result(result, &id, &turn.calls[at])));
                }
                continue;
            }
            let before = number;
            self.speak(turn, &mut number, &mut messages, family);
            for (at, call) in turn.calls.iter().enumerate().take(results) {
                let id = identifier(before + at, call, family);
                messages.extend(turns.next().map(|result| self.result(result, &id, call)));
            }
        }
        messages
    }

    /// One turn that is no result.
    fn speak(&self, turn: &Turn, number: &mut usize, messages: &mut Vec<Value>, family: &'static Family) {
        if self.apart && !turn.calls.is_empty() && !turn.text.is_empty() {
            let (words, calls) = (Turn { calls: Vec::new(), ..turn.clone() }, Turn { text: String::new(), ..turn.clone() });
            self.speak(&Turn { reasoning: String::new(), ..words }, number, messages, family);
            return self.speak(&calls, number, messages, family);
        }
        let mut message = Map::new();
        let mut text = turn.text.clone();
        let role = if turn.role == Role::Tool && !self.results { Role::User } else { turn.role };
        message.insert("role".to_owned(), Value::from(role.name()));
        let shown = self.calls.filter(|_| !turn.calls.is_empty());
        if shown.is_none() && !turn.calls.is_empty() {
            if !text.is_empty() {
                text.push_str("\n\n");
            }
            text.push_str(&written(&turn.calls, family));
        }
        let absent = text.is_empty() && shown.is_some_and(|(_, empty)| !empty);
        message.insert("content".to_owned(), if absent { Value::Null } else { Value::from(text) });
        if !turn.reasoning.is_empty() && self.calls.is_some() {
            // The names that templates have for it.
            message.insert("reasoning_content".to_owned(), Value::from(turn.reasoning.as_str()));
            if turn.text.is_empty() || turn.calls.is_empty() {
                message.insert("thinking".to_owned(), Value::from(turn.reasoning.as_str()));
            }
        }
        if let Some((form, _)) = shown {
            let calls = turn.calls.iter().map(|call| {
                let arguments = match form {
                    Arguments::Object => object(&call.arguments),
                    Arguments::Text => Value::from(call.arguments.as_str()),
                };
                let id = identifier(*number, call, family);
                *number += 1;
                json!({"id": id, "type": "function", "function": {"name": call.name, "arguments": arguments}})
            });
            let calls: Vec<Value> = calls.collect();
            message.insert("tool_calls".to_owned(), Value::from(calls));
        } else {
            *number += turn.calls.len();
        }
        messages.push(Value::Object(message));
    }

    /// What came of a call.
    fn result(&self, turn: &Turn, id: &str, call: &Call) -> Value {
        if self.results {
            return json!({"role": "tool", "content": turn.text, "name": call.name, "tool_call_id": id});
        }
        json!({"role": "user", "content": format!("<tool_response>\n{}\n</tool_response>", turn.text)})
    }
}

/// A tool in the form that templates know.
pub(crate) fn definition(name: &str, description: &str, parameters: Value) -> Value {
    json!({"type": "function", "function": {"name": name, "description": description, "parameters": parameters}})
}

/// Arguments as an object, whatever they are: a template may look into it.
fn object(arguments: &str) -> Value {
    match serde_json::from_str(arguments) {
        Ok(value @ Value::Object(_)) => value,
        _ if arguments.trim().is_empty() => json!({}),
        _ => json!({"arguments": arguments}),
    }
}

/// An id for a call within a prompt: nine letters and digits, which is what the strictest templates insist on. Kimi reads the name out of it.
fn identifier(number: usize, call: &Call, family: &'static Family) -> String {
    if family.name == "kimi" { format!("functions.{}:{number}", call.name) } else { format!("call{number:05}") }
}

/// Calls as a model would write them.
fn written(calls: &[Call], family: &'static Family) -> String {
    if family.name == "lfm2" {
        let calls: Vec<String> = calls
            .iter()
            .map(|call| {
                let arguments = object(&call.arguments);
                let arguments =
                    arguments.as_object().into_iter().flatten().map(|(key, value)| format!("{key}={}", super::repr::python(value)));
                format!("{}({})", call.name, arguments.collect::<Vec<_>>().join(", "))
            })
            .collect();
        return format!("<|tool_call_start|>[{}]<|tool_call_end|>", calls.join(", "));
    }
    let calls = calls.iter().map(|call| {
        let call = json!({"name": call.name, "arguments": object(&call.arguments)});
        format!("<tool_call>\n{call}\n</tool_call>")
    });
    calls.collect::<Vec<_>>().join("\n")
}

/// Tools as a text, for models whose templates have no place for them.
fn description(tools: &[Value]) -> String {
    let mut text = "You may call these tools. Each line between <tools> and </tools> is the JSON description of one:\n<tools>\n".to_owned();
    for tool in tools {
        text.push_str(&tool.to_string());
        text.push('\n');
    }
    text.push_str(
        "</tools>\nTo call a tool, answer with its name and its arguments as JSON between <tool_call> and </tool_call>, like this:\n\
         <tool_call>\n{\"name\": \"the tool's name\", \"arguments\": {\"an argument\": \"its value\"}}\n</tool_call>",
    );
    text
}
