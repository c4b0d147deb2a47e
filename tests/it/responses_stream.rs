//! The order of events, held to its rules whatever an answer is and however its text is cut.

use std::sync::Arc;
use std::time::{Duration, Instant};

use emberd::engine::Timing;
use emberd::error::{Code, Error};
use emberd::models::{Ending, Likely, Piece, TokenLogprob};
use emberd::responses::{Arrival, Begin, Effective, Event, Ids, ReasoningEvents, Request, Seal, Sink, Stream, Unheard, Usage};
use emberd::text::{Format, Kind, Parsed, Parser};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::calls;

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

pub fn usage() -> Usage {
    let start = Instant::now();
    let at = |milliseconds| Some(start + Duration::from_millis(milliseconds));
    let submitted = start + Duration::from_millis(10);
    let timing = Timing { submitted, taken: at(20), first: at(70), last: at(170), tokens: 11, cached: 20 };
    let arrival = Arrival { arrived: start, resolve: Some(Duration::from_micros(5)), load_wait: None, load_owner: None };
    Usage::new(100, 5, &timing, &arrival)
}

pub fn stream(thoughts: ReasoningEvents) -> Stream {
    let tools = json!([
        {"type": "function", "name": "weather"},
        {"type": "custom", "name": "draw"},
        {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "do"}]},
    ]);
    let body = json!({"input": "hi", "instructions": "be brief", "metadata": {"a": "b"}, "tools": tools});
    let request = Request::from_json(body.to_string().as_bytes()).unwrap();
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
    Stream::new(begin, Ids::from(1), thoughts, request.tools)
}

#[derive(Debug, Clone, Copy)]
pub enum End {
    Ending(Ending),
    Failure,
}

