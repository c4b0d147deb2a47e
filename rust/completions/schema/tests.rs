//! Holds the description of requests to what reads them.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::*;
use crate::completions::read;
use crate::responses::schema::described::Described;

/// Fields that are read as they are, without being looked at one by one.
const PASSED_OVER: [&str; 3] = ["extra_body", "generation_mode", "mtp_depth"];
/// Words of the readers' own, which no request that is taken has in these places.
const OWN: [&str; 7] = [
    // Where forms are at fault.
    "response_format.json_schema.schema",
    "text.format",
    "text.format.schema",
    // What is refused by its name.
    "file",
    "image_url",
    "input_audio",
    "video_url",
];

fn described() -> Described {
    let read = |body: &Value| read(body.to_string().as_bytes()).map(drop);
    Described::new::<CreateChatCompletion>(read, json!({ "messages": [{ "role": "user", "content": "hi" }] }))
}

#[test]
fn every_field_that_is_read_is_described_and_the_other_way_round() {
    described().check_fields(&PASSED_OVER, &BTreeSet::new());
}

#[test]
fn every_word_that_the_readers_know_is_described() {
    let sources = [include_str!("../request.rs"), include_str!("../messages.rs"), include_str!("../tools.rs")];
    described().check_words(&sources, &OWN);
}

#[test]
fn what_is_at_a_bound_is_taken_and_what_is_beyond_it_is_not() {
    let described = described();
    described.check_bounds(&["tool_choice", "top_logprobs"]);
    let top = &described.root["properties"]["top_logprobs"];
    described.probe("top_logprobs", top, &|value| {
        let mut body = described.with("top_logprobs", value);
        body["logprobs"] = json!(true);
        body
    });
    described.refuse("top_logprobs", &described.with("top_logprobs", json!(1)));
    described.take(&described.with("modalities", json!(["text"])));
    described.refuse("modalities[0]", &described.with("modalities", json!(["audio"])));
}

#[test]
fn messages_tools_and_choices_that_are_described_are_read() {
    let described = described();
    described.take_samples("messages", &[], &|sample| {
        let message = &sample[0];
        let call = json!({ "role": "assistant", "tool_calls": [{ "id": "word", "function": { "name": "f", "arguments": "{}" } }] });
        let result = json!({ "role": "tool", "tool_call_id": "word", "content": "x" });
        match message["role"].as_str() {
            Some("tool") => json!({ "messages": [call, message] }),
            _ if message["tool_calls"].is_array() => json!({ "messages": [message, result] }),
            _ => json!({ "messages": sample }),
        }
    });
    for key in ["tools", "response_format"] {
        described.take_samples(key, &[], &|sample| described.with(key, sample));
    }
    let named = json!([{ "type": "function", "function": { "name": "word" } }]);
    described.take_samples("tool_choice", &[], &|sample| {
        let mut body = described.with("tool_choice", sample);
        body["tools"] = named.clone();
        body
    });
}
