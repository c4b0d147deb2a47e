//! What a request for a completion may say: it is read as the request of the Responses API that says the same, and complaints name its own fields.

use emberd::completions::{Wanted, in_terms, read};
use emberd::error::{Code, Error, Result};
use emberd::responses::{Format, Request};
use serde_json::{Value, json};

fn chat(body: &Value) -> Result<(Request, Wanted)> {
    read(body.to_string().as_bytes())
}

/// A request with one field more than it needs.
fn with(key: &str, value: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
    body[key] = value;
    body
}

fn messages(messages: Value) -> Value {
    json!({"messages": messages})
}

fn function(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name}})
}

#[test]
fn each_wrong_field_is_named_with_its_path() {
    use Code::{InvalidType, InvalidValue, MissingRequiredParameter, UnsupportedParameter};
    let user = |content: Value| messages(json!([{"role": "user", "content": content}]));
    let calls =
        |calls: Value| messages(json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": null, "tool_calls": calls}]));
    let tools = |tools: Value| with("tools", tools);
    let choice = |choice: Value| {
        let mut body = with("tools", json!([function("f")]));
        body["tool_choice"] = choice;
        body
    };
    let both = |old: u32, new: u32| {
        let mut body = with("max_tokens", json!(old));
        body["max_completion_tokens"] = json!(new);
        body
    };
    let cases = [
        (json!([]), InvalidType, ""),
        (json!({}), MissingRequiredParameter, "messages"),
        (json!({"messages": null}), MissingRequiredParameter, "messages"),
        (messages(json!([])), InvalidValue, "messages"),
        (messages(json!("hi")), InvalidType, "messages"),
        (messages(json!(["hi"])), InvalidType, "messages[0]"),
        (messages(json!([{"content": "hi"}])), MissingRequiredParameter, "messages[0].role"),
        (messages(json!([{"role": "robot", "content": "hi"}])), InvalidValue, "messages[0].role"),
        (messages(json!([{"role": "function", "name": "f", "content": "hi"}])), UnsupportedParameter, "messages[0].role"),
        (messages(json!([{"role": "user"}])), MissingRequiredParameter, "messages[0].content"),
        (messages(json!([{"role": "system", "content": null}])), MissingRequiredParameter, "messages[0].content"),
        (messages(json!([{"role": "user", "content": "x", "name": 5}])), InvalidType, "messages[0].name"),
        (user(json!(5)), InvalidType, "messages[0].content"),
        (user(json!({"type": "text", "text": "hi"})), InvalidType, "messages[0].content"),
        (user(json!(["hi"])), InvalidType, "messages[0].content[0]"),
        (user(json!([{"text": "hi"}])), MissingRequiredParameter, "messages[0].content[0].type"),
        (user(json!([{"type": "text"}])), MissingRequiredParameter, "messages[0].content[0].text"),
        (user(json!([{"type": "text", "text": "a"}, {"type": "text", "text": 1}])), InvalidType, "messages[0].content[1].text"),
        (user(json!([{"type": "image_url", "image_url": {"url": "data:,"}}])), UnsupportedParameter, "messages[0].content[0].type"),
        (user(json!([{"type": "input_audio", "input_audio": {}}])), UnsupportedParameter, "messages[0].content[0].type"),
        (user(json!([{"type": "file", "file": {}}])), UnsupportedParameter, "messages[0].content[0].type"),
        (user(json!([{"type": "wibble"}])), InvalidValue, "messages[0].content[0].type"),
        (
            messages(json!([{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}])),
            UnsupportedParameter,
            "messages[0].function_call",
        ),
        (messages(json!([{"role": "assistant", "content": null, "audio": {"id": "a"}}])), UnsupportedParameter, "messages[0].audio"),
        (messages(json!([{"role": "assistant", "content": "x", "reasoning_content": 1}])), InvalidType, "messages[0].reasoning_content"),
        (messages(json!([{"role": "assistant", "content": "x", "refusal": 1}])), InvalidType, "messages[0].refusal"),
        (calls(json!({})), InvalidType, "messages[1].tool_calls"),
        (calls(json!(["f"])), InvalidType, "messages[1].tool_calls[0]"),
        (
            calls(json!([{"type": "function", "function": {"name": "f", "arguments": "{}"}}])),
            MissingRequiredParameter,
            "messages[1].tool_calls[0].id",
        ),
        (calls(json!([{"id": "", "function": {"name": "f", "arguments": "{}"}}])), InvalidValue, "messages[1].tool_calls[0].id"),
        (calls(json!([{"id": "c", "type": "shell"}])), InvalidValue, "messages[1].tool_calls[0].type"),
        (calls(json!([{"id": "c", "type": "function"}])), MissingRequiredParameter, "messages[1].tool_calls[0].function"),
        (calls(json!([{"id": "c", "function": {"arguments": "{}"}}])), MissingRequiredParameter, "messages[1].tool_calls[0].function.name"),
        (
            calls(json!([{"id": "c", "function": {"name": "f", "arguments": {}}}])),
            InvalidType,
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            calls(json!([{"id": "c", "type": "custom", "custom": {"name": "f"}}])),
            MissingRequiredParameter,
            "messages[1].tool_calls[0].custom.input",
        ),
        (calls(json!([{"id": "c", "function": {"name": "f", "arguments": "{}"}}])), InvalidValue, "messages"),
        (with("model", json!(5)), InvalidType, "model"),
        (with("stream", json!("true")), InvalidType, "stream"),
        (with("stream_options", json!(true)), InvalidType, "stream_options"),
        (with("stream_options", json!({"include_usage": 1})), InvalidType, "stream_options.include_usage"),
        (with("max_tokens", json!(0)), InvalidValue, "max_tokens"),
        (with("max_tokens", json!("5")), InvalidType, "max_tokens"),
        (with("max_completion_tokens", json!(-1)), InvalidValue, "max_completion_tokens"),
        (both(5, 6), InvalidValue, "max_tokens"),
        (with("n", json!(2)), UnsupportedParameter, "n"),
        (with("n", json!(0)), InvalidValue, "n"),
        (with("n", json!("1")), InvalidType, "n"),
        (with("temperature", json!(2.1)), InvalidValue, "temperature"),
        (with("top_p", json!("1")), InvalidType, "top_p"),
        (with("top_k", json!(-1)), InvalidValue, "top_k"),
        (with("min_p", json!(2)), InvalidValue, "min_p"),
        (with("repetition_penalty", json!(0)), InvalidValue, "repetition_penalty"),
        (with("presence_penalty", json!(3)), InvalidValue, "presence_penalty"),
        (with("frequency_penalty", json!(-3)), InvalidValue, "frequency_penalty"),
        (with("logit_bias", json!({"5": 101})), InvalidValue, "logit_bias.5"),
        (with("seed", json!(1.5)), InvalidType, "seed"),
        (with("stop", json!(["a", ""])), InvalidValue, "stop[1]"),
        (with("logprobs", json!(3)), InvalidType, "logprobs"),
        (with("top_logprobs", json!(3)), InvalidValue, "top_logprobs"),
        (with("top_logprobs", json!(21)), InvalidValue, "top_logprobs"),
        (with("functions", json!([])), UnsupportedParameter, "functions"),
        (with("function_call", json!("auto")), UnsupportedParameter, "function_call"),
        (with("modalities", json!(["text", "audio"])), UnsupportedParameter, "modalities[1]"),
        (with("audio", json!({"voice": "x"})), UnsupportedParameter, "audio"),
        (with("prediction", json!("x")), InvalidType, "prediction"),
        (with("reasoning_effort", json!("huge")), InvalidValue, "reasoning_effort"),
        (with("verbosity", json!("loud")), InvalidValue, "verbosity"),
        (with("store", json!("yes")), InvalidType, "store"),
        (with("user", json!(1)), InvalidType, "user"),
        (with("metadata", json!({"a": 1})), InvalidType, "metadata.a"),
        (with("parallel_tool_calls", json!("no")), InvalidType, "parallel_tool_calls"),
        (with("cache_salt", json!("")), InvalidValue, "cache_salt"),
        (tools(json!({})), InvalidType, "tools"),
        (tools(json!([{"function": {"name": "f"}}])), MissingRequiredParameter, "tools[0].type"),
        (tools(json!([{"type": "function", "name": "f"}])), MissingRequiredParameter, "tools[0].function"),
        (tools(json!([{"type": "function", "function": "f"}])), InvalidType, "tools[0].function"),
        (tools(json!([{"type": "function", "function": {"name": "a b"}}])), InvalidValue, "tools[0].function.name"),
        (tools(json!([{"type": "function", "function": {"name": "f", "parameters": "{}"}}])), InvalidType, "tools[0].function.parameters"),
        (tools(json!([function("f"), function("f")])), InvalidValue, "tools[1].function"),
        (tools(json!([{"type": "custom", "custom": {}}])), MissingRequiredParameter, "tools[0].custom.name"),
        (choice(json!(5)), InvalidType, "tool_choice"),
        (choice(json!("any")), InvalidValue, "tool_choice"),
        (choice(json!({"type": "function"})), MissingRequiredParameter, "tool_choice.function"),
        (choice(json!({"type": "function", "name": "f"})), MissingRequiredParameter, "tool_choice.function"),
        (choice(function("g")), InvalidValue, "tool_choice.function.name"),
        (choice(json!({"type": "web_search"})), UnsupportedParameter, "tool_choice"),
        (choice(json!({"type": "allowed_tools"})), MissingRequiredParameter, "tool_choice.allowed_tools"),
        (
            choice(json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto"}})),
            MissingRequiredParameter,
            "tool_choice.allowed_tools.tools",
        ),
        (
            choice(json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [function("f"), function("g")]}})),
            InvalidValue,
            "tool_choice.allowed_tools.tools[1].function.name",
        ),
        (choice(json!({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}})), InvalidValue, "tool_choice"),
        (with("tool_choice", json!("required")), InvalidValue, "tool_choice"),
        (with("response_format", json!("json")), InvalidType, "response_format"),
        (with("response_format", json!({})), MissingRequiredParameter, "response_format.type"),
        (with("response_format", json!({"type": "xml"})), InvalidValue, "response_format.type"),
        (with("response_format", json!({"type": "json_schema"})), MissingRequiredParameter, "response_format.json_schema"),
        (with("response_format", json!({"type": "json_schema", "json_schema": 1})), InvalidType, "response_format.json_schema"),
        (
            with("response_format", json!({"type": "json_schema", "json_schema": {"schema": {}}})),
            MissingRequiredParameter,
            "response_format.json_schema.name",
        ),
        (
            with("response_format", json!({"type": "json_schema", "json_schema": {"name": "a"}})),
            MissingRequiredParameter,
            "response_format.json_schema.schema",
        ),
    ];
    for (body, code, param) in cases {
        let error = chat(&body).expect_err(&body.to_string());
        assert_eq!((error.code, error.param.as_deref().unwrap_or_default()), (code, param), "{body}: {error}");
        assert!(error.hint.is_some() || code == UnsupportedParameter, "{body}: {error}");
    }
}

