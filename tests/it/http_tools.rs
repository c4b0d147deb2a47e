//! Tools, thoughts and what comes of them over the wire, with the mock engine told what to answer.

use emberd::engine::mock::Mock;
use emberd::http::Options;
use emberd::responses::ReasoningEvents;
use serde_json::{Value, json};

use crate::http_support::{Server, call, get, post, script, until};

fn tools() -> Value {
    json!([
        {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
        {"type": "web_search"},
        {"type": "custom", "name": "draw"},
        {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "do"}]},
    ])
}

/// The output without ids, which differ.
fn bare(response: &Value) -> Vec<Value> {
    let mut items = response["output"].as_array().unwrap().clone();
    for item in &mut items {
        let fields = item.as_object_mut().unwrap();
        fields.remove("id").unwrap();
        fields.remove("call_id");
    }
    items
}

#[tokio::test]
async fn a_turn_with_a_tool_goes_round_in_both_forms() {
    let answer = format!("<think>\nHm.\n</think>\n\nI ask.\n{}{}", call("weather", "{\"city\": \"Paris\"}"), call("ns__do", "{}"));
    for stream in [false, true] {
        let server = Server::start(script(&[&answer, "It is sunny."])).await;
        let ask = async |input: Value| {
            let reply = server.ask(&json!({"input": input, "tools": tools(), "stream": stream})).await;
            if stream { reply.events().last().unwrap()["response"].clone() } else { reply.json() }
        };
        let user = json!({"role": "user", "content": "Weather?"});
        let response = ask(json!([user])).await;
        assert_eq!(
            bare(&response),
            [
                json!({"type": "reasoning", "status": "completed", "summary": [{"type": "summary_text", "text": "Hm."}]}),
                json!({"type": "message", "status": "completed", "role": "assistant",
                    "content": [{"type": "output_text", "annotations": [], "logprobs": [], "text": "I ask."}]}),
                json!({"type": "function_call", "status": "completed", "name": "weather", "arguments": "{\"city\": \"Paris\"}"}),
                json!({"type": "function_call", "status": "completed", "name": "do", "namespace": "ns", "arguments": "{}"}),
            ],
            "stream: {stream}"
        );
        assert_eq!(response["status"], "completed");
        // `\nHm.\n</think>`, a byte each.
        assert_eq!(response["usage"]["output_tokens_details"]["reasoning_tokens"], 13);
        assert_eq!(response["tools"].as_array().unwrap().len(), 4);

        // What came goes back as it is, and with it what came of the calls.
        let mut input = vec![user];
        input.extend(response["output"].as_array().unwrap().iter().cloned());
        for (index, output) in [(3, "done"), (2, "sunny")] {
            input.push(json!({"type": "function_call_output", "call_id": response["output"][index]["call_id"], "output": output}));
        }
        let response = ask(Value::from(input)).await;
        assert_eq!(response["output"][0]["content"][0]["text"], "It is sunny.");
        assert_eq!(response["output"].as_array().unwrap().len(), 1);
    }
}

#[tokio::test]
async fn without_parallel_calls_the_answer_ends_with_the_first() {
    let answer = call("weather", "{}").repeat(3);
    for stream in [false, true] {
        let server = Server::start(script(&[&answer])).await;
        let body = json!({"input": "hi", "tools": tools(), "parallel_tool_calls": false, "stream": stream});
        let reply = server.ask(&body).await;
        let response = if stream { reply.events().last().unwrap()["response"].clone() } else { reply.json() };
        assert_eq!(response["output"].as_array().unwrap().len(), 1, "{response}");
        assert_eq!(response["status"], "completed");
        assert!(response["usage"]["output_tokens"].as_u64().unwrap() < answer.len() as u64);
        until("the engine has let go of it", || server.load().running == 0).await;
    }
}

