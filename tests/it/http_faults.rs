//! An engine that stalls, fails, dies or does not know when to stop, as the client of a stream sees it.

use std::time::Duration;

use emberd::engine::mock::Mock;
use emberd::engine::script::{Rule, Script, Trouble};
use emberd::http::Options;
use http_body_util::BodyExt;
use hyper::Response;
use hyper::body::Incoming;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::http_support::{Server, post, until};

const ENGINE_FAILED: &str = "the engine failed while it worked on the request (hint: try again; the server's log says why)";

/// A rule for prompts whose last turn has its name in it.
fn rule(says: &str, answer: &str, fault: Option<Trouble>, after: u32) -> Rule {
    Rule { says: Some(says.to_owned()), answer: answer.to_owned(), fault, after, ..Rule::default() }
}

fn rules() -> Script {
    Script::from(vec![
        rule("stall", "one two three", Some(Trouble::Stall), 3),
        rule("fail", "one two three", Some(Trouble::Fail), 3),
        rule("die", "one two three", Some(Trouble::Die), 3),
        rule("overrun", "one two three", Some(Trouble::Overrun), 3),
        Rule { endless: true, ..rule("go on", "on and ", None, 0) },
        rule("form", "{\"a\": 1}", None, 0),
        rule("other", "{\"b\": 1}", None, 0),
        rule("hello", "Good day.", None, 0),
    ])
}

fn mock() -> Mock {
    Mock { rules: rules(), ..Mock::default() }
}

fn text(response: &Value) -> &str {
    response["output"][0]["content"][0]["text"].as_str().unwrap()
}

/// What has come of a stream.
#[derive(Default)]
struct Heard(String);

impl Heard {
    /// Reads until something is so, and no further.
    async fn until(stream: &mut Response<Incoming>, so: impl Fn(&Self) -> bool) {
        let mut heard = Self::default();
        while !so(&heard) {
            let frame = stream.frame().await.unwrap().unwrap();
            heard.0.push_str(std::str::from_utf8(frame.data_ref().unwrap()).unwrap());
        }
    }

    /// The text so far.
    fn text(&self) -> String {
        let whole = self.0.rfind("\n\n").map_or("", |end| &self.0[..end]);
        let data = whole.lines().filter_map(|line| line.strip_prefix("data: {"));
        let events = data.map(|data| serde_json::from_str::<Value>(&format!("{{{data}")).unwrap());
        events.filter_map(|event| event["delta"].as_str().map(str::to_owned)).collect()
    }
}

#[tokio::test]
async fn a_stream_of_an_engine_that_is_stuck_is_kept_alive_by_the_clock_and_can_be_left() {
    let server = Server::with(mock(), Options { stall: Duration::ZERO, ..Options::default() }, 8).await;
    let mut client = server.client().await;
    let mut stream = client.begin(post("/v1/responses", json!({"input": "stall", "stream": true}).to_string())).await;
    Heard::until(&mut stream, |heard| heard.text() == "one").await;
    // From here on the clock stands still but for what is waited for.
    tokio::time::pause();
    let mut quiet_since = None;
    for _ in 0..4 {
        let frame = stream.frame().await.unwrap().unwrap();
        assert_eq!(frame.data_ref().unwrap().as_ref(), b": keep-alive\n\n");
        let now = Instant::now();
        if let Some(since) = quiet_since.replace(now) {
            let silence: Duration = now - since;
            assert!(silence >= Duration::from_secs(10) && silence < Duration::from_millis(10_100), "{silence:?}");
        }
    }
    tokio::time::resume();
    assert_eq!(server.get("/health").await.json()["status"], "stalled");
    assert_eq!(server.load().running, 1);
    drop((stream, client));
    until("the engine is free, though it makes no step", || server.load().running == 0).await;
    assert_eq!(server.get("/health").await.json()["status"], "ok");
    assert_eq!(text(&server.ask(&json!({"input": "hello"})).await.json()), "Good day.");
}

