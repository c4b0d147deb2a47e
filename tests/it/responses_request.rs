//! What a request may say, and what is said of one that says something else.

use emberd::error::Code;
use emberd::prompt::Role;
use emberd::responses::Request;
use serde_json::{Value, json};

fn read(body: &Value) -> emberd::error::Result<Request> {
    Request::from_json(body.to_string().as_bytes())
}

/// A request with one field more than it needs.
fn with(key: &str, value: Value) -> Value {
    let mut body = json!({"input": "hi"});
    body[key] = value;
    body
}

#[test]
fn each_wrong_field_is_named_with_its_path() {
    use Code::{InvalidType, InvalidValue, MissingRequiredParameter, UnsupportedParameter};
    let message = |content: Value| json!({"input": [{"role": "user", "content": content}]});
    let many: serde_json::Map<String, Value> = (0..17).map(|n| (n.to_string(), json!("v"))).collect();
    let cases = [
        (json!(null), InvalidType, ""),
        (json!([]), InvalidType, ""),
        (json!("hi"), InvalidType, ""),
        (json!({}), MissingRequiredParameter, "input"),
        (json!({"input": null}), MissingRequiredParameter, "input"),
        (json!({"input": []}), InvalidValue, "input"),
        (json!({"input": 5}), InvalidType, "input"),
        (json!({"input": {"role": "user"}}), InvalidType, "input"),
        (json!({"input": ["hi"]}), InvalidType, "input[0]"),
        (json!({"input": [{"content": "x"}]}), MissingRequiredParameter, "input[0].role"),
        (json!({"input": [{"role": "tool", "content": "x"}]}), InvalidValue, "input[0].role"),
        (json!({"input": [{"role": 1, "content": "x"}]}), InvalidType, "input[0].role"),
        (json!({"input": [{"role": "user"}]}), MissingRequiredParameter, "input[0].content"),
        (json!({"input": [{"role": "user", "content": null}]}), MissingRequiredParameter, "input[0].content"),
        (json!({"input": [{"role": "user", "content": 5}]}), InvalidType, "input[0].content"),
        (json!({"input": [{"role": "user", "content": "x", "id": 5}]}), InvalidType, "input[0].id"),
        (message(json!(["x"])), InvalidType, "input[0].content[0]"),
        (message(json!([{"text": "x"}])), MissingRequiredParameter, "input[0].content[0].type"),
        (
            message(json!([{"type": "input_text", "text": "x"}, {"type": "input_text"}])),
            MissingRequiredParameter,
            "input[0].content[1].text",
        ),
        (message(json!([{"type": "input_text", "text": 1}])), InvalidType, "input[0].content[0].text"),
        (message(json!([{"type": "input_image", "image_url": "data:,"}])), UnsupportedParameter, "input[0].content[0].type"),
        (message(json!([{"type": "image_url", "image_url": "data:,"}])), UnsupportedParameter, "input[0].content[0].type"),
        (message(json!([{"type": "input_file", "file_data": ""}])), UnsupportedParameter, "input[0].content[0].type"),
        (message(json!([{"type": "wibble"}])), InvalidValue, "input[0].content[0].type"),
        (json!({"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]}), InvalidValue, "input[0].call_id"),
        (json!({"input": [{"role": "user", "content": "x"}, {"type": "function_call"}]}), MissingRequiredParameter, "input[1].name"),
        (json!({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}), MissingRequiredParameter, "input[0].call_id"),
        (json!({"input": [{"type": "function_call", "name": "f", "arguments": {}, "call_id": "c"}]}), InvalidType, "input[0].arguments"),
        (json!({"input": [{"type": "function_call", "name": "f", "arguments": "", "call_id": ""}]}), InvalidValue, "input[0].call_id"),
        (
            json!({"input": [{"type": "reasoning", "summary": [{"type": "summary_text"}]}]}),
            MissingRequiredParameter,
            "input[0].summary[0].text",
        ),
        (
            json!({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}]}),
            Code::InvalidEncryptedContent,
            "input[0].encrypted_content",
        ),
        (json!({"input": [{"type": "item_reference", "id": "msg_1"}]}), UnsupportedParameter, "input[0].type"),
        (json!({"input": [{"id": "msg_1"}]}), UnsupportedParameter, "input[0].id"),
        (json!({"input": [{"type": "compaction", "encrypted_content": "x"}]}), UnsupportedParameter, "input[0].type"),
        (json!({"input": [{"type": "wibble"}]}), InvalidValue, "input[0].type"),
        (json!({"input": [{"type": 7}]}), InvalidType, "input[0].type"),
        (with("model", json!(5)), InvalidType, "model"),
        (with("instructions", json!(["x"])), InvalidType, "instructions"),
        (with("stream", json!("true")), InvalidType, "stream"),
        (with("max_output_tokens", json!(0)), InvalidValue, "max_output_tokens"),
        (with("max_output_tokens", json!(-1)), InvalidValue, "max_output_tokens"),
        (with("max_output_tokens", json!(2_147_483_648_u64)), InvalidValue, "max_output_tokens"),
        (with("max_output_tokens", json!(u64::MAX)), InvalidValue, "max_output_tokens"),
        (with("max_output_tokens", json!(1e23)), InvalidValue, "max_output_tokens"),
        (with("max_output_tokens", json!(-1e23)), InvalidValue, "max_output_tokens"),
        (with("max_output_tokens", json!(5.5)), InvalidType, "max_output_tokens"),
        (with("max_output_tokens", json!("5")), InvalidType, "max_output_tokens"),
        (with("temperature", json!(2.1)), InvalidValue, "temperature"),
        (with("temperature", json!(-0.1)), InvalidValue, "temperature"),
        (with("temperature", json!("1")), InvalidType, "temperature"),
        (with("top_p", json!(1.5)), InvalidValue, "top_p"),
        (with("top_k", json!(-1)), InvalidValue, "top_k"),
        (with("seed", json!(1.5)), InvalidType, "seed"),
        (with("seed", json!(1e23)), InvalidValue, "seed"),
        (with("seed", json!(-1e23)), InvalidValue, "seed"),
        (with("stop", json!("")), InvalidValue, "stop"),
        (with("stop", json!(["a", ""])), InvalidValue, "stop[1]"),
        (with("stop", json!(["a", 1])), InvalidType, "stop[1]"),
        (with("stop", json!({})), InvalidType, "stop"),
        (with("stop", json!(vec!["x"; 17])), InvalidValue, "stop"),
        (with("min_p", json!(1.1)), InvalidValue, "min_p"),
        (with("min_p", json!(-0.1)), InvalidValue, "min_p"),
        (with("min_p", json!("0.1")), InvalidType, "min_p"),
        (with("repetition_penalty", json!(0)), InvalidValue, "repetition_penalty"),
        (with("repetition_penalty", json!(2.1)), InvalidValue, "repetition_penalty"),
        (with("repetition_penalty", json!(true)), InvalidType, "repetition_penalty"),
        (with("presence_penalty", json!(3)), InvalidValue, "presence_penalty"),
        (with("frequency_penalty", json!("0")), InvalidType, "frequency_penalty"),
        (with("frequency_penalty", json!(-2.5)), InvalidValue, "frequency_penalty"),
        (with("logit_bias", json!([1])), InvalidType, "logit_bias"),
        (with("logit_bias", json!({"5": "1"})), InvalidType, "logit_bias.5"),
        (with("logit_bias", json!({"5": 100.5})), InvalidValue, "logit_bias.5"),
        (with("logit_bias", json!({"five": 1})), InvalidValue, "logit_bias.five"),
        (with("logit_bias", json!({"05": 1})), InvalidValue, "logit_bias.05"),
        (with("logit_bias", json!({"-5": 1})), InvalidValue, "logit_bias.-5"),
        (with("logit_bias", json!({"4294967296": 1})), InvalidValue, "logit_bias.4294967296"),
        (with("logit_bias", Value::Object((0..1025).map(|n| (n.to_string(), json!(1))).collect())), InvalidValue, "logit_bias"),
        (with("top_logprobs", json!(-1)), InvalidValue, "top_logprobs"),
        (with("top_logprobs", json!(1.5)), InvalidType, "top_logprobs"),
        (with("top_logprobs", json!(21)), InvalidValue, "top_logprobs"),
        (with("previous_response_id", json!("resp_1")), UnsupportedParameter, "previous_response_id"),
        (with("previous_response_id", json!(1)), InvalidType, "previous_response_id"),
        (with("conversation", json!("conv_1")), UnsupportedParameter, "conversation"),
        (with("prompt", json!({"id": "p"})), UnsupportedParameter, "prompt"),
        (with("background", json!(true)), UnsupportedParameter, "background"),
        (with("background", json!(1)), InvalidType, "background"),
        (with("store", json!("yes")), InvalidType, "store"),
        (with("truncation", json!("middle")), InvalidValue, "truncation"),
        (with("tools", json!({})), InvalidType, "tools"),
        (with("tools", json!([{"name": "f"}])), MissingRequiredParameter, "tools[0].type"),
        (with("tools", json!([{"type": "web_search"}, {"type": "function"}])), MissingRequiredParameter, "tools[1].name"),
        (with("tools", json!([{"type": "function", "name": ""}])), InvalidValue, "tools[0].name"),
        (with("tools", json!([{"type": "function", "name": "f", "parameters": "{}"}])), InvalidType, "tools[0].parameters"),
        (with("tools", json!([{"type": "function", "name": "f", "strict": 1}])), InvalidType, "tools[0].strict"),
        (with("tools", json!([{"type": "function", "name": "f"}, {"type": "custom", "name": "f"}])), InvalidValue, "tools[1]"),
        (with("tools", json!([{"type": "namespace", "name": "n"}])), MissingRequiredParameter, "tools[0].tools"),
        (
            with("tools", json!([{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}])),
            MissingRequiredParameter,
            "tools[0].tools[0].name",
        ),
        (
            with("tools", json!([{"type": "custom", "name": "n", "format": {"type": "grammar", "definition": 5}}])),
            InvalidType,
            "tools[0].format.definition",
        ),
        (
            with("tools", json!([{"type": "custom", "name": "n", "format": {"type": "grammar", "grammar": 5}}])),
            InvalidType,
            "tools[0].format.grammar",
        ),
        (with("tool_choice", json!("always")), InvalidValue, "tool_choice"),
        (with("tool_choice", json!("required")), InvalidValue, "tool_choice"),
        (with("tool_choice", json!({"type": "function", "name": "f"})), InvalidValue, "tool_choice.name"),
        (with("tool_choice", json!({"type": "web_search"})), UnsupportedParameter, "tool_choice"),
        (with("tool_choice", json!({"type": "allowed_tools", "mode": "auto"})), MissingRequiredParameter, "tool_choice.tools"),
        (
            with("tool_choice", json!({"type": "allowed_tools", "tools": [{"type": "function", "name": "g"}]})),
            InvalidValue,
            "tool_choice.tools[0].name",
        ),
        (with("tool_choice", json!({"type": "allowed_tools", "mode": "required", "tools": []})), InvalidValue, "tool_choice"),
        (with("tool_choice", json!(1)), InvalidType, "tool_choice"),
        (with("text", json!("x")), InvalidType, "text"),
        (with("text", json!({"format": {}})), MissingRequiredParameter, "text.format.type"),
        (with("text", json!({"format": {"type": "json_schema", "schema": {}}})), MissingRequiredParameter, "text.format.name"),
        (with("text", json!({"format": {"type": "json_schema", "name": "a b", "schema": {}}})), InvalidValue, "text.format.name"),
        (with("text", json!({"format": {"type": "json_schema", "name": "a"}})), MissingRequiredParameter, "text.format.schema"),
        (with("text", json!({"format": {"type": "json_schema", "name": "a", "schema": "{}"}})), InvalidType, "text.format.schema"),
        (
            with("text", json!({"format": {"type": "json_schema", "name": "a", "schema": {}, "strict": 1}})),
            InvalidType,
            "text.format.strict",
        ),
        (with("text", json!({"format": {"type": "grammar", "syntax": "bnf", "definition": ""}})), InvalidValue, "text.format.syntax"),
        (with("text", json!({"format": {"type": "grammar", "syntax": "regex"}})), MissingRequiredParameter, "text.format.definition"),
        (with("text", json!({"format": {"type": "xml"}})), InvalidValue, "text.format.type"),
        (with("text", json!({"verbosity": "chatty"})), InvalidValue, "text.verbosity"),
        (with("reasoning", json!("low")), InvalidType, "reasoning"),
        (with("reasoning", json!({"effort": "huge"})), InvalidValue, "reasoning.effort"),
        (with("reasoning", json!({"summary": 1})), InvalidType, "reasoning.summary"),
        (with("include", json!("x")), InvalidType, "include"),
        (with("include", json!(["message.output_text.logprobs", "message.output_text.logits"])), InvalidValue, "include[1]"),
        (with("include", json!(["wibble"])), InvalidValue, "include[0]"),
        (with("metadata", json!("x")), InvalidType, "metadata"),
        (with("metadata", json!({"a": 1})), InvalidType, "metadata.a"),
        (with("metadata", Value::Object(many)), InvalidValue, "metadata"),
        (with("metadata", json!({"a": "x".repeat(513)})), InvalidValue, "metadata.a"),
        (with("metadata", json!({"retention_seconds": "60"})), InvalidType, "metadata.retention_seconds"),
        (with("metadata", json!({"retention_seconds": 59})), InvalidValue, "metadata.retention_seconds"),
        (with("metadata", json!({"retention_seconds": 7_776_001})), InvalidValue, "metadata.retention_seconds"),
        (with("cache_salt", json!("")), InvalidValue, "cache_salt"),
        (with("cache_salt", json!("é".repeat(129))), InvalidValue, "cache_salt"),
        (with("cache_salt", json!(5)), InvalidType, "cache_salt"),
        (with("prompt_cache_key", json!(5)), InvalidType, "prompt_cache_key"),
        (with("user", json!(5)), InvalidType, "user"),
        (with("safety_identifier", json!([])), InvalidType, "safety_identifier"),
        (with("service_tier", json!(1)), InvalidType, "service_tier"),
        (with("client_metadata", json!("x")), InvalidType, "client_metadata"),
        (with("stream_options", json!({"include_obfuscation": 1})), InvalidType, "stream_options.include_obfuscation"),
        (with("parallel_tool_calls", json!("no")), InvalidType, "parallel_tool_calls"),
        (with("max_tool_calls", json!(0)), InvalidValue, "max_tool_calls"),
    ];
    for (body, code, param) in cases {
        let error = read(&body).err().unwrap_or_else(|| panic!("accepted: {body}"));
        assert_eq!((error.code, error.param.as_deref().unwrap_or_default()), (code, param), "{body}: {error}");
        assert!(error.hint.is_some(), "{body}: {error}");
        if !param.is_empty() {
            assert!(error.message.contains(&format!("`{param}`")), "{error}");
        }
    }
}

#[test]
fn half_a_surrogate_pair_is_taken_as_a_replacement_character() {
    assert_eq!(Request::from_json(b"{\"input\":\"\\ud800\"}").unwrap().turns[0].text, "\u{fffd}");
}

#[test]
fn what_is_not_json_is_told_so() {
    for body in [&b""[..], b"{\"input\":", b"{\"input\":\"\xff\"}", b"nul", b"{} {}"] {
        assert_eq!(Request::from_json(body).err().map(|error| error.code), Some(Code::InvalidJson), "{body:?}");
    }
    let deep = "[".repeat(100_000);
    assert_eq!(Request::from_json(deep.as_bytes()).err().map(|error| error.code), Some(Code::InvalidJson));
}

#[test]
fn a_long_value_is_not_thrown_back_whole() {
    let error = read(&with("truncation", json!("é".repeat(10_000)))).unwrap_err();
    assert!(error.message.len() < 300, "{error}");
}

#[test]
fn what_clients_send_along_is_accepted() {
    for (key, value) in [
        ("store", json!(false)),
        ("background", json!(false)),
        ("include", json!([])),
        ("include", json!(["reasoning.encrypted_content"])),
        ("tools", json!([])),
        ("tools", json!([{"type": "web_search", "external_web_access": false}, {"type": "local_shell"}])),
        ("tool_choice", json!("auto")),
        ("parallel_tool_calls", json!(false)),
        ("reasoning", json!({"effort": null, "summary": "auto"})),
        ("text", json!({"format": {"type": "text"}, "verbosity": "low"})),
        ("text", json!({"format": {"type": "json_object"}})),
        ("text", json!({"format": {"type": "json_schema", "name": "a-B_3", "schema": {}, "strict": null, "description": "d"}})),
        ("text", json!({"format": {"type": "grammar", "syntax": "lark", "definition": "start: \"a\""}})),
        ("client_metadata", json!({"x": "y"})),
        ("stream_options", json!({"include_obfuscation": false})),
        ("service_tier", json!("auto")),
        ("prompt_cache_retention", json!("24h")),
        ("extra_body", json!({"generation_mode": 5, "mtp_depth": "x"})),
        ("extra_body", json!("anything")),
        ("top_logprobs", json!(0)),
        ("presence_penalty", json!(0)),
        ("presence_penalty", json!(-2)),
        ("frequency_penalty", json!(2.0)),
        ("repetition_penalty", json!(1.0)),
        ("logit_bias", json!({})),
        ("cache_salt", json!("é".repeat(128))),
        ("metadata", json!({"retention_seconds": 60, "a": "b"})),
        ("previous_response_id", json!(null)),
        ("max_output_tokens", json!(2_147_483_647)),
        ("seed", json!(-1)),
        ("generate", json!(false)),
        ("wibble", json!([1, 2])),
    ] {
        read(&with(key, value.clone())).unwrap_or_else(|error| panic!("{key}: {value}: {error}"));
    }
}

#[test]
fn function_tools_are_kept_when_their_use_is_ruled_out() {
    let mut body = with("tools", json!([{"type": "function", "name": "f"}]));
    body["tool_choice"] = json!("none");
    let echo = read(&body).unwrap().echo;
    assert_eq!(echo.tools, [json!({"type": "function", "name": "f", "description": null, "parameters": null, "strict": null})]);
    assert_eq!(echo.tool_choice, json!("none"));
}

#[test]
fn metadata_is_echoed_without_the_retention() {
    let echo = read(&with("metadata", json!({"retention_seconds": 7_776_000, "a": "b", "c": null}))).unwrap().echo;
    assert_eq!(Value::Object(echo.metadata), json!({"a": "b"}));
}

fn turns(body: &Value) -> Vec<(Role, String)> {
    read(body).unwrap().turns.into_iter().map(|turn| (turn.role, turn.text)).collect()
}

#[test]
fn input_becomes_turns() {
    use Role::{Assistant, System, User};
    let turn = |role, text: &str| (role, text.to_owned());
    assert_eq!(turns(&json!({"input": "hi"})), [turn(User, "hi")]);
    assert_eq!(turns(&json!({"input": ""})), [turn(User, "")]);
    assert_eq!(turns(&json!({"instructions": "be brief", "input": []})), [turn(System, "be brief"), turn(User, "")]);
    assert_eq!(turns(&json!({"instructions": "be brief"})), [turn(System, "be brief"), turn(User, "")]);
    assert_eq!(
        turns(&json!({"instructions": "a", "input": [
            {"type": "message", "role": "developer", "id": "msg_1", "content": [{"type": "input_text", "text": "b"}]},
            {"role": "system", "content": "c"},
            {"role": "user", "content": [{"type": "input_text", "text": "d"}, {"type": "text", "text": "e"}]},
            {"type": "message", "role": "assistant", "status": null, "content": [{"type": "output_text", "text": "f", "annotations": [], "logprobs": []}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "g"}]},
            {"role": "user", "content": "h"},
            {"role": "user", "content": "i"},
        ]})),
        [turn(System, "a\n\nb\n\nc"), turn(User, "d\ne"), turn(Assistant, "f\n\ng"), turn(User, "h"), turn(User, "i")]
    );
}