/// What both say the same of is read the same.
fn assert_same(chat_says: &Value, responses_say: &Value) {
    let (chat, _) = chat(chat_says).unwrap_or_else(|error| panic!("{chat_says}: {error}"));
    let responses = Request::from_json(responses_say.to_string().as_bytes()).unwrap_or_else(|error| panic!("{responses_say}: {error}"));
    assert_eq!(chat.turns, responses.turns, "{chat_says}");
    assert_eq!(chat.tools.definitions(), responses.tools.definitions(), "{chat_says}");
    assert_eq!(chat.tools.signatures(), responses.tools.signatures(), "{chat_says}");
    for parallel in [true, false] {
        assert_eq!(chat.tools.grammar(parallel), responses.tools.grammar(parallel), "{chat_says}");
    }
    let rest = |request: &Request| {
        let Request { model, stream, max_output_tokens, controls, speculation, stop, truncation, echo, .. } = request;
        let one = format!("{:?}", (model, stream, max_output_tokens, controls, speculation, stop, truncation));
        let echo = format!("{:?}", (&echo.parallel_tool_calls, &echo.reasoning, &echo.format, &echo.metadata, &echo.user, &echo.verbosity));
        (one, echo)
    };
    assert_eq!(rest(&chat), rest(&responses), "{chat_says}");
}