/// What a model does, one thing after another.
#[derive(Debug, Clone)]
pub enum Act {
    Says(Vec<String>),
    Thinks(Vec<String>),
    /// The tool, the arguments as they come, and whether they end.
    Calls(&'static str, Vec<String>, Option<bool>),
}

pub fn acts() -> impl Strategy<Value = Vec<Act>> {
    let words = || prop::collection::vec("[a-zé🔥\"\\\\\n ]{1,5}", 1..5);
    let call =
        (prop::sample::select(vec!["weather", "ns__do", "draw", "nobody"]), prop::collection::vec("[a-z{}]{1,4}", 0..4), any::<bool>());
    let act = prop_oneof![
        words().prop_map(Act::Says),
        words().prop_map(Act::Thinks),
        call.prop_map(|(name, pieces, whole)| Act::Calls(name, pieces, Some(whole))),
    ];
    (prop::collection::vec(act, 0..6), any::<bool>()).prop_map(|(mut acts, cut)| {
        if cut && let Some(Act::Calls(_, _, end)) = acts.last_mut() {
            *end = None;
        }
        acts
    })
}

/// The pieces in which it is told; `joined`: with neighbours as one.
pub fn told(acts: &[Act], joined: bool) -> Vec<(Kind, String)> {
    let mut found: Vec<(Kind, String)> = Vec::new();
    let mut tell = |kind, pieces: &[String]| {
        if joined && !pieces.is_empty() {
            found.push((kind, pieces.concat()));
        } else {
            found.extend(pieces.iter().map(|piece| (kind, piece.clone())));
        }
    };
    for act in acts {
        match act {
            Act::Says(pieces) => tell(Kind::Text, pieces),
            Act::Thinks(pieces) => tell(Kind::Reasoning, pieces),
            Act::Calls(name, pieces, end) => {
                tell(Kind::Call, &[(*name).to_owned()]);
                tell(Kind::Arguments, pieces);
                if let Some(whole) = end {
                    tell(Kind::End { whole: *whole }, &[String::new()]);
                }
            }
        }
    }
    found
}

fn run(acts: &[Act], joined: bool, thoughts: ReasoningEvents, end: End) -> (Vec<Value>, Value) {
    let (mut heard, mut stream) = (Heard::default(), stream(thoughts));
    stream.begin(&mut heard);
    for (kind, text) in told(acts, joined) {
        stream.piece(Piece { kind, text: &text, logprobs: &[] }, &mut heard);
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

/// The events between those of an item's start and its end: what announces its part, tells of it, and ends it.
fn form(item: &Value) -> (Option<&'static str>, &'static str, Vec<&'static str>) {
    match item["type"].as_str().unwrap() {
        "message" => (Some("response.content_part.added"), "response.output_text", vec!["response.content_part.done"]),
        "reasoning" if item.get("content").is_some() => {
            (Some("response.content_part.added"), "response.reasoning_text", vec!["response.content_part.done"])
        }
        "reasoning" => {
            (Some("response.reasoning_summary_part.added"), "response.reasoning_summary_text", vec!["response.reasoning_summary_part.done"])
        }
        "function_call" => (None, "response.function_call_arguments", vec![]),
        "custom_tool_call" => (None, "response.custom_tool_call_input", vec![]),
        kind => panic!("an item of type {kind}"),
    }
}

/// The rules of the order of events.
fn lawful(events: &[Value], end: End) {
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], json!(number));
    }
    let types: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(types[..2], ["response.created", "response.in_progress"]);
    let terminal = match end {
        End::Ending(Ending::Length) => "response.incomplete",
        End::Ending(_) => "response.completed",
        End::Failure => "response.failed",
    };
    assert_eq!(types.last(), Some(&terminal));
    let mut rest = events[2..events.len() - 1].iter().peekable();
    let mut done = Vec::new();
    while let Some(added) = rest.next() {
        let (index, item) = (json!(done.len()), &added["item"]);
        assert_eq!((&added["type"], &added["output_index"]), (&json!("response.output_item.added"), &index));
        assert_eq!(item["status"], "in_progress");
        let (part, stem, after) = form(item);
        let mut own = |kind: &str| {
            let event = rest.next_if(|event| event["type"] == kind)?;
            assert_eq!((&event["item_id"], &event["output_index"]), (&item["id"], &index));
            Some(event)
        };
        if let Some(part) = part {
            let added = own(part).expect("the part is announced");
            assert_eq!(added["part"]["text"], "");
        }
        let mut sum = String::new();
        while let Some(delta) = own(&format!("{stem}.delta")) {
            assert_ne!(delta["delta"], "");
            sum.push_str(delta["delta"].as_str().unwrap());
        }
        let whole = own(&format!("{stem}.done")).expect("what was told is told whole");
        let text = ["text", "arguments", "input"].iter().find_map(|key| whole.get(key)).unwrap();
        assert_eq!(text, &json!(sum));
        for kind in after {
            assert_eq!(own(kind).expect("the part ends")["part"]["text"], json!(sum));
        }
        let ended = rest.next().unwrap();
        assert_eq!((&ended["type"], &ended["output_index"]), (&json!("response.output_item.done"), &index));
        assert_eq!((&ended["item"]["id"], &ended["item"]["type"]), (&item["id"], &item["type"]));
        assert_ne!(ended["item"]["status"], "in_progress");
        if item["type"] == "function_call" {
            assert_eq!((&whole["name"], &whole["arguments"]), (&ended["item"]["name"], &ended["item"]["arguments"]));
        }
        done.push(ended["item"].clone());
    }
    let response = &events.last().unwrap()["response"];
    assert_eq!(response["output"], json!(done));
    let mut ids: Vec<&str> = done.iter().flat_map(|item| [item["id"].as_str(), item["call_id"].as_str()]).flatten().collect();
    ids.push(response["id"].as_str().unwrap());
    let count = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), count, "every id is different");
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
    fn events_obey_the_order_and_add_up_to_the_answer(acts in acts(), text: bool, end in end()) {
        let thoughts = if text { ReasoningEvents::Text } else { ReasoningEvents::Summary };
        let (events, response) = run(&acts, false, thoughts, end);
        lawful(&events, end);
        prop_assert_eq!(&events.last().unwrap()["response"], &response);
        // A client that does not stream gets the same, and so does one whose text was cut elsewhere.
        let (merged, whole) = run(&acts, true, thoughts, end);
        lawful(&merged, end);
        prop_assert_eq!(response, whole);
    }
}

