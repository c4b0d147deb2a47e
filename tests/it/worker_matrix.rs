//! What a line gets that is no good request: an answer, nothing that is loaded, and a worker that goes on.
//!
//! The workers that this one stands in for lose the connection or the whole process over some of these, or load the model for them.

use emberd::models::State;
use serde_json::{Value, json};

use crate::worker_support::{Worker, options, words};
use emberd::engine::mock::Mock;

/// A line, the id that it is answered under, and what the answer's error begins with; no answer where that is `None`.
type Row = (&'static [u8], Option<&'static str>, Option<&'static str>);

const MATRIX: &[Row] = &[
    (b"{oops", None, Some("the line is not JSON: ")),
    (b"{\"type\":\"ping\",\"id\":\"1\"", Some("1"), Some("the line is not JSON: ")),
    (b"5", None, Some("a request is a JSON object, one a line")),
    (b"[]", None, Some("a request is a JSON object, one a line")),
    (b"\"x\"", None, Some("a request is a JSON object, one a line")),
    (b"null", None, Some("a request is a JSON object, one a line")),
    (b"true", None, Some("a request is a JSON object, one a line")),
    (b"{}", None, Some("the request has no type")),
    (b"{\"id\":\"b\"}", Some("b"), Some("the request has no type")),
    (b"{\"type\":null,\"id\":\"b\"}", Some("b"), Some("the request has no type")),
    (b"{\"type\":\"bogus\",\"id\":\"b\"}", Some("b"), Some("unknown request type: \"bogus\"")),
    (b"{\"type\":\"judge\",\"id\":\"b\",\"state\":1,\"questions\":{}}", Some("b"), Some("unknown request type: \"judge\"")),
    (b"{\"type\":\"chat\",\"id\":\"c\",\"maxNewTokens\":1}", Some("c"), Some("a chat needs messages")),
    (b"{\"type\":\"chat\",\"id\":\"c\",\"messages\":{},\"maxNewTokens\":1}", Some("c"), Some("messages must be a list")),
    (b"", None, None),
    (b" \t \r", None, None),
    (b"\xef\xbb\xbf{\"type\":\"ping\",\"id\":\"1\"}", None, Some("the line is not JSON: ")),
    (
        b"{\"type\":\"chat\",\"id\":\"c\",\"messages\":[{\"role\":\"user\",\"content\":\"\xff\"}]}",
        Some("c"),
        Some("the line is not UTF-8 (byte "),
    ),
    (b"{\"type\":\"chat\",\"id\":\"c\",\"messages\":[7]}", Some("c"), Some("messages[0].role must be a string")),
    (
        b"{\"type\":\"chat\",\"id\":\"c\",\"messages\":[{\"role\":\"robot\",\"content\":\"\"}]}",
        Some("c"),
        Some("messages[0].role is \"robot\""),
    ),
    (b"{\"type\":\"chat\",\"id\":\"c\",\"messages\":[{\"role\":\"user\"}]}", Some("c"), Some("messages[0].content must be a string")),
    (b"{\"type\":\"chat\",\"id\":\"c\",\"messages\":[],\"stop\":[\"a\"]}", Some("c"), Some("stop must be a string, not a list")),
    (b"{\"type\":\"chat\",\"id\":\"c\",\"messages\":[],\"prefill\":{}}", Some("c"), Some("prefill must be a string, not an object")),
    (b"{\"type\":\"chat\",\"id\":\"c\",\"messages\":[],\"maxNewTokens\":0}", Some("c"), Some("maxNewTokens is 0, below 1")),
    (b"{\"type\":\"chat\",\"id\":\"c\",\"messages\":[],\"maxNewTokens\":\"20\"}", Some("c"), Some("maxNewTokens must be a number")),
    (b"{\"type\":\"chat\",\"id\":\"c\",\"messages\":[]", Some("c"), Some("the line is not JSON: ")),
    (b"{\"id\":\"1\",\"type\":\"bogus\",\"type\":\"nonsense\",\"id\":\"2\"}", Some("2"), Some("unknown request type: \"nonsense\"")),
];

#[tokio::test]
async fn every_bad_line_has_an_answer_and_harms_nothing() {
    let worker = Worker::absent(options());
    let mut old = worker.client().await;
    let deep = [&b"{\"type\":\"chat\",\"id\":\"d\",\"messages\":"[..], &b"[".repeat(100_000)].concat();
    let long = [&b"{\"type\":\"chat\",\"id\":\"l\",\"messages\":\""[..], &b"x".repeat(2 << 20)].concat();
    let made: [(&[u8], _, _); 2] = [
        (&deep, Some("d"), Some("the line is not JSON: ")),
        (&long, Some("l"), Some("the line has 2097188 bytes, and the limit is 1048576")),
    ];
    for &(line, id, wanted) in MATRIX.iter().chain(&made) {
        let shown = String::from_utf8_lossy(&line[..line.len().min(200)]).into_owned();
        let mut fresh = worker.client().await;
        for client in [&mut old, &mut fresh] {
            client.say(line).await;
            client.say(r#"{"type":"ping","id":"after"}"#).await;
            if let Some(wanted) = wanted {
                let reply = client.next().await;
                assert_eq!((&reply["type"], reply.get("id")), (&json!("error"), id.map(Value::from).as_ref()), "{shown}");
                let said = reply["error"].as_str().unwrap();
                assert!(said.starts_with(wanted) && !said.contains('\n'), "{shown}: {said}");
            }
            assert_eq!(client.next().await, json!({"type": "pong", "id": "after", "tag": "1|onnx||"}), "{shown}");
        }
    }
    assert_eq!(worker.models.state(), State::Absent, "no bad line loads the model");
    // A chat without a length is a good one.
    worker.launch(Mock { stop_after: 5, ..Mock::default() });
    old.say(r#"{"type":"chat","id":"d","messages":[]}"#).await;
    assert_eq!(old.answer().await, json!({"type": "text", "id": "d", "text": words(5)}));
}
