//! Holds the description of requests to what reads them.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::*;
use crate::anthropic::Request;
use crate::responses::schema::CreateResponse;
use crate::responses::schema::described::Described;

/// Fields that are read as they are, without being looked at one by one.
const PASSED_OVER: [&str; 2] = ["generation_mode", "mtp_depth"];
/// Words of the readers' own, which no request that is taken has in these places.
const OWN: [&str; 17] = [
    // Of the request that one of this form becomes.
    "answer",
    "max_output_tokens",
    "parallel_tool_calls",
    "parameters",
    "reasoning",
    "stop",
    // Where an answer that goes on from a text is at fault.
    "output_config.format",
    // Of what a provider ran by itself: its kinds, and what is taken out of it.
    "_tool_result",
    "cache_control",
    "caller",
    "encrypted_content",
    "mcp_tool_use",
    "server_tool_use",
    // What is refused by its name.
    "container_upload",
    "file",
    "image",
    "url",
];

fn described() -> Described {
    let read = |body: &Value| Request::create(body.to_string().as_bytes()).map(drop);
    Described::new::<CreateMessage>(read, json!({ "max_tokens": 5, "messages": [{ "role": "user", "content": "hi" }] }))
}

fn counted() -> Described {
    let read = |body: &Value| Request::count(body.to_string().as_bytes()).map(drop);
    Described::new::<CountMessageTokens>(read, json!({ "messages": [{ "role": "user", "content": "hi" }] }))
}

/// Those of the request of the Responses API that one of this form becomes.
fn beneath() -> BTreeSet<String> {
    Described::new::<CreateResponse>(|_| Ok(()), json!({})).fields()
}

#[test]
fn every_field_that_is_read_is_described_and_the_other_way_round() {
    for described in [described(), counted()] {
        described.check_fields(&PASSED_OVER, &beneath());
    }
}

#[test]
fn every_word_that_the_readers_know_is_described() {
    let sources = [include_str!("../request.rs"), include_str!("../conversation.rs"), include_str!("../blocks.rs")];
    described().check_words(&sources, &OWN);
}

#[test]
fn what_is_at_a_bound_is_taken_and_what_is_beyond_it_is_not() {
    for described in [described(), counted()] {
        described.check_bounds(&[]);
        let thinking = described.branches(&described.root["properties"]["thinking"]).into_iter();
        let [enabled] = thinking.filter(|branch| branch["properties"]["budget_tokens"].is_object()).collect::<Vec<_>>()[..] else {
            panic!("one way of thinking has a budget");
        };
        let with = |budget: Value| described.with("thinking", json!({ "type": "enabled", "budget_tokens": budget }));
        described.probe("thinking.budget_tokens", &enabled["properties"]["budget_tokens"], &with);
        described.refuse("thinking.type", &described.with("thinking", json!({ "type": "sometimes" })));
    }
    described().refuse("max_tokens", &counted().with("stream", json!(true)));
}

#[test]
fn messages_tools_and_choices_that_are_described_are_read() {
    let described = described();
    let has =
        |message: &Value, kind: &str| message["content"].as_array().is_some_and(|blocks| blocks.iter().any(|block| block["type"] == kind));
    described.take_samples("messages", &[], &|sample| {
        let message = sample[0].clone();
        let used = json!({ "role": "assistant", "content": [{ "type": "tool_use", "id": "word", "name": "f", "input": {} }] });
        let result = json!({ "role": "user", "content": [{ "type": "tool_result", "tool_use_id": "word" }] });
        let messages = if has(&message, "tool_result") {
            json!([used, message])
        } else if has(&message, "tool_use") {
            json!([message, result])
        } else {
            sample
        };
        described.with("messages", messages)
    });
    for key in ["system", "tools", "thinking", "output_config", "output_format"] {
        described.take_samples(key, &[], &|sample| described.with(key, sample));
    }
    described.take_samples("tool_choice", &[], &|sample| {
        let mut body = described.with("tool_choice", sample);
        body["tools"] = json!([{ "name": "word", "input_schema": {} }]);
        body
    });
}