/// What becomes of a text that comes in these pieces, from the parser on.
fn read(family: &str, pieces: &[&str], ending: Ending) -> (Vec<Value>, Value) {
    let mut parser = Parser::of(Format::of(family), Arc::new(calls::tools()), "").unwrap();
    let (mut heard, mut stream, mut parsed) = (Heard::default(), stream(ReasoningEvents::Summary), Parsed::default());
    stream.begin(&mut heard);
    let mut tell = |parsed: &mut Parsed| {
        parsed.spans().for_each(|(kind, text)| stream.piece(Piece { kind, text, logprobs: &[] }, &mut heard));
        parsed.clear();
    };
    for piece in pieces {
        parser.push(piece, &mut parsed);
        tell(&mut parsed);
    }
    parser.finish(&mut parsed);
    tell(&mut parsed);
    stream.end(ending, Some(usage()), 9, &mut heard);
    (heard.0, serde_json::to_value(stream.response()).unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn whatever_a_model_writes_and_however_it_is_cut_the_events_are_lawful_and_the_answer_is_the_same(
        text in calls::scraps(),
        family in prop::sample::select(vec![calls::HERMES, calls::QWEN, calls::CODER, calls::HARMONY, calls::LFM2, calls::LLAMA]),
        cuts in prop::collection::vec(0_usize..120, 0..8),
        length: bool,
    ) {
        let ending = if length { Ending::Length } else { Ending::Stop };
        let (events, whole) = read(family, &[&text], ending);
        lawful(&events, End::Ending(ending));
        let mut places: Vec<usize> = cuts.into_iter().map(|at| at.min(text.len())).filter(|at| text.is_char_boundary(*at)).collect();
        places.extend([0, text.len()]);
        places.sort_unstable();
        let pieces: Vec<&str> = places.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
        let (events, cut) = read(family, &pieces, ending);
        lawful(&events, End::Ending(ending));
        prop_assert_eq!(&cut, &whole);
        // Blanks before a call or a thought are no message.
        let output = whole["output"].as_array().unwrap();
        for pair in output.windows(2).filter(|pair| pair[0]["type"] == "message") {
            prop_assert!(!pair[0]["content"][0]["text"].as_str().unwrap().trim().is_empty(), "{}", whole);
        }
    }
}

#[test]
fn an_answer_without_anything_still_has_its_message() {
    let (events, _) = run(&[], false, ReasoningEvents::Summary, End::Ending(Ending::Stop));
    lawful(&events, End::Ending(Ending::Stop));
    assert_eq!(events.len(), 8);
    let (events, response) = run(&[], false, ReasoningEvents::Summary, End::Failure);
    assert_eq!((events.len(), &response["output"]), (3, &json!([])));
}

#[test]
fn thoughts_words_and_calls_are_items_of_their_own() {
    let pieces = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
    let acts = [
        Act::Thinks(pieces(&["H", "m"])),
        Act::Says(pieces(&["I ", "ask."])),
        Act::Calls("ns__do", pieces(&["{\"a\"", ": 1}"]), Some(true)),
        Act::Calls("draw", pieces(&["{\"input\": \"a", "\\nb\"}"]), Some(true)),
        Act::Calls("weather", pieces(&["{\"city"]), None),
    ];
    let id = |prefix: &str, number: usize| format!("{prefix}_{number:032x}");
    let (events, response) = run(&acts, false, ReasoningEvents::Summary, End::Ending(Ending::Length));
    lawful(&events, End::Ending(Ending::Length));
    let output = json!([
        {"type": "reasoning", "id": id("rs", 1), "status": "completed", "summary": [{"type": "summary_text", "text": "Hm"}]},
        {"type": "message", "id": id("msg", 2), "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "annotations": [], "logprobs": [], "text": "I ask."}]},
        {"type": "function_call", "id": id("fc", 3), "status": "completed", "call_id": id("call", 4), "name": "do", "namespace": "ns",
         "arguments": "{\"a\": 1}"},
        {"type": "custom_tool_call", "id": id("ctc", 5), "status": "completed", "call_id": id("call", 6), "name": "draw", "input": "a\nb"},
        {"type": "function_call", "id": id("fc", 7), "status": "incomplete", "call_id": id("call", 8), "name": "weather", "arguments": "{\"city"},
    ]);
    assert_eq!((&response["output"], &response["status"]), (&output, &json!("incomplete")));
    let (_, response) = run(&acts[..1], false, ReasoningEvents::Text, End::Ending(Ending::Stop));
    let content = json!([{"type": "reasoning_text", "text": "Hm"}]);
    assert_eq!((&response["output"][0]["content"], &response["output"][0]["summary"]), (&content, &json!([])));
}

#[test]
fn the_text_of_a_custom_tool_that_is_cut_short_is_what_came_of_it() {
    for (arguments, input) in [
        ("{\"input\": \"a\\nb", "a\nb"),
        ("{ \"input\" : \"a \\\"b\\\" c", "a \"b\" c"),
        ("{\"input\": \"é\\", "é"),
        ("{\"input\": \"a\\\\", "a\\"),
        ("{\"input\": \"a\\u00", "a"),
        ("{\"input\": \"a\\ud83d\\ude0", "a"),
        ("{\"input\": \"a\\ud83d\\ude00", "a😀"),
        ("{\"input\": \"abc\"", "abc"),
        ("{\"input\": \"", ""),
        ("{\"input\": ", ""),
        ("{\"inp", ""),
        ("{", ""),
        ("", ""),
    ] {
        let act = Act::Calls("draw", vec![arguments.to_owned()], Some(false));
        let (events, response) = run(&[act], false, ReasoningEvents::Summary, End::Ending(Ending::Length));
        lawful(&events, End::Ending(Ending::Length));
        let item = &response["output"][0];
        assert_eq!((&item["input"], &item["status"]), (&json!(input), &json!("incomplete")), "{arguments}");
    }
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
        let mut stream = stream(ReasoningEvents::Summary);
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
            "output_tokens": 11, "output_tokens_details": {"reasoning_tokens": 5}, "total_tokens": 111,
            "prefill_input_tokens": 80, "cached_prefix_tokens": 20,
            "time_to_first_token_ms": 70.0, "prefill_tokens_per_second": 1600.0, "decode_tokens_per_second": 100.0,
            "server_inference_elapsed_ms": 150.0, "server_time_to_first_token_ms": 50.0, "server_total_time_to_first_token_ms": 70.0,
            "server_prefill_tokens_per_second": 1600.0, "server_decode_tokens_per_second": 100.0,
            "server_model_resolve_ms": 0.005, "server_queue_ms": 10.0, "server_pre_inference_ms": 20.0,
        })
    );
    let start = Instant::now();
    let timing = Timing { submitted: start, taken: None, first: None, last: None, tokens: 0, cached: 0 };
    let nothing = Usage::new(3, 0, &timing, &Arrival { arrived: start, resolve: None, load_wait: None, load_owner: None });
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
    let (mut heard, mut stream) = (Heard::default(), stream(ReasoningEvents::Summary));
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

#[test]
fn sealed_thoughts_stand_in_the_finished_item_and_open_to_what_was_thought() {
    let seal = Seal::default();
    for thoughts in [ReasoningEvents::Summary, ReasoningEvents::Text] {
        let (mut heard, mut stream) = (Heard::default(), stream(thoughts).sealing(Some(seal.clone())));
        stream.begin(&mut heard);
        for text in ["H", "m."] {
            stream.piece(Piece { kind: Kind::Reasoning, text, logprobs: &[] }, &mut heard);
        }
        stream.text("Four.", &[], &mut heard);
        stream.end(Ending::Stop, None, 9, &mut heard);
        lawful(&heard.0, End::Ending(Ending::Stop));
        let response = serde_json::to_value(stream.response()).unwrap();
        let sealed = response["output"][0]["encrypted_content"].as_str().unwrap();
        assert_eq!(seal.open(sealed).as_deref(), Some("Hm."));
        let added = heard.0.iter().find(|event| event["type"] == "response.output_item.added").unwrap();
        assert!(added["item"].get("encrypted_content").is_none());
    }
}
