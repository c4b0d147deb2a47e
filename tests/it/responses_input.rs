//! Items and tools of a request: what the model is given of them, and which do not belong together.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use emberd::responses::{Request, Seal};
use serde_json::{Value, json};

fn read(body: &Value) -> emberd::error::Result<Request> {
    Request::from_json(body.to_string().as_bytes())
}

fn with(key: &str, value: Value) -> Value {
    let mut body = json!({"input": "hi"});
    body[key] = value;
    body
}

#[test]
fn tools_are_shown_under_names_that_are_given_back() {
    let tools = json!([
        {"type": "function", "name": "f", "description": null, "parameters": null, "strict": false},
        {"type": "web_search", "external_web_access": false},
        {"type": "namespace", "name": "ns", "description": "many", "tools": [
            {"type": "function", "name": "do", "description": "does", "parameters": {"properties": {"a": {"type": "string"}}, "x": 1}}]},
        {"type": "custom", "name": "draw", "description": "draws", "format": {"type": "grammar", "syntax": "lark", "definition": "start: \"a\""}},
    ]);
    let request = read(&with("tools", tools.clone())).unwrap();
    let shown = request.tools.definitions();
    let names: Vec<&str> = shown.iter().map(|tool| tool["function"]["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["f", "ns__do", "draw"]);
    assert_eq!(shown[0]["function"]["parameters"], json!({"type": "object", "properties": {}}));
    assert_eq!(shown[1]["function"]["parameters"], json!({"properties": {"a": {"type": "string"}}, "x": 1, "type": "object"}));
    assert_eq!(shown[2]["function"]["description"], "draws\nThe input follows this grammar:\nstart: \"a\"");
    assert_eq!(request.tools.named("ns__do"), ("do", Some("ns"), false));
    assert_eq!(request.tools.named("draw"), ("draw", None, true));
    assert_eq!(request.tools.named("other"), ("other", None, false));
    assert_eq!(request.echo.tools[1..], tools.as_array().unwrap()[1..]);

    let mut body = with("tools", tools);
    body["tool_choice"] =
        json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "namespace": "ns", "name": "do"}]});
    let request = read(&body).unwrap();
    let shown: Vec<Value> = request.tools.definitions().iter().map(|tool| tool["function"]["name"].clone()).collect();
    assert_eq!(shown, ["ns__do"]);
    let signatures = request.tools.signatures();
    let callable: Vec<&str> = signatures.iter().filter(|(_, schema)| **schema != json!(false)).map(|(name, _)| name.as_str()).collect();
    assert_eq!((callable, signatures.len()), (vec!["ns__do"], 3));
    assert_eq!(request.echo.tool_choice, body["tool_choice"]);
    body["tool_choice"] = json!("none");
    assert!(read(&body).unwrap().tools.is_empty());
}

#[test]
fn names_of_tools_are_letters_digits_underscores_and_dashes() {
    let function = |name: &str| json!({"type": "function", "name": name});
    for name in ["a", "get_weather-2", "mcp__files__read", &"x".repeat(64)] {
        assert!(read(&with("tools", json!([function(name)]))).is_ok(), "{name}");
    }
    for name in ["", "a b", "a.b", "a/b", "f\n", "é", "\"", "<tool>", &"x".repeat(65)] {
        for (tools, param) in [
            (json!([{"type": "web_search"}, function(name)]), "tools[1].name"),
            (json!([{"type": "custom", "name": name}]), "tools[0].name"),
            (json!([{"type": "namespace", "name": name, "tools": []}]), "tools[0].name"),
            (json!([{"type": "namespace", "name": "ns", "tools": [function("a"), function(name)]}]), "tools[0].tools[1].name"),
        ] {
            let error = read(&with("tools", tools)).unwrap_err();
            assert_eq!((error.code.row().name, error.param.as_deref()), ("invalid_value", Some(param)), "{name:?}");
        }
    }
}

/// Turns as short words: the role's first letter, `thoughts?`, the text, `name(arguments)`.
fn shape(input: Value) -> Vec<String> {
    let turns = read(&json!({"input": input})).unwrap().turns;
    turns
        .iter()
        .map(|turn| {
            let thoughts = if turn.reasoning.is_empty() { String::new() } else { format!("{}?", turn.reasoning) };
            let calls: String = turn.calls.iter().map(|call| format!(" {}({})", call.name, call.arguments)).collect();
            format!("{}:{thoughts}{}{calls}", &turn.role.name()[..1], turn.text)
        })
        .collect()
}

fn call(id: &str, name: &str) -> Value {
    json!({"type": "function_call", "id": "fc_1", "call_id": id, "name": name, "arguments": "{}", "status": "completed"})
}

fn output(id: &str, text: &str) -> Value {
    json!({"type": "function_call_output", "id": null, "call_id": id, "output": text})
}

