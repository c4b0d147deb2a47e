//! What a line gets that is no good request: an answer, nothing that is loaded, and a worker that goes on.
//!
//! The workers that this one stands in for lose the connection or the whole process over some of these, or load the model for them.

use emberd::models::State;
use serde_json::{Value, json};

use crate::worker_support::{Worker, options, words};
use emberd::engine::mock::Mock;

/// A line, and what comes back: nothing, or a reply whose error begins so.
const MATRIX: [(&str, Option<&str>, Option<&str>); 16] = [
    ("{oops", None, Some("the line is not JSON: ")),
    ("{\"type\":\"ping\",\"id\":\"1\"", None, Some("the line is not JSON: ")),
    ("5", None, Some("a request is a JSON object, one a line")),
    ("[]", None, Some("a request is a JSON object, one a line")),
    ("\"x\"", None, Some("a request is a JSON object, one a line")),
    ("null", None, Some("a request is a JSON object, one a line")),
    ("true", None, Some("a request is a JSON object, one a line")),
    ("{}", None, Some("the request has no type")),
    ("{\"id\":\"b\"}", Some("b"), Some("the request has no type")),
    ("{\"type\":null,\"id\":\"b\"}", Some("b"), Some("the request has no type")),
    ("{\"type\":\"bogus\",\"id\":\"b\"}", Some("b"), Some("unknown request type: \"bogus\"")),
    ("{\"type\":\"judge\",\"id\":\"b\",\"state\":1,\"questions\":{}}", Some("b"), Some("unknown request type: \"judge\"")),
    ("{\"type\":\"chat\",\"id\":\"c\",\"maxNewTokens\":1}", Some("c"), Some("a chat needs messages")),
    ("{\"type\":\"chat\",\"id\":\"c\",\"messages\":{},\"maxNewTokens\":1}", Some("c"), Some("messages must be a list")),
    ("", None, None),
    (" \t \r", None, None),
];

#[tokio::test]
async fn every_bad_line_has_an_answer_and_harms_nothing() {
    let worker = Worker::absent(options());
    let mut old = worker.client().await;
    for (line, id, wanted) in MATRIX {
        let mut fresh = worker.client().await;
        for client in [&mut old, &mut fresh] {
            client.say(line).await;
            client.say(r#"{"type":"ping","id":"after"}"#).await;
            if let Some(wanted) = wanted {
                let reply = client.next().await;
                assert_eq!((&reply["type"], reply.get("id")), (&json!("error"), id.map(Value::from).as_ref()), "{line}");
                let said = reply["error"].as_str().unwrap();
                assert!(said.starts_with(wanted) && !said.contains('\n'), "{line}: {said}");
            }
            assert_eq!(client.next().await, json!({"type": "pong", "id": "after", "tag": "1|onnx||"}), "{line}");
        }
    }
    assert_eq!(worker.models.state(), State::Absent, "no bad line loads the model");
    // A chat without a length is a good one.
    worker.launch(Mock { stop_after: 5, ..Mock::default() });
    old.say(r#"{"type":"chat","id":"d","messages":[]}"#).await;
    assert_eq!(old.answer().await, json!({"type": "text", "id": "d", "text": words(5)}));
}
