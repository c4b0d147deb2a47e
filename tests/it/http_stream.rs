//! Answers as they go over the wire, whole.

use emberd::engine::host::launcher;
use emberd::engine::mock::{Fault, Mock, vocabulary};
use emberd::engine::{Capabilities, Finish, Order, Settings, Step};
use emberd::http::Options;
use emberd::models::Models;
use emberd::models::fetch::Shelf;
use hyper::StatusCode;
use serde_json::{Value, json};

use crate::http_support::{MODEL, Server};
use crate::vocab;

/// What the engine itself said is in the log alone.
const ENGINE_FAILED: &str = "the engine failed while it worked on the request (hint: try again; the server's log says why)";

/// What differs from run to run, taken out.
fn settled() -> insta::Settings {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path("../snapshots");
    settings.set_prepend_module_to_snapshot(false);
    settings.add_filter("(resp|msg|rs|fc|ctc|call)_[0-9a-f]{32}", "${1}_ID");
    settings.add_filter(r#""(created|completed)_at":\d{10}"#, r#""${1}_at":TIME"#);
    settings.add_filter(r#","(time_to_first|prefill_tokens|decode_tokens|server_)[a-z_]*":[0-9.]+"#, "");
    settings
}

fn three_words() -> Mock {
    Mock { stop_after: 3, ..Mock::default() }
}

#[tokio::test]
async fn a_stream_is_exactly_this() {
    let server = Server::start(three_words()).await;
    let request = json!({
        "model": MODEL, "stream": true, "instructions": "be brief", "input": "hi", "metadata": {"a": "b", "retention_seconds": 60},
        "reasoning": {"effort": "low"}, "text": {"verbosity": "low"}, "prompt_cache_key": "session", "user": "me", "tools": [],
    });
    let reply = server.ask(&request).await;
    for (name, value) in [("content-type", "text/event-stream"), ("cache-control", "no-cache"), ("x-accel-buffering", "no")] {
        assert_eq!(reply.header(name), value);
    }
    assert!(reply.header("x-request-id").starts_with("req_"));
    settled().bind(|| insta::assert_snapshot!("http_stream", reply.text()));
}

#[tokio::test]
async fn an_object_is_exactly_this() {
    let server = Server::start(three_words()).await;
    let reply =
        server.ask(&json!({"input": [{"role": "user", "content": "hi"}], "temperature": 0.7, "seed": 5, "max_output_tokens": 2})).await;
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("content-type"), "application/json");
    settled().bind(|| insta::assert_snapshot!("http_object", reply.text()));
}

#[tokio::test]
async fn both_forms_give_the_same_answer() {
    let server = Server::start(three_words()).await;
    let forms = [json!({"input": "hi", "stream": true}), json!({"input": "hi"})];
    let streamed = server.ask(&forms[0]).await.events().last().unwrap()["response"].clone();
    let whole = server.ask(&forms[1]).await.json();
    let core = |response: &Value| {
        (response["output"][0]["content"].clone(), response["status"].clone(), response["usage"]["output_tokens"].clone())
    };
    assert_eq!(core(&streamed), core(&whole));
    assert_eq!(
        core(&whole),
        (json!([{"type": "output_text", "annotations": [], "logprobs": [], "text": " a small model"}]), json!("completed"), json!(4))
    );
    assert_ne!(streamed["id"], whole["id"]);
    for time in
        ["time_to_first_token_ms", "server_inference_elapsed_ms", "server_queue_ms", "server_pre_inference_ms", "server_model_resolve_ms"]
    {
        assert!(whole["usage"][time].is_number(), "{time}");
    }
    assert!(whole["usage"].get("server_load_wait_ms").is_none());
}

#[tokio::test]
async fn the_first_request_loads_the_model_and_says_how_long_it_waited() {
    let mut server = Server::absent(emberd::http::Options::default(), 8).await;
    server.launch(three_words());
    let response = server.ask(&json!({"input": "hi"})).await.json();
    assert!(response["usage"]["server_load_wait_ms"].is_number());
    assert_eq!(response["usage"]["server_load_owner"], true);
}

#[tokio::test]
async fn the_limit_makes_an_answer_incomplete() {
    let server = Server::start(Mock::default()).await;
    let events = server.ask(&json!({"input": "hi", "stream": true, "max_output_tokens": 2})).await.events();
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.incomplete");
    assert_eq!(last["response"]["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(last["response"]["output"][0]["status"], "incomplete");
    assert_eq!(last["response"]["usage"]["output_tokens"], 2);
    assert_eq!(last["response"]["completed_at"], Value::Null);
}

#[tokio::test]
async fn the_window_bounds_an_answer_that_asked_for_more() {
    let server = Server::start(Mock { context_length: 64, ..Mock::default() }).await;
    let response = server.ask(&json!({"input": "hi", "max_output_tokens": 1_000_000})).await.json();
    assert_eq!(response["status"], "incomplete");
    assert_eq!(response["usage"]["total_tokens"], 64);
    assert_eq!(response["max_output_tokens"], 1_000_000);
}

#[tokio::test]
async fn a_prompt_that_does_not_fit_is_refused_before_a_stream_begins() {
    let server = Server::start(Mock { context_length: 64, ..Mock::default() }).await;
    let reply = server.ask(&json!({"input": "x".repeat(100), "stream": true})).await;
    assert_eq!(reply.error(), (400, "context_length_exceeded".into(), Some("input".into())));
    assert!(reply.text().contains("64"));
    // One turn cannot be shortened by leaving out turns.
    let reply = server.ask(&json!({"input": "x".repeat(100), "truncation": "auto"})).await;
    assert_eq!(reply.error(), (400, "context_length_exceeded".into(), Some("input".into())));
}

/// A server whose model's template does not take a conversation in which the assistant had the last word.
async fn strict(folder: &std::path::Path) -> Server {
    let template =
        "{% if messages[-1].role != 'user' %}{{ raise_exception('the user must speak last') }}{% endif %}{{ messages[-1].content }}";
    for (name, content) in
        [("config.json", json!({})), ("tokenizer.json", vocab::byte_level()), ("tokenizer_config.json", json!({"chat_template": template}))]
    {
        std::fs::write(folder.join(name), content.to_string()).unwrap();
    }
    let (launcher, launches) = launcher(8);
    let shelf = Shelf::new(folder.join("unused"), None);
    // The engine's name says only that the model is one with files.
    let models = Models::new(&[folder.to_str().unwrap().to_owned()], shelf, launcher, "onnx", Settings::default()).unwrap();
    let mut server = Server::of(models, launches, Options::default()).await;
    server.launch(three_words());
    server.models.find(None).unwrap().ready().await.unwrap();
    server
}

#[tokio::test]
async fn a_conversation_that_the_template_refuses_is_refused_before_a_stream_begins() {
    let folder = tempfile::tempdir().unwrap();
    let server = strict(folder.path()).await;
    let user = json!({"role": "user", "content": "hi"});
    let assistant = json!({"role": "assistant", "content": "hello"});
    for stream in [true, false] {
        let reply = server.ask(&json!({"input": [user, assistant], "stream": stream})).await;
        assert_eq!(reply.error(), (400, "invalid_value".into(), Some("input".into())), "stream: {stream}");
        assert!(reply.text().contains("the user must speak last"));
        assert_eq!(server.ask(&json!({"input": [user, assistant, user], "stream": stream})).await.status, 200);
    }
}

#[tokio::test]
async fn truncation_leaves_out_the_oldest_turns_until_the_prompt_fits() {
    let server = Server::start(Mock { context_length: 256, stop_after: 2, ..Mock::default() }).await;
    let turn = |role: &str, letter: &str| json!({"role": role, "content": letter.repeat(20)});
    let recent = [turn("user", "y"), turn("assistant", "z"), json!({"role": "user", "content": "now?"})];
    let old = (0..20).flat_map(|_| [turn("user", "u"), turn("assistant", "a")]);
    let all: Vec<Value> = old.chain(recent.clone()).collect();
    let ask = async |input: &[Value], truncation: &str| {
        let body = json!({"instructions": "be brief", "input": input, "truncation": truncation, "max_output_tokens": 50});
        server.ask(&body).await
    };
    assert_eq!(ask(&all, "disabled").await.error().1, "context_length_exceeded");
    let response = ask(&all, "auto").await.json();
    assert_eq!(response["truncation"], "auto");
    let tokens = response["usage"]["input_tokens"].as_u64().unwrap();
    // It fits, with room for what was asked for, and one exchange more would not.
    let exchange = ask(&all[38..], "disabled").await.json()["usage"]["input_tokens"].as_u64().unwrap()
        - ask(&all[40..], "disabled").await.json()["usage"]["input_tokens"].as_u64().unwrap();
    assert!(tokens <= 206 && tokens + exchange > 206, "{tokens} {exchange}");
}

#[tokio::test]
async fn an_engine_that_breaks_ends_a_stream_with_failed_and_an_object_with_an_error() {
    for fault in [Fault::FailAfter(3), Fault::EndAfter(3)] {
        let server = Server::start(Mock { fault, ..Mock::default() }).await;
        let events = server.ask(&json!({"input": "hi", "stream": true})).await.events();
        let last = events.last().unwrap();
        assert_eq!(last["type"], "response.failed");
        assert_eq!(last["response"]["error"], json!({"code": "server_error", "message": ENGINE_FAILED}));
        assert_eq!(last["response"]["output"][0]["status"], "incomplete");
        assert_eq!(events[events.len() - 2]["type"], "response.output_item.done");
    }
    let server = Server::start(Mock { fault: Fault::FailAfter(3), ..Mock::default() }).await;
    let reply = server.ask(&json!({"input": "hi"})).await;
    assert_eq!(reply.error(), (500, "engine_failed".into(), None));
    assert_eq!(reply.json()["error"]["message"], ENGINE_FAILED);
}

#[tokio::test]
async fn a_request_that_the_engine_refuses_fails_alone() {
    let server = Server::start(Mock { fault: Fault::FailRequest, ..Mock::default() }).await;
    for _ in 0..2 {
        let events = server.ask(&json!({"input": "hi", "stream": true})).await.events();
        let types: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
        assert_eq!(types, ["response.created", "response.in_progress", "response.failed"]);
    }
}

#[tokio::test]
async fn a_stop_string_ends_an_answer_and_is_not_part_of_it() {
    let server = Server::start(Mock::default()).await;
    let response = server.ask(&json!({"input": "hi", "stop": ["keeps warm"]})).await.json();
    assert_eq!(response["output"][0]["content"][0]["text"], " a small model ");
    assert_eq!((&response["status"], &response["stop"]), (&json!("completed"), &json!(["keeps warm"])));
}

#[tokio::test]
async fn many_streams_at_once_are_all_whole() {
    let server = Server::start(Mock { stop_after: 200, ..Mock::default() }).await;
    let text: String = vocabulary::WORDS.iter().cycle().take(200).copied().collect();
    let mut asks = tokio::task::JoinSet::new();
    for _ in 0..32 {
        let mut client = server.client().await;
        asks.spawn(async move {
            client.send(crate::http_support::post("/v1/responses", json!({"input": "hi", "stream": true}).to_string())).await
        });
    }
    while let Some(reply) = asks.join_next().await {
        let events = reply.unwrap().events();
        assert_eq!(events.last().unwrap()["response"]["output"][0]["content"][0]["text"], json!(text));
        assert!(events.iter().enumerate().all(|(number, event)| event["sequence_number"] == json!(number)));
    }
}

#[tokio::test]
async fn how_far_to_guess_reaches_the_engine() {
    let mut server = Server::absent(emberd::http::Options::default(), 8).await;
    let launches = server.launches();
    let engine = std::thread::spawn(move || {
        let port = launches.next().unwrap().port;
        port.ready(Capabilities { context_length: 512, max_batch: 4, vocab_size: vocabulary::SIZE, eos_ids: vec![], constraints: false })
            .unwrap();
        let mut asked = Vec::new();
        while asked.len() < 4 {
            for order in port.wait().unwrap().unwrap() {
                let Order::Admit(admit) = order else { continue };
                asked.push(admit.speculation);
                port.push(vec![Step {
                    id: admit.id,
                    tokens: vec![vocabulary::FIRST_WORD],
                    finish: Some(Finish::Length),
                    logprobs: vec![],
                }])
                .unwrap();
            }
        }
        asked
    });
    for body in [
        json!({"input": "hi", "max_output_tokens": 1}),
        json!({"input": "hi", "max_output_tokens": 1, "generation_mode": "ar", "mtp_depth": {}}),
        json!({"input": "hi", "max_output_tokens": 1, "stream": true, "extra_body": {"generation_mode": "mtp", "mtp_depth": 9}}),
        json!({"input": "hi", "max_output_tokens": 1, "extra_body": {"generation_mode": "mtp"}}),
    ] {
        assert_eq!(server.ask(&body).await.status, StatusCode::OK, "{body}");
    }
    assert_eq!(engine.join().unwrap(), [None, Some(0), Some(9), Some(64)]);
}
