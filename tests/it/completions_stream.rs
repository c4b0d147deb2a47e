//! Chunks and whole completions say the same, whatever an answer is and however its text is cut.

use emberd::completions::{Chunks, Completion, Said, Wanted};
use emberd::error::{Code, Error};
use emberd::models::{Ending, Likely, Piece, TokenLogprob};
use emberd::responses::{Event, ReasoningEvents, Sink};
use emberd::text::Kind;
use proptest::prelude::*;
use serde_json::{Map, Value, json};

use crate::responses_stream::{Act, acts, stream, told, usage};

/// Keeps what is said.
struct Heard {
    chunks: Chunks,
    said: Vec<Value>,
    failed: Option<Error>,
    done: bool,
}

impl Sink for Heard {
    fn event(&mut self, event: Event<'_>) {
        let Self { chunks, said, failed, done } = self;
        assert!(failed.is_none() && !*done, "nothing follows the end");
        chunks.tell(event, |one| match one {
            Said::Chunk(chunk) => said.push(serde_json::to_value(chunk).unwrap()),
            Said::Failed(error) => *failed = Some(error.clone()),
            Said::Done => *done = true,
        });
    }
}

/// Adds up the deltas, as clients do: texts go on, calls go by their index.
pub fn sum(chunks: &[Value]) -> Value {
    let mut message = Map::new();
    let mut calls: Vec<Value> = Vec::new();
    let mut logprobs: Option<Vec<Value>> = None;
    let mut finish = Value::Null;
    let add = |to: &mut Map<String, Value>, delta: &Map<String, Value>| {
        for (key, value) in delta {
            match (to.get_mut(key), value) {
                (Some(Value::String(text)), Value::String(more)) => text.push_str(more),
                (Some(Value::String(_)), Value::Null) => {}
                (_, value) => _ = to.insert(key.clone(), value.clone()),
            }
        }
    };
    for choice in chunks.iter().filter_map(|chunk| chunk["choices"].get(0)) {
        assert_eq!(finish, Value::Null, "nothing is said after why it ended");
        finish = choice["finish_reason"].clone();
        let mut delta = choice["delta"].as_object().unwrap().clone();
        if let Some(told) = delta.remove("tool_calls") {
            let [call] = told.as_array().unwrap().as_slice() else { panic!("{told}") };
            let mut call = call.as_object().unwrap().clone();
            let index = usize::try_from(call.remove("index").unwrap().as_u64().unwrap()).unwrap();
            if index == calls.len() {
                assert!(call.contains_key("id") && call.contains_key("type"), "{call:?}");
                calls.push(json!({}));
            } else {
                assert_eq!(index + 1, calls.len(), "only the last call goes on");
                assert!(!call.contains_key("id") && !call.contains_key("type"), "{call:?}");
            }
            let whole = calls[index].as_object_mut().unwrap();
            for (key, value) in call {
                match (whole.get_mut(&key), &value) {
                    (Some(Value::Object(inner)), Value::Object(more)) => add(inner, more),
                    (None, _) => _ = whole.insert(key, value),
                    (Some(old), _) => panic!("{key}: {old}, {value}"),
                }
            }
        }
        add(&mut message, &delta);
        if let Some(tokens) = choice["logprobs"]["content"].as_array() {
            logprobs.get_or_insert_default().extend(tokens.iter().cloned());
        }
    }
    if !calls.is_empty() {
        message.insert("tool_calls".to_owned(), Value::from(calls));
    }
    let logprobs = logprobs.map_or(Value::Null, |tokens| json!({"content": tokens, "refusal": null}));
    json!({"index": 0, "message": message, "logprobs": logprobs, "finish_reason": finish})
}

/// The choice of a whole completion, without what no chunk has.
pub fn choice(completion: &Value) -> Value {
    let mut choice = completion["choices"][0].clone();
    assert_eq!(choice["message"].as_object_mut().unwrap().remove("refusal"), Some(Value::Null));
    choice
}

/// The tokens of a text: each two bytes of it.
fn tokens(text: &str) -> Vec<TokenLogprob> {
    let likely = |bytes: &[u8]| Likely { token: String::from_utf8_lossy(bytes).into_owned(), logprob: -1.0, bytes: bytes.to_vec() };
    text.as_bytes().chunks(2).map(|bytes| TokenLogprob { chosen: likely(bytes), top_logprobs: vec![likely(bytes)] }).collect()
}

fn run(acts: &[Act], joined: bool, thoughts: ReasoningEvents, wanted: Wanted, end: Result<Ending, Error>) -> (Heard, Value) {
    let mut stream = stream(thoughts);
    let chunks = Chunks::new(stream.response(), wanted);
    let mut heard = Heard { chunks, said: Vec::new(), failed: None, done: false };
    stream.begin(&mut heard);
    for (kind, text) in told(acts, joined) {
        let logprobs = if wanted.logprobs && kind == Kind::Text { tokens(&text) } else { Vec::new() };
        stream.piece(Piece { kind, text: &text, logprobs: &logprobs }, &mut heard);
    }
    match end {
        Ok(ending) => stream.end(ending, Some(usage()), 9, &mut heard),
        Err(error) => stream.fail(&error, None, &mut heard),
    }
    let whole = serde_json::to_value(Completion::new(stream.response(), wanted)).unwrap();
    (heard, whole)
}