#[tokio::test]
async fn an_answer_that_fails_on_the_way_fails_alone_and_in_words() {
    let server = Server::start(mock()).await;
    let mut client = server.client().await;
    let mut other = client.begin(post("/v1/responses", json!({"input": "stall", "stream": true}).to_string())).await;
    Heard::until(&mut other, |heard| heard.text() == "one").await;
    for fault in ["fail", "overrun"] {
        let events = server.ask(&json!({"input": fault, "stream": true, "max_output_tokens": 100})).await.events();
        let last = &events.last().unwrap();
        assert_eq!(last["type"], "response.failed", "{fault}");
        let response = &last["response"];
        assert_eq!(response["error"], json!({"code": "server_error", "message": ENGINE_FAILED}), "{fault}");
        assert_eq!((&response["status"], &response["output"][0]["status"]), (&json!("failed"), &json!("incomplete")), "{fault}");
        // What came before stands.
        assert_eq!(text(response), "one", "{fault}");
        let whole = server.ask(&json!({"input": fault})).await;
        assert_eq!(whole.error(), (500, "engine_failed".into(), None), "{fault}");
    }
    let events = server.ask(&json!({"input": "nobody has a rule for this", "stream": true})).await.events();
    assert_eq!(events.last().unwrap()["response"]["error"]["code"], "server_error");
    assert_eq!(server.load().running, 1, "the other one is still there");
    assert_eq!(server.get("/health").await.status, 200);
}

#[tokio::test]
async fn an_engine_that_dies_ends_its_streams_shows_in_the_health_and_is_started_again() {
    let mut server = Server::absent(Options::default(), 8).await;
    let launches = server.launches();
    std::thread::spawn(move || {
        while let Some(launch) = launches.next() {
            mock().spawn(launch.port, launch.settings).unwrap();
        }
    });
    server.models.find(None).unwrap().ready().await.unwrap();
    let mut client = server.client().await;
    let mut beside = client.begin(post("/v1/responses", json!({"input": "stall", "stream": true}).to_string())).await;
    Heard::until(&mut beside, |heard| heard.text() == "one").await;
    let events = server.ask(&json!({"input": "die", "stream": true})).await.events();
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["response"]["error"]["code"]), (&json!("response.failed"), &json!("server_error")));
    assert_eq!(text(&last["response"]), "one");
    // Whoever shared the engine hears of it as well.
    Heard::until(&mut beside, |heard| heard.0.contains("event: response.failed\n")).await;
    let health = server.get("/health").await;
    assert_eq!((health.status.as_u16(), &health.json()["status"]), (503, &json!("failed")));
    assert_eq!(text(&server.ask(&json!({"input": "hello"})).await.json()), "Good day.");
    assert_eq!(server.get("/health").await.status, 200);
}

#[tokio::test]
async fn an_answer_without_an_end_is_cut_where_it_was_asked_to_be() {
    let server = Server::start(mock()).await;
    for stream in [false, true] {
        let reply = server.ask(&json!({"input": "go on", "stream": stream, "max_output_tokens": 10})).await;
        let response = if stream { reply.events().last().unwrap()["response"].clone() } else { reply.json() };
        assert_eq!(text(&response), "on and on ");
        assert_eq!(response["status"], "incomplete");
        assert_eq!(response["incomplete_details"], json!({"reason": "max_output_tokens"}));
        assert_eq!(response["usage"]["output_tokens"], 10);
    }
}

#[tokio::test]
async fn a_script_that_breaks_the_form_of_its_answer_fails_and_one_that_keeps_it_does_not() {
    let server = Server::start(mock()).await;
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false});
    let format = json!({"format": {"type": "json_schema", "name": "one", "schema": schema}});
    let response = server.ask(&json!({"input": "form", "text": format})).await.json();
    assert_eq!((text(&response), &response["status"]), ("{\"a\": 1}", &json!("completed")));
    let events = server.ask(&json!({"input": "other", "text": format, "stream": true})).await.events();
    assert_eq!(events.last().unwrap()["type"], "response.failed");
}
