//! Items and tools of a request: what the model is given of them, and which do not belong together.

use emberd::responses::Request;
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
