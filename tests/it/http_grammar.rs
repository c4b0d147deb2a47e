//! `text.format` over HTTP, with an engine that says whatever it may.

use emberd::engine::mock::vocabulary;
use emberd::engine::{Capabilities, Constraint, Finish, Order, Port, Step};
use emberd::http::Options;
use serde_json::{Value, json};

use crate::http_support::Server;

/// Says the allowed token that a simple generator picks, until the answer is complete. Without a constraint it ends at once.
fn say(constraint: Option<Constraint>, mut seed: u64, most: u32) -> (Vec<u32>, Finish) {
    let Some(mut constraint) = constraint else { return (vec![vocabulary::EOS], Finish::Stop) };
    let mut made = Vec::new();
    let mut words = vec![0; constraint.words()];
    loop {
        constraint.mask(&mut words).unwrap();
        let allowed: Vec<u32> = (0..vocabulary::SIZE).filter(|id| words[*id as usize / 32] >> (id % 32) & 1 == 1).collect();
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let next = allowed[(seed >> 33) as usize % allowed.len()];
        constraint.accept(next).unwrap();
        made.push(next);
        if next == vocabulary::EOS {
            return (made, Finish::Stop);
        }
        if made.len() == most as usize {
            return (made, Finish::Length);
        }
    }
}

fn engine(port: &Port) {
    let (vocab_size, eos_ids) = (vocabulary::SIZE, vec![vocabulary::EOS]);
    port.ready(Capabilities { context_length: 8192, max_batch: 8, vocab_size, eos_ids, constraints: true }).unwrap();
    while let Some(orders) = port.wait().unwrap() {
        for order in orders {
            let Order::Admit(admit) = order else { continue };
            let seed = admit.sampling.map_or(0, |sampling| sampling.seed);
            let (tokens, finish) = say(admit.constraint, seed, admit.max_tokens);
            port.push(vec![Step { id: admit.id, tokens, finish: Some(finish), logprobs: vec![] }]).unwrap();
        }
    }
}

pub async fn server() -> Server {
    let mut server = Server::absent(Options::default(), 8).await;
    server.launch_engine(|launch| engine(&launch.port));
    server
}

pub fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {"on": {"type": "boolean"}, "size": {"type": "integer", "minimum": 1, "maximum": 12}},
        "required": ["on", "size"],
        "additionalProperties": false,
    })
}

fn text_of(response: &Value) -> &str {
    response["output"][0]["content"][0]["text"].as_str().unwrap()
}

#[tokio::test]
async fn a_schema_is_kept_to_and_told_again() {
    let server = server().await;
    for (seed, strict) in [(1, json!(true)), (2, json!(false)), (3, Value::Null)] {
        let format = json!({"type": "json_schema", "name": "switch", "schema": schema(), "strict": strict});
        let response = server.ask(&json!({"input": "hi", "temperature": 1, "seed": seed, "text": {"format": format}})).await.json();
        let said: Value = serde_json::from_str(text_of(&response)).unwrap();
        assert!(said["on"].is_boolean() && (1..=12).contains(&said["size"].as_i64().unwrap()), "{said}");
        assert_eq!(response["status"], "completed");
        let told =
            json!({"type": "json_schema", "name": "switch", "description": null, "schema": schema(), "strict": strict == json!(true)});
        assert_eq!(response["text"], json!({"format": told, "verbosity": "medium"}));
    }
}

#[tokio::test]
async fn a_stream_says_the_same_and_a_limit_cuts_it() {
    let server = server().await;
    let request =
        json!({"input": "hi", "temperature": 1, "seed": 9, "text": {"format": {"type": "json_schema", "name": "s", "schema": schema()}}});
    let with = |key: &str, value: Value| {
        let mut request = request.clone();
        request[key] = value;
        request
    };
    let whole = server.ask(&request).await.json();
    let events = server.ask(&with("stream", json!(true))).await.events();
    let deltas: String = events.iter().filter_map(|event| event["delta"].as_str()).collect();
    assert_eq!(deltas, text_of(&whole));
    assert_eq!(events[0]["response"]["text"], whole["text"]);
    let cut = server.ask(&with("max_output_tokens", json!(5))).await.json();
    assert_eq!(cut["status"], "incomplete");
    assert_eq!(text_of(&cut), &deltas[..5]);
}

