//! How completions end before their time: an engine that breaks, a client that leaves, a server that goes away.

use std::time::Duration;

use emberd::engine::mock::{Fault, Mock};
use emberd::http::Options;
use http_body_util::BodyExt;
use serde_json::{Value, json};

use crate::http_chat::{PATH, ask, blocks};
use crate::http_disconnect::leave;
use crate::http_support::{PATIENCE, Reply, Server, gated, post, until};

const STREAM: &str = r#"{"messages":[{"role":"user","content":"hi"}],"stream":true,"stream_options":{"include_usage":true}}"#;
const OBJECT: &str = r#"{"messages":[{"role":"user","content":"hi"}]}"#;
const ENGINE_FAILED: &str = "the engine failed while it worked on the request (hint: try again; the server's log says why)";

#[tokio::test]
async fn an_engine_that_breaks_ends_a_stream_with_an_error_and_no_reason() {
    for fault in [Fault::FailAfter(3), Fault::EndAfter(3), Fault::FailRequest] {
        let server = Server::start(Mock { fault, ..Mock::default() }).await;
        let reply = server.client().await.send(post(PATH, STREAM)).await;
        assert_eq!(reply.status, 200);
        let (told, done) = blocks(reply.text());
        let (last, rest) = told.split_last().unwrap();
        assert_eq!(*last, json!({"error": {"message": ENGINE_FAILED, "type": "server_error", "param": null, "code": "engine_failed"}}));
        assert!(!done && !rest.is_empty());
        for chunk in rest {
            assert_eq!((&chunk["choices"][0]["finish_reason"], &chunk["usage"]), (&Value::Null, &Value::Null));
        }
        let server = Server::start(Mock { fault, ..Mock::default() }).await;
        let reply = ask(&server, &serde_json::from_str(OBJECT).unwrap()).await;
        assert_eq!(reply.error(), (500, "engine_failed".into(), None));
    }
}

#[tokio::test]
async fn leaving_frees_the_engine_in_prefill_and_decode() {
    for body in [STREAM, OBJECT] {
        for steps in [0, 3] {
            leave(PATH, body, steps).await;
        }
    }
}

#[tokio::test]
async fn the_first_chunk_and_the_signs_of_life_wait_for_no_token() {
    let (gate, mock) = gated();
    let server = Server::with(mock, Options { keep_alive: Duration::from_millis(1), ..Options::default() }, 8).await;
    let mut client = server.client().await;
    let mut stream = client.begin(post(PATH, STREAM)).await;
    let mut next = async || {
        let frame = tokio::time::timeout(PATIENCE, stream.frame()).await.unwrap().unwrap().unwrap();
        String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap()
    };
    let first = next().await;
    assert_eq!(blocks(&first).0[0]["choices"][0]["delta"], json!({"role": "assistant", "content": null}));
    assert_eq!(next().await, ": keep-alive\n\n");
    drop(gate); // As fast as it can from here on.
    drop(stream);
}

#[tokio::test]
async fn a_full_queue_and_a_server_that_goes_away_say_so() {
    let (gate, mock) = gated();
    let options = Options { grace: Duration::ZERO, ..Options::default() };
    let mut server = Server::with(Mock { max_batch: 1, ..mock }, options, 1).await;
    let mut running = server.client().await;
    let stream = running.begin(post(PATH, STREAM)).await;
    until("the first is with the engine", || server.load().running == 1).await;
    let mut waiting = server.client().await;
    let object = tokio::spawn(async move { waiting.send(post(PATH, OBJECT)).await });
    until("the second waits", || server.load().waiting == 1).await;
    let full = server.client().await.send(post(PATH, STREAM)).await;
    assert_eq!((full.error(), full.header("retry-after")), ((429, "queue_full".into(), None), "1"));
    server.stop();
    let reply = Reply::of(stream).await;
    let (told, done) = blocks(reply.text());
    assert_eq!((&told.last().unwrap()["error"]["code"], done), (&json!("shutting_down"), false));
    assert_eq!(object.await.unwrap().error(), (503, "shutting_down".into(), None));
    tokio::time::timeout(PATIENCE, &mut server.task).await.unwrap().unwrap();
    drop(gate);
}
