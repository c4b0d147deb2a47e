//! What a line means: requests with all their variants, and the refusals of everything else.

use emberd::error::Code;
use emberd::models::progress::{Part, Progress, Stage};
use emberd::prompt::Role;
use emberd::worker::message::{Chat, parse};
use emberd::worker::{Event, Request};
use proptest::prelude::*;

fn chat(line: &str) -> Chat {
    match parse(line.as_bytes()) {
        (_, Ok(Request::Chat(chat))) => chat,
        other => panic!("{other:?}"),
    }
}

/// The chat whose last field this is.
fn with(field: &str) -> String {
    format!(r#"{{"type":"chat","id":"1","messages":[],{field}}}"#)
}

fn refused(line: impl AsRef<[u8]>) -> (Code, String) {
    let (_, request) = parse(line.as_ref());
    let error = request.unwrap_err();
    assert!(!error.one_line().contains('\n'), "{error}");
    (error.code, error.message.into_owned())
}

#[test]
fn a_ping_that_asks_for_the_status_is_as_good_as_a_status() {
    let request = |line: &str| parse(line.as_bytes()).1.unwrap();
    for line in [r#"{"type":"status"}"#, r#"{"type":"ping","status":true}"#, r#"{"status": true,"id":1,"type":"ping"}"#] {
        assert_eq!(request(line), Request::Status, "{line}");
    }
    for status in ["false", "null", "1", "\"true\"", "{}"] {
        assert_eq!(request(&format!(r#"{{"type":"ping","status":{status}}}"#)), Request::Ping, "{status}");
    }
}

#[test]
fn of_a_field_that_stands_twice_the_last_one_counts() {
    let line = r#"{"type":"load","id":1,"type":"chat","messages":5,"id":2,"maxNewTokens":3,"messages":[{"role":"system","role":"user","content":"a","content":"b"}]}"#;
    let (id, request) = parse(line.as_bytes());
    let Ok(Request::Chat(chat)) = request else { panic!("{request:?}") };
    assert_eq!((id.unwrap().get(), chat.max_new_tokens), ("2", 3));
    assert_eq!(chat.turns, [emberd::prompt::Turn::new(Role::User, "b")]);
}

#[test]
fn a_line_that_cannot_be_read_to_its_end_has_the_id_that_it_begins_with() {
    let id = |line: &[u8]| emberd::worker::message::head_id(line).map(|id| id.get().to_owned());
    assert_eq!(id(br#"{"type":"chat","id":"L","messages":[{"role":"us"#).as_deref(), Some("\"L\""));
    assert_eq!(id(br#"{"messages":[],"id":{"a":[1]},"#).as_deref(), Some(r#"{"a":[1]}"#));
    for none in [&br#"{"type":"chat","messages":[{"id":"not this"#[..], br#"{"type":"chat","id":"cut"#, b"nonsense", b""] {
        assert_eq!(id(none), None);
    }
}

#[test]
fn the_length_of_an_answer_is_a_number_of_any_kind_or_absent() {
    let asked = |value: &str| chat(&with(&format!(r#""maxNewTokens":{value}"#))).max_new_tokens;
    assert_eq!(chat(r#"{"type":"chat","messages":[]}"#).max_new_tokens, 256);
    assert_eq!(["null", "1", "20", "20.0", "20.9", "2e1"].map(asked), [256, 1, 20, 20, 20, 20]);
    assert_eq!(["4294967296", "1e300", "18446744073709551616"].map(asked), [u32::MAX; 3]);
    for (value, expected) in
        [("0", Code::InvalidValue), ("-1", Code::InvalidValue), ("0.5", Code::InvalidValue), ("\"20\"", Code::InvalidType)]
    {
        let (code, message) = refused(with(&format!(r#""maxNewTokens":{value}"#)));
        assert_eq!(code, expected, "{message}");
        assert!(message.starts_with("maxNewTokens"), "{message}");
    }
}

#[test]
fn prefill_and_stop_are_strings_and_empty_ones_are_none() {
    let both = chat(&with(r#""prefill":"<title>","stop":"</title>""#));
    assert_eq!((both.prefill.as_deref(), both.stop.as_deref()), (Some("<title>"), Some("</title>")));
    let none = chat(&with(r#""prefill":"","stop":null"#));
    assert_eq!((none.prefill, none.stop), (None, None));
    assert_eq!(refused(with(r#""stop":["a"]"#)), (Code::InvalidType, "stop must be a string, not a list".into()));
}

#[test]
fn roles_are_those_of_a_conversation_and_a_wrong_one_is_named_with_its_place() {
    let line = r#"{"type":"chat","messages":[{"role":"developer","content":"a"},{"role":"user","content":"b"},{"role":"assistant","content":""}]}"#;
    let turns = chat(line).turns;
    assert_eq!(turns.iter().map(|turn| turn.role).collect::<Vec<_>>(), [Role::System, Role::User, Role::Assistant]);
    let (_, message) = refused(r#"{"type":"chat","messages":[{"role":"user","content":"a"},{"role":"tool","content":"b"}]}"#);
    assert_eq!(message, r#"messages[1].role is "tool""#);
    let (_, message) = refused(r#"{"type":"chat","messages":[{"role":"user"}]}"#);
    assert_eq!(message, "messages[0].content must be a string, not null or absent");
    assert_eq!(refused(r#"{"type":"chat","messages":[7]}"#).0, Code::InvalidType);
}

#[test]
fn half_a_surrogate_pair_is_a_replacement_character_and_no_reason_to_refuse() {
    let content = |escaped: &str| {
        chat(&format!(r#"{{"type":"chat","id":"1","messages":[{{"role":"user","content":"{escaped}"}}]}}"#)).turns[0].text.clone()
    };
    for (escaped, expected) in [
        (r"cut \ud83d", "cut \u{fffd}"),
        (r"\ude00 cut", "\u{fffd} cut"),
        (r"\ud83d\ude00", "😀"),
        (r"\ud83d\ud83d\ude00", "\u{fffd}😀"),
        (r"\uDE00\uD83D", "\u{fffd}\u{fffd}"),
        (r"\ud83d\n\u00e9\\ud83d\u0041", "\u{fffd}\né\\ud83dA"),
        (r"\ud83d🙂\\\ude00", "\u{fffd}🙂\\\u{fffd}"),
    ] {
        assert_eq!(content(escaped), expected, "{escaped}");
    }
    // What else is wrong stays wrong.
    assert_eq!(refused(r#"{"type":"chat","id":"1","messages":[{"role":"user","content":"\ud83d \x"}]}"#).0, Code::InvalidJson);
}

#[test]
fn what_is_no_request_is_refused_with_what_it_is() {
    for line in ["{oops", "{\"type\":", "nul", "{} {}", "{\"type\":\"ping\"}x"] {
        assert_eq!(refused(line).0, Code::InvalidJson, "{line}");
    }
    for line in ["null", "5", "[]", "[\"ping\", \"1\"]", "\"ping\"", "true"] {
        assert_eq!(refused(line), (Code::InvalidType, "a request is a JSON object, one a line".into()), "{line}");
    }
    assert_eq!(refused("{}").0, Code::MissingRequiredParameter);
    assert_eq!(refused(r#"{"type":7}"#), (Code::InvalidValue, "unknown request type: 7".into()));
    assert_eq!(refused(b"{\"type\":\"\xff\xfe\"}"), (Code::InvalidJson, "the line is not UTF-8 (byte 9)".into()));
    assert_eq!(refused(format!(r#"{{"type":"chat","messages":{}"#, "[".repeat(100_000))).0, Code::InvalidJson);
    let (_, message) = refused(format!(r#"{{"type":"{}"}}"#, "x".repeat(1 << 20)));
    assert!(message.len() < 200, "what a client sent does not come back whole");
}

#[test]
fn a_downloads_news_are_events_as_clients_know_them() {
    let (model, file) = ("org/name".to_owned(), "onnx/model_q4.onnx".to_owned());
    let parts = [Part { file: "config.json".into(), done: 10, total: 10 }, Part { file: file.clone(), done: 20, total: 90 }];
    let told = |news: &Progress| -> Vec<String> {
        Event::of("key", news).iter().flatten().map(|event| serde_json::to_string(event).unwrap()).collect()
    };
    let advance = |stage, done, total| Progress::Advance { model: model.clone(), file: file.clone(), stage, done, total };
    let about = r#"{"modelKey":"key","status":"#;
    let named = r#""name":"org/name","file":"onnx/model_q4.onnx""#;
    for (news, expected) in [
        (
            Progress::Initiate { model: model.clone(), file: file.clone() },
            vec![format!(r#"{about}"initiate",{named}}}"#), format!(r#"{about}"download",{named}}}"#)],
        ),
        (advance(Stage::Download, 20, 80), vec![format!(r#"{about}"progress",{named},"progress":25.0,"loaded":20,"total":80}}"#)]),
        (advance(Stage::Download, 0, 0), vec![format!(r#"{about}"progress",{named},"progress":100.0,"loaded":0,"total":0}}"#)]),
        (advance(Stage::Import, 1, 2), vec![]),
        (
            Progress::Whole { model: model.clone(), parts: parts.into() },
            vec![format!(
                r#"{about}"progress_total","name":"org/name","progress":30.0,"loaded":30,"total":100,"files":{{"config.json":{{"loaded":10,"total":10}},"onnx/model_q4.onnx":{{"loaded":20,"total":90}}}}}}"#
            )],
        ),
        (Progress::Done { model: model.clone(), file: file.clone() }, vec![format!(r#"{about}"done",{named}}}"#)]),
    ] {
        assert_eq!(told(&news), expected, "{news:?}");
    }
}

proptest! {
    #[test]
    fn no_bytes_are_a_fault(line in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse(&line);
    }

    #[test]
    fn no_escapes_are_a_fault(content in r#"(\\u[dD][89a-fA-F][0-9a-f]{2}|\\u[0-9a-f]{0,4}|\\.|[a-z🙂é"]){0,12}"#) {
        let line = format!(r#"{{"type":"chat","id":7,"messages":[{{"role":"user","content":"{content}"}}]}}"#);
        let (id, _) = parse(line.as_bytes());
        prop_assert!(id.is_none_or(|id| id.get() == "7"));
    }
}
