//! Chat Completions over the wire: both forms of an answer, tools, forms, and what is refused before the first byte.

use emberd::engine::mock::Mock;
use emberd::http::Options;
use emberd::responses::ReasoningEvents;
use serde_json::{Value, json};

use crate::completions_stream::{choice, sum};
use crate::http_grammar;
use crate::http_messages_input;
use crate::http_support::{MODEL, Reply, Server, call, post, request, script};

pub const PATH: &str = "/v1/chat/completions";

pub async fn ask(server: &Server, body: &Value) -> Reply {
    server.client().await.send(post(PATH, body.to_string())).await
}

/// What a stream says: each block is data alone, and the last one may mark the end.
pub fn blocks(stream: &str) -> (Vec<Value>, bool) {
    assert!(stream.ends_with("\n\n"), "{stream}");
    let blocks: Vec<&str> = stream.split_terminator("\n\n").filter(|block| !block.starts_with(':')).collect();
    let done = blocks.last() == Some(&"data: [DONE]");
    let told = blocks.iter().take(blocks.len() - usize::from(done));
    (told.map(|block| serde_json::from_str(block.strip_prefix("data: ").unwrap()).unwrap()).collect(), done)
}

/// The chunks of a stream that came to its end.
fn chunks(reply: &Reply) -> Vec<Value> {
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!((reply.header("content-type"), reply.header("cache-control")), ("text/event-stream", "no-cache"));
    let (chunks, done) = blocks(reply.text());
    assert!(done, "{}", reply.text());
    chunks
}

fn hello() -> Value {
    json!({"messages": [{"role": "user", "content": "hi"}]})
}

fn with(mut body: Value, more: &Value) -> Value {
    for (key, value) in more.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

fn tools() -> Value {
    json!([
        {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}},
        {"type": "custom", "custom": {"name": "draw"}},
    ])
}

/// The choice without the ids of its calls, which differ.
fn bare(mut choice: Value) -> Value {
    for call in choice["message"].get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
        let id = call.as_object_mut().unwrap().remove("id").unwrap();
        assert!(id.as_str().unwrap().starts_with("call_"), "{id}");
    }
    choice
}

/// The choice, whichever way it comes.
async fn answered(server: &Server, body: &Value, stream: bool) -> Value {
    let reply = ask(server, &with(body.clone(), &json!({"stream": stream}))).await;
    if stream { sum(&chunks(&reply)) } else { choice(&reply.json()) }
}

#[tokio::test]
async fn an_answer_comes_whole_or_in_chunks_that_add_up() {
    let server = Server::start(Mock { stop_after: 3, ..Mock::default() }).await;
    let whole = ask(&server, &hello()).await.json();
    assert_eq!(
        choice(&whole),
        json!({"index": 0, "message": {"role": "assistant", "content": " a small model"}, "logprobs": null, "finish_reason": "stop"})
    );
    assert_eq!((&whole["object"], &whole["model"]), (&json!("chat.completion"), &json!(MODEL)));
    let usage = &whole["usage"];
    // The end of the answer is a token too.
    assert_eq!(usage["completion_tokens"], 4);
    assert_eq!(usage["total_tokens"], json!(usage["prompt_tokens"].as_u64().unwrap() + 4));
    assert_eq!(usage["completion_tokens_details"], json!({"reasoning_tokens": 0}));
    // The same as the other route counts.
    let response = server.ask(&json!({"input": "hi"})).await.json();
    assert_eq!(usage["prompt_tokens"], response["usage"]["input_tokens"]);

    let told = chunks(&ask(&server, &with(hello(), &json!({"stream": true}))).await);
    assert_eq!(sum(&told), choice(&whole));
    assert_eq!(told[0]["choices"][0]["delta"], json!({"role": "assistant", "content": null}));
    assert_eq!(told.len(), 5);
    assert!(told.iter().all(|chunk| chunk["id"] == told[0]["id"] && chunk.get("usage").is_none()));
    assert_ne!(told[0]["id"], whole["id"]);

    let usage_too = json!({"stream": true, "stream_options": {"include_usage": true}});
    let told = chunks(&ask(&server, &with(hello(), &usage_too)).await);
    let (last, rest) = told.split_last().unwrap();
    assert_eq!((&last["choices"], &last["usage"]["completion_tokens"]), (&json!([]), &json!(4)));
    assert!(rest.iter().all(|chunk| chunk.get("usage") == Some(&Value::Null)));
}