#[tokio::test]
async fn any_object_a_regular_expression_and_a_grammar_are_kept_to() {
    let server = server().await;
    let ask = |format: Value| json!({"input": "hi", "temperature": 1, "seed": 4, "max_output_tokens": 4000, "text": {"format": format}});
    let format = json!({"type": "grammar", "syntax": "regex", "definition": "[a-c]{3}!"});
    let response = server.ask(&ask(format.clone())).await.json();
    let text = text_of(&response);
    assert!(text.len() == 4 && text.ends_with('!') && text[..3].bytes().all(|byte| (b'a'..=b'c').contains(&byte)), "{text}");
    assert_eq!(response["text"]["format"], format);
    let lark = json!({"type": "grammar", "syntax": "lark", "definition": "start: \"yes\" | \"no\""});
    let response = server.ask(&ask(lark.clone())).await.json();
    assert!(["yes", "no"].contains(&text_of(&response)));
    assert_eq!(response["text"]["format"], lark);
    let response = server.ask(&ask(json!({"type": "json_object"}))).await.json();
    assert!(text_of(&response).starts_with('{'));
    assert_eq!(response["text"]["format"], json!({"type": "json_object"}));
}

#[tokio::test]
async fn what_cannot_be_used_is_refused_before_the_engine_hears_of_it() {
    let server = server().await;
    server.models.find(None).unwrap().ready().await.unwrap();
    let json_schema = |schema: Value| json!({"type": "json_schema", "name": "a", "schema": schema});
    let grammar = |syntax: &str, definition: &str| json!({"type": "grammar", "syntax": syntax, "definition": definition});
    for (format, param, reason) in [
        (json_schema(json!({"not": {}})), "text.format.schema", "not"),
        (json_schema(json!({"$ref": "#"})), "text.format.schema", "no text"),
        (json_schema(json!({"const": "x".repeat(70_000)})), "text.format.schema", "above 65536"),
        (grammar("regex", "("), "text.format.definition", "unclosed"),
        (grammar("lark", "start: x"), "text.format.definition", "unknown name"),
    ] {
        for stream in [false, true] {
            let reply = server.ask(&json!({"input": "hi", "stream": stream, "text": {"format": format}})).await;
            assert_eq!(reply.error(), (400, "invalid_value".to_owned(), Some(param.to_owned())));
            assert!(reply.text().contains(reason), "{}", reply.text());
        }
    }
    assert_eq!(server.load().tokens, 0);
    let after = json!({"input": "hi", "text": {"format": json_schema(schema())}});
    assert_eq!(server.ask(&after).await.json()["status"], "completed");
}

#[tokio::test]
async fn the_schemas_of_strict_tools_have_to_be_usable() {
    let server = server().await;
    let function =
        |name: &str, parameters: Value, strict: bool| json!({"type": "function", "name": name, "parameters": parameters, "strict": strict});
    let (good, bad) = (schema(), json!({"type": "object", "properties": {"a": {"not": {}}}}));
    let inner = json!({"type": "namespace", "name": "ns", "tools": [function("f", good.clone(), true), function("g", bad.clone(), true)]});
    let listed = json!([{"type": "web_search"}, function("f", good.clone(), true), function("g", bad.clone(), true)]);
    let named = json!({"type": "function", "name": "g"});
    let allowed = json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]});
    let lax = json!([function("g", bad.clone(), false)]);
    for (tools, choice, param) in [
        (listed.clone(), json!("auto"), Some("tools[2].parameters")),
        (listed.clone(), json!("required"), Some("tools[2].parameters")),
        (listed.clone(), named, Some("tools[2].parameters")),
        (json!([inner]), json!("auto"), Some("tools[0].tools[1].parameters")),
        (json!([function("g", json!({"type": "nothing"}), true)]), json!("auto"), Some("tools[0].parameters")),
        (lax.clone(), json!("required"), Some("tools[0].parameters")),
        (lax, json!("auto"), None),
        (listed.clone(), allowed, None),
        (listed, json!("none"), None),
        (json!([function("f", good.clone(), true)]), json!("auto"), None),
    ] {
        let reply = server.ask(&json!({"input": "hi", "tools": tools, "tool_choice": choice})).await;
        match param {
            Some(param) => assert_eq!(reply.error(), (400, "invalid_value".to_owned(), Some(param.to_owned())), "{choice}"),
            None => assert_eq!(reply.json()["status"], "completed", "{choice}"),
        }
    }
    // Each can be used, if not all of them at once: it is the prompt that is too long.
    let large = |name: &str| function(name, json!({"type": "object", "properties": {"a": {"const": "x".repeat(30_000)}}}), true);
    let reply = server.ask(&json!({"input": "hi", "tools": [large("a"), large("b"), large("c")]})).await;
    assert_eq!(reply.error(), (400, "context_length_exceeded".to_owned(), Some("input".to_owned())));
}

