//! The Messages API over the wire: messages, their events, and errors in its own envelope. The mock engine is told what to answer.

use std::time::Duration;

use emberd::engine::mock::{Fault, Mock};
use emberd::http::Options;
use http_body_util::{BodyExt, Full};
use hyper::StatusCode;
use serde_json::{Map, Value, json};

use crate::http_support::{Client, MODEL, Reply, Server, call, gated, get, post, request, script, until};

fn tools() -> Value {
    json!([
        {"name": "weather", "description": "tells it", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "custom", "name": "close", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}},
    ])
}

/// A request with these fields besides what every request has.
fn asking(more: Value) -> Value {
    let mut body = json!({"model": MODEL, "max_tokens": 1000, "messages": [{"role": "user", "content": "hi"}]});
    let Value::Object(more) = more else { panic!("no object") };
    body.as_object_mut().unwrap().extend(more);
    body
}

async fn ask(server: &Server, body: &Value) -> Reply {
    server.client().await.send(post("/v1/messages", body.to_string())).await
}

/// The message of an answer in both forms, which have to say the same.
async fn message(mock: impl Fn() -> Mock, body: &Value) -> Value {
    let whole = ask(&Server::start(mock()).await, body).await;
    assert_eq!(whole.status, StatusCode::OK, "{}", whole.text());
    let whole = whole.json();
    let mut streaming = body.clone();
    streaming["stream"] = json!(true);
    let events = events(ask(&Server::start(mock()).await, &streaming).await.text());
    let summed = sum(&events);
    assert_eq!(bare(&summed), bare(&whole));
    bare(&whole)
}

/// The events of a stream, each of which has to be framed as it should be.
fn events(stream: &str) -> Vec<Value> {
    let block = |block: &str| {
        let (name, data) = block.split_once('\n').unwrap();
        let event: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: "), event["type"].as_str());
        event
    };
    assert!(stream.ends_with("\n\n"));
    stream.split_terminator("\n\n").map(block).collect()
}

/// The message that events add up to. They have to be in order, and every block has to be closed before the next begins.
fn sum(events: &[Value]) -> Value {
    let mut events = events.iter().filter(|event| event["type"] != "ping");
    let start = events.next().unwrap();
    assert_eq!(start["type"], "message_start");
    let mut message = start["message"].clone();
    assert_eq!((&message["content"], &message["stop_reason"], &message["stop_sequence"]), (&json!([]), &Value::Null, &Value::Null));
    let mut arguments: Option<String> = None;
    let mut open = false;
    while let Some(event) = events.next() {
        let content = message["content"].as_array_mut().unwrap();
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert!(!open);
                assert_eq!(event["index"], json!(content.len()));
                content.push(event["content_block"].clone());
                open = true;
            }
            "content_block_delta" => {
                assert!(open);
                assert_eq!(event["index"], json!(content.len() - 1));
                let delta = &event["delta"];
                let key = match delta["type"].as_str().unwrap() {
                    "text_delta" => "text",
                    "thinking_delta" => "thinking",
                    "signature_delta" => "signature",
                    "input_json_delta" => {
                        arguments.get_or_insert_default().push_str(delta["partial_json"].as_str().unwrap());
                        continue;
                    }
                    other => panic!("{other}"),
                };
                let block = content.last_mut().unwrap();
                block[key] = json!(block[key].as_str().unwrap().to_owned() + delta[key].as_str().unwrap());
            }
            "content_block_stop" => {
                assert!(open);
                assert_eq!(event["index"], json!(content.len() - 1));
                if let Some(arguments) = arguments.take() {
                    content.last_mut().unwrap()["input"] = serde_json::from_str(&arguments).unwrap();
                }
                open = false;
            }
            "message_delta" => {
                assert!(!open);
                message["stop_reason"] = event["delta"]["stop_reason"].clone();
                message["stop_sequence"] = event["delta"]["stop_sequence"].clone();
                message["usage"] = event["usage"].clone();
                assert_eq!(events.next().unwrap(), &json!({"type": "message_stop"}));
                assert!(events.next().is_none());
                return message;
            }
            other => panic!("{other}"),
        }
    }
    panic!("the stream has no end");
}