#[tokio::test]
async fn a_custom_tool_gets_its_text() {
    let server = Server::start(script(&[&call("draw", "{\"input\": \"a \\\"line\\\"\\nand more\"}")])).await;
    let events = server.ask(&json!({"input": "hi", "tools": tools(), "stream": true})).await.events();
    let response = &events.last().unwrap()["response"];
    assert_eq!(
        bare(response),
        [json!({"type": "custom_tool_call", "status": "completed", "name": "draw", "input": "a \"line\"\nand more"})]
    );
    // The mock says a byte at a time, and each is told when it is said.
    let deltas: Vec<&str> = events
        .iter()
        .filter(|event| event["type"] == "response.custom_tool_call_input.delta")
        .map(|event| event["delta"].as_str().unwrap())
        .collect();
    assert_eq!(deltas.concat(), "a \"line\"\nand more");
    assert!(deltas.len() > 1, "{deltas:?}");
}

#[tokio::test]
async fn a_call_that_is_none_is_shown_and_one_that_is_cut_off_is_incomplete() {
    let broken = "<tool_call>{\"name\": \"weather\", \"arguments\": oops}</tool_call>";
    let server = Server::start(script(&[broken])).await;
    let response = server.ask(&json!({"input": "hi", "tools": tools()})).await.json();
    assert_eq!(response["output"][0]["content"][0]["text"], broken);

    let server = Server::start(script(&[&call("weather", "{\"city\": \"Paris\"}")])).await;
    for (limit, kind, field, text) in
        [(20, "message", "/content/0/text", "<tool_call>\n{\"name\":"), (60, "function_call", "/arguments", "{\"city\": \"P")]
    {
        let body = json!({"input": "hi", "tools": tools(), "max_output_tokens": limit});
        let response = server.ask(&body).await.json();
        assert_eq!((&response["status"], &response["incomplete_details"]["reason"]), (&json!("incomplete"), &json!("max_output_tokens")));
        let item = &response["output"][0];
        assert_eq!((&item["type"], &item["status"]), (&json!(kind), &json!("incomplete")));
        let found = item.pointer(field).unwrap().as_str().unwrap();
        assert!(found.starts_with(text), "{found}");
    }
}

#[tokio::test]
async fn calls_are_text_where_tools_are_ruled_out() {
    let answer = call("weather", "{}");
    let server = Server::start(script(&[&answer])).await;
    for body in [json!({"input": "hi", "tools": tools(), "tool_choice": "none"}), json!({"input": "hi"})] {
        let response = server.ask(&body).await.json();
        assert_eq!(response["output"][0]["content"][0]["text"], answer);
    }
}

#[tokio::test]
async fn a_call_of_a_tool_that_is_not_allowed_is_text() {
    let (barred, allowed) = (call("ns__do", "{}"), call("weather", "{}"));
    let choice = json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]});
    for stream in [false, true] {
        let server = Server::start(script(&[&format!("{allowed}{barred}"), &barred])).await;
        let ask = async || {
            let reply = server.ask(&json!({"input": "hi", "tools": tools(), "tool_choice": choice, "stream": stream})).await;
            if stream { reply.events().last().unwrap()["response"].clone() } else { reply.json() }
        };
        let both = bare(&ask().await);
        assert_eq!(both[0], json!({"type": "function_call", "status": "completed", "name": "weather", "arguments": "{}"}));
        assert_eq!((both.len(), &both[1]["type"], &both[1]["content"][0]["text"]), (2, &json!("message"), &json!(barred)));
        let alone = bare(&ask().await);
        assert_eq!((alone.len(), &alone[0]["content"][0]["text"]), (1, &json!(barred)));
    }
}

#[tokio::test]
async fn thoughts_go_out_as_text_where_that_is_set() {
    let options = Options { reasoning_events: ReasoningEvents::Text, ..Options::default() };
    let server = Server::with(script(&["<think>Hm.</think>Four."]), options, 8).await;
    let events = server.ask(&json!({"input": "hi", "stream": true})).await.events();
    let types: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).filter(|kind| !kind.ends_with(".delta")).collect();
    assert_eq!(
        types,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.reasoning_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
}

