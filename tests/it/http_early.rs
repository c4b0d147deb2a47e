//! What is refused before a model is loaded for it, and what an engine without grammars refuses.

use emberd::engine::mock::Mock;
use emberd::http::Options;
use emberd::models::State;
use serde_json::{Value, json};

use crate::http_support::{Server, post};

fn strict(parameters: &Value) -> Value {
    json!({"type": "function", "name": "f", "parameters": parameters, "strict": true})
}

#[tokio::test]
async fn a_schema_that_cannot_be_used_loads_no_model() {
    let server = Server::absent(Options::default(), 8).await;
    let not = json!({"not": {}});
    let format = |format: Value| json!({"input": "hi", "text": {"format": format}});
    let messages = json!([{"role": "user", "content": "hi"}]);
    let chat = |more: (&str, Value)| {
        let mut body = json!({"messages": messages});
        body[more.0] = more.1;
        body
    };
    let named = json!({"type": "function", "name": "f"});
    for (path, body, param) in [
        ("/v1/responses", format(json!({"type": "json_schema", "name": "a", "schema": not})), "text.format.schema"),
        ("/v1/responses/input_tokens", format(json!({"type": "json_schema", "name": "a", "schema": not})), "text.format.schema"),
        ("/v1/responses", format(json!({"type": "grammar", "syntax": "regex", "definition": "("})), "text.format.definition"),
        ("/v1/responses", json!({"input": "hi", "tools": [{"type": "function", "name": "g"}, strict(&not)]}), "tools[1].parameters"),
        (
            "/v1/responses",
            json!({"input": "hi", "tools": [{"type": "function", "name": "f", "parameters": not}], "tool_choice": named}),
            "tools[0].parameters",
        ),
        (
            "/v1/chat/completions",
            chat(("response_format", json!({"type": "json_schema", "json_schema": {"name": "a", "schema": not}}))),
            "response_format.json_schema.schema",
        ),
        (
            "/v1/chat/completions",
            chat(("tools", json!([{"type": "function", "function": {"name": "f", "parameters": not, "strict": true}}]))),
            "tools[0].function.parameters",
        ),
    ] {
        for stream in [false, true] {
            let mut body = body.clone();
            body["stream"] = json!(stream);
            let reply = server.client().await.send(post(path, body.to_string())).await;
            assert_eq!(reply.error(), (400, "invalid_value".to_owned(), Some(param.to_owned())), "{path}: {body}");
            assert!(reply.text().contains("cannot be used"), "{}", reply.text());
        }
    }
    let tool = json!([{"name": "f", "input_schema": not, "strict": true}]);
    for (more, param) in [
        (json!({"tools": tool}), "tools[0].input_schema"),
        (json!({"output_config": {"format": {"type": "json_schema", "schema": not}}}), "output_config.format.schema"),
    ] {
        let mut body = json!({"max_tokens": 5, "messages": messages});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        for path in ["/v1/messages", "/v1/messages/count_tokens"] {
            let reply = server.client().await.send(post(path, body.to_string())).await;
            assert_eq!(reply.status, 400);
            assert!(reply.json()["error"]["message"].as_str().unwrap().contains(param), "{}", reply.text());
        }
    }
    assert_eq!(server.models.state(), State::Absent);
}

#[tokio::test]
async fn what_an_engine_without_grammars_cannot_promise_is_refused() {
    let server = Server::start(Mock { stop_after: 2, ..Mock::default() }).await;
    let schema = json!({"type": "object"});
    let forced = json!({"input": "hi", "tools": [{"type": "function", "name": "f"}], "tool_choice": "required"});
    for (body, param) in [
        (json!({"input": "hi", "tools": [strict(&schema)]}), "tools[0].strict"),
        (forced, "tool_choice"),
        (json!({"input": "hi", "text": {"format": {"type": "json_object"}}}), "text.format.type"),
    ] {
        for stream in [false, true] {
            let mut body = body.clone();
            body["stream"] = json!(stream);
            assert_eq!(server.ask(&body).await.error(), (400, "unsupported_parameter".to_owned(), Some(param.to_owned())), "{body}");
        }
    }
    let lax = json!({"input": "hi", "tools": [{"type": "function", "name": "f", "strict": false}]});
    assert_eq!(server.ask(&lax).await.json()["status"], "completed");
}