#[test]
fn a_conversation_becomes_the_turns_that_items_become() {
    let call =
        |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    let item =
        |id: &str, name: &str, arguments: &str| json!({"type": "function_call", "call_id": id, "name": name, "arguments": arguments});
    let output = |id: &str, text: &str| json!({"type": "function_call_output", "call_id": id, "output": text});
    let tool = |id: &str, text: &str| json!({"role": "tool", "tool_call_id": id, "content": text});
    for (messages, input) in [
        (json!([{"role": "user", "content": "hi"}]), json!("hi")),
        (
            json!([{"role": "system", "content": "a"}, {"role": "developer", "content": [{"type": "text", "text": "b"}]}, {"role": "user", "content": "c", "name": "Ann"}]),
            json!([{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}, {"role": "user", "content": "c"}]),
        ),
        (json!([{"role": "system", "content": "alone"}]), json!([{"role": "system", "content": "alone"}])),
        (
            json!([
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "c"}, {"type": "refusal", "refusal": "d"}]},
                {"role": "user", "content": "e"},
                {"role": "user", "content": ""},
            ]),
            json!([
                {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "c"}, {"type": "refusal", "refusal": "d"}]},
                {"role": "user", "content": "e"},
                {"role": "user", "content": ""},
            ]),
        ),
        // Answers in another order than their calls, and a word of the system's between them.
        (
            json!([
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b", "reasoning_content": "t", "tool_calls": [call("1", "f", "{}"), call("2", "g", "{\"x\": 1}")]},
                tool("2", "second"),
                {"role": "system", "content": "between"},
                tool("1", "first"),
                {"role": "assistant", "content": null, "tool_calls": [{"id": "3", "type": "custom", "custom": {"name": "draw", "input": "a \"sun\""}}]},
                {"role": "tool", "tool_call_id": "3", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
                {"role": "assistant", "content": "c", "tool_calls": []},
                {"role": "assistant", "content": "d", "function_call": null, "audio": null},
            ]),
            json!([
                {"role": "user", "content": "a"},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
                {"role": "assistant", "content": "b"},
                item("1", "f", "{}"),
                item("2", "g", "{\"x\": 1}"),
                output("2", "second"),
                {"role": "system", "content": "between"},
                output("1", "first"),
                {"type": "custom_tool_call", "call_id": "3", "name": "draw", "input": "a \"sun\""},
                {"type": "custom_tool_call_output", "call_id": "3", "output": "x\ny"},
                {"role": "assistant", "content": "c"},
                {"role": "assistant", "content": "d"},
            ]),
        ),
    ] {
        assert_same(&json!({"messages": messages}), &json!({"input": input}));
    }
    let refused = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": null, "refusal": "no"}]);
    assert_same(
        &json!({"messages": refused}),
        &json!({"input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "no"}]}),
    );
}

#[test]
fn calls_are_answered_once_each_and_before_anything_else() {
    let call = |id: &str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let calls = json!({"role": "assistant", "content": null, "tool_calls": [call("call_a"), call("call_b")]});
    let tool = |id: &str| json!({"role": "tool", "tool_call_id": id, "content": "x"});
    let user = json!({"role": "user", "content": "hi"});
    for (messages, param, named) in [
        (json!([user, tool("call_a")]), "messages[1].tool_call_id", "call_a"),
        (json!([user, calls, tool("call_a"), tool("call_a")]), "messages[3].tool_call_id", "call_a"),
        (json!([user, calls, tool("call_c")]), "messages[2].tool_call_id", "call_c"),
        (json!([user, calls, tool("call_a")]), "messages", "call_b"),
        (json!([user, calls]), "messages", "\"call_a\", \"call_b\""),
        (json!([user, calls, user]), "messages[2]", "\"call_a\", \"call_b\""),
        (json!([user, calls, {"role": "assistant", "content": "x"}]), "messages[2]", "\"call_a\", \"call_b\""),
        (json!([user, calls, tool("call_a"), tool("call_b"), tool("call_b")]), "messages[4].tool_call_id", "call_b"),
        (json!([user, {"role": "assistant", "tool_calls": [call("call_a"), call("call_a")]}]), "messages[1].tool_calls[1].id", "call_a"),
        (json!([user, {"role": "tool", "content": "x"}]), "messages[1].tool_call_id", "tool_call_id"),
    ] {
        let error = chat(&json!({"messages": messages})).expect_err(&messages.to_string());
        assert_eq!(error.param.as_deref(), Some(param), "{messages}: {error}");
        assert!(error.message.contains(named), "{error}");
    }
}

#[test]
fn every_field_is_that_of_the_responses_api() {
    let chat = |more: &Value| merged(&json!({"messages": [{"role": "user", "content": "hi"}]}), more);
    let responses = |more: &Value| merged(&json!({"input": "hi"}), more);
    let same = json!({
        "model": "m", "stream": true, "temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5, "presence_penalty": 1,
        "frequency_penalty": -1, "logit_bias": {"7": -100}, "seed": -5, "stop": ["a", "b"], "user": "u", "store": true, "metadata": {"a": "b"},
        "parallel_tool_calls": false, "service_tier": "flex", "safety_identifier": "s", "prompt_cache_key": "key", "generation_mode": "ar", "wibble": 5,
    });
    assert_same(&chat(&same), &responses(&same));
    let nulls: Value = [
        "model",
        "stream",
        "temperature",
        "stop",
        "n",
        "logprobs",
        "top_logprobs",
        "tools",
        "tool_choice",
        "response_format",
        "functions",
        "function_call",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "modalities",
        "audio",
        "reasoning_effort",
        "include",
    ]
    .into_iter()
    .map(|key| (key.to_owned(), Value::Null))
    .collect();
    assert_same(&chat(&nulls), &responses(&json!({})));
    for (ours, theirs) in [
        (json!({"max_tokens": 5}), json!({"max_output_tokens": 5})),
        (json!({"max_completion_tokens": 5}), json!({"max_output_tokens": 5})),
        (json!({"max_tokens": 5, "max_completion_tokens": 5}), json!({"max_output_tokens": 5})),
        (json!({"stop": "x", "n": 1, "modalities": ["text"], "prediction": {}, "include": 5}), json!({"stop": "x"})),
        (json!({"reasoning_effort": "none"}), json!({"reasoning": {"effort": "none"}})),
        (json!({"reasoning_effort": "high", "verbosity": "low"}), json!({"reasoning": {"effort": "high"}, "text": {"verbosity": "low"}})),
        (json!({"logprobs": false, "top_logprobs": 0}), json!({"top_logprobs": 0})),
        (json!({"logprobs": true}), json!({"include": ["message.output_text.logprobs"]})),
        (json!({"logprobs": true, "top_logprobs": 3}), json!({"top_logprobs": 3})),
        (json!({"response_format": {"type": "text"}}), json!({})),
        (json!({"response_format": {"type": "json_object"}}), json!({"text": {"format": {"type": "json_object"}}})),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "description": "d", "schema": {"type": "object"}, "strict": true}}}),
            json!({"text": {"format": {"type": "json_schema", "name": "a", "description": "d", "schema": {"type": "object"}, "strict": true}}}),
        ),
    ] {
        assert_same(&chat(&ours), &responses(&theirs));
    }
}