#[test]
fn what_the_assistant_did_is_one_turn_and_outputs_follow_in_the_order_of_the_calls() {
    let user = json!({"role": "user", "content": "hi"});
    let reasoning = json!({"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}], "encrypted_content": null, "status": null});
    let said = json!({"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": "ok", "annotations": [], "logprobs": []}]});
    let parts = json!({"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "1"}, {"type": "output_text", "text": "2"}]});
    assert_eq!(
        shape(json!([user, reasoning, said, call("a", "f"), call("b", "g"), output("b", "B"), output("a", "A"), said, user])),
        ["u:hi", "a:hm?ok f({}) g({})", "t:A", "t:B", "a:ok", "u:hi"]
    );
    assert_eq!(
        shape(json!([user, call("a", "f"), said, reasoning, parts, call("b", "g"), output("b", "B")])),
        ["u:hi", "a:hm?ok f({})", "t:1\n2", "a: g({})", "t:B"]
    );
    assert_eq!(
        shape(json!([
            {"type": "reasoning", "id": "", "summary": [{"type": "summary_text", "text": "s"}], "content": null},
            {"type": "function_call", "call_id": "a", "namespace": "ns", "name": "do", "arguments": "{\"x\": 1}"},
            {"type": "custom_tool_call", "call_id": "b", "name": "draw", "input": "a\"b"},
            {"type": "custom_tool_call_output", "call_id": "b", "output": "B"},
            output("a", "A"),
            {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}, "status": "completed"},
            {"type": "local_shell_call_output", "call_id": "c", "output": "{}"},
            {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
        ])),
        [
            "a:s? ns__do({\"x\": 1}) draw({\"input\":\"a\\\"b\"})",
            "t:A",
            "t:B",
            "a: local_shell({\"type\":\"exec\",\"command\":[\"ls\"]})",
            "t:{}",
            "a:[web_search_call: {\"action\":{\"type\":\"search\",\"query\":\"q\"}}]",
        ]
    );
}

#[test]
fn what_the_system_says_between_a_call_and_its_output_comes_after_both() {
    let user = json!({"role": "user", "content": "hi"});
    let system = |text: &str| json!({"role": "developer", "content": text});
    assert_eq!(
        shape(json!([
            user,
            call("a", "f"),
            system("1"),
            call("b", "g"),
            output("b", "B"),
            system("2"),
            output("a", "A"),
            system("3"),
            user
        ])),
        ["u:hi", "a: f({}) g({})", "t:A", "t:B", "s:1\n\n2\n\n3", "u:hi"]
    );
    assert_eq!(
        shape(json!([user, call("a", "f"), {"role": "system", "content": "1"}, output("a", "A"), call("b", "g"), output("b", "B")])),
        ["u:hi", "a: f({})", "t:A", "s:1", "a: g({})", "t:B"]
    );
    let error = read(&json!({"input": [user, call("a", "f"), system("1")]})).unwrap_err();
    assert_eq!(error.param.as_deref(), Some("input"));
}

#[test]
fn a_message_of_the_assistant_may_be_empty_and_that_of_others_may_not() {
    let user = json!({"role": "user", "content": "hi"});
    for said in [json!({"role": "assistant", "content": null}), json!({"type": "message", "role": "assistant"})] {
        assert_eq!(shape(json!([user, said, call("a", "f"), output("a", "A")])), ["u:hi", "a: f({})", "t:A"]);
    }
    for role in ["user", "system", "developer"] {
        let error = read(&json!({"input": [user, {"role": role, "content": null}]})).unwrap_err();
        assert_eq!((error.code.row().name, error.param.as_deref()), ("missing_required_parameter", Some("input[1].content")));
    }
}

#[test]
fn the_output_of_a_local_shell_may_name_its_call_by_its_own_id() {
    let shell = |id: &str| json!({"type": "local_shell_call", "id": format!("lsh_{id}"), "call_id": id, "action": {"type": "exec"}});
    let came = |key: &str, id: &str| json!({"type": "local_shell_call_output", key: id, "output": id});
    let expected = ["a: local_shell({\"type\":\"exec\"}) local_shell({\"type\":\"exec\"})", "t:a", "t:lsh_b"];
    assert_eq!(shape(json!([shell("a"), shell("b"), came("id", "lsh_b"), came("id", "a")])), expected);
    for (item, param) in [
        (came("id", "c"), "input[1].id"),
        (json!({"type": "local_shell_call_output", "output": "x"}), "input[1].call_id"),
        (json!({"type": "local_shell_call_output", "id": "a", "call_id": "b", "output": "x"}), "input[1].call_id"),
        (json!({"type": "function_call_output", "id": "a", "output": "x"}), "input[1].call_id"),
    ] {
        let error = read(&json!({"input": [shell("a"), item]})).unwrap_err();
        assert_eq!(error.param.as_deref(), Some(param), "{item}");
    }
}

#[test]
fn calls_and_outputs_that_do_not_match_are_named() {
    let user = json!({"role": "user", "content": "hi"});
    for (input, param, id) in [
        (json!([user, output("a", "A")]), "input[1].call_id", "\"a\""),
        (json!([call("a", "f"), output("a", "A"), output("a", "A")]), "input[2].call_id", "\"a\""),
        (json!([call("a", "f"), call("b", "f"), output("a", "A"), output("a", "A")]), "input[3].call_id", "\"a\""),
        (json!([call("a", "f"), output("b", "B")]), "input[1].call_id", "\"b\""),
        (json!([call("a", "f"), call("a", "f")]), "input[1].call_id", "\"a\""),
        (json!([call("a", "f"), user, output("a", "A")]), "input[1]", "\"a\""),
        (json!([call("a", "f"), call("b", "f"), output("b", "B"), call("c", "f")]), "input[3]", "\"a\""),
        (json!([user, call("a", "f"), call("b", "f")]), "input", "\"a\", \"b\""),
        (json!([user, call("a", "f"), call("b", "f"), output("a", "A")]), "input", "\"b\""),
        (json!([call("a", "f"), {"type": "function_call_output", "output": "A"}]), "input[1].call_id", "call_id"),
        (json!([call("a", "f"), {"type": "function_call_output", "call_id": "a"}]), "input[1].output", "output"),
        (
            json!([call("a", "f"), {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image", "image_url": "data:,"}]}]),
            "input[1].output[0].type",
            "input_image",
        ),
    ] {
        let error = read(&json!({"input": input})).err().unwrap_or_else(|| panic!("accepted: {input}"));
        assert_eq!(error.param.as_deref(), Some(param), "{input}: {error}");
        assert!(error.code.row().status == 400 && error.message.contains(id), "{input}: {error}");
    }
}

#[test]
fn a_call_that_is_asked_for_is_held_to_a_grammar() {
    use emberd::grammar::Grammar;
    let tools = json!([{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}, {"type": "custom", "name": "draw"}]);
    let asked = |choice: Value, parallel: bool| {
        let mut body = with("tools", tools.clone());
        body["tool_choice"] = choice;
        let request = read(&body).unwrap();
        request.tools.grammar(parallel).map(|grammar| match grammar {
            Grammar::Tagged(tagged) => {
                assert_eq!((tagged.text, tagged.least), (false, 1));
                (tagged.tags.iter().map(|tag| tag.begin.to_string()).collect::<Vec<_>>(), tagged.most)
            }
            other => panic!("{other:?}"),
        })
    };
    let begin = |name: &str| format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": ");
    assert_eq!(asked(json!("auto"), true), None);
    assert_eq!(asked(json!("none"), true), None);
    assert_eq!(asked(json!("required"), true), Some((vec![begin("f"), begin("draw")], None)));
    assert_eq!(asked(json!("required"), false), Some((vec![begin("f"), begin("draw")], Some(1))));
    assert_eq!(asked(json!({"type": "function", "name": "f"}), true), Some((vec![begin("f")], Some(1))));
    assert_eq!(asked(json!({"type": "custom", "name": "draw"}), true), Some((vec![begin("draw")], Some(1))));
    let allowed = json!({"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "draw"}]});
    assert_eq!(asked(allowed, true), Some((vec![begin("draw")], None)));
}

#[test]
fn sealed_thoughts_come_back_to_the_model_and_others_are_refused() {
    let seal = Seal::default();
    let blob = seal.seal("what I thought").unwrap();
    let item = |blob: Value| json!({"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "changed"}], "encrypted_content": blob});
    let body =
        |blob: Value| json!({"input": [item(blob), {"role": "assistant", "content": "so"}, {"role": "user", "content": "hi"}]}).to_string();
    let read = |seal: &Seal, blob: Value| Request::read(body(blob).as_bytes(), seal);
    assert_eq!(read(&seal, json!(blob)).unwrap().turns[0].reasoning, "what I thought");
    for none in [Value::Null, json!("")] {
        assert_eq!(read(&seal, none).unwrap().turns[0].reasoning, "changed");
    }
    for (seal, blob) in [(&seal, "gAAAAAB".to_owned()), (&seal, format!("{blob}A")), (&Seal::default(), blob)] {
        let error = read(seal, json!(blob)).unwrap_err();
        assert_eq!((error.code.row().name, error.code.row().status), ("invalid_encrypted_content", 400));
        assert_eq!(error.param.as_deref(), Some("input[0].encrypted_content"));
    }
    let error = read(&seal, json!(7)).unwrap_err();
    assert_eq!((error.code.row().name, error.param.as_deref()), ("invalid_type", Some("input[0].encrypted_content")));
    for (include, sealed) in
        [(json!(["reasoning.encrypted_content"]), true), (json!(["message.output_text.logprobs"]), false), (Value::Null, false)]
    {
        let body = json!({"input": "hi", "include": include});
        assert_eq!(Request::read(body.to_string().as_bytes(), &seal).unwrap().seal.is_some(), sealed, "{include}");
    }
}

fn data(kind: &str, bytes: &[u8]) -> String {
    format!("data:{kind};base64,{}", BASE64_STANDARD.encode(bytes))
}

#[test]
fn text_files_are_text_wherever_they_stand() {
    let file = |url: String, name: Option<&str>| json!({"type": "input_file", "file_data": url, "filename": name});
    for (part, expected) in [
        (file(data("text/plain", "größe 🙂\n".as_bytes()), None), "größe 🙂\n"),
        (file(data("text/markdown; charset=utf-8", b"# Title"), Some("notes.md")), "notes.md:\n# Title"),
        (file(data("TEXT/CSV", b"a,b\n1,2"), None), "a,b\n1,2"),
        (file(data("application/json", b"{}"), Some("a.json")), "a.json:\n{}"),
        (file(data("application/ld+json", b"[]"), None), "[]"),
        (file(data("application/octet-stream", b"x"), Some("a.TXT")), "a.TXT:\nx"),
        (file("data:text/plain,a%20b%2C".to_owned(), None), "a b,"),
        (file("data:text/plain;base64,YWI".to_owned(), None), "ab"),
        (file("data:text/plain;base64,YWI%3D\n".to_owned(), None), "ab"),
        (file(data("text/plain", "\u{feff}bom".as_bytes()), None), "bom"),
        (file(data("text/plain", b""), None), ""),
    ] {
        let input = json!([{"role": "user", "content": [{"type": "input_text", "text": "Read:"}, part.clone()]}]);
        assert_eq!(shape(input), [format!("u:Read:\n{expected}")], "{part}");
        let input = json!([call("a", "f"), {"type": "function_call_output", "call_id": "a", "output": [part]}]);
        assert_eq!(shape(input)[1], format!("t:{expected}"));
    }
}

#[test]
fn files_and_images_that_are_not_text_are_refused_by_name() {
    let png = data("image/png", b"\x89PNG");
    let (pdf, program) = (data("application/pdf", b"%PDF"), data("application/octet-stream", b"x"));
    let unsupported = "unsupported_parameter";
    for (part, code, field, what) in [
        (json!({"type": "input_image", "image_url": png}), unsupported, "type", "input_image"),
        (json!({"type": "input_image", "image_url": "https://example.com/a.png"}), unsupported, "type", "input_image"),
        (json!({"type": "input_image", "file_id": "file_1"}), unsupported, "type", "input_image"),
        (json!({"type": "image_url", "image_url": {"url": png}}), unsupported, "type", "image_url"),
        (json!({"type": "input_file", "file_data": pdf, "filename": "a.pdf"}), unsupported, "file_data", "application/pdf"),
        (json!({"type": "input_file", "file_data": png}), unsupported, "file_data", "image/png"),
        (json!({"type": "input_file", "file_data": program, "filename": "a.exe"}), unsupported, "file_data", "octet-stream"),
        (json!({"type": "input_file", "file_url": "https://example.com/a.txt"}), unsupported, "file_url", "fetches"),
        (json!({"type": "input_file", "file_id": "file_1"}), unsupported, "file_id", "keeps"),
        (json!({"type": "input_file"}), unsupported, "type", "file_data"),
        (json!({"type": "input_file", "file_data": "YWI="}), "invalid_value", "file_data", "data URL"),
        (json!({"type": "input_file", "file_data": "data:text/plain;base64,%%%"}), "invalid_value", "file_data", "base64"),
        (json!({"type": "input_file", "file_data": data("text/plain", &[0xFF, 0xFE])}), "invalid_value", "file_data", "UTF-8"),
        (json!({"type": "input_file", "file_data": 7}), "invalid_type", "file_data", "string"),
    ] {
        for (input, place) in [
            (json!([{"role": "user", "content": [part.clone()]}]), "input[0].content[0]"),
            (json!([call("a", "f"), {"type": "function_call_output", "call_id": "a", "output": [part.clone()]}]), "input[1].output[0]"),
        ] {
            let error = read(&json!({"input": input})).unwrap_err();
            assert_eq!((error.code.row().name, error.param.clone()), (code, Some(format!("{place}.{field}"))), "{part}");
            assert!(error.message.contains(what), "{part}: {}", error.message);
        }
    }
}