#[tokio::test]
async fn a_stop_string_does_not_cut_thoughts_or_calls() {
    let answer = format!("<think>a STOP b</think>c STO{}STOP d", call("weather", "{\"city\": \"STOP\"}"));
    let server = Server::start(script(&[&answer])).await;
    let response = server.ask(&json!({"input": "hi", "tools": tools(), "stop": ["STOP"]})).await.json();
    let output = &response["output"];
    assert_eq!(output[0]["summary"][0]["text"], "a STOP b");
    assert_eq!(output[1]["content"][0]["text"], "c STO");
    assert_eq!(output[2]["arguments"], "{\"city\": \"STOP\"}");
    assert_eq!((output.as_array().unwrap().len(), &response["status"]), (3, &json!("completed")));
}

#[tokio::test]
async fn truncation_keeps_calls_and_what_came_of_them_together() {
    let server = Server::start(Mock { context_length: 1024, stop_after: 2, ..Mock::default() }).await;
    let round = |letter: &str| {
        vec![
            json!({"role": "user", "content": letter.repeat(60)}),
            json!({"type": "function_call", "call_id": letter, "name": "weather", "arguments": "{}"}),
            json!({"type": "function_call_output", "call_id": letter, "output": letter.repeat(60)}),
        ]
    };
    let input: Vec<Value> = ["a", "b", "c", "d", "e", "f", "g", "h"].iter().flat_map(|letter| round(letter)).collect();
    let body = |truncation: &str| json!({"input": input, "truncation": truncation});
    assert_eq!(server.ask(&body("disabled")).await.error().1, "context_length_exceeded");
    let response = server.ask(&body("auto")).await.json();
    assert_eq!(response["status"], "completed");
    assert!(response["usage"]["input_tokens"].as_u64().unwrap() < 1024);
}

#[tokio::test]
async fn truncation_helps_where_one_question_led_to_many_calls() {
    let server = Server::start(Mock { context_length: 1024, stop_after: 2, ..Mock::default() }).await;
    let round = |number: usize| {
        let id = number.to_string();
        [
            json!({"type": "function_call", "call_id": id, "name": "weather", "arguments": "{}"}),
            json!({"type": "function_call_output", "call_id": id, "output": "x".repeat(60)}),
        ]
    };
    let asked = json!({"role": "user", "content": "Weather everywhere?"});
    let input: Vec<Value> = std::iter::once(asked).chain((0..20).flat_map(round)).collect();
    let body = |truncation: &str| json!({"instructions": "be brief", "input": input, "tools": tools(), "truncation": truncation});
    assert_eq!(server.ask(&body("disabled")).await.error().1, "context_length_exceeded");
    let response = server.ask(&body("auto")).await.json();
    assert_eq!(response["status"], "completed", "{response}");
    // No more is left out than has to be.
    let tokens = response["usage"]["input_tokens"].as_u64().unwrap();
    assert!((700..1024).contains(&tokens), "{tokens}");
}

#[tokio::test]
async fn input_is_counted_as_it_would_be_read() {
    let server = Server::start(script(&["hi"])).await;
    for body in
        [json!({"input": "hi"}), json!({"input": "hi", "instructions": "be brief", "tools": tools(), "reasoning": {"effort": "none"}})]
    {
        let counted = server.client().await.send(post("/v1/responses/input_tokens", body.to_string())).await.json();
        assert_eq!(counted["object"], "response.input_tokens");
        assert_eq!(counted["input_tokens"], server.ask(&body).await.json()["usage"]["input_tokens"]);
    }
    let refused = server.client().await.send(post("/v1/responses/input_tokens", "{}")).await;
    assert_eq!(refused.error(), (400, "missing_required_parameter".into(), Some("input".into())));
    let wrong = server.client().await.send(get("/v1/responses/input_tokens")).await;
    assert_eq!((wrong.status.as_u16(), wrong.header("allow")), (405, "POST"));
}

