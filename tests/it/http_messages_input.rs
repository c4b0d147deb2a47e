//! What a request of the Messages API comes to: the prompt that a request of the Responses API with the same meaning has, and what is refused.

use std::sync::mpsc::{Receiver, channel};

use emberd::engine::mock::vocabulary::{EOS, SIZE};
use emberd::engine::{Admit, Capabilities, Finish, Order, Step};
use emberd::http::Options;
use serde_json::{Value, json};

use crate::http_support::{Server, post, request};

/// A server whose engine tells the test what it was asked, and says nothing.
pub async fn server() -> (Server, Receiver<Admit>) {
    let (tell, told) = channel();
    let mut server = Server::absent(Options::default(), 8).await;
    server.launch_engine(move |launch| {
        let port = launch.port;
        port.ready(Capabilities { context_length: 1 << 16, max_batch: 4, vocab_size: SIZE, eos_ids: vec![EOS], constraints: true })
            .unwrap();
        while let Some(orders) = port.wait().unwrap() {
            for order in orders {
                let Order::Admit(admit) = order else { continue };
                port.push(vec![Step { id: admit.id, tokens: vec![EOS], finish: Some(Finish::Stop), logprobs: vec![] }]).unwrap();
                let _ = tell.send(admit);
            }
        }
    });
    (server, told)
}

/// What the engine was asked by a request to this path, and the answer.
pub async fn admitted(server: &Server, told: &Receiver<Admit>, path: &str, body: &Value) -> (Admit, Value) {
    let reply = server.client().await.send(post(path, body.to_string())).await;
    assert_eq!(reply.status, 200, "{body}: {}", reply.text());
    (told.recv().unwrap(), reply.json())
}