/// Without ids, which differ, once they have been looked at.
fn bare(message: &Value) -> Value {
    let mut message = message.clone();
    let id = |value: Option<Value>, prefix: &str| {
        let id = value.unwrap();
        let number = id.as_str().unwrap().strip_prefix(prefix).unwrap();
        assert!(number.len() == 32 && number.bytes().all(|byte| byte.is_ascii_hexdigit()), "{id}");
    };
    let fields: &mut Map<String, Value> = message.as_object_mut().unwrap();
    id(fields.remove("id"), "msg_");
    for block in fields["content"].as_array_mut().unwrap() {
        let fields = block.as_object_mut().unwrap();
        match fields["type"].as_str().unwrap() {
            "tool_use" => id(fields.remove("id"), "toolu_"),
            "thinking" => id(fields.remove("signature"), "rs_"),
            _ => {}
        }
    }
    message
}

/// Status, kind and sentence of an error.
fn error(reply: &Reply) -> (u16, String, String) {
    let body = reply.json();
    assert_eq!(body.as_object().unwrap().keys().collect::<Vec<_>>(), ["type", "error", "request_id"]);
    assert_eq!(body["error"].as_object().unwrap().keys().collect::<Vec<_>>(), ["type", "message"]);
    assert_eq!(body["type"], "error");
    assert_eq!(body["request_id"], json!(reply.header("request-id")));
    let text = |key: &str| body["error"][key].as_str().unwrap().to_owned();
    (reply.status.as_u16(), text("type"), text("message"))
}

#[tokio::test]
async fn a_message_is_words_with_their_usage_and_their_end() {
    let body = asking(json!({"system": "be brief"}));
    let found = message(|| script(&["Four."]), &body).await;
    let prompt = "<>system\nbe brief<>\n<>user\nhi<>\n<>assistant\n";
    let input = prompt.replace("<>", "x").len();
    assert_eq!(
        found,
        json!({
            "type": "message", "role": "assistant", "model": MODEL, "content": [{"type": "text", "text": "Four."}],
            "stop_reason": "end_turn", "stop_sequence": null,
            "usage": {"input_tokens": input, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 6,
                "output_tokens_details": {"thinking_tokens": 0}},
        })
    );
    let server = Server::start(script(&["Four."])).await;
    let reply = ask(&server, &body).await;
    assert_eq!(reply.header("request-id"), reply.header("x-request-id"));
    assert!(reply.header("request-id").starts_with("req_"));
}

#[tokio::test]
async fn a_stream_is_exactly_this() {
    let answer = format!("<think>Hm.</think>Hi{}", call("weather", "{\"city\": 1}"));
    let server = Server::start(script(&[&answer])).await;
    let reply = ask(&server, &asking(json!({"stream": true, "tools": tools()}))).await;
    for (name, value) in [("content-type", "text/event-stream"), ("cache-control", "no-cache"), ("x-accel-buffering", "no")] {
        assert_eq!(reply.header(name), value);
    }
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path("../snapshots");
    settings.set_prepend_module_to_snapshot(false);
    settings.add_filter("(msg|rs|toolu)_[0-9a-f]{32}", "${1}_ID");
    settings.bind(|| insta::assert_snapshot!("http_messages", reply.text()));
}

#[tokio::test]
async fn thoughts_words_and_uses_of_tools_are_blocks() {
    let answer = format!("<think>\nHm.\n</think>\n\nI ask.\n{}{}", call("weather", "{\"city\": \"Paris\"}"), call("close", "{}"));
    let found = message(|| script(&[&answer]), &asking(json!({"tools": tools(), "thinking": {"type": "adaptive"}}))).await;
    assert_eq!(
        found["content"],
        json!([
            {"type": "thinking", "thinking": "Hm."},
            {"type": "text", "text": "I ask."},
            {"type": "tool_use", "name": "weather", "input": {"city": "Paris"}},
            {"type": "tool_use", "name": "close", "input": {}},
        ])
    );
    assert_eq!((&found["stop_reason"], &found["stop_sequence"]), (&json!("tool_use"), &Value::Null));
    // `\nHm.\n</think>`, a byte each.
    assert_eq!(found["usage"]["output_tokens_details"], json!({"thinking_tokens": 13}));
}

