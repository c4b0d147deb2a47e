//! Holds the description of requests to what reads them.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::described::Described;
use super::*;
use crate::responses::Request;

/// Fields that are read as they are, without being looked at one by one.
const PASSED_OVER: [&str; 5] = ["extra_body", "generation_mode", "mtp_depth", "input[].action", "input[].operation"];
/// Words of the readers' own, which no request that is taken has in these places.
const OWN: [&str; 16] = [
    // What names and calls are made of, what is taken out of hosted calls, and where forms are at fault.
    "__",
    "_call",
    "result",
    "text.format",
    "text.format.definition",
    "text.format.schema",
    "text.format.type",
    // What is refused by its name.
    "compaction",
    "compaction_trigger",
    "computer_screenshot",
    "image_url",
    "input_audio",
    "input_image",
    "input_video",
    "item_reference",
    "mcp_approval_response",
];

fn described() -> Described {
    Described::new::<CreateResponse>(|body| Request::from_json(body.to_string().as_bytes()).map(drop), json!({ "input": "hi" }))
}

#[test]
fn every_field_that_is_read_is_described_and_the_other_way_round() {
    described().check_fields(&PASSED_OVER, &BTreeSet::new());
}

#[test]
fn every_word_that_the_readers_know_is_described() {
    let sources = [
        include_str!("../request.rs"),
        include_str!("../controls.rs"),
        include_str!("../format.rs"),
        include_str!("../tools.rs"),
        include_str!("../input.rs"),
    ];
    described().check_words(&sources, &OWN);
}

#[test]
fn what_is_at_a_bound_is_taken_and_what_is_beyond_it_is_not() {
    let described = described();
    described.check_bounds(&["input", "tool_choice"]);
    let properties = &described.root["properties"];
    let biases = &properties["logit_bias"]["additionalProperties"];
    described.probe("logit_bias.7", biases, &|value| described.with("logit_bias", json!({ "7": value })));
    let include = &described.branches(&properties["include"])[0]["items"];
    for word in described.samples(include) {
        described.take(&described.with("include", json!([word])));
    }
    described.refuse("include[0]", &described.with("include", json!(["no_such_word"])));
}

#[test]
fn items_parts_tools_and_choices_that_are_described_are_read() {
    let described = described();
    described.take_samples("input", &[], &|sample| {
        let Value::Array(items) = &sample else { return json!({ "input": sample }) };
        let kind = items[0]["type"].as_str().unwrap_or("message");
        let call = json!({ "type": "function_call", "call_id": "word", "name": "f", "arguments": "{}" });
        let output = json!({ "type": "function_call_output", "call_id": "word", "output": "x" });
        match kind {
            kind if kind.ends_with("_output") => json!({ "input": [call, items[0]] }),
            "function_call" | "custom_tool_call" | "local_shell_call" | "shell_call" | "apply_patch_call" | "computer_call" => {
                json!({ "input": [items[0], output] })
            }
            _ => json!({ "input": sample }),
        }
    });
    for key in ["tools", "text"] {
        described.take_samples(key, &[], &|sample| described.with(key, sample));
    }
    let named = json!([{ "type": "function", "name": "word" }, { "type": "namespace", "name": "word", "tools": [{ "type": "function", "name": "word" }] }]);
    described.take_samples("tool_choice", &[], &|sample| json!({ "input": "hi", "tools": named, "tool_choice": sample }));
}
