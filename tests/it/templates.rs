//! Chat templates against the reference: every real template of the corpus, over every conversation, must give what Jinja2 gave.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use emberd::prompt::{ChatTemplate, RenderInput, Specials, TemplateError};
use serde::Deserialize;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

/// One case of `tests/golden/conversations.json`.
#[derive(Deserialize)]
struct Conversation {
    name: String,
    messages: Vec<Value>,
    tools: Option<Vec<Value>>,
    add_generation_prompt: bool,
    #[serde(default)]
    kwargs: Map<String, Value>,
}

/// One row of `tests/golden/snippets.json`.
#[derive(Deserialize)]
struct Snippet {
    template: String,
    /// What Jinja2 gives; `None` where it fails.
    text: Option<String>,
    /// Why ours is different, where it is.
    differs: Option<String>,
}

/// One template of `tests/golden/exceptions.json`.
#[derive(Deserialize)]
struct Exception {
    reason: String,
    conversations: Vec<String>,
}

fn golden(name: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)).expect(name)
}

fn corpus() -> Option<PathBuf> {
    let folder = std::env::var_os("EMBERD_TEMPLATES")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/data/chat-templates"), PathBuf::from);
    folder.is_dir().then_some(folder)
}

fn specials() -> Specials {
    let token = |text: &str| Some(text.to_owned());
    Specials { bos_token: token("<s>"), eos_token: token("</s>"), unk_token: token("<unk>"), pad_token: token("<pad>") }
}

fn compile(source: &str) -> Result<ChatTemplate, TemplateError> {
    // The moment at which tests/golden/make_templates.py stopped the clock.
    Ok(ChatTemplate::new(source, specials())?.with_fixed_time(jiff::civil::datetime(2026, 1, 15, 9, 30, 5, 0)))
}

fn render(template: &ChatTemplate, conversation: &Conversation) -> Result<String, TemplateError> {
    template.render(&RenderInput {
        messages: &conversation.messages,
        tools: conversation.tools.as_deref(),
        add_generation_prompt: conversation.add_generation_prompt,
        extra: &conversation.kwargs,
    })
}

fn head(text: &str) -> String {
    text.chars().take(40).collect()
}

fn tail(text: &str) -> String {
    let skip = text.chars().count().saturating_sub(40);
    text.chars().skip(skip).collect()
}

/// Our outcome in the form that `make_templates.py` writes.
fn outcome(template: Result<&ChatTemplate, &TemplateError>, conversation: &Conversation) -> (Value, String) {
    let Ok(template) = template else {
        return (Value::from(vec!["failed"]), format!("{}", template.expect_err("checked")));
    };
    match render(template, conversation) {
        Ok(text) => {
            let mut hash = String::new();
            for byte in Sha256::digest(text.as_bytes()) {
                write!(hash, "{byte:02x}").unwrap();
            }
            (serde_json::json!(["text", hash, text.len(), head(&text), tail(&text)]), text)
        }
        Err(TemplateError::Raised(message)) => (serde_json::json!(["raised", head(&message)]), message),
        Err(error) => (Value::from(vec!["failed"]), error.to_string()),
    }
}

#[test]
fn real_templates_render_as_jinja2_renders_them() {
    let Some(folder) = corpus() else {
        println!("skipped: no folder of templates; set EMBERD_TEMPLATES to one");
        return;
    };
    let conversations: Vec<Conversation> = serde_json::from_str(&golden("conversations.json")).unwrap();
    let expected: BTreeMap<String, BTreeMap<String, Value>> = serde_json::from_str(&golden("templates.json")).unwrap();
    let exceptions: BTreeMap<String, Exception> = serde_json::from_str(&golden("exceptions.json")).unwrap();
    assert!(exceptions.values().all(|exception| !exception.reason.is_empty()));
    let (mut equal, mut excepted, mut wrong) = (0, 0, Vec::new());
    for (name, rows) in &expected {
        let source = std::fs::read_to_string(folder.join(format!("{name}.jinja"))).expect(name);
        let template = compile(&source);
        for conversation in &conversations {
            let case = &conversation.name;
            let listed = exceptions.get(name).is_some_and(|exception| exception.conversations.contains(case));
            let (ours, text) = outcome(template.as_ref(), conversation);
            match (ours == rows[case], listed) {
                (true, false) => equal += 1,
                (false, true) => excepted += 1,
                (true, true) => wrong.push(format!("{name} / {case}: equal, but listed in exceptions.json")),
                (false, false) => wrong.push(format!("{name} / {case}: expected {}\ngot {ours}\n{text}", rows[case])),
            }
        }
    }
    println!("{equal} renderings are equal, {excepted} are listed as different");
    assert!(wrong.is_empty(), "{} renderings differ:\n{}", wrong.len(), wrong.join("\n"));
    let listed: usize = exceptions.values().map(|exception| exception.conversations.len()).sum();
    assert_eq!(excepted, listed, "exceptions.json names a template or a conversation that does not exist");
}