fn merged(one: &Value, other: &Value) -> Value {
    let fields = one.as_object().unwrap().iter().chain(other.as_object().unwrap());
    fields.map(|(key, value)| (key.clone(), value.clone())).collect()
}

#[test]
fn tools_and_the_choice_among_them_are_those_of_the_responses_api() {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let ours = json!([
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": parameters, "strict": true}},
        {"type": "web_search"},
        {"type": "custom", "custom": {"name": "g", "description": "e", "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: \"x\""}}}},
        {"type": "function", "function": {"name": "h"}},
    ]);
    let theirs = json!([
        {"type": "function", "name": "f", "description": "d", "parameters": parameters, "strict": true},
        {"type": "web_search"},
        {"type": "custom", "name": "g", "description": "e", "format": {"type": "grammar", "syntax": "lark", "definition": "start: \"x\""}},
        {"type": "function", "name": "h"},
    ]);
    let allowed = |mode: &str| {
        (
            json!({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [function("h"), {"type": "custom", "custom": {"name": "g"}}]}}),
            json!({"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "h"}, {"type": "custom", "name": "g"}]}),
        )
    };
    for (our, their) in [
        (json!(null), json!(null)),
        (json!("none"), json!("none")),
        (json!("auto"), json!("auto")),
        (json!("required"), json!("required")),
        (function("f"), json!({"type": "function", "name": "f"})),
        (json!({"type": "custom", "custom": {"name": "g"}}), json!({"type": "custom", "name": "g"})),
        allowed("auto"),
        allowed("required"),
    ] {
        assert_same(
            &json!({"messages": [{"role": "user", "content": "hi"}], "tools": ours, "tool_choice": our}),
            &json!({"input": "hi", "tools": theirs, "tool_choice": their}),
        );
    }
}