#[tokio::test]
async fn limits_and_stop_strings_say_why_an_answer_ended() {
    let server = Server::start(Mock::default()).await;
    for stream in [false, true] {
        for (more, content, reason) in [
            (json!({"max_tokens": 2}), " a small", "length"),
            (json!({"max_completion_tokens": 1}), " a", "length"),
            (json!({"stop": "model"}), " a small ", "stop"),
            (json!({"stop": ["now", "keeps warm"]}), " a small model ", "stop"),
        ] {
            let choice = answered(&server, &with(hello(), &more), stream).await;
            assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!(content), &json!(reason)), "{more}");
        }
    }
}

#[tokio::test]
async fn a_turn_with_tools_goes_round_in_both_forms() {
    let answer = format!(
        "<think>\nHm.\n</think>\n\nI ask.\n{}{}",
        call("weather", "{\"city\": \"Paris\"}"),
        call("draw", "{\"input\": \"a \\\"sun\\\"\"}")
    );
    for (stream, thoughts) in [(false, ReasoningEvents::Summary), (true, ReasoningEvents::Summary), (true, ReasoningEvents::Text)] {
        let options = Options { reasoning_events: thoughts, ..Options::default() };
        let server = Server::with(script(&[&answer, "It is sunny."]), options, 8).await;
        let user = json!({"role": "user", "content": "Weather?"});
        let first = answered(&server, &json!({"messages": [user], "tools": tools()}), stream).await;
        let message = first["message"].clone();
        assert_eq!(
            bare(first),
            json!({
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "I ask.",
                    "reasoning_content": "Hm.",
                    "tool_calls": [
                        {"type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Paris\"}"}},
                        {"type": "custom", "custom": {"name": "draw", "input": "a \"sun\""}},
                    ],
                },
                "logprobs": null,
                "finish_reason": "tool_calls",
            }),
            "stream: {stream}"
        );
        // What came goes back as it is, and with it what came of the calls.
        let tool = |index: usize, text: &str| json!({"role": "tool", "tool_call_id": message["tool_calls"][index]["id"], "content": text});
        let history = json!([user, message, tool(1, "done"), tool(0, "sunny")]);
        let second = answered(&server, &json!({"messages": history, "tools": tools()}), stream).await;
        assert_eq!(second["message"], json!({"role": "assistant", "content": "It is sunny."}));
        assert_eq!(second["finish_reason"], "stop");
    }
}

#[tokio::test]
async fn an_answer_of_calls_alone_has_no_content_and_one_of_nothing_has_an_empty_one() {
    for stream in [false, true] {
        let server = Server::start(script(&[&call("weather", "{}").repeat(2), ""])).await;
        let body = with(hello(), &json!({"tools": tools()}));
        let calls = answered(&server, &body, stream).await;
        assert_eq!(calls["message"]["content"], Value::Null);
        assert_eq!(calls["message"]["tool_calls"].as_array().unwrap().len(), 2);
        let nothing = answered(&server, &body, stream).await;
        assert_eq!(nothing["message"], json!({"role": "assistant", "content": ""}));
        assert_eq!(nothing["finish_reason"], "stop");
    }
}