#[tokio::test]
async fn a_turn_with_a_tool_goes_round() {
    let answer = format!("<think>Hm.</think>I ask.{}", call("weather", "{\"city\": \"Paris\"}"));
    let server = Server::start(script(&[&answer, "It is sunny."])).await;
    let user = json!({"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]});
    let first = ask(&server, &asking(json!({"messages": [user], "tools": tools()}))).await.json();
    let used = &first["content"][2]["id"];
    let result = json!({"type": "tool_result", "tool_use_id": used, "content": [{"type": "text", "text": "sunny"}]});
    let messages = json!([user, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]);
    let second = ask(&server, &asking(json!({"messages": messages, "tools": tools()}))).await.json();
    assert_eq!((&second["content"][0]["text"], &second["stop_reason"]), (&json!("It is sunny."), &json!("end_turn")));
}

#[tokio::test]
async fn one_use_is_the_end_where_several_are_ruled_out() {
    let answer = call("weather", "{}").repeat(3);
    let choice = json!({"type": "auto", "disable_parallel_tool_use": true});
    let found = message(|| script(&[&answer]), &asking(json!({"tools": tools(), "tool_choice": choice}))).await;
    assert_eq!((found["content"].as_array().unwrap().len(), &found["stop_reason"]), (1, &json!("tool_use")));
    let none = asking(json!({"tools": tools(), "tool_choice": {"type": "none"}}));
    let found = message(|| script(&[&answer]), &none).await;
    assert_eq!(found["content"], json!([{"type": "text", "text": answer}]));
}

#[tokio::test]
async fn a_stop_sequence_is_told_and_is_no_part_of_the_answer() {
    let body = asking(json!({"stop_sequences": ["keeps warm", " now"]}));
    let found = message(Mock::default, &body).await;
    assert_eq!(found["content"], json!([{"type": "text", "text": " a small model "}]));
    assert_eq!((&found["stop_reason"], &found["stop_sequence"]), (&json!("stop_sequence"), &json!("keeps warm")));
    // One that never comes changes nothing.
    let found = message(|| script(&["Four."]), &asking(json!({"stop_sequences": ["Five"]}))).await;
    assert_eq!((&found["stop_reason"], &found["stop_sequence"]), (&json!("end_turn"), &Value::Null));
}

#[tokio::test]
async fn an_answer_that_reaches_its_limit_says_so() {
    let found = message(Mock::default, &asking(json!({"max_tokens": 2}))).await;
    assert_eq!((&found["stop_reason"], &found["usage"]["output_tokens"]), (&json!("max_tokens"), &json!(2)));
    let answer = call("weather", "{\"city\": \"Paris\", \"day\": 1}");
    let server = Server::start(script(&[&answer])).await;
    let body = asking(json!({"tools": tools(), "max_tokens": answer.find(", \"day").unwrap() + 4}));
    let cut = ask(&server, &body).await.json();
    assert_eq!((&cut["content"][0]["input"], &cut["stop_reason"]), (&json!({"city": "Paris"}), &json!("max_tokens")));
}

#[tokio::test]
async fn an_answer_without_a_word_has_no_block() {
    let found = message(|| script(&[""]), &asking(json!({}))).await;
    assert_eq!((&found["content"], &found["stop_reason"]), (&json!([]), &json!("end_turn")));
}

#[tokio::test]
async fn the_beginning_does_not_wait_for_the_engine_and_silence_is_broken_by_pings() {
    let (gate, mock) = gated();
    let server = Server::with(mock, Options { keep_alive: Duration::from_millis(1), ..Options::default() }, 8).await;
    let mut client = server.client().await;
    let mut response = client.begin(post("/v1/messages", asking(json!({"stream": true, "max_tokens": 1})).to_string())).await;
    let mut read = async || String::from_utf8(response.frame().await.unwrap().unwrap().into_data().unwrap().to_vec()).unwrap();
    let first = read().await;
    assert_eq!(events(&first)[0]["message"]["usage"]["input_tokens"], 21);
    let second = read().await;
    assert!(events(&second).iter().all(|event| *event == json!({"type": "ping"})), "{second}");
    gate.send(()).unwrap();
    let rest = Reply::of(response).await;
    sum(&events(&(first + &second + rest.text())));
}

#[tokio::test]
async fn a_client_that_leaves_frees_the_engine() {
    let (gate, mock) = gated();
    let server = Server::start(mock).await;
    let mut client = server.client().await;
    let response = client.begin(post("/v1/messages", asking(json!({"stream": true})).to_string())).await;
    until("the engine has the request", || server.load().running == 1).await;
    drop((response, client));
    until("the engine is free", || {
        let _ = gate.try_send(());
        server.load().running == 0
    })
    .await;
}

#[tokio::test]
async fn an_engine_that_fails_ends_the_stream_with_an_error() {
    let server = Server::start(Mock { fault: Fault::FailAfter(3), ..Mock::default() }).await;
    let reply = ask(&server, &asking(json!({"stream": true}))).await;
    let all = events(reply.text());
    let last = all.last().unwrap();
    assert_eq!(
        (&last["type"], &last["error"]["type"], &last["request_id"]),
        (&json!("error"), &json!("api_error"), &json!(reply.header("request-id")))
    );
    assert!(all.iter().all(|event| event["type"] != "message_delta" && event["type"] != "message_stop"));
    let count = |kind: &str| all.iter().filter(|event| event["type"] == kind).count();
    assert_eq!(count("content_block_start"), count("content_block_stop"));
    let server = Server::start(Mock { fault: Fault::FailRequest, ..Mock::default() }).await;
    let (status, kind, _) = error(&ask(&server, &asking(json!({}))).await);
    assert_eq!((status, kind.as_str()), (500, "api_error"));
}

#[tokio::test]
async fn a_server_that_goes_away_says_so() {
    let (_gate, mock) = gated();
    let mut server = Server::with(mock, Options { grace: Duration::ZERO, ..Options::default() }, 8).await;
    let mut client = server.client().await;
    let stream = client.begin(post("/v1/messages", asking(json!({"stream": true})).to_string())).await;
    until("the engine has the request", || server.load().running == 1).await;
    server.stop();
    let all = events(Reply::of(stream).await.text());
    let last = all.last().unwrap();
    assert_eq!((&last["type"], &last["error"]["type"]), (&json!("error"), &json!("overloaded_error")));
}

#[tokio::test]
async fn every_error_of_these_routes_is_in_their_envelope() {
    let options = Options { max_body: 4096, ..Options::default() };
    let server = Server::with(Mock { context_length: 512, ..Mock::default() }, options, 8).await;
    let mut client = server.client().await;
    let mut send = async |request| {
        let reply = client.send(request).await;
        let (status, kind, message) = error(&reply);
        (status, kind, message, reply.header("allow").to_owned())
    };
    let body = |more: Value| post("/v1/messages", asking(more).to_string());
    let typed = |kind: &str| request("POST", "/v1/messages").header("content-type", kind).body(Full::from("{}")).unwrap();
    let from = |host: &str| hyper::Request::builder().uri("/v1/messages").header("host", host).body(Full::default()).unwrap();
    let long = json!({"messages": [{"role": "user", "content": "x".repeat(1000)}]});
    for (request, status, kind, says) in [
        (post("/v1/messages", "{"), 400, "invalid_request_error", "not JSON"),
        (post("/v1/messages", "[]"), 400, "invalid_request_error", "the body must be an object"),
        (post("/v1/messages/count_tokens", "{}"), 400, "invalid_request_error", "`messages` is required"),
        (body(json!({"max_tokens": null})), 400, "invalid_request_error", "`max_tokens` is required"),
        (body(json!({"model": "claude"})), 404, "not_found_error", "claude"),
        (body(long.clone()), 400, "invalid_request_error", "prompt is too long: the prompt has"),
        (body(json!({"stream": true, "messages": long["messages"]})), 400, "invalid_request_error", "prompt is too long"),
        (body(json!({"tools": tools(), "tool_choice": {"type": "any"}})), 400, "invalid_request_error", "tool_choice"),
        (post("/v1/messages", " ".repeat(5000)), 413, "request_too_large", "4096"),
        (typed("text/plain"), 415, "invalid_request_error", "text/plain"),
        (get("/v1/messages"), 405, "invalid_request_error", "POST"),
        (get("/v1/messages/count_tokens"), 405, "invalid_request_error", "POST"),
        (post("/v1/messages/batches", "{}"), 404, "not_found_error", "/v1/messages/batches"),
        (from("example.com"), 403, "permission_error", "example.com"),
    ] {
        let what = format!("{request:?}");
        let (found, found_kind, message, allow) = send(request).await;
        assert_eq!((found, found_kind.as_str()), (status, kind), "{what}: {message}");
        assert!(message.contains(says), "{what}: {message}");
        assert_eq!(allow, if status == 405 { "POST" } else { "" });
    }
    // Other routes have their own, and nothing of this one.
    let other = server.get("/v1/messages_of_mine").await;
    assert_eq!((other.error().1.as_str(), other.header("request-id")), ("not_found", ""));
}

#[tokio::test]
async fn a_full_queue_says_when_to_come_again() {
    let (_gate, mock) = gated();
    let server = Server::with(Mock { max_batch: 1, ..mock }, Options::default(), 0).await;
    let mut first: Client = server.client().await;
    let _first = first.begin(post("/v1/messages", asking(json!({"stream": true})).to_string())).await;
    until("the engine has the request", || server.load().running == 1).await;
    let refused = ask(&server, &asking(json!({}))).await;
    let (status, kind, _) = error(&refused);
    assert_eq!((status, kind.as_str(), refused.header("retry-after")), (429, "rate_limit_error", "1"));
}
