//! The order of events, held to its rules whatever an answer is and however its text is cut.

use std::time::{Duration, Instant};

use emberd::engine::Timing;
use emberd::error::{Code, Error};
use emberd::models::{Ending, Likely, TokenLogprob};
use emberd::responses::{Arrival, Begin, Effective, Event, Request, Sink, Stream, Unheard, Usage};
use proptest::prelude::*;
use serde_json::{Value, json};

/// Keeps the events as they would go out.
#[derive(Default)]
struct Heard(Vec<Value>);

impl Sink for Heard {
    fn event(&mut self, event: Event<'_>) {
        let value = serde_json::to_value(event).unwrap();
        assert_eq!(value["type"], event.name());
        self.0.push(value);
    }
}

fn usage() -> Usage {
    let start = Instant::now();
    let at = |milliseconds| Some(start + Duration::from_millis(milliseconds));
    let submitted = start + Duration::from_millis(10);
    let timing = Timing { submitted, taken: at(20), first: at(70), last: at(170), tokens: 11, cached: 20 };
    let arrival = Arrival { arrived: start, resolve: Some(Duration::from_micros(5)), load_wait: None, load_owner: None };
    Usage::new(100, &timing, &arrival)
}

fn stream() -> Stream {
    let request = Request::from_json(br#"{"input":"hi","instructions":"be brief","metadata":{"a":"b"}}"#).unwrap();
    let begin = Begin {
        id: "resp_1".into(),
        created_at: 7,
        model: "m".into(),
        max_output_tokens: None,
        effective: Effective { temperature: 0.7, seed: Some(5), ..Effective::default() },
        stop: Vec::new(),
        truncation: request.truncation,
        echo: request.echo,
    };
    Stream::new(begin, "msg_1".into())
}

#[derive(Debug, Clone, Copy)]
enum End {
    Ending(Ending),
    Failure,
}

fn run(pieces: &[String], end: End) -> (Vec<Value>, Value) {
    let (mut heard, mut stream) = (Heard::default(), stream());
    stream.begin(&mut heard);
    for piece in pieces {
        stream.text(piece, &[], &mut heard);
    }
    match end {
        End::Ending(ending) => stream.end(ending, Some(usage()), 9, &mut heard),
        End::Failure => stream.fail(&Error::new(Code::EngineFailed, "it broke"), None, &mut heard),
    }
    // What comes after the end is not heard.
    stream.text("late", &[], &mut heard);
    stream.end(Ending::Stop, Some(usage()), 10, &mut heard);
    stream.fail(&Error::new(Code::ServerError, "late"), None, &mut heard);
    assert!(stream.over());
    (heard.0, serde_json::to_value(stream.response()).unwrap())
}

/// The rules of the order of events.
fn lawful(events: &[Value], text: &str, end: End) {
    let types: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], json!(number));
        if let Some(id) = event.get("item_id") {
            assert_eq!((id, &event["output_index"], &event["content_index"]), (&json!("msg_1"), &json!(0), &json!(0)));
        }
    }
    assert_eq!(types[..2], ["response.created", "response.in_progress"]);
    let terminal = match end {
        End::Ending(Ending::Length) => "response.incomplete",
        End::Ending(_) => "response.completed",
        End::Failure => "response.failed",
    };
    assert_eq!(types.last(), Some(&terminal));
    let terminals = ["response.completed", "response.incomplete", "response.failed"];
    assert_eq!(types.iter().filter(|kind| terminals.contains(kind)).count(), 1);
    let between = &events[2..events.len() - 1];
    let output = &events.last().unwrap()["response"]["output"];
    if between.is_empty() {
        // Nothing was said before it failed.
        assert!(matches!(end, End::Failure) && text.is_empty());
        assert_eq!(output, &json!([]));
        return;
    }
    let count = between.len();
    assert_eq!(between[0]["type"], "response.output_item.added");
    assert_eq!(between[0]["item"], json!({"type": "message", "id": "msg_1", "status": "in_progress", "role": "assistant", "content": []}));
    assert_eq!(between[1]["type"], "response.content_part.added");
    assert_eq!(between[1]["part"]["text"], "");
    let deltas = &between[2..count - 3];
    assert!(
        deltas.iter().all(|event| event["type"] == "response.output_text.delta" && event["delta"] != "" && event["logprobs"] == json!([]))
    );
    let sum: String = deltas.iter().map(|event| event["delta"].as_str().unwrap()).collect();
    assert_eq!(sum, text);
    assert_eq!((&between[count - 3]["type"], &between[count - 3]["text"]), (&json!("response.output_text.done"), &json!(text)));
    assert_eq!((&between[count - 2]["type"], &between[count - 2]["part"]["text"]), (&json!("response.content_part.done"), &json!(text)));
    let item = &between[count - 1];
    assert_eq!(item["type"], "response.output_item.done");
    assert_eq!(item["item"]["content"], json!([{"type": "output_text", "annotations": [], "logprobs": [], "text": text}]));
    let status = if terminal == "response.completed" { "completed" } else { "incomplete" };
    assert_eq!(item["item"]["status"], status);
    assert_eq!(output, &json!([item["item"]]));
}