#[tokio::test]
async fn sealed_thoughts_go_out_where_they_are_asked_for_and_come_back() {
    let server = Server::start(script(&["<think>Hm.</think>Four.", "<think>Hm.</think>Four.", "So."])).await;
    let include = json!(["reasoning.encrypted_content"]);
    let plain = server.ask(&json!({"input": "hi"})).await.json();
    assert!(plain["output"][0].get("encrypted_content").is_none());
    let events = server.ask(&json!({"input": "hi", "include": include, "stream": true})).await.events();
    let response = &events.last().unwrap()["response"];
    let blob = response["output"][0]["encrypted_content"].as_str().unwrap();
    assert!(!blob.contains("Hm") && !blob.is_empty());
    let done = events.iter().find(|event| event["type"] == "response.output_item.done").unwrap();
    assert_eq!(done["item"], response["output"][0]);
    let mut input = response["output"].as_array().unwrap().clone();
    input.push(json!({"role": "user", "content": "And?"}));
    assert_eq!(server.ask(&json!({"input": input, "include": include})).await.json()["status"], "completed");
    input[0]["encrypted_content"] = json!(format!("A{blob}"));
    let refused = server.ask(&json!({"input": input})).await.error();
    assert_eq!(refused, (400, "invalid_encrypted_content".into(), Some("input[0].encrypted_content".into())));
}

#[tokio::test]
async fn without_parallel_calls_one_that_went_wrong_is_shown_and_no_other_follows() {
    let wrong = "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": Paris}}</tool_call>";
    let server = Server::start(script(&[&format!("{wrong} so{}", call("weather", "{}"))])).await;
    for stream in [false, true] {
        let reply = server.ask(&json!({"input": "hi", "tools": tools(), "parallel_tool_calls": false, "stream": stream})).await;
        let response = if stream { reply.events().last().unwrap()["response"].clone() } else { reply.json() };
        let items = bare(&response);
        assert_eq!((items.len(), &response["status"]), (2, &json!("completed")), "{response}");
        assert_eq!((&items[0]["type"], &items[0]["status"]), (&json!("function_call"), &json!("incomplete")));
        assert_eq!(items[1]["content"][0]["text"], format!("{wrong} so"));
    }
    // One that is cut off is cut off.
    let body = json!({"input": "hi", "tools": tools(), "parallel_tool_calls": false, "max_output_tokens": 60});
    let server = Server::start(script(&[&call("weather", "{\"city\": \"Paris\"}")])).await;
    let response = server.ask(&body).await.json();
    assert_eq!((&response["status"], &response["output"][0]["status"]), (&json!("incomplete"), &json!("incomplete")));
}

#[tokio::test]
async fn a_tool_that_nobody_gave_may_not_be_called_where_only_some_are_allowed() {
    let other = call("nobody", "{}");
    let server = Server::start(script(&[&other])).await;
    let choice = json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]});
    let items = bare(&server.ask(&json!({"input": "hi", "tools": tools(), "tool_choice": choice})).await.json());
    assert_eq!((items.len(), &items[0]["content"][0]["text"]), (1, &json!(other)));
    let items = bare(&server.ask(&json!({"input": "hi", "tools": tools()})).await.json());
    assert_eq!((&items[0]["type"], &items[0]["name"]), (&json!("function_call"), &json!("nobody")));
}

#[tokio::test]
async fn stop_strings_end_words_wherever_they_are_cut_and_the_earliest_does() {
    let answer = "one two three, one two four";
    let server = Server::start(script(&[answer])).await;
    for (stop, expected) in [
        (json!("two three"), "one "),
        (json!(["two f", "e, on", "never"]), "one two thre"),
        (json!(["one two four", "two four!"]), "one two three, "),
        (json!(["three, one two five", "ee, one t"]), "one two thr"),
        (json!(["four?"]), answer),
        (json!(["o"]), ""),
    ] {
        for stream in [false, true] {
            let reply = server.ask(&json!({"input": "hi", "stop": stop, "stream": stream})).await;
            let events = if stream { reply.events() } else { Vec::new() };
            let response = events.last().map_or_else(|| reply.json(), |last| last["response"].clone());
            assert_eq!(response["output"][0]["content"][0]["text"], expected, "{stop}");
            assert_eq!(response["status"], "completed");
            if stream {
                let told: String = events.iter().filter_map(|event| event["delta"].as_str()).collect();
                assert_eq!(told, expected);
            }
        }
    }
}
