//! What is counted, how health and metrics tell it, and the rules that every route keeps.

use std::collections::BTreeMap;
use std::time::Duration;

use emberd::engine::mock::{Fault, Mock};
use emberd::http::Options;
use http_body_util::Full;
use serde_json::{Value, json};

use crate::http_support::{MODEL, Reply, Server, gated, post, request, until};

/// The samples of a page, by name and labels.
async fn metrics(server: &Server) -> BTreeMap<String, f64> {
    let reply = server.get("/metrics").await;
    assert_eq!((reply.status.as_u16(), reply.header("content-type")), (200, "text/plain; version=0.0.4; charset=utf-8"));
    let samples = reply.text().lines().filter(|line| !line.starts_with('#'));
    samples.map(|line| line.rsplit_once(' ').unwrap()).map(|(name, value)| (name.to_owned(), value.parse().unwrap())).collect()
}

/// The name of a sample of this model at the HTTP door.
fn at(name: &str) -> String {
    format!("{name}{{door=\"http\",model=\"{MODEL}\"}}")
}

/// How many requests ended in which way; those of which there are none are left out.
async fn outcomes(server: &Server) -> Vec<(&'static str, u64)> {
    let samples = metrics(server).await;
    let count = |outcome: &str| samples[&format!("emberd_requests_total{{door=\"http\",model=\"{MODEL}\",outcome=\"{outcome}\"}}")];
    let all = ["completed", "incomplete", "failed", "cancelled", "refused", "queue_full"];
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    all.into_iter().map(|outcome| (outcome, count(outcome) as u64)).filter(|(_, count)| *count > 0).collect()
}

#[tokio::test]
async fn tokens_and_times_of_answers_are_counted() {
    let server = Server::start(Mock { stop_after: 4, ..Mock::default() }).await;
    let whole = server.ask(&json!({"input": "hi"})).await.json();
    let events = server.ask(&json!({"input": "hi", "stream": true})).await.events();
    let usage = [&whole["usage"], &events.last().unwrap()["response"]["usage"]];
    let told = |field: &str| usage.iter().map(|usage| usage[field].as_f64().unwrap()).sum::<f64>();
    let samples = metrics(&server).await;
    assert_eq!(samples[&at("emberd_prompt_tokens_total")], told("input_tokens"));
    assert_eq!(samples[&at("emberd_output_tokens_total")], told("output_tokens"));
    assert_eq!(samples[&at("emberd_cached_tokens_total")], 0.0);
    assert_eq!(samples[&at("emberd_time_to_first_token_seconds_count")], 2.0);
    assert_eq!(samples[&at("emberd_time_between_tokens_seconds_count")], told("output_tokens") - 2.0);
    let all = format!("emberd_time_to_first_token_seconds_bucket{{door=\"http\",model=\"{MODEL}\",le=\"+Inf\"}}");
    assert_eq!(samples[&all], 2.0);
    assert!(samples[&at("emberd_time_to_first_token_seconds_sum")] > 0.0);
    assert_eq!(samples[&format!("emberd_step_sequences_count{{model=\"{MODEL}\"}}")], told("output_tokens"));
    assert_eq!(samples[&format!("emberd_model_loaded{{model=\"{MODEL}\"}}")], 1.0);
    // A process without that door does not tell of it.
    assert!(!samples.keys().any(|name| name.contains("door=\"worker\"")));
}