#[tokio::test]
async fn with_tools_an_answer_is_of_its_form_or_calls_them() {
    let server = server().await;
    let tools = json!([{"type": "function", "name": "f", "parameters": schema(), "strict": true}, {"type": "function", "name": "g"}]);
    let format = json!({"type": "json_schema", "name": "switch", "schema": schema()});
    let mut kinds = [0, 0];
    for seed in 0..40 {
        let body = json!({"input": "hi", "temperature": 1, "seed": seed, "reasoning": {"effort": "none"}, "max_output_tokens": 600,
            "parallel_tool_calls": seed % 2 == 0, "tools": tools, "text": {"format": format}});
        let response = server.ask(&body).await.json();
        let items = response["output"].as_array().unwrap();
        let said = |text: &str| {
            let said: Value = serde_json::from_str(text).unwrap();
            assert!(said["on"].is_boolean() && (1..=12).contains(&said["size"].as_i64().unwrap()), "{said}");
        };
        if items[0]["type"] == "message" {
            kinds[0] += 1;
            assert_eq!((items.len(), &response["status"]), (1, &json!("completed")));
            said(text_of(&response));
        } else {
            kinds[1] += 1;
            // Where it is cut, it may be within the mark of the next call.
            let cut = response["status"] == "incomplete" && items.last().unwrap()["type"] == "message";
            let calls = &items[..items.len() - usize::from(cut)];
            assert!(calls.iter().all(|item| item["type"] == "function_call") && (seed % 2 == 0 || calls.len() <= 1), "{response}");
            let strict = items.iter().filter(|item| item["name"] == "f" && item["status"] == "completed");
            strict.for_each(|item| said(item["arguments"].as_str().unwrap()));
        }
    }
    assert!(kinds.iter().all(|count| *count > 0), "{kinds:?}");
}

#[tokio::test]
async fn what_cannot_be_used_together_is_refused_where_it_stands() {
    let server = server().await;
    let tool = |name: &str, parameters: Value| json!({"type": "function", "name": name, "parameters": parameters, "strict": true});
    let format = |schema: Value| json!({"format": {"type": "json_schema", "name": "a", "schema": schema}});
    let bad = json!({"type": "object", "properties": {"a": {"not": {}}}});
    for (tools, text, param) in [
        (json!([tool("f", schema())]), format(bad.clone()), "text.format.schema"),
        (json!([tool("f", schema()), tool("g", bad)]), format(schema()), "tools[1].parameters"),
    ] {
        let reply = server.ask(&json!({"input": "hi", "tools": tools, "text": text})).await;
        assert_eq!(reply.error(), (400, "invalid_value".to_owned(), Some(param.to_owned())));
    }
    let large = |name: &str| tool(name, json!({"type": "object", "properties": {"a": {"const": "x".repeat(60_000)}}}));
    let tools: Vec<Value> = ["a", "b", "c", "d", "e"].map(large).to_vec();
    let reply = server.ask(&json!({"input": "hi", "tools": tools})).await;
    assert_eq!(reply.error(), (400, "invalid_value".to_owned(), Some("tools".to_owned())));
}

#[tokio::test]
async fn an_engine_without_grammars_refuses_them_and_answers_the_rest() {
    let server = Server::start(emberd::engine::mock::Mock::default()).await;
    let ask = |format: Value| json!({"input": "hi", "max_output_tokens": 3, "text": {"format": format}});
    let reply = server.ask(&ask(json!({"type": "json_object"}))).await;
    assert_eq!(reply.error(), (400, "unsupported_parameter".to_owned(), Some("text.format.type".to_owned())));
    assert_eq!(server.ask(&ask(json!({"type": "text"}))).await.json()["text"]["format"], json!({"type": "text"}));
}
