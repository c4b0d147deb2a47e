//! When a worker goes by itself, on a clock that only moves when nothing else happens.

use std::time::Duration;

use emberd::engine::mock::Mock;
use emberd::shutdown::Reason;
use tokio::time::{Instant, sleep};

use crate::http_support::gated;
use crate::worker_support::{WINDOW, Worker, chat};

/// Whether the worker ended a window after this long, give or take what the timer's grain is.
async fn ends_a_window_after(start: Instant, last: Duration, worker: &mut Worker) {
    assert_eq!((&mut worker.task).await.unwrap(), Reason::Idle);
    let (ended, due) = (start.elapsed(), last + WINDOW);
    assert!(ended >= due && ended <= due + Duration::from_millis(50), "it ended after {ended:?} instead of {due:?}");
}

#[tokio::test(start_paused = true)]
async fn pings_bad_lines_and_connections_are_no_work() {
    let (start, mut worker) = (Instant::now(), Worker::absent(crate::worker_support::options()));
    let mut client = worker.client().await;
    for _ in 0..8 {
        sleep(Duration::from_secs(100)).await;
        for line in [
            r#"{"type":"ping","id":"1"}"#,
            "{oops",
            r#"{"type":"bogus","id":"2"}"#,
            r#"{"type":"status","id":"3"}"#,
            r#"{"type":"ping","status":true}"#,
        ] {
            client.say(line).await;
            assert!(client.hear().await.is_some());
        }
        drop(worker.client().await);
    }
    ends_a_window_after(start, Duration::ZERO, &mut worker).await;
    assert_eq!(client.hear().await, None);
}

#[tokio::test(start_paused = true)]
async fn a_load_starts_the_window_anew() {
    let (start, mut worker) = (Instant::now(), Worker::start(Mock::default()));
    let mut client = worker.client().await;
    sleep(Duration::from_secs(600)).await;
    client.say(r#"{"type":"load","id":"1"}"#).await;
    while client.hear().await.is_some_and(|line| !line.contains("loaded")) {}
    ends_a_window_after(start, Duration::from_secs(600), &mut worker).await;
}

#[tokio::test(start_paused = true)]
async fn nothing_ends_while_a_chat_runs_and_its_end_starts_the_window_anew() {
    let (gate, mock) = gated();
    let (start, mut worker) = (Instant::now(), Worker::start(mock));
    let mut client = worker.client().await;
    client.say(chat("1", 1)).await;
    assert!(client.hear().await.is_some_and(|line| line.contains("ready")));
    sleep(Duration::from_secs(5000)).await; // Much longer than the window.
    assert!(!worker.task.is_finished());
    drop(gate);
    assert!(client.hear().await.is_some_and(|line| line.contains("\"text\"")));
    ends_a_window_after(start, Duration::from_secs(5000), &mut worker).await;
}

#[tokio::test(start_paused = true)]
async fn the_work_of_a_client_that_has_gone_holds_nothing() {
    let (_gate, mock) = gated();
    let (start, mut worker) = (Instant::now(), Worker::start(mock));
    let mut client = worker.client().await;
    client.say(chat("1", 8000)).await;
    assert!(client.hear().await.is_some_and(|line| line.contains("ready")));
    sleep(Duration::from_secs(2000)).await;
    drop(client);
    ends_a_window_after(start, Duration::from_secs(2000), &mut worker).await;
}

#[tokio::test(start_paused = true)]
async fn a_load_whose_client_has_gone_is_work_until_it_ends() {
    let (start, mut worker) = (Instant::now(), Worker::absent(crate::worker_support::options()));
    let (ready, loading) = std::sync::mpsc::channel();
    worker.engine(move |launch| {
        loading.recv().unwrap();
        Mock::default().spawn(launch.port, launch.settings).unwrap();
    });
    let mut client = worker.client().await;
    client.say(r#"{"type":"load","id":"1"}"#).await;
    client.say(r#"{"type":"ping","id":"2"}"#).await;
    assert!(client.hear().await.is_some_and(|line| line.contains("pong"))); // The load is under way.
    drop(client);
    sleep(Duration::from_secs(5000)).await; // A large model on a slow line.
    assert!(!worker.task.is_finished());
    ready.send(()).unwrap();
    let mut next = worker.client().await;
    next.say(r#"{"type":"load","id":"2"}"#).await;
    while next.hear().await.is_some_and(|line| !line.contains("loaded")) {}
    ends_a_window_after(start, Duration::from_secs(5000), &mut worker).await;
}