/// A request of one text by the user, with these fields besides.
fn asking(more: Value) -> Value {
    let mut body = json!({"max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]});
    let Value::Object(more) = more else { panic!("no object") };
    body.as_object_mut().unwrap().extend(more);
    body
}

fn of(messages: Value) -> Value {
    asking(json!({ "messages": messages }))
}

fn user(content: impl Into<Value>) -> Value {
    json!({"role": "user", "content": content.into()})
}

fn assistant(content: impl Into<Value>) -> Value {
    json!({"role": "assistant", "content": content.into()})
}

fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

fn used(id: &str, input: Value) -> Value {
    json!({"type": "tool_use", "id": id, "name": "weather", "input": input})
}

fn result(id: &str, content: impl Into<Value>) -> Value {
    json!({"type": "tool_result", "tool_use_id": id, "content": content.into()})
}

fn schema() -> Value {
    json!({"type": "object", "properties": {"city": {"type": "string"}}})
}

#[tokio::test]
async fn what_means_the_same_is_the_same_prompt_in_both_forms() {
    let (server, told) = server().await;
    let call = |id: &str, arguments: &str| json!({"type": "function_call", "call_id": id, "name": "weather", "arguments": arguments});
    let output = |id: &str, output: &str| json!({"type": "function_call_output", "call_id": id, "output": output});
    let system = |text: &str| json!({"role": "system", "content": text});
    let reasoning = json!({"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]});
    let search = json!([{"type": "web_search_result", "title": "t", "url": "u", "encrypted_content": "AAAA"}]);
    for (messages, responses) in [
        (asking(json!({})), json!({"input": "hi"})),
        (asking(json!({"system": "be brief"})), json!({"input": "hi", "instructions": "be brief"})),
        // Many blocks of it; the one that is different every time is left out.
        (
            asking(
                json!({"system": [text("x-anthropic-billing-header: cc_version=2.1; cch=ab12c;"), {"type": "text", "text": "one", "cache_control": {"type": "ephemeral", "ttl": "1h"}}, text("two")]}),
            ),
            json!({"input": "hi", "instructions": "one\n\ntwo"}),
        ),
        (
            of(json!([user(json!([text("a"), text("b")])), assistant("c"), user(json!([text("d")]))])),
            json!({"input": [user("a\nb"), assistant("c"), user("d")]}),
        ),
        // The system speaks late, as it does in Claude Code.
        (of(json!([user("a"), system("be brief")])), json!({"input": [user("a"), system("be brief")]})),
        (of(json!([system("be brief"), user("a")])), json!({"instructions": "be brief", "input": "a"})),
        // Uses and results, with words behind them, and the system between them.
        (
            of(json!([
                user("a"),
                assistant(json!([text("I ask."), used("1", json!({"city": "Paris"})), used("2", json!({}))])),
                system("be brief"),
                user(json!([text("go on"), result("2", "two"), result("1", json!([text("o"), text("ne")]))])),
            ])),
            json!({"input": [
                user("a"), assistant("I ask."), call("1", "{\"city\":\"Paris\"}"), call("2", "{}"),
                output("1", "o\nne"), output("2", "two"), system("be brief"), user("go on"),
            ]}),
        ),
        (
            of(json!([
                user("a"),
                assistant(json!([used("1", json!({}))])),
                user(json!([{"type": "tool_result", "tool_use_id": "1", "is_error": true, "content": "no"}]))
            ])),
            json!({"input": [user("a"), call("1", "{}"), output("1", "Error: no")]}),
        ),
        (
            of(json!([user("a"), assistant(json!([used("1", json!({}))])), user(json!([{"type": "tool_result", "tool_use_id": "1"}]))])),
            json!({"input": [user("a"), call("1", "{}"), output("1", "")]}),
        ),
        // Thoughts go back as they came; sealed ones are not looked at.
        (
            of(json!([
                user("a"),
                assistant(
                    json!([{"type": "thinking", "thinking": "Hm.", "signature": "rs_1"}, {"type": "redacted_thinking", "data": "AAAA"}, text("b")])
                ),
                user("c"),
            ])),
            json!({"input": [user("a"), reasoning, assistant("b"), user("c")]}),
        ),
        // Documents and findings that are text.
        (
            of(json!([user(json!([
                {"type": "document", "title": "T", "context": "C", "source": {"type": "text", "media_type": "text/plain", "data": "D"}, "citations": {"enabled": true}},
                {"type": "document", "source": {"type": "content", "content": [text("E"), text("F")]}},
                {"type": "search_result", "title": "G", "source": "H", "content": [text("I")]},
            ]))])),
            json!({"input": "T\nC\nD\nE\nF\nG\nH\nI"}),
        ),
        // What a provider did itself is told in words, without what is sealed.
        (
            of(json!([
                user("a"),
                assistant(json!([
                    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "q"}},
                    {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": search},
                    text("b"),
                ])),
                user("c"),
            ])),
            json!({"input": [
                user("a"),
                assistant("[server_tool_use: {\"name\":\"web_search\",\"input\":{\"query\":\"q\"}}]"),
                assistant("[web_search_tool_result: {\"content\":[{\"type\":\"web_search_result\",\"title\":\"t\",\"url\":\"u\"}]}]"),
                assistant("b"),
                user("c"),
            ]}),
        ),
        // Tools; those that the provider would run are left out.
        (
            asking(json!({"tools": [
                {"name": "weather", "description": "tells it", "input_schema": schema(), "cache_control": {"type": "ephemeral"}, "defer_loading": true},
                {"type": "web_search_20260209", "name": "web_search"},
                {"type": "mcp_toolset", "mcp_server_name": "s"},
            ]})),
            json!({"input": "hi", "tools": [{"type": "function", "name": "weather", "description": "tells it", "parameters": schema()}]}),
        ),
    ] {
        let (found, message) = admitted(&server, &told, "/v1/messages", &messages).await;
        let (expected, _) = admitted(&server, &told, "/v1/responses", &responses).await;
        assert_eq!(found.prompt, expected.prompt, "{messages}");
        let counted = server.client().await.send(post("/v1/messages/count_tokens", messages.to_string())).await.json();
        assert_eq!(counted, json!({"input_tokens": found.prompt.len()}), "{messages}");
        assert_eq!(message["usage"]["input_tokens"], json!(found.prompt.len()));
    }
}

#[tokio::test]
async fn what_is_sampled_and_how_far_is_the_same_in_both_forms() {
    let (server, told) = server().await;
    for (messages, responses) in [
        (
            json!({"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3}),
            json!({"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3}),
        ),
        (json!({"temperature": 1, "seed": 1, "min_p": 0.1}), json!({"temperature": 1, "seed": 1, "min_p": 0.1})),
        (json!({"temperature": 0}), json!({"temperature": 0})),
        (json!({}), json!({})),
    ] {
        let mut other = responses;
        other["input"] = json!("hi");
        other["max_output_tokens"] = json!(100);
        let (found, _) = admitted(&server, &told, "/v1/messages", &asking(messages)).await;
        let (expected, _) = admitted(&server, &told, "/v1/responses", &other).await;
        assert_eq!((found.sampling, found.max_tokens), (expected.sampling, expected.max_tokens));
        assert_eq!(found.max_tokens, 100);
    }
}

#[tokio::test]
async fn requests_of_a_salt_share_what_is_kept_with_their_like_alone() {
    let (server, told) = server().await;
    let hello = json!([user("hi")]);
    for (path, body) in [
        ("/v1/responses", json!({"input": "hi"})),
        ("/v1/chat/completions", json!({ "messages": hello })),
        ("/v1/messages", json!({"messages": hello, "max_tokens": 5})),
    ] {
        for (salt, expected) in [(json!(null), ""), (json!("mine"), "mine"), (json!("theirs"), "theirs")] {
            let mut body = body.clone();
            body["cache_salt"] = salt;
            let (found, _) = admitted(&server, &told, path, &body).await;
            assert_eq!((&*found.reuse.salt, found.reuse.start_from, found.reuse.save_as), (expected, None, None), "{path}: {body}");
        }
        let mut body = body;
        for wrong in [json!(""), json!(5), json!("x".repeat(257))] {
            body["cache_salt"] = wrong;
            let reply = server.client().await.send(post(path, body.to_string())).await;
            let message = reply.json()["error"]["message"].to_string();
            assert!(reply.status == 400 && message.contains("`cache_salt` must be"), "{path}: {message}");
        }
    }
}

#[tokio::test]
async fn an_answer_goes_on_from_a_last_message_of_the_assistants() {
    let (server, told) = server().await;
    let (plain, _) = admitted(&server, &told, "/v1/messages", &of(json!([user("a")]))).await;
    for last in [assistant("It is ("), assistant(json!([text("It is (")]))] {
        let body = of(json!([user("a"), last]));
        let (found, message) = admitted(&server, &told, "/v1/messages", &body).await;
        let prompt: Vec<u32> = plain.prompt.iter().copied().chain("It is (".bytes().map(u32::from)).collect();
        assert_eq!(found.prompt, prompt);
        // What came before is no part of what comes back.
        assert_eq!(message["content"], json!([]));
        let counted = server.client().await.send(post("/v1/messages/count_tokens", body.to_string())).await.json();
        assert_eq!(counted["input_tokens"], json!(prompt.len()));
    }
    for last in [assistant(""), assistant(json!([]))] {
        let (found, _) = admitted(&server, &told, "/v1/messages", &of(json!([user("a"), last]))).await;
        assert_eq!(found.prompt, plain.prompt);
    }
}

#[tokio::test]
async fn a_use_that_is_asked_for_and_a_form_are_held_to() {
    let (server, told) = server().await;
    let tools = json!([{"name": "weather", "input_schema": schema()}, {"name": "close", "input_schema": schema()}]);
    let strict = json!([{"name": "weather", "input_schema": schema(), "strict": true}, {"name": "close", "input_schema": schema()}]);
    let format = json!({"type": "json_schema", "schema": schema()});
    for (more, held) in [
        (json!({"tools": tools}), false),
        (json!({"tools": tools, "tool_choice": {"type": "auto"}}), false),
        (json!({"tools": tools, "tool_choice": {"type": "any"}}), true),
        (json!({"tools": tools, "tool_choice": {"type": "tool", "name": "close"}, "thinking": {"type": "adaptive"}}), true),
        (json!({"output_config": {"format": format, "effort": "low"}}), true),
        (json!({"output_format": format}), true),
        // Where calling is left to the model.
        (json!({"tools": strict}), true),
        (json!({"tools": strict, "tool_choice": {"type": "auto"}}), true),
        (json!({"tools": strict, "tool_choice": {"type": "auto"}, "thinking": {"type": "adaptive"}}), true),
        (json!({"tools": tools, "tool_choice": {"type": "auto"}, "output_config": {"format": format}}), true),
        (json!({"tools": strict, "tool_choice": {"type": "none"}}), false),
        // Where thoughts come first, how the prompt ends is looked at; a long one beside the thread that serves the sockets.
        (json!({"output_format": format, "thinking": {"type": "adaptive"}}), true),
        (json!({"output_format": format, "thinking": {"type": "adaptive"}, "messages": [user("long ".repeat(2000))]}), true),
    ] {
        let body = asking(more);
        let (found, _) = admitted(&server, &told, "/v1/messages", &body).await;
        assert_eq!(found.constraint.is_some(), held, "{body}");
        let counted = server.client().await.send(post("/v1/messages/count_tokens", body.to_string())).await.json();
        assert_eq!(counted["input_tokens"], json!(found.prompt.len()), "{body}");
    }
}

#[tokio::test]
async fn names_of_tools_are_as_long_as_in_the_api() {
    let (server, told) = server().await;
    let name = "mcp__".to_owned() + &"a".repeat(123);
    let tools = json!([{"name": name, "input_schema": schema()}]);
    for choice in [json!({"type": "auto"}), json!({"type": "tool", "name": name})] {
        let (found, _) = admitted(&server, &told, "/v1/messages", &asking(json!({"tools": tools, "tool_choice": choice}))).await;
        let text: Vec<u8> = found.prompt.iter().filter_map(|id| u8::try_from(*id).ok()).collect();
        assert!(String::from_utf8_lossy(&text).contains(&name));
    }
    // The other forms know no names of more than 64 characters.
    let tools = json!([{"type": "function", "name": "a".repeat(65)}]);
    let reply = server.ask(&json!({"input": "hi", "tools": tools})).await;
    assert_eq!(reply.error(), (400, "invalid_value".into(), Some("tools[0].name".into())));
}

#[tokio::test]
async fn what_claude_code_sends_is_taken() {
    let (server, _told) = server().await;
    let tools: Vec<Value> = (0..40)
        .map(|number| {
            let schema = json!({"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "additionalProperties": false,
                "properties": {"path": {"type": "string", "description": "a".repeat(500)}, "limit": {"type": "number", "exclusiveMinimum": 0}}, "required": ["path"]});
            json!({"name": format!("Tool{number}"), "description": "b".repeat(200), "input_schema": schema, "eager_input_streaming": true})
        })
        .collect();
    let body = json!({
        "model": "mock/one", "max_tokens": 32_000, "stream": true, "tools": tools, "temperature": 1, "betas": ["x"], "speed": "fast",
        "system": [text("x-anthropic-billing-header: cch=1;"), {"type": "text", "text": "You are it.", "cache_control": {"type": "ephemeral"}}],
        "messages": [user(json!([text("<system-reminder>"), {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]))],
        "metadata": {"user_id": "user_1_account__session_2"}, "thinking": {"type": "enabled", "budget_tokens": 31_999, "display": "summarized"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, "output_config": {"effort": "high"}, "service_tier": "auto",
        "mcp_servers": [], "container": null, "wibble": {"a": [1]},
    });
    let head = request("POST", "/v1/messages?beta=true")
        .header("content-type", "application/json")
        .header("anthropic-version", "2023-06-01")
        .header("anthropic-beta", "claude-code-20250219,interleaved-thinking-2025-05-14")
        .header("x-api-key", "none")
        .header("authorization", "Bearer none")
        .header("anthropic-dangerous-direct-browser-access", "true");
    let reply = server.client().await.send(head.body(body.to_string().into()).unwrap()).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert!(reply.text().ends_with("event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"));
}

#[tokio::test]
async fn what_is_wrong_is_named_by_the_field_that_the_client_knows() {
    let (server, _told) = server().await;
    let with = |block: Value| of(json!([user(json!([block]))]));
    let tool = |more: Value| asking(json!({ "tools": [more] }));
    let not = json!({"type": "object", "properties": {"a": {"not": {}}}});
    let thinking = |thinking: Value| asking(json!({ "thinking": thinking }));
    for (body, says) in [
        (asking(json!({"max_tokens": 0})), "`max_tokens` must be"),
        (asking(json!({"max_tokens": "5"})), "`max_tokens` must be an integer"),
        (asking(json!({"temperature": 1.5})), "`temperature` must be from 0 to 1"),
        (asking(json!({"top_p": 2})), "`top_p`"),
        (asking(json!({"top_k": -1})), "`top_k`"),
        (asking(json!({"stream": "yes"})), "`stream` must be a boolean"),
        (asking(json!({"stop_sequences": "x"})), "`stop_sequences` must be an array"),
        (asking(json!({"stop_sequences": ["a", ""]})), "`stop_sequences[1]`"),
        (asking(json!({"stop_sequences": vec!["a"; 17]})), "`stop_sequences` must be at most 16"),
        (asking(json!({"metadata": {"user_id": 5}})), "`metadata.user_id`"),
        (asking(json!({"system": 5})), "`system` must be a string or an array"),
        (asking(json!({"system": [{"type": "image"}]})), "`system[0].type` is \"image\""),
        (of(json!([])), "`messages` must be an array of at least one message"),
        (of(json!("hi")), "`messages` must be an array"),
        (of(json!([{"role": "tool", "content": "x"}])), "`messages[0].role`"),
        (of(json!([{"role": "user"}])), "`messages[0].content` is required"),
        (of(json!([user(5)])), "`messages[0].content` must be a string or an array of blocks"),
        (with(json!({"text": "x"})), "`messages[0].content[0].type` is required"),
        (with(json!({"type": "text"})), "`messages[0].content[0].text` is required"),
        (with(json!({"type": "poem", "text": "x"})), "`messages[0].content[0].type` must be"),
        (
            with(json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}})),
            "`messages[0].content[0].type` is \"image\": this server takes text only",
        ),
        (
            with(json!({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}})),
            "`messages[0].content[0].source.type` is \"base64\"",
        ),
        (
            // Only text stands within a block of words.
            with(json!({"type": "document", "source": {"type": "content", "content": [{"type": "image"}]}})),
            "`messages[0].content[0].source.content[0].type` is \"image\"",
        ),
        (
            with(json!({"type": "search_result", "title": "a", "source": "b", "content": [{"type": "tool_reference", "tool_name": "a"}]})),
            "`messages[0].content[0].content[0].type` must be",
        ),
        (with(used("1", json!({}))), "`messages[0].content[0].type` must be"),
        (with(result("toolu_9", "x")), "`messages[0].content[0].tool_use_id` is the id of no call that waits for its output: \"toolu_9\""),
        (of(json!([user("a"), assistant(json!([used("toolu_1", json!({}))]))])), "\"toolu_1\""),
        (
            of(json!([user("a"), assistant(json!([used("toolu_1", json!({}))])), user("b")])),
            "`messages[2]` comes before the outputs of these calls: \"toolu_1\"",
        ),
        (
            of(json!([user("a"), assistant(json!([used("1", json!({})), used("1", json!({}))])), user(json!([result("1", "x")]))])),
            "`messages[1].content[1].id` is the id of an earlier call",
        ),
        (
            of(json!([
                user("a"),
                assistant(json!([used("1", json!({})), used("2", json!({}))])),
                user(json!([result("1", "x"), result("1", "y")]))
            ])),
            "`messages[2].content[1].tool_use_id` is answered a second time",
        ),
        (of(json!([user("a"), assistant(json!([used("1", json!("x"))]))])), "`messages[1].content[0].input` must be an object"),
        (
            of(json!([user("a"), assistant(json!([used("1", json!({}))])), user(json!([result("1", json!([{"type": "image"}]))]))])),
            "`messages[2].content[0].content[0].type` is \"image\"",
        ),
        (of(json!([user("a"), assistant("b ")])), "ends with a blank"),
        (asking(json!({"messages": [user("a"), assistant("b")], "thinking": {"type": "adaptive"}})), "with thinking cannot go on from"),
        (
            asking(
                json!({"messages": [user("a"), assistant("b")], "output_config": {"format": {"type": "json_schema", "schema": schema()}}}),
            ),
            "with output_config.format cannot go on from",
        ),
        (thinking(json!({"type": "enabled"})), "`thinking.budget_tokens` is required"),
        (thinking(json!({"type": "enabled", "budget_tokens": 100})), "`thinking.budget_tokens` must be an integer from 1024"),
        (thinking(json!({"type": "hard"})), "`thinking.type` must be one of"),
        (asking(json!({"output_config": {"effort": "none"}})), "`output_config.effort`"),
        (asking(json!({"output_config": {"format": {"type": "text"}}})), "`output_config.format.type`"),
        (asking(json!({"output_config": {"format": {"type": "json_schema", "schema": not}}})), "output_config.format.schema: "),
        (
            asking(json!({"output_config": {"format": {"type": "json_schema", "schema": {}}}, "output_format": {"type": "text"}})),
            "`output_format.type` must be one of",
        ),
        (tool(json!({"input_schema": schema()})), "`tools[0].name` is required"),
        (tool(json!({"name": "a b", "input_schema": schema()})), "`tools[0].name` must be"),
        (tool(json!({"name": "a".repeat(129), "input_schema": schema()})), "`tools[0].name` must be 1 to 128 letters"),
        (tool(json!({"name": "a"})), "`tools[0].input_schema` is required"),
        (tool(json!({"type": "function", "name": "a", "parameters": schema()})), "`tools[0].type` must be"),
        (tool(json!({"name": "a", "input_schema": not, "strict": true})), "tools[0].input_schema: "),
        (asking(json!({"tool_choice": {"type": "any"}})), "`tool_choice` asks for a call"),
        (
            asking(json!({"tool_choice": {"type": "tool", "name": "b"}, "tools": [{"name": "a", "input_schema": schema()}]})),
            "`tool_choice.name` must be the name of a tool: a",
        ),
        (asking(json!({"tool_choice": "auto"})), "`tool_choice` must be an object"),
    ] {
        let reply = server.client().await.send(post("/v1/messages", body.to_string())).await;
        let found = reply.json();
        assert_eq!((reply.status.as_u16(), &found["error"]["type"]), (400, &json!("invalid_request_error")), "{body}");
        let message = found["error"]["message"].as_str().unwrap();
        assert!(message.contains(says) && message.contains("(hint: "), "{body}: {message}");
    }
}