proptest! {
    #[test]
    fn the_chunks_add_up_to_the_completion(
        acts in acts(),
        joined in any::<bool>(),
        summary in any::<bool>(),
        logprobs in any::<bool>(),
        usage in any::<bool>(),
        ending in prop::sample::select(vec![Ending::Stop, Ending::Length, Ending::StopString]),
    ) {
        let thoughts = if summary { ReasoningEvents::Summary } else { ReasoningEvents::Text };
        let (heard, whole) = run(&acts, joined, thoughts, Wanted { logprobs, usage }, Ok(ending));
        prop_assert!(heard.done && heard.failed.is_none());
        prop_assert_eq!(sum(&heard.said), choice(&whole));
        let calls = acts.iter().any(|act| matches!(act, Act::Calls(..)));
        let reason = if ending == Ending::Length { "length" } else if calls { "tool_calls" } else { "stop" };
        prop_assert_eq!(&whole["choices"][0]["finish_reason"], reason);
        let says = |act: &Act| matches!(act, Act::Says(_));
        // Words are null only where there are calls or thoughts in their place.
        prop_assert_eq!(whole["choices"][0]["message"]["content"].is_null(), !acts.is_empty() && !acts.iter().any(says));
        for chunk in &heard.said {
            for key in ["id", "created", "model"] {
                prop_assert_eq!(&chunk[key], &whole[key]);
            }
            prop_assert_eq!(&chunk["object"], "chat.completion.chunk");
            prop_assert_eq!(chunk.get("usage").is_some(), usage);
        }
        let (last, rest) = heard.said.split_last().unwrap();
        prop_assert!(rest.iter().all(|chunk| chunk["usage"].is_null() && chunk["choices"].as_array().unwrap().len() == 1));
        if usage {
            prop_assert_eq!(&last["usage"], &whole["usage"]);
            prop_assert_eq!(&last["choices"], &json!([]));
        } else {
            prop_assert_eq!(&last["choices"][0]["finish_reason"], reason);
        }
    }

    #[test]
    fn a_failure_ends_the_chunks_without_a_reason(acts in acts()) {
        let error = Error::new(Code::EngineFailed, "it broke").at("input[0]");
        let (heard, _) = run(&acts, false, ReasoningEvents::Summary, Wanted { usage: true, ..Wanted::default() }, Err(error.clone()));
        prop_assert!(!heard.done);
        prop_assert_eq!(heard.failed, Some(error.at("messages[0]")));
        prop_assert!(heard.said.iter().all(|chunk| chunk["choices"][0]["finish_reason"].is_null() && chunk["usage"].is_null()));
    }
}

#[test]
fn an_answer_in_two_texts_is_one_with_a_blank_line_as_it_will_be_read_again() {
    let says = |text: &str| Act::Says(vec![text.to_owned()]);
    let acts = [says("I ask."), Act::Calls("weather", vec!["{}".to_owned()], Some(true)), says("And wait.")];
    let (heard, whole) = run(&acts, false, ReasoningEvents::Summary, Wanted::default(), Ok(Ending::Stop));
    let message = &whole["choices"][0]["message"];
    assert_eq!(message["content"], "I ask.\n\nAnd wait.");
    assert_eq!(message["tool_calls"][0]["function"], json!({"name": "weather", "arguments": "{}"}));
    let deltas: Vec<&Value> = heard.said.iter().map(|chunk| &chunk["choices"][0]["delta"]).collect();
    let id = &message["tool_calls"][0]["id"];
    assert_eq!(
        deltas,
        [
            &json!({"role": "assistant", "content": null}),
            &json!({"content": "I ask."}),
            &json!({"tool_calls": [{"index": 0, "id": id, "type": "function", "function": {"name": "weather", "arguments": ""}}]}),
            &json!({"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}),
            &json!({"content": "\n\n"}),
            &json!({"content": "And wait."}),
            &json!({}),
        ]
    );
}

#[test]
fn a_completion_is_of_the_documented_form() {
    let acts = [
        Act::Thinks(vec!["Hm.".to_owned()]),
        Act::Says(vec!["ab".to_owned()]),
        Act::Calls("draw", vec!["{\"input\":\"x\"}".to_owned()], Some(true)),
    ];
    let (_, whole) = run(&acts, false, ReasoningEvents::Text, Wanted { logprobs: true, usage: false }, Ok(Ending::Stop));
    let likely = json!({"token": "ab", "logprob": -1.0, "bytes": [97, 98]});
    assert_eq!(
        whole,
        json!({
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 7,
            "model": "m",
            "choices": [{
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "ab",
                    "refusal": null,
                    "reasoning_content": "Hm.",
                    "tool_calls": [{"id": whole["choices"][0]["message"]["tool_calls"][0]["id"], "type": "custom", "custom": {"name": "draw", "input": "x"}}],
                },
                "logprobs": {
                    "content": [{"token": "ab", "logprob": -1.0, "bytes": [97, 98], "top_logprobs": [likely]}],
                    "refusal": null,
                },
                "finish_reason": "tool_calls",
            }],
            "usage": {
                "prompt_tokens": 100,
                "completion_tokens": 11,
                "total_tokens": 111,
                "prompt_tokens_details": {"cached_tokens": 20},
                "completion_tokens_details": {"reasoning_tokens": 5},
            },
            "system_fingerprint": null,
        })
    );
}
