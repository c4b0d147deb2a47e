//! Stopping: what is in flight finishes, or fails in words.

use std::time::Duration;

use emberd::http::Options;
use http_body_util::BodyExt;
use serde_json::json;
use tokio::net::TcpStream;

use crate::http_support::{PATIENCE, Reply, Server, gated, post, until};

const STREAM: &str = r#"{"input":"hi","stream":true,"max_output_tokens":5}"#;

#[tokio::test]
async fn answers_in_flight_are_finished_and_nothing_new_is_taken() {
    let (gate, mock) = gated();
    let mut server = Server::start(mock).await;
    let mut idle = server.client().await;
    assert_eq!(idle.send(crate::http_support::get("/health")).await.status, 200);
    let mut client = server.client().await;
    let stream = client.begin(post("/v1/responses", STREAM)).await;
    server.stop();
    // The listener is closed once the draining has begun.
    let port = server.port;
    let closed = async { while TcpStream::connect(("127.0.0.1", port)).await.is_ok() {} };
    tokio::time::timeout(PATIENCE, closed).await.unwrap();
    for _ in 0..10 {
        gate.send(()).unwrap();
    }
    let events = Reply::of(stream).await.events();
    assert_eq!(events.last().unwrap()["type"], "response.incomplete");
    tokio::time::timeout(PATIENCE, &mut server.task).await.unwrap().unwrap();
}

#[tokio::test]
async fn at_the_deadline_streams_fail_in_words_and_objects_with_an_error() {
    let (gate, mock) = gated();
    let mut server = Server::with(mock, Options { grace: Duration::ZERO, ..Options::default() }, 8).await;
    let mut client = server.client().await;
    let mut stream = client.begin(post("/v1/responses", STREAM)).await;
    let first = stream.frame().await.unwrap().unwrap().into_data().unwrap();
    let mut other = server.client().await;
    let object = tokio::spawn(async move { other.send(post("/v1/responses", r#"{"input":"hi"}"#)).await });
    until("both are with the engine or wait", || server.load().running + server.load().waiting == 2).await;
    server.stop();
    let rest = Reply::of(stream).await;
    let whole = [&first[..], &rest.body[..]].concat();
    let events = crate::http_support::events(std::str::from_utf8(&whole).unwrap());
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["response"]["error"]["code"]), (&json!("response.failed"), &json!("server_error")));
    let object = object.await.unwrap();
    assert_eq!(object.error(), (503, "shutting_down".into(), None));
    assert_eq!(object.header("retry-after"), "1");
    tokio::time::timeout(PATIENCE, &mut server.task).await.unwrap().unwrap();
    drop(gate);
}
