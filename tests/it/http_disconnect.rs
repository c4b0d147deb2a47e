//! A client that leaves takes its request with it, wherever that is; so does one that stays and reads nothing.

use emberd::engine::mock::Mock;
use emberd::http::Options;
use emberd::models::State;
use http_body_util::BodyExt;

use crate::http_support::{Server, gated, post, until};

const STREAM: &str = r#"{"input":"hi","stream":true}"#;
const OBJECT: &str = r#"{"input":"hi"}"#;

async fn leave_while_it_runs(body: &str, steps_before: usize) {
    leave("/v1/responses", body, steps_before).await;
}

/// Asks, leaves once the engine has the request, and waits until the engine is free of it.
pub async fn leave(path: &'static str, body: &str, steps_before: usize) {
    let (gate, mock) = gated();
    let server = Server::start(mock).await;
    let mut client = server.client().await;
    let body = body.to_owned();
    let ask = tokio::spawn(async move {
        let mut response = client.begin(post(path, body)).await;
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

#[cfg(unix)]
#[tokio::test]
async fn a_client_that_reads_nothing_is_hung_up_on() {
    use std::time::Duration;

    use emberd::http::{Listener, serve};
    use tokio::io::AsyncWriteExt;
    use tokio::net::UnixStream;

    use crate::http_support::{Client, get, models};

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("door");
    let listener = tokio::net::UnixListener::bind(&path).unwrap();
    let (models, launches) = models(8);
    let (gate, mock) = gated();
    std::thread::spawn(move || {
        let launch = launches.next().unwrap();
        Mock { context_length: 1 << 30, stop_after: 1 << 29, ..mock }.spawn(launch.port, launch.settings).unwrap();
    });
    models.find(None).unwrap().ready().await.unwrap();
    let engine = models.find(None).unwrap().loaded().unwrap().engine.clone();
    // One connection at a time: the second is served only when the first has given its place back.
    let options = Options { write_timeout: Duration::from_millis(50), max_connections: 1, ..Options::default() };
    tokio::spawn(serve(vec![Listener::Unix(listener)], models, options, std::future::pending()));
    let mut deaf = UnixStream::connect(&path).await.unwrap();
    let head = "POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
    deaf.write_all(format!("{head}content-length: {}\r\n\r\n{STREAM}", STREAM.len()).as_bytes()).await.unwrap();
    until("the engine has the request", || engine.load().running == 1).await;
    // Far more than a socket holds unread.
    until("the engine is free", || {
        let _ = gate.try_send(());
        engine.load().running == 0
    })
    .await;
    assert!(engine.load().tokens < 1 << 29, "the answer came to its own end");
    let mut next = Client::over(UnixStream::connect(&path).await.unwrap()).await;
    assert_eq!(next.send(get("/health")).await.status, 200);
    drop(deaf); // It kept its end open all the while.
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