#[test]
fn what_is_to_be_told_is_what_was_asked_for() {
    for (body, logprobs, usage) in [
        (with("stream", json!(true)), false, false),
        (with("stream_options", json!({"include_usage": true, "include_obfuscation": false})), false, true),
        (with("stream_options", json!({"include_usage": null})), false, false),
        (with("logprobs", json!(true)), true, false),
    ] {
        let (request, wanted) = chat(&body).unwrap();
        assert_eq!(wanted, Wanted { logprobs, usage }, "{body}");
        assert_eq!(request.controls.top_logprobs.is_some(), logprobs);
        assert_eq!(request.echo.format, Format::Text);
    }
}

#[test]
fn later_complaints_are_told_in_the_same_terms() {
    for (theirs, ours) in [
        ("input", "messages"),
        ("text.format.schema", "response_format.json_schema.schema"),
        ("text.format.type", "response_format.type"),
        ("text.format", "response_format"),
        ("tools[0].function.parameters", "tools[0].function.parameters"),
        ("input_tokens", "input_tokens"),
        ("logit_bias.5", "logit_bias.5"),
    ] {
        let error = Error::new(Code::InvalidValue, "it is wrong").at(theirs);
        assert_eq!(in_terms(error).param.as_deref(), Some(ours));
    }
    assert_eq!(in_terms(Error::new(Code::QueueFull, "full")).param, None);
}
