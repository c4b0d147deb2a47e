//! Conversations with tools, and in every order of roles, over every real chat template: none refuses one, and none loses a word.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use emberd::prompt::{Call, Prompter, Role, Tokenizer, Turn, Writing};
use emberd::text::{Family, Format};
use serde_json::{Value, json};

use crate::vocab;

/// The corpus: each template with its name.
fn templates() -> Vec<(String, String)> {
    let folder = std::env::var_os("EMBERD_TEMPLATES")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/data/chat-templates"), PathBuf::from);
    let Ok(entries) = std::fs::read_dir(folder) else {
        println!("skipped: no folder of templates; set EMBERD_TEMPLATES to one");
        return Vec::new();
    };
    let mut found: Vec<(String, String)> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|kind| kind == "jinja"))
        .map(|path| (path.file_stem().unwrap().to_str().unwrap().to_owned(), std::fs::read_to_string(path).unwrap()))
        .collect();
    found.sort();
    found
}

fn prompter(source: &str) -> Prompter {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, content: &str| std::fs::write(folder.path().join(name), content).unwrap();
    write("tokenizer.json", &vocab::byte_level().to_string());
    write(
        "tokenizer_config.json",
        &json!({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}).to_string(),
    );
    write("chat_template.jinja", source);
    Prompter::new(Arc::new(Tokenizer::load(folder.path()).unwrap())).unwrap()
}

fn user(text: &str) -> Turn {
    Turn::new(Role::User, text)
}

fn system(text: &str) -> Turn {
    Turn::new(Role::System, text)
}

fn assistant(text: &str, calls: &[&str]) -> Turn {
    let call = |name: &&str| Call { name: (*name).to_owned(), arguments: json!({"city": format!("city-of-{name}")}).to_string() };
    Turn { calls: calls.iter().map(call).collect(), ..Turn::new(Role::Assistant, text) }
}

fn result(text: &str) -> Turn {
    Turn::new(Role::Tool, text)
}

fn thinking(turn: Turn) -> Turn {
    Turn { reasoning: "a-thought".to_owned(), ..turn }
}

/// Conversations, each with words that must all be in the prompt.
fn conversations() -> Vec<(&'static str, Vec<Turn>)> {
    vec![
        ("system late", vec![system("sys-one"), user("ask-one"), assistant("said-one", &[]), system("sys-two"), user("ask-two")]),
        ("system last", vec![user("ask-one"), system("sys-one")]),
        ("system alone", vec![system("sys-one"), user("")]),
        ("users in a row", vec![user("ask-one"), user("ask-two"), user("ask-three")]),
        ("assistant first", vec![assistant("said-one", &[]), user("ask-one")]),
        ("assistants in a row", vec![user("ask-one"), assistant("said-one", &[]), assistant("said-two", &[]), user("ask-two")]),
        ("a call", vec![system("sys-one"), user("ask-one"), assistant("", &["weather"]), result("out-one")]),
        ("words and a call", vec![user("ask-one"), thinking(assistant("said-one", &["weather"])), result("out-one")]),
        ("two calls", vec![user("ask-one"), assistant("", &["weather", "time"]), result("out-one"), result("out-two")]),
        (
            "calls after calls",
            vec![user("ask-one"), assistant("", &["weather"]), result("out-one"), assistant("", &["time"]), result("out-two")],
        ),
        ("a user after results", vec![user("ask-one"), assistant("", &["weather"]), result("out-one"), user("ask-two")]),
        ("tool turns alone", vec![assistant("", &["weather"]), result("out-one")]),
        (
            "a whole round",
            vec![
                system("sys-one"),
                user("ask-one"),
                thinking(assistant("", &["weather", "time"])),
                result("out-one"),
                result("out-two"),
                assistant("said-one", &[]),
                system("sys-two"),
                user("ask-two"),
                assistant("", &["time"]),
                result("out-three"),
            ],
        ),
    ]
}