#[tokio::test]
async fn every_request_is_counted_once_by_how_it_ended() {
    let server = Server::start(Mock { stop_after: 4, ..Mock::default() }).await;
    for (stream, body) in [
        (false, json!({"input": "hi"})),
        (true, json!({"input": "hi"})),
        (false, json!({"input": "hi", "max_output_tokens": 1})),
        (true, json!({"input": "hi", "max_output_tokens": 1})),
        // A stop string ends the engine's work early, and is no reader that left.
        (true, json!({"input": "hi", "stop": " small"})),
        // What only the model shows to be wrong, before its place is taken, after that, and in a long prompt.
        (false, json!({"input": "hi", "logit_bias": {"99999999": 1}})),
        (true, json!({"input": "x".repeat(9000)})),
        (false, json!({"input": "hi", "text": {"format": {"type": "json_object"}}})),
    ] {
        let mut body = body;
        body["stream"] = json!(stream);
        server.ask(&body).await;
    }
    assert_eq!(outcomes(&server).await, [("completed", 3), ("incomplete", 2), ("refused", 3)]);

    let server = Server::start(Mock { fault: Fault::FailRequest, ..Mock::default() }).await;
    for stream in [false, true] {
        server.ask(&json!({"input": "hi", "stream": stream})).await;
    }
    assert_eq!(outcomes(&server).await, [("failed", 2)]);
}