#[tokio::test]
async fn calls_obey_the_choice_and_parallel_calls_may_be_ruled_out() {
    let answer = call("weather", "{}").repeat(3);
    for stream in [false, true] {
        let server = Server::start(script(&[&answer])).await;
        let ask = async |more: Value| answered(&server, &with(hello(), &with(more, &json!({"tools": tools()}))), stream).await;
        let one = ask(json!({"parallel_tool_calls": false})).await;
        assert_eq!(one["message"]["tool_calls"].as_array().unwrap().len(), 1);
        let none = ask(json!({"tool_choice": "none"})).await;
        assert_eq!((&none["message"]["content"], &none["finish_reason"]), (&json!(answer), &json!("stop")));
        let drawing =
            json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "custom", "custom": {"name": "draw"}}]}});
        let barred = ask(json!({"tool_choice": drawing})).await;
        assert!(barred["message"].get("tool_calls").is_none(), "{barred}");
        // Cut in the middle of its arguments, it is what it is.
        let cut = ask(json!({"max_tokens": 55})).await;
        assert_eq!(cut["finish_reason"], "length");
        assert_eq!(cut["message"]["tool_calls"][0]["function"]["name"], "weather");
    }
}

#[tokio::test]
async fn forms_and_forced_calls_hold_the_answer() {
    let server = http_grammar::server().await;
    let schema = http_grammar::schema();
    let form = json!({"type": "json_schema", "json_schema": {"name": "switch", "schema": schema, "strict": true}});
    let function = json!([{"type": "function", "function": {"name": "set", "parameters": schema, "strict": true}}]);
    for stream in [false, true] {
        let body = with(hello(), &json!({"temperature": 1, "seed": 5}));
        let choice = answered(&server, &with(body.clone(), &json!({"response_format": form})), stream).await;
        let said: Value = serde_json::from_str(choice["message"]["content"].as_str().unwrap()).unwrap();
        assert!(said["on"].is_boolean(), "{said}");
        for forced in [json!("required"), json!({"type": "function", "function": {"name": "set"}})] {
            let choice = answered(
                &server,
                &with(body.clone(), &json!({"tools": function, "tool_choice": forced, "parallel_tool_calls": false})),
                stream,
            )
            .await;
            assert_eq!(choice["finish_reason"], "tool_calls");
            let [call] = choice["message"]["tool_calls"].as_array().unwrap().as_slice() else { panic!("{choice}") };
            let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
            assert!(arguments["on"].is_boolean(), "{arguments}");
        }
        let bad = json!({"type": "object", "properties": {"a": {"not": {}}}});
        for (more, param) in [
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": bad}}}),
                "response_format.json_schema.schema",
            ),
            (
                json!({"tools": [{"type": "function", "function": {"name": "f", "parameters": bad, "strict": true}}]}),
                "tools[0].function.parameters",
            ),
        ] {
            let reply = ask(&server, &with(with(hello(), &more), &json!({"stream": stream}))).await;
            assert_eq!(reply.error(), (400, "invalid_value".into(), Some(param.into())));
        }
    }
    // An engine that holds nothing to anything says so.
    let server = Server::start(Mock::default()).await;
    for (more, param) in [
        (json!({"response_format": {"type": "json_object"}}), "response_format.type"),
        (json!({"tools": function, "tool_choice": "required"}), "tool_choice"),
    ] {
        assert_eq!(ask(&server, &with(hello(), &more)).await.error(), (400, "unsupported_parameter".into(), Some(param.into())));
    }
}

#[tokio::test]
async fn the_text_of_a_custom_tool_streams() {
    let server = Server::start(script(&[&call("draw", "{\"input\": \"a \\\"sun\\\"\"}")])).await;
    let reply = ask(&server, &with(hello(), &json!({"tools": tools(), "stream": true}))).await;
    let told = chunks(&reply);
    let inputs = told.iter().filter_map(|chunk| chunk.pointer("/choices/0/delta/tool_calls/0/custom/input")?.as_str());
    let inputs: Vec<&str> = inputs.filter(|input| !input.is_empty()).collect();
    assert_eq!(inputs.concat(), "a \"sun\"");
    assert!(inputs.len() > 1, "{inputs:?}");
}