fn tools() -> Vec<Value> {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string", "description": "a city"}}, "required": ["city"]});
    ["weather", "time"]
        .map(|name| json!({"type": "function", "function": {"name": name, "description": format!("about-{name}"), "parameters": schema}}))
        .to_vec()
}

#[test]
fn no_template_refuses_a_conversation_or_loses_its_words() {
    let (mut wrong, mut refusing) = (Vec::new(), Vec::new());
    let templates = templates();
    for (name, source) in templates.clone() {
        let prompter = prompter(&source);
        if prompter.text(&[user("hi")], &Writing::default()).is_err() {
            // It insists on variables that only its makers' own code gives it.
            refusing.push(name);
            continue;
        }
        for (case, turns) in conversations() {
            for tools in [&tools()[..], &[]] {
                let writing = Writing { tools, ..Writing::default() };
                let text = match prompter.text(&turns, &writing) {
                    Ok(text) => text,
                    Err(error) => {
                        wrong.push(format!("{name}: {case}: {error}"));
                        continue;
                    }
                };
                let words = turns.iter().map(|turn| turn.text.clone()).filter(|word| !word.is_empty());
                let calls =
                    turns.iter().flat_map(|turn| &turn.calls).flat_map(|call| [call.name.clone(), format!("city-of-{}", call.name)]);
                let shown = tools.iter().map(|tool| tool["function"]["name"].as_str().unwrap().to_owned());
                for word in words.chain(calls).chain(shown).filter(|word| !text.contains(word.as_str())) {
                    wrong.push(format!("{name}: {case} ({} tools): {word} is lost in {text:?}", tools.len()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} are wrong:\n{}", wrong.len(), wrong.join("\n"));
    assert!(templates.is_empty() || refusing == ["fireworks-ai-llama-3-firefunction-v2"], "{refusing:?}");
}

#[test]
fn families_are_recognised_by_their_templates() {
    let expected = [
        ("ByteDance-Seed-OSS", "seed", Some("<seed:think>")),
        ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", "command-r", Some("<|START_THINKING|>")),
        ("GLM-4.6", "glm", Some("<think>")),
        ("HuggingFaceTB-SmolLM3-3B", "hermes", Some("<think>")),
        ("Kimi-K2-Instruct", "kimi", None),
        ("LFM2-8B-A1B", "lfm2", None),
        ("LFM2.5-8B-A1B", "lfm2", Some("<think>")),
        ("LFM2.5-Instruct", "lfm2", Some("<think>")),
        ("MiniMax-M2", "minimax", Some("<think>")),
        ("Mistral-Small-3.2-24B-Instruct-2506", "mistral", None),
        ("NVIDIA-Nemotron-Nano-v2", "nemotron", Some("<think>")),
        ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "hermes", None),
        ("Qwen-QwQ-32B", "hermes", Some("<think>")),
        ("Qwen-Qwen2.5-7B-Instruct", "hermes", None),
        ("Qwen-Qwen3-0.6B", "hermes", Some("<think>")),
        ("Qwen3-Coder", "qwen-coder", None),
        ("Qwen3.5-4B", "qwen-coder", Some("<think>")),
        ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek", Some("<think>")),
        ("deepseek-ai-DeepSeek-V3.1", "deepseek", Some("<think>")),
        ("deepseek-ai-DeepSeek-V3.2", "dsml", Some("<think>")),
        ("google-gemma-2-2b-it", "gemma", None),
        ("google-gemma-4-31B-it", "gemma-4", Some("<|channel>thought")),
        ("ibm-granite-granite-3.3-2B-Instruct", "granite", Some("<think>")),
        ("meta-llama-Llama-3.1-8B-Instruct", "llama-3", None),
        ("meta-llama-Llama-3.2-3B-Instruct", "llama-3", None),
        ("mistralai-Ministral-3-14B-Reasoning-2512", "mistral", Some("[THINK]")),
        ("mistralai-Mistral-Nemo-Instruct-2407", "mistral", None),
        ("openai-gpt-oss-120b", "harmony", None),
    ];
    let templates = templates();
    let mut wrong = Vec::new();
    for (name, family, open) in expected {
        let Some((_, source)) = templates.iter().find(|(other, _)| other == name) else {
            assert!(templates.is_empty(), "no template {name}");
            return;
        };
        let found = Format::of(source);
        let tags = found.tags.map(|tags| tags.open);
        if (found.family.name, tags) != (family, open) {
            wrong.push(format!("{name}: {} {tags:?}", found.family.name));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_family_has_a_name_of_its_own() {
    let mut names: Vec<&str> = Family::all().map(|family| family.name).collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count);
}

const PLAIN: &str = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}";

#[test]
fn a_template_that_knows_no_tools_is_told_of_them_in_words() {
    let tools = tools();
    let text = prompter(PLAIN)
        .text(&[system("sys"), user("ask"), assistant("", &["weather"]), result("out")], &Writing { tools: &tools, ..Writing::default() });
    let text = text.unwrap();
    assert!(text.starts_with("system:sys\n\nYou may call these tools."), "{text}");
    assert!(text.contains(&tools[1].to_string()));
    let call = "assistant:<tool_call>\n{\"name\":\"weather\",\"arguments\":{\"city\":\"city-of-weather\"}}\n</tool_call>;";
    assert!(text.ends_with(&format!("user:ask;{call}user:<tool_response>\nout\n</tool_response>;")), "{text}");
}

#[test]
fn a_template_that_takes_one_call_a_turn_gets_one_a_turn_with_its_result() {
    let source = "{% for m in messages %}{{ m.role }}:{% if m.tool_calls %}{% if m.tool_calls|length > 1 %}{{ raise_exception('one') }}{% endif %}\
        {{ m.tool_calls[0].function.name }}={{ m.tool_calls[0].function.arguments|tojson }}#{{ m.tool_calls[0].id }}{% else %}{{ m.content }}\
        {% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}{% endif %};{% endfor %}";
    let turns = [user("ask"), assistant("", &["weather", "time"]), result("A"), result("B"), assistant("", &["time"]), result("C")];
    assert_eq!(
        prompter(source).text(&turns, &Writing::default()).unwrap(),
        "user:ask;assistant:weather={\"city\": \"city-of-weather\"}#call00000;tool:A#call00000;assistant:time={\"city\": \"city-of-time\"}#call00001;tool:B#call00001;\
         assistant:time={\"city\": \"city-of-time\"}#call00002;tool:C#call00002;"
    );
}

#[test]
fn templates_are_told_of_thinking_under_the_names_that_they_have_for_it() {
    let source = "{{ enable_thinking }} {{ thinking }} {{ thinking_budget }} {{ reasoning_effort }}";
    let text = |writing: Writing<'_>| prompter(source).text(&[user("hi")], &writing).unwrap();
    assert_eq!(text(Writing { enable_thinking: Some(false), ..Writing::default() }), "False False 0 ");
    assert_eq!(text(Writing { enable_thinking: Some(true), effort: Some("high"), ..Writing::default() }), "True True  high");
    assert_eq!(text(Writing::default()), "   ");
}

#[test]
fn thoughts_of_the_past_go_where_the_template_has_a_place_for_them() {
    let source = "{% for m in messages %}{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content or '' }}\
        {% for call in m.tool_calls or [] %}{{ call.function.name }}={{ call.function.arguments|tojson }}{% endfor %};{% endfor %}";
    let turns = [user("ask"), thinking(assistant("", &["weather"])), result("out")];
    assert_eq!(prompter(source).text(&turns, &Writing::default()).unwrap(), "ask;(a-thought)weather={\"city\": \"city-of-weather\"};out;");
}
