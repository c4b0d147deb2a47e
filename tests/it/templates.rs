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
    let exceptions: BTreeMap<String, String> = serde_json::from_str(&golden("exceptions.json")).unwrap();
    let only = std::env::var("EMBERD_TEMPLATE_DUMP").ok();
    let mut equal = 0;
    let mut wrong = Vec::new();
    for (name, rows) in &expected {
        let source = std::fs::read_to_string(folder.join(format!("{name}.jinja"))).expect(name);
        let template = compile(&source);
        for conversation in &conversations {
            let key = format!("{name}/{}", conversation.name);
            let (ours, text) = outcome(template.as_ref(), conversation);
            let same = ours == rows[&conversation.name];
            if let Some(folder) = &only {
                std::fs::write(Path::new(folder).join(key.replace('/', "__")), &text).unwrap();
            }
            match (same, exceptions.contains_key(&key)) {
                (true, false) => equal += 1,
                (false, true) => {}
                (true, true) => wrong.push(format!("{key}: equal now, but listed in exceptions.json")),
                (false, false) => wrong.push(format!("{key}: expected {} got {ours} {}", rows[&conversation.name], if ours[0] == "text" {""} else {&text})),
            }
        }
    }
    println!("{equal} renders equal, {} excepted", exceptions.len());
    assert!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), equal + wrong.len(), wrong.join("\n"));
}