#[tokio::test]
async fn an_answer_in_which_calling_is_left_to_the_model_is_held_to_what_is_asked_for() {
    let (server, told) = http_messages_input::server().await;
    let schema = http_grammar::schema();
    let function = |strict: bool| json!([{"type": "function", "function": {"name": "set", "parameters": schema, "strict": strict}}]);
    let form = json!({"type": "json_schema", "json_schema": {"name": "switch", "schema": schema}});
    for (more, held) in [
        (json!({"tools": function(false)}), false),
        (json!({"tools": function(false), "tool_choice": "auto"}), false),
        (json!({"tools": function(true)}), true),
        (json!({"tools": function(true), "tool_choice": "auto"}), true),
        (json!({"tools": function(true), "tool_choice": "none"}), false),
        (json!({"tools": function(false), "tool_choice": "auto", "response_format": form}), true),
        (json!({"tools": function(false), "response_format": {"type": "json_object"}}), true),
    ] {
        let body = with(hello(), &more);
        let (found, _) = http_messages_input::admitted(&server, &told, PATH, &body).await;
        assert_eq!(found.constraint.is_some(), held, "{body}");
    }
}

#[tokio::test]
async fn what_is_wrong_is_told_before_the_first_byte() {
    let server = Server::start(Mock { context_length: 64, ..Mock::default() }).await;
    for stream in [false, true] {
        for (body, status, code, param) in [
            (json!({}), 400, "missing_required_parameter", Some("messages")),
            (with(hello(), &json!({"model": "other"})), 404, "model_not_found", Some("model")),
            (json!({"messages": [{"role": "user", "content": "x".repeat(100)}]}), 400, "context_length_exceeded", Some("messages")),
            (with(hello(), &json!({"logit_bias": {"4000000": 1}})), 400, "invalid_value", Some("logit_bias.4000000")),
            (with(hello(), &json!({"n": 2})), 400, "unsupported_parameter", Some("n")),
        ] {
            let reply = ask(&server, &with(body.clone(), &json!({"stream": stream}))).await;
            assert_eq!(reply.error(), (status, code.to_owned(), param.map(str::to_owned)), "{body}");
        }
    }
    let mut client = server.client().await;
    assert_eq!(client.send(post(PATH, "{\"messages\":")).await.error(), (400, "invalid_json".into(), None));
    for method in ["GET", "PUT", "DELETE"] {
        let reply = client.send(request(method, PATH).body(http_body_util::Full::default()).unwrap()).await;
        assert_eq!((reply.error(), reply.header("allow")), ((405, "method_not_allowed".into(), None), "POST"));
    }
    let text = request("POST", PATH).header("content-type", "text/plain");
    let reply = client.send(text.body(http_body_util::Full::from(hello().to_string())).unwrap()).await;
    assert_eq!(reply.error(), (415, "unsupported_media_type".into(), None));
    for path in ["/v1/chat", "/v1/chat/completions/", "/v1/completions"] {
        assert_eq!(client.send(post(path, hello().to_string())).await.error(), (404, "not_found".into(), None), "{path}");
    }
    let server = Server::with(Mock::default(), Options { max_body: 64, ..Options::default() }, 8).await;
    let long = json!({"messages": [{"role": "user", "content": "x".repeat(100)}]});
    assert_eq!(ask(&server, &long).await.error(), (413, "body_too_large".into(), None));
}

#[tokio::test]
async fn a_long_body_is_read_as_a_short_one_is() {
    let server = Server::start(Mock { stop_after: 1, context_length: 1 << 20, ..Mock::default() }).await;
    let body = json!({"messages": [{"role": "user", "content": "x".repeat(200 * 1024)}]});
    for stream in [false, true] {
        assert_eq!(answered(&server, &body, stream).await["message"]["content"], " a");
    }
    let wrong = json!({"messages": [{"role": "user", "content": "x".repeat(200 * 1024)}, {"role": "user"}]});
    assert_eq!(ask(&server, &wrong).await.error(), (400, "missing_required_parameter".into(), Some("messages[1].content".into())));
}