#[test]
fn json_that_is_too_deep_or_too_large_is_told_apart_from_what_is_none() {
    let said = |body: &str| {
        let error = Request::from_json(body.as_bytes()).unwrap_err();
        assert_eq!(error.code, Code::InvalidJson, "{body}");
        error.one_line()
    };
    let deep = format!(r#"{{"input":"hi","x":{}{}}}"#, "[".repeat(200), "]".repeat(200));
    assert!(said(&deep).starts_with("the body is nested deeper than 128 levels, at line 1, column "));
    assert!(said(r#"{"input":"hi","temperature":1e999}"#).starts_with("the body has a number out of range, at line 1, column "));
    assert!(said(r#"{"input":"#).starts_with("the body is not JSON: "));
}

#[test]
fn an_integer_beyond_64_bits_is_an_impossible_value() {
    for key in ["max_output_tokens", "seed", "top_k"] {
        let error = Request::from_json(format!(r#"{{"input":"hi","{key}":99999999999999999999999}}"#).as_bytes()).unwrap_err();
        assert_eq!((error.code, error.param.as_deref()), (Code::InvalidValue, Some(key)));
    }
}

#[test]
fn every_complaint_says_what_to_do() {
    for (body, hint) in [
        (json!({}), "add `input`"),
        (json!([]), "send an object"),
        (json!({"input": 5}), "send a string or an array of items"),
        (with("max_output_tokens", json!("5")), "send it without the quotes"),
        (with("max_output_tokens", json!("five")), "send an integer"),
        (json!({"input": ["5"]}), "send an object"),
        (with("stream", json!("true")), "send it without the quotes"),
        (with("temperature", json!(3)), "correct `temperature`"),
    ] {
        assert_eq!(read(&body).unwrap_err().hint.as_deref(), Some(hint), "{body}");
    }
}

#[test]
fn sampling_is_read_as_it_was_sent_and_what_is_left_out_is_left_to_the_model() {
    let controls = read(&json!({
        "input": "hi", "temperature": 0.5, "top_p": 0, "top_k": 7, "min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": -1,
        "frequency_penalty": 0.5, "logit_bias": {"7": -100, "0": 0.5, "9": null}, "seed": -1,
    }));
    let controls = controls.unwrap().controls;
    assert_eq!((controls.temperature, controls.top_p, controls.top_k, controls.min_p), (Some(0.5), Some(0.0), Some(7), Some(0.25)));
    assert_eq!((controls.repetition_penalty, controls.presence_penalty, controls.frequency_penalty), (Some(1.5), Some(-1.0), Some(0.5)));
    assert_eq!((&*controls.logit_bias, controls.seed), (&[(7, -100.0), (0, 0.5)][..], Some(u64::MAX)));
    assert_eq!(read(&json!({"input": "hi"})).unwrap().controls, emberd::models::Controls::default());
}

#[test]
fn how_far_to_guess_is_asked_for_in_two_places_and_never_an_error() {
    for (fields, expected) in [
        (json!({}), None),
        (json!({"generation_mode": "ar"}), Some(0)),
        (json!({"generation_mode": "ar", "mtp_depth": 4}), Some(0)),
        (json!({"generation_mode": "mtp"}), Some(64)),
        (json!({"generation_mode": "mtp", "mtp_depth": 1}), Some(1)),
        (json!({"generation_mode": "mtp", "mtp_depth": 64}), Some(64)),
        (json!({"generation_mode": "mtp", "mtp_depth": 65}), Some(64)),
        (json!({"generation_mode": "mtp", "mtp_depth": 0}), Some(64)),
        (json!({"generation_mode": "mtp", "mtp_depth": -3}), Some(64)),
        (json!({"generation_mode": "mtp", "mtp_depth": "8"}), Some(64)),
        (json!({"generation_mode": "mtp", "mtp_depth": 2.5}), Some(64)),
        (json!({"generation_mode": "mtp", "mtp_depth": 1e300}), Some(64)),
        (json!({"generation_mode": "MTP"}), None),
        (json!({"generation_mode": ["mtp"]}), None),
        (json!({"generation_mode": {"mtp": true}, "mtp_depth": [1]}), None),
        (json!({"generation_mode": null, "mtp_depth": null}), None),
        (json!({"generation_mode": "auto", "mtp_depth": 5}), Some(5)),
        (json!({"mtp_depth": 5}), Some(5)),
    ] {
        let mut body = json!({"input": "hi", "extra_body": fields});
        assert_eq!(read(&body).unwrap().speculation, expected, "{body}");
        body = fields;
        body["input"] = json!("hi");
        assert_eq!(read(&body).unwrap().speculation, expected, "{body}");
    }
    for (body, expected) in [
        (json!({"extra_body": "mtp"}), None),
        (json!({"extra_body": ["generation_mode", "mtp"]}), None),
        (json!({"extra_body": null, "generation_mode": "ar"}), Some(0)),
        (json!({"extra_body": {"generation_mode": "mtp", "mtp_depth": 3}, "generation_mode": "ar"}), Some(0)),
        (json!({"extra_body": {"generation_mode": "mtp", "mtp_depth": 3}, "generation_mode": 7}), Some(3)),
        (json!({"extra_body": {"mtp_depth": 3}, "generation_mode": "mtp"}), Some(3)),
    ] {
        let mut body = body;
        body["input"] = json!("hi");
        assert_eq!(read(&body).unwrap().speculation, expected, "{body}");
    }
}

#[test]
fn log_probabilities_are_asked_for_by_either_of_two_fields() {
    let asked = |top: Value, include: Value| {
        let body = json!({"input": "hi", "top_logprobs": top, "include": include});
        read(&body).unwrap().controls.top_logprobs
    };
    let include = || json!(["reasoning.encrypted_content", "message.output_text.logprobs"]);
    assert_eq!(asked(json!(null), json!(null)), None);
    assert_eq!(asked(json!(0), json!([])), None, "the default that clients send along");
    assert_eq!(asked(json!(null), include()), Some(0));
    assert_eq!(asked(json!(0), include()), Some(0));
    assert_eq!(asked(json!(20), include()), Some(20));
    assert_eq!(asked(json!(3), json!(null)), Some(3));
}