#[test]
fn snippets_render_as_jinja2_renders_them() {
    let variables = serde_json::json!({
        "s": "string",
        "l": [1, 2, 3],
        "d": {"a": 1, "b": "two", "c": [1, null]},
        "f": 0.300_000_000_000_000_04,
        "tiny": 1.5e-7,
        "whole": 3.0,
        "big": 9_223_372_036_854_775_808_u64,
        "schema": {"type": "array", "items": {"type": "string"}},
        "maps": [{"n": 1, "q": "x"}, {"n": 2}],
    });
    let snippets: Vec<Snippet> = serde_json::from_str(&golden("snippets.json")).unwrap();
    let mut wrong = Vec::new();
    for Snippet { template, text, differs } in snippets {
        let ours = compile(&template).and_then(|compiled| {
            compiled.render(&RenderInput { messages: &[], tools: None, add_generation_prompt: true, extra: variables.as_object().unwrap() })
        });
        if (ours.as_ref().ok() == text.as_ref()) == differs.is_some() {
            wrong.push(format!("{template}\n  expected {text:?}\n  got      {ours:?}"));
        }
    }
    assert!(wrong.is_empty(), "{} snippets:\n{}", wrong.len(), wrong.join("\n"));
}

fn render_source(source: &str) -> Result<String, TemplateError> {
    compile(source)?.render(&RenderInput { messages: &[], tools: None, add_generation_prompt: false, extra: &Map::new() })
}

#[test]
fn the_three_kinds_of_failure_are_told_apart() {
    assert!(matches!(compile("{% if %}"), Err(TemplateError::Compile(_))));
    assert!(matches!(compile("{{ x "), Err(TemplateError::Compile(_))));
    let raised = render_source("{% macro m() %}{{ raise_exception('only ' ~ 1) }}{% endmacro %}{{ m() }}");
    assert!(matches!(raised, Err(TemplateError::Raised(message)) if message == "only 1"));
    let Err(TemplateError::Render(message)) = render_source("\n\n{{ nothing.at.all }}") else { panic!("rendered") };
    assert!(message.contains("line 3"), "{message}");
}

#[test]
fn a_template_that_never_ends_is_stopped() {
    let bombs = [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
        "{% set ns = namespace(s='xxxxxxxxxxxxxxxx') %}{% for i in range(99999) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{{ 'x'.ljust(99999999999) }}",
        "{% set ns = namespace(l=[1]) %}{% for i in range(999) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l|tojson }}",
    ];
    for bomb in bombs {
        assert!(matches!(render_source(bomb), Err(TemplateError::Render(_))), "{bomb}");
    }
}

#[test]
fn variables_of_the_request_win_over_special_tokens_and_not_over_messages() {
    let extra = serde_json::json!({"bos_token": "mine", "messages": "theirs", "enable_thinking": false});
    let input = RenderInput { messages: &[], tools: None, add_generation_prompt: true, extra: extra.as_object().unwrap() };
    let template = compile("{{ bos_token }}{{ messages }}{{ enable_thinking }}").unwrap();
    assert_eq!(template.render(&input).unwrap(), "mine[]False");
}

#[test]
fn the_clock_runs_unless_it_is_stopped() {
    let template = ChatTemplate::new("{{ strftime_now('%Y-%m-%d') }}", Specials::default()).unwrap();
    let input = RenderInput { messages: &[], tools: None, add_generation_prompt: false, extra: &Map::new() };
    let before = jiff::ZonedDateTime::now().datetime().date();
    let found: jiff::civil::Date = template.render(&input).unwrap().parse().unwrap();
    assert!((before..=jiff::ZonedDateTime::now().datetime().date()).contains(&found));
}

#[test]
fn a_long_conversation_comes_to_an_end_in_every_real_template() {
    let Some(folder) = corpus() else {
        println!("skipped: no folder of templates; set EMBERD_TEMPLATES to one");
        return;
    };
    let words = "a long story ".repeat(100);
    let messages: Vec<Value> =
        (0..600).map(|index| serde_json::json!({"role": if index % 2 == 0 { "user" } else { "assistant" }, "content": words})).collect();
    let input = RenderInput { messages: &messages, tools: None, add_generation_prompt: true, extra: &Map::new() };
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let template = compile(&std::fs::read_to_string(&path).unwrap()).unwrap();
        if let Err(TemplateError::Render(message)) = template.render(&input) {
            assert!(!message.contains("come to an end"), "{}", path.display());
        }
    }
}