#[tokio::test]
async fn who_waits_runs_leaves_and_finds_no_room_shows_at_once() {
    let (gate, mock) = gated();
    let server = Server::with(Mock { max_batch: 1, ..mock }, Options::default(), 1).await;
    let mut clients = Vec::new();
    for asked in 1..=2 {
        let mut client = server.client().await;
        clients.push((client.begin(post("/v1/responses", r#"{"input":"hi","stream":true}"#)).await, client));
        until("the request is with the engine or waits", || {
            server.load().running + server.load().waiting == asked && server.load().running == 1
        })
        .await;
    }
    assert_eq!(server.ask(&json!({"input": "hi"})).await.error().0, 429);
    assert_eq!(outcomes(&server).await, [("queue_full", 1)]);
    let samples = metrics(&server).await;
    let gauges = ["emberd_requests_in_flight", "emberd_queue_length", "emberd_batch_size"].map(|name| samples[&at(name)]);
    assert_eq!(gauges, [2.0, 1.0, 1.0]);
    let health = server.get("/health").await.json();
    let counts = json!({"in_flight": 2, "queue_length": 1, "batch_size": 1});
    let mut model = counts.clone();
    model["id"] = json!(MODEL);
    model["state"] = json!("ready");
    let mut expected = counts;
    expected["status"] = json!("ok");
    expected["models"] = json!([model]);
    assert_eq!(health, expected);
    drop(clients);
    let meters = std::sync::Arc::clone(server.models.default_model().meters());
    until("both are gone", || meters.door(emberd::metrics::Door::Http).in_flight() == 0).await;
    assert_eq!(outcomes(&server).await, [("cancelled", 2), ("queue_full", 1)]);
    drop(gate); // Until here the engine made no step that could have ended them.
}

#[tokio::test]
async fn a_request_that_waits_for_the_model_is_in_flight_and_fails_with_it() {
    let mut server = Server::absent(Options::default(), 8).await;
    let launches = server.launches();
    let mut client = server.client().await;
    let asking = tokio::spawn(async move { client.send(post("/v1/responses", r#"{"input":"hi"}"#)).await });
    let launch = tokio::task::spawn_blocking(move || (launches.next().unwrap(), launches)).await.unwrap();
    let samples = metrics(&server).await;
    assert_eq!(samples[&at("emberd_requests_in_flight")], 1.0);
    assert_eq!(samples[&format!("emberd_model_loaded{{model=\"{MODEL}\"}}")], 0.0);
    assert_eq!(server.get("/health").await.json()["models"][0]["state"], "loading");
    launch.0.port.fail("no weights");
    assert_eq!(asking.await.unwrap().error().0, 503);
    assert_eq!(outcomes(&server).await, [("failed", 1)]);
}

#[tokio::test]
async fn answers_are_counted_by_route_and_status_and_never_by_a_clients_own_path() {
    let server = Server::start(Mock { stop_after: 2, ..Mock::default() }).await;
    for path in ["/v1/models", "/v1/models/one", "/v1/models/mock/one", "/nowhere", "/v1/%22", "/health"] {
        server.get(path).await;
    }
    server.ask(&json!({"input": 5})).await;
    server.ask(&json!({"input": "hi", "stream": true})).await;
    let samples = metrics(&server).await;
    let counted: Vec<(&str, f64)> =
        samples.iter().filter_map(|(name, count)| Some((name.strip_prefix("emberd_http_requests_total")?, *count))).collect();
    let expected = [
        (r#"{route="/health",status="200"}"#, 1.0),
        (r#"{route="/v1/models",status="200"}"#, 1.0),
        (r#"{route="/v1/models/{id}",status="200"}"#, 1.0),
        (r#"{route="/v1/models/{id}",status="404"}"#, 1.0),
        (r#"{route="/v1/responses",status="200"}"#, 1.0),
        (r#"{route="/v1/responses",status="400"}"#, 1.0),
        (r#"{route="other",status="404"}"#, 2.0),
    ];
    assert_eq!(counted, expected);
}

/// What an error is told as, wherever.
fn assert_error(reply: &Reply, status: u16, what: &str) {
    assert_eq!(reply.status, status, "{what}");
    assert!(!reply.json()["error"]["message"].as_str().unwrap().is_empty(), "{what}");
}

#[tokio::test]
async fn every_route_of_the_document_keeps_the_rules_of_the_door() {
    const LIMIT: usize = 2048;
    let options = Options { max_body: LIMIT, body_timeout: Duration::from_secs(10), ..Options::default() };
    let server = Server::with(Mock { stop_after: 2, ..Mock::default() }, options, 8).await;
    let document = server.get("/openapi.json").await.json();
    assert_eq!(document["openapi"], "3.1.0");
    let mut client = server.client().await;
    let paths = document["paths"].as_object().unwrap();
    assert!(paths.len() >= 7);
    for (template, methods) in paths {
        let path = template.replace("{id}", MODEL);
        for method in ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"] {
            if methods.get(method.to_lowercase()).is_none() {
                let what = format!("{method} {path}");
                let reply = client.send(request(method, &path).body(Full::default()).unwrap()).await;
                assert_error(&reply, 405, &what);
                assert_eq!(reply.header("allow"), if methods.get("get").is_some() { "GET, HEAD" } else { "POST" }, "{what}");
            }
        }
        if let Some(operation) = methods.get("get") {
            let reply = client.send(request("GET", &path).body(Full::default()).unwrap()).await;
            assert_eq!(reply.status, 200, "{path}");
            let kinds = operation["responses"]["200"]["content"].as_object().unwrap();
            assert!(kinds.contains_key(reply.header("content-type")), "{path}: {kinds:?}");
            let head = client.send(request("HEAD", &path).body(Full::default()).unwrap()).await;
            assert_eq!((head.status.as_u16(), head.body.len()), (200, 0), "{path}");
        }
        if methods.get("post").is_some() {
            for kind in [None, Some("text/plain"), Some("application/x-www-form-urlencoded"), Some("multipart/form-data")] {
                let head = kind.into_iter().fold(request("POST", &path), |head, kind| head.header("content-type", kind));
                assert_error(&client.send(head.body(Full::from("{}")).unwrap()).await, 415, &path);
            }
            let long = json!({ "input": "x".repeat(LIMIT) }).to_string();
            assert_error(&client.send(post(&path, long)).await, 413, &path);
            for broken in ["", "{", "nope", "[]", "5", "\"\"", "null", "{}", "\u{feff}{}"] {
                assert_error(&client.send(post(&path, broken)).await, 400, &format!("{path}: {broken:?}"));
            }
        }
    }
    assert_error(&client.send(request("GET", "/v1/nowhere").body(Full::default()).unwrap()).await, 404, "nowhere");
    let whole: Value = client.send(post("/v1/responses", r#"{"input":"hi"}"#)).await.json();
    assert_eq!(whole["status"], "completed");
}
