//! Turns made to fit strict templates.

use emberd::prompt::messages::{merged, normalise, render, without_system};
use emberd::prompt::{ChatTemplate, RenderInput, Specials, TemplateError};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

fn turn(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

fn turns(list: &[(&str, &str)]) -> Vec<Value> {
    list.iter().map(|(role, content)| turn(role, content)).collect()
}

const LENIENT: &str = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}";

/// Refuses a system turn that is not first, and anything but user and assistant in turn after it.
const STRICT: &str = "{% if messages[0].role == 'system' %}{{ messages[0].content }}|{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}\
    {% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}\
    {{ m.role }}:{{ m.content }};{% endfor %}";

/// The same, without any system turn.
const STRICTER: &str = "{% for m in messages %}{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}\
    {{ raise_exception('no') }}{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}";

fn rendered(source: &str, messages: &[Value]) -> Result<String, TemplateError> {
    let template = ChatTemplate::new(source, Specials::default()).unwrap();
    render(&template, &RenderInput { messages, tools: None, add_generation_prompt: true, extra: &Map::new() })
}

#[test]
fn a_lenient_template_gets_the_turns_as_they_are() {
    let given = turns(&[("system", "a"), ("developer", "b"), ("user", "c"), ("user", "d"), ("system", "e")]);
    assert_eq!(rendered(LENIENT, &given).unwrap(), "system:a;system:b;user:c;user:d;system:e;");
}

#[test]
fn a_strict_template_gets_merged_turns() {
    let given = turns(&[("system", "a"), ("developer", "b"), ("user", "c"), ("user", "d"), ("assistant", "e"), ("system", "f")]);
    assert_eq!(rendered(STRICT, &given).unwrap(), "a\n\nb|user:c\n\nd;assistant:e;user:f;");
}

#[test]
fn a_template_without_a_system_role_gets_its_text_from_the_user() {
    let given = turns(&[("system", "a"), ("user", "b"), ("assistant", "c"), ("user", "d")]);
    assert_eq!(rendered(STRICTER, &given).unwrap(), "user:a\n\nb;assistant:c;user:d;");
    assert_eq!(rendered(STRICTER, &turns(&[("system", "a")])).unwrap(), "user:a;");
}

#[test]
fn no_turns_are_one_empty_user_turn() {
    assert_eq!(rendered(LENIENT, &[]).unwrap(), "user:;");
    assert_eq!(rendered(STRICT, &[]).unwrap(), "user:;");
}

#[test]
fn an_assistant_that_speaks_first_answers_an_empty_user() {
    assert_eq!(rendered(STRICT, &turns(&[("assistant", "a"), ("user", "b")])).unwrap(), "user:;assistant:a;user:b;");
}

#[test]
fn the_first_refusal_is_the_one_that_is_told() {
    let source = "{{ raise_exception('never with ' ~ messages|length) }}";
    let error = rendered(source, &turns(&[("user", "a"), ("user", "b")])).unwrap_err();
    assert!(matches!(error, TemplateError::Raised(message) if message == "never with 2"));
}

#[test]
fn calls_and_results_of_tools_are_not_merged() {
    let call = json!({"role": "assistant", "content": null, "tool_calls": [{"id": "1"}]});
    let result = json!({"role": "tool", "content": "x", "tool_call_id": "1"});
    let given = vec![turn("user", "a"), call, result.clone(), result, turn("assistant", "b"), turn("assistant", "c")];
    let found = merged(&given);
    assert_eq!(found.len(), 5);
    assert_eq!(found[1]["content"], "");
    assert_eq!(found[4]["content"], "b\n\nc");
}

#[test]
fn content_in_parts_is_kept_or_made_plain() {
    let text = json!({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]});
    let image = json!({"role": "user", "content": [{"type": "image", "url": "u"}]});
    assert_eq!(merged(std::slice::from_ref(&text)), [turn("user", "ab")]);
    let both = merged(&[text, image]);
    assert_eq!(both, [json!({"role": "user", "content": [{"type": "text", "text": "ab"}, {"type": "image", "url": "u"}]})]);
}

fn any_turns() -> impl Strategy<Value = Vec<Value>> {
    let role = prop_oneof!["system", "developer", "user", "assistant"];
    prop::collection::vec((role, "[a-z]{0,3}").prop_map(|(role, content)| turn(&role, &content)), 0..8)
}

proptest! {
    #[test]
    fn any_speech_fits_the_strictest_template_and_loses_no_word(given in any_turns()) {
        let found = without_system(&merged(&normalise(&given)));
        for (index, turn) in found.iter().enumerate() {
            prop_assert_eq!(&turn["role"], if index % 2 == 0 { "user" } else { "assistant" });
        }
        let words = |turns: &[Value]| {
            turns.iter().map(|turn| turn["content"].as_str().unwrap().replace('\n', "")).collect::<String>()
        };
        prop_assert_eq!(words(&found), words(&given));
        prop_assert!(rendered(STRICT, &given).is_ok() && rendered(STRICTER, &given).is_ok());
    }
}
