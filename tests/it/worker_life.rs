//! How work and workers end: engines that fail, clients that go, shutdowns.

use std::sync::Arc;

use emberd::engine::mock::{Fault, Mock};
use emberd::engine::port::Load;
use emberd::models::State;
use emberd::shutdown::Reason;
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;

use crate::http_support::{PATIENCE, gated, until};
use crate::worker_support::{Worker, chat, options, orders_after_loading, words};

#[tokio::test]
async fn whatever_the_engine_does_a_request_has_one_answer_of_its_kind_and_the_next_is_served() {
    let faults = [Fault::FailAfter(1), Fault::EndAfter(1), Fault::PanicAfter(1), Fault::Overrun, Fault::FailRequest, Fault::FailLoad];
    for fault in faults {
        let worker = Worker::start(Mock { fault, ..Mock::default() });
        let mut client = worker.client().await;
        client.say(chat("1", 4)).await;
        let error = client.answer().await;
        assert_eq!((&error["type"], &error["id"]), (&json!("error"), &json!("1")), "{fault:?}");
        let text = error["error"].as_str().unwrap();
        assert!(!text.is_empty() && !text.contains('\n'), "{text:?}");
        // Nothing else is said of it: the next line is the pong.
        assert_eq!(client.ask(r#"{"type":"ping","id":"2"}"#).await["type"], "pong", "{fault:?}");
        if matches!(fault, Fault::Overrun | Fault::FailRequest) {
            assert_eq!(client.ask(chat("3", 4)).await["type"], "error", "the engine lives, and fails each request");
        } else {
            worker.launch(Mock::default());
            client.say(chat("3", 4)).await;
            assert_eq!(client.answer().await, json!({"type": "text", "id": "3", "text": words(4)}), "{fault:?}");
        }
        assert_eq!(worker.load(), Load { tokens: worker.load().tokens, ..Load::default() });
    }
}

#[tokio::test]
async fn a_load_that_fails_is_an_error_for_all_who_wait_and_the_next_tries_again() {
    let worker = Worker::absent(options());
    let (mut first, mut second) = (worker.client().await, worker.client().await);
    first.say(r#"{"type":"load","id":"1"}"#).await;
    let launch = worker.next_launch().await;
    second.say(r#"{"type":"load","id":"2"}"#).await;
    assert_eq!(second.ask(r#"{"type":"ping","id":"3"}"#).await["type"], "pong");
    launch.port.fail("the weights are torn; hint: pull the model again\nTraceback: of no interest here");
    for (client, id) in [(&mut first, "1"), (&mut second, "2")] {
        assert_eq!(client.next().await, json!({"type": "error", "id": id, "error": "the weights are torn (hint: pull the model again)"}));
    }
    worker.launch(Mock::default());
    second.say(r#"{"type":"load","id":"4"}"#).await;
    assert_eq!(second.answer().await, json!({"type": "loaded", "id": "4"}));
}

#[tokio::test]
async fn a_gone_clients_running_and_queued_work_is_dropped() {
    let (gate, mock) = gated();
    let worker = Worker::start(Mock { max_batch: 1, ..mock });
    let mut client = worker.client().await;
    for id in ["1", "2", "3"] {
        client.say(chat(id, 8000)).await;
    }
    worker.until(1, 2).await;
    drop(client);
    worker.until(1, 0).await;
    gate.send(()).unwrap(); // The step in which the engine hears of it.
    worker.until(0, 0).await;
    assert!(worker.load().tokens <= 1);
}

#[tokio::test]
async fn a_client_that_only_stops_sending_gets_its_answers() {
    let (gate, mock) = gated();
    let worker = Worker::start(mock);
    let mut client = worker.client().await;
    client.say(chat("1", 2)).await;
    client.writer.write_all(chat("2", 3).as_bytes()).await.unwrap(); // The last line needs no newline.
    client.writer.shutdown().await.unwrap();
    worker.until_asked(2).await;
    drop(gate);
    let mut texts = [client.answer().await["text"].clone(), client.answer().await["text"].clone()];
    texts.sort_by_key(|text| text.as_str().unwrap().len());
    assert_eq!(texts, [words(2), words(3)]);
    assert_eq!(client.line().await, None);
}

#[tokio::test]
async fn a_client_that_stops_sending_and_then_goes_is_noticed() {
    let (gate, mock) = gated();
    let worker = Worker::start(Mock { max_batch: 1, ..mock });
    let mut client = worker.client().await;
    client.say(chat("1", 8000)).await;
    client.say(chat("2", 8000)).await;
    client.writer.shutdown().await.unwrap();
    worker.until(1, 1).await;
    drop(client);
    worker.until(1, 0).await;
    gate.send(()).unwrap();
    worker.until(0, 0).await;
}

#[tokio::test]
async fn half_a_line_and_a_hang_up_leave_nothing_behind() {
    let worker = Worker::start(Mock::default());
    for half in [r#"{"type":"cha"#, r#"{"type":"shutdown""#, "\n{"] {
        worker.client().await.writer.write_all(half.as_bytes()).await.unwrap();
    }
    assert_eq!(worker.client().await.ask(r#"{"type":"ping","id":"1"}"#).await["type"], "pong");
    assert_eq!(worker.models.state(), State::Absent);
}

#[tokio::test]
async fn a_load_goes_on_when_the_client_that_asked_for_it_has_gone() {
    let worker = Worker::absent(options());
    let mut client = worker.client().await;
    client.say(r#"{"type":"load","id":"1"}"#).await;
    let launch = worker.next_launch().await;
    drop(client);
    Mock::default().spawn(launch.port, launch.settings).unwrap();
    until("the model is there", || worker.models.state() == State::Ready).await;
}

#[tokio::test]
async fn a_shutdown_ends_the_worker_at_once_whatever_runs() {
    let (_gate, mock) = gated();
    let mut worker = Worker::start(mock);
    let (mut busy, mut idle) = (worker.client().await, worker.client().await);
    busy.say(chat("1", 8000)).await;
    worker.until(1, 0).await;
    // What was said before it is answered, what comes after it is not.
    idle.say("{\"type\":\"ping\",\"id\":\"2\"}\n{\"type\":\"shutdown\",\"id\":\"replace\"}\n{\"type\":\"ping\",\"id\":\"3\"}").await;
    assert_eq!(idle.next().await["id"], "2");
    assert_eq!(idle.line().await, None);
    while let Some(line) = busy.line().await {
        assert!(line.starts_with("{\"type\":\"progress\""), "{line}");
    }
    assert_eq!(worker.ended().await, Reason::Asked);
    UnixStream::connect(worker.path()).await.unwrap_err();
}

#[tokio::test]
async fn a_signal_ends_the_worker_and_its_number_is_the_exit_code() {
    let mut worker = Worker::absent(options());
    let mut client = worker.client().await;
    assert_eq!(client.ask(r#"{"type":"ping","id":"1"}"#).await["type"], "pong");
    worker.stop.stop(Reason::Signal(15));
    worker.stop.stop(Reason::Asked); // The first reason counts.
    assert_eq!(worker.ended().await, Reason::Signal(15));
    assert_eq!(client.line().await, None);
    assert_eq!([Reason::Signal(15), Reason::Signal(2), Reason::Idle, Reason::Asked].map(Reason::exit_code), [143, 130, 0, 0]);
}

#[tokio::test]
async fn a_shutdown_ends_a_worker_that_is_loading_and_its_engine() {
    let mut worker = Worker::absent(options());
    let mut client = worker.client().await;
    client.say(r#"{"type":"load","id":"1"}"#).await;
    let launch = worker.next_launch().await;
    client.say(r#"{"type":"shutdown","id":"2"}"#).await;
    assert_eq!(client.line().await, None);
    assert_eq!(worker.ended().await, Reason::Asked);
    worker.models.close();
    // The engine comes to the end of its loading and finds that it is not wanted any more.
    assert_eq!(orders_after_loading(launch.port).await, None);
    let model = Arc::clone(worker.models.default_model());
    until("nothing is loading", || matches!(model.state(), State::Failed(_))).await;
}

#[tokio::test]
async fn a_passing_trouble_is_the_end_of_the_connection_and_no_error() {
    let (_gate, mock) = gated();
    let worker = Worker::start(mock);
    let mut client = worker.client().await;
    client.say(r#"{"type":"load","id":"1"}"#).await;
    assert_eq!(client.answer().await["type"], "loaded");
    client.say(chat("2", 5)).await;
    worker.until(1, 0).await;
    worker.models.close();
    assert_eq!(client.line().await, None);
}

#[tokio::test]
async fn a_client_that_writes_all_before_it_reads_is_served() {
    const PINGS: usize = 20_000;
    let worker = Worker::absent(options());
    let mut client = worker.client().await;
    let pings: String = (0..PINGS).map(|id| format!("{{\"type\":\"ping\",\"id\":{id}}}\n")).collect();
    tokio::time::timeout(PATIENCE, client.writer.write_all(pings.as_bytes())).await.expect("the worker goes on reading").unwrap();
    for id in 0..PINGS {
        assert_eq!(client.line().await.unwrap(), format!("{{\"type\":\"pong\",\"id\":{id},\"tag\":\"1|onnx||\"}}"));
    }
}

#[tokio::test]
async fn a_client_that_never_reads_is_not_read_from_for_ever() {
    let worker = Worker::absent(options());
    let client = worker.client().await;
    let line = b"{\"type\":\"ping\",\"id\":\"1\"}\n".repeat(1000);
    let (mut taken, mut refused) = (0, 0);
    while refused < 10_000 {
        match client.writer.try_write(&line) {
            Ok(bytes) => (taken, refused) = (taken + bytes, 0),
            Err(_) => refused += 1,
        }
        assert!(taken < 64 << 20, "{taken} bytes were taken");
        tokio::task::yield_now().await;
    }
    assert_eq!(worker.client().await.ask(r#"{"type":"ping","id":"1"}"#).await["type"], "pong");
}
