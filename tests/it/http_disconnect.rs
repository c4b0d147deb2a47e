//! A client that leaves takes its request with it, wherever that is.

use emberd::engine::mock::Mock;
use emberd::http::Options;
use emberd::models::State;
use http_body_util::BodyExt;

use crate::http_support::{Server, gated, post, until};

const STREAM: &str = r#"{"input":"hi","stream":true}"#;
const OBJECT: &str = r#"{"input":"hi"}"#;

/// Asks, leaves once the engine has the request, and waits until the engine is free of it.
async fn leave_while_it_runs(body: &str, steps_before: usize) {
    let (gate, mock) = gated();
    let server = Server::start(mock).await;
    let mut client = server.client().await;
    let body = body.to_owned();
    let ask = tokio::spawn(async move {
        let mut response = client.begin(post("/v1/responses", body)).await;
        while response.frame().await.is_some() {}
    });
    until("the engine has the request", || server.load().running == 1).await;
    for _ in 0..steps_before {
        gate.send(()).unwrap();
    }
    until("the steps are made", || server.load().tokens >= steps_before as u64).await;
    ask.abort();
    // One step, whenever the connection's end has been noticed, and no more.
    until("the engine is free", || {
        let _ = gate.try_send(());
        server.load().running == 0
    })
    .await;
}

#[tokio::test]
async fn leaving_a_stream_in_prefill_frees_the_engine() {
    leave_while_it_runs(STREAM, 0).await;
}

#[tokio::test]
async fn leaving_a_stream_in_decode_frees_the_engine() {
    leave_while_it_runs(STREAM, 3).await;
}

#[tokio::test]
async fn leaving_an_object_in_prefill_frees_the_engine() {
    leave_while_it_runs(OBJECT, 0).await;
}

#[tokio::test]
async fn leaving_an_object_in_decode_frees_the_engine() {
    leave_while_it_runs(OBJECT, 3).await;
}

#[tokio::test]
async fn leaving_the_queue_frees_the_place_at_once() {
    for body in [STREAM, OBJECT] {
        let (_gate, mock) = gated();
        let server = Server::with(Mock { max_batch: 1, ..mock }, Options::default(), 8).await;
        let mut first = server.client().await;
        let _first = first.begin(post("/v1/responses", STREAM)).await;
        until("the first is with the engine", || server.load().running == 1).await;
        let mut second = server.client().await;
        let ask = tokio::spawn(async move {
            let mut response = second.begin(post("/v1/responses", body)).await;
            while response.frame().await.is_some() {}
        });
        until("the second waits", || server.load().waiting == 1).await;
        ask.abort();
        // The engine is not asked: it makes no step.
        until("nobody waits", || server.load().waiting == 0).await;
        assert_eq!(server.load().running, 1);
    }
}

#[tokio::test]
async fn leaving_while_the_model_loads_does_not_stop_the_load() {
    let mut server = Server::absent(Options::default(), 8).await;
    let mut client = server.client().await;
    let ask = tokio::spawn(async move { client.begin(post("/v1/responses", OBJECT)).await });
    until("the model loads", || server.models.state() == State::Loading).await;
    ask.abort();
    assert!(ask.await.is_err_and(|error| error.is_cancelled()));
    let (_gate, mock) = gated();
    server.launch(mock);
    until("the model is ready", || server.models.state() == State::Ready).await;
    let load = server.load();
    assert_eq!((load.running, load.waiting), (0, 0));
}