fn end() -> impl Strategy<Value = End> {
    prop_oneof![
        Just(End::Ending(Ending::Stop)),
        Just(End::Ending(Ending::StopString)),
        Just(End::Ending(Ending::Length)),
        Just(End::Failure)
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn events_obey_the_order_and_add_up_to_the_answer(pieces in prop::collection::vec("[a-zé🔥\"\\\\\n ]{0,5}", 0..20), end in end()) {
        let text = pieces.concat();
        let (events, response) = run(&pieces, end);
        lawful(&events, &text, end);
        prop_assert_eq!(&events.last().unwrap()["response"], &response);
        // A client that does not stream gets the same, and so does one whose text was cut elsewhere.
        let (_, whole) = run(std::slice::from_ref(&text), end);
        prop_assert_eq!(response, whole);
    }
}

#[test]
fn an_answer_without_text_still_has_its_message() {
    let (events, _) = run(&[], End::Ending(Ending::Stop));
    lawful(&events, "", End::Ending(Ending::Stop));
    assert_eq!(events.len(), 8);
}

#[test]
fn a_failure_is_told_in_words_that_clients_know() {
    let own = "what happened (hint: what to do)";
    let engine = "the engine failed while it worked on the request (hint: try again; the server's log says why)";
    for (code, known, message) in [
        (Code::EngineFailed, "server_error", engine),
        (Code::ShuttingDown, "server_error", own),
        (Code::QueueFull, "rate_limit_exceeded", own),
        (Code::ContextLengthExceeded, "invalid_prompt", own),
    ] {
        let mut stream = stream();
        stream.fail(&Error::new(code, "what happened").hint("what to do"), None, &mut Unheard);
        let response = serde_json::to_value(stream.response()).unwrap();
        assert_eq!(response["error"], json!({"code": known, "message": message}));
        assert_eq!(response["status"], "failed");
        assert_eq!(response["completed_at"], Value::Null);
    }
}

#[test]
fn times_are_told_where_they_are_known_and_only_there() {
    let usage = serde_json::to_value(usage()).unwrap();
    assert_eq!(
        usage,
        json!({
            "input_tokens": 100, "input_tokens_details": {"cached_tokens": 20, "cache_write_tokens": 0},
            "output_tokens": 11, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 111,
            "prefill_input_tokens": 80, "cached_prefix_tokens": 20,
            "time_to_first_token_ms": 70.0, "prefill_tokens_per_second": 1600.0, "decode_tokens_per_second": 100.0,
            "server_inference_elapsed_ms": 150.0, "server_time_to_first_token_ms": 50.0, "server_total_time_to_first_token_ms": 70.0,
            "server_prefill_tokens_per_second": 1600.0, "server_decode_tokens_per_second": 100.0,
            "server_model_resolve_ms": 0.005, "server_queue_ms": 10.0, "server_pre_inference_ms": 20.0,
        })
    );
    let start = Instant::now();
    let timing = Timing { submitted: start, taken: None, first: None, last: None, tokens: 0, cached: 0 };
    let nothing = Usage::new(3, &timing, &Arrival { arrived: start, resolve: None, load_wait: None, load_owner: None });
    let nothing = serde_json::to_value(nothing).unwrap();
    let keys: Vec<&str> = nothing.as_object().unwrap().keys().map(String::as_str).collect();
    let counts = ["input_tokens", "input_tokens_details", "output_tokens", "output_tokens_details", "total_tokens"];
    assert_eq!(keys, [&counts[..], &["prefill_input_tokens", "cached_prefix_tokens"]].concat());
}

#[test]
fn log_probabilities_go_out_with_their_text_and_stand_in_the_whole() {
    let likely = |token: &str, logprob| Likely { token: token.to_owned(), logprob, bytes: token.as_bytes().to_vec() };
    let told = |token, logprob| TokenLogprob { chosen: likely(token, logprob), top_logprobs: vec![likely("x", -0.25)] };
    let (first, rest) = (vec![told("a", -0.5)], vec![told("b", -1.5), told("c", -2.0)]);
    let (mut heard, mut stream) = (Heard::default(), stream());
    stream.begin(&mut heard);
    stream.text("a", &first, &mut heard);
    stream.text("bc", &rest, &mut heard);
    stream.end(Ending::Stop, None, 9, &mut heard);
    let json = |token: &str, logprob: f64| {
        let top = json!([{"token": "x", "logprob": -0.25, "bytes": [120]}]);
        json!({"token": token, "logprob": logprob, "bytes": token.as_bytes(), "top_logprobs": top})
    };
    let all = json!([json("a", -0.5), json("b", -1.5), json("c", -2.0)]);
    let of = |kind: &str| heard.0.iter().filter(|event| event["type"] == kind).map(|event| event["logprobs"].clone()).collect::<Vec<_>>();
    assert_eq!(of("response.output_text.delta"), [json!([all[0]]), json!([all[1], all[2]])]);
    assert_eq!(of("response.output_text.done"), std::slice::from_ref(&all));
    assert_eq!(heard.0.last().unwrap()["response"]["output"][0]["content"][0]["logprobs"], all);
}
