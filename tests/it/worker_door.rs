//! What clients say to a worker and what they hear: requests, refusals, the text of answers.

use std::sync::mpsc;

use emberd::engine::mock::Mock;
use emberd::worker::Options;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

use crate::http_support::{PATIENCE, gated};
use crate::worker_support::{Worker, chat, listening, options, words};

fn settled() -> insta::Settings {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path("../snapshots");
    settings.set_prepend_module_to_snapshot(false);
    settings
}

#[tokio::test]
async fn a_whole_conversation() {
    let worker = Worker::start(Mock::default());
    let mut client = worker.client().await;
    let mut heard = String::new();
    for line in [
        r#"{"type":"ping","id":"1"}"#,
        r#"{"type":"load","id":"2"}"#,
        r#"{"type":"load","id":"3"}"#,
        r#"{"type":"chat","id":"4","messages":[{"role":"user","content":"Fix the login loop"}],"maxNewTokens":8}"#,
        r#"{"type":"chat","id":"5","messages":[{"role":"system","content":"Title it"},{"role":"user","content":"now"}],"prefill":"<title>","stop":" now","maxNewTokens":20}"#,
        r#"{"type":"ping","id":"6"}"#,
    ] {
        client.note(line, &mut heard).await;
    }
    settled().bind(|| insta::assert_snapshot!("worker_conversation", heard));
}

#[tokio::test]
async fn a_chat_loads_the_model_and_its_client_hears_of_it() {
    let worker = Worker::start(Mock::default());
    let mut client = worker.client().await;
    let mut heard = String::new();
    client.note(&chat("first", 2), &mut heard).await;
    client.note(&chat("second", 2), &mut heard).await;
    settled().bind(|| insta::assert_snapshot!("worker_chat_loads", heard));
}

#[tokio::test]
async fn ids_come_back_as_they_were_written() {
    let worker = Worker::start(Mock::default());
    let mut client = worker.client().await;
    let mut heard = String::new();
    for line in [
        r#"{"type":"ping","id":7}"#,
        r#"{"type":"ping","id":null}"#,
        r#"{"type":"ping"}"#,
        r#"{"id": {"a" : [1,  2.50]}, "type":"ping"}"#,
        r#"{"type":"ping","id":"\u0041\ud800","unknown":{}}"#,
        r#"{"type":"ping","id":12345678901234567890123456789}"#,
        r#"{"type":"load","id":1e0}"#,
        r#"{"type":"chat","id":false,"messages":[],"maxNewTokens":1}"#,
        r#"{"type":"chat","id":[],"messages":7}"#,
    ] {
        client.note(line, &mut heard).await;
    }
    settled().bind(|| insta::assert_snapshot!("worker_ids", heard));
}

#[tokio::test]
async fn bad_lines_are_refused_and_the_next_one_is_served() {
    let worker = Worker::absent(Options { max_line: 200, ..options() });
    let mut client = worker.client().await;
    let mut heard = String::new();
    for line in [
        "{oops",
        "null",
        "5",
        "[]",
        r#"{"id":"a"}"#,
        r#"{"type":"bogus","id":"b"}"#,
        r#"{"type":"judge","id":"c","questions":{}}"#,
        r#"{"type":"ping","type":"ping","id":"d"}"#,
        r#"{"type":"chat","id":"e"}"#,
        r#"{"type":"chat","id":"f","messages":"hi"}"#,
        r#"{"type":"chat","id":"g","messages":[{"role":"robot","content":"hi"}]}"#,
        r#"{"type":"chat","id":"h","messages":[{"role":"user","content":["hi"]}]}"#,
        r#"{"type":"chat","id":"i","messages":[],"maxNewTokens":0}"#,
        r#"{"type":"chat","id":"j","messages":[],"maxNewTokens":"20"}"#,
        r#"{"type":"chat","id":"k","messages":[],"stop":["a"]}"#,
        r#"{"type":"ping","id":"still here"}"#,
    ] {
        client.note(line, &mut heard).await;
    }
    settled().bind(|| insta::assert_snapshot!("worker_bad_lines", heard));
    assert_eq!(worker.models.state(), emberd::models::State::Absent, "no bad line loads the model");
    client.say("\r\n  \n\t").await; // Blank lines are nothing at all.
    let error = client.ask(b"{\"type\":\"ping\",\"id\":\"\xff\xfe\"}").await;
    assert_eq!(error, json!({"type": "error", "id": "\u{fffd}\u{fffd}", "error": "the line is not UTF-8 (byte 21)"}));
    let error = client.ask(vec![b'x'; 3 << 20]).await;
    let too_long = "the line has 3145728 bytes, and the limit is 200 (hint: send less, or raise --max-line)";
    assert_eq!(error, json!({"type": "error", "error": too_long}));
    let head = r#"{"type":"chat","id":"long","messages":[{"role":"user","content":""#;
    let error = client.ask(format!("{head}{}", "x".repeat((3 << 20) - head.len()))).await;
    assert_eq!(error, json!({"type": "error", "id": "long", "error": too_long}));
    assert_eq!(client.ask("{\"type\":\"ping\",\"id\":\"1\"}\r").await["type"], "pong");
}

#[tokio::test]
async fn an_answer_ends_with_the_stop_string_wherever_the_tokens_are_cut() {
    let worker = Worker::start(Mock::default());
    let mut client = worker.client().await;
    let long: String = words(50).chars().skip(3).collect();
    let cases = [
        (" warm".to_owned(), " a small model keeps warm".to_owned()),
        ("l keeps w".into(), " a small model keeps w".into()),
        (long, words(50)),
        ("never said".into(), words(60)),
        ("warm, or".into(), words(60)),
    ];
    for (stop, expected) in cases {
        // The stop is in the prompt and in the prefill as well, and neither ends the answer.
        let messages = json!([{"role": "user", "content": format!("say {stop}")}]);
        let line = json!({"type": "chat", "id": "1", "messages": messages, "stop": stop, "prefill": stop, "maxNewTokens": 60});
        client.say(line.to_string()).await;
        assert_eq!(client.answer().await, json!({"type": "text", "id": "1", "text": expected}));
    }
    worker.until(0, 0).await;
}

#[tokio::test]
async fn the_length_of_an_answer_is_what_is_asked_for_and_what_fits() {
    let worker = Worker::start(Mock { context_length: 400, ..Mock::default() });
    let mut client = worker.client().await;
    let mut length = async |limit: &str| {
        client.say(format!(r#"{{"type":"chat","id":"1","messages":[{{"role":"user","content":"hi"}}]{limit}}}"#)).await;
        let text = client.answer().await["text"].as_str().unwrap().to_owned();
        let tokens = text.matches(' ').count();
        assert_eq!(text, words(tokens));
        tokens
    };
    assert_eq!(length("").await, 256);
    assert_eq!(length(r#","maxNewTokens":20.0"#).await, 20);
    let prompt = "<user\nhi<\n<assistant\n".len(); // Each of the template's marks is one token.
    assert_eq!(length(r#","maxNewTokens":1e300"#).await, 400 - prompt);
}

#[tokio::test]
async fn a_prompt_over_the_window_is_refused_with_both_sizes_and_the_next_one_answered() {
    let worker = Worker::start(Mock { context_length: 100, ..Mock::default() });
    let mut client = worker.client().await;
    // What cannot fit whatever its tokens are is refused before it is tokenised: its size is then a bound.
    for (length, size) in [(1000, "1019"), (100_000, "at least ")] {
        let content = "x".repeat(length);
        client.say(json!({"type": "chat", "id": "1", "messages": [{"role": "user", "content": content}]}).to_string()).await;
        let error = client.answer().await;
        let text = error["error"].as_str().unwrap();
        assert!(text.starts_with(&format!("the prompt has {size}")), "{text}");
        assert!(text.ends_with("tokens, but the window is 100 for prompt and answer together (hint: shorten the input)"), "{text}");
    }
    assert_eq!(client.ask(chat("2", 3)).await, json!({"type": "text", "id": "2", "text": words(3)}));
}

#[tokio::test]
async fn the_prompt_is_the_template_with_the_prefill_and_takes_any_turns() {
    let worker = Worker::absent(options());
    let (sender, prompts) = mpsc::channel();
    worker.engine(move |launch| listening(&launch.port, &sender));
    let mut client = worker.client().await;
    let mut prompt = async |turns: &[(&str, &str)], prefill: &str| {
        let messages: Vec<Value> = turns.iter().map(|(role, content)| json!({"role": role, "content": content})).collect();
        client.say(json!({"type": "chat", "id": "1", "messages": messages, "prefill": prefill}).to_string()).await;
        assert_eq!(client.answer().await, json!({"type": "text", "id": "1", "text": ""}), "a prefill is not echoed");
        prompts.recv().unwrap()
    };
    const END: &str = "<|im_start|>assistant\n";
    assert_eq!(
        prompt(&[("system", "Be short"), ("user", "Hi")], "<title>").await,
        format!("<|im_start|>system\nBe short<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n{END}<title>")
    );
    assert_eq!(prompt(&[], "").await, format!("<|im_start|>user\n<|im_end|>\n{END}"));
    // This template takes any turns; they stay as they are.
    assert_eq!(
        prompt(&[("system", "A"), ("developer", "B"), ("user", "C"), ("user", "D"), ("system", "E")], "").await,
        format!(
            "<|im_start|>system\nA<|im_end|>\n<|im_start|>system\nB<|im_end|>\n<|im_start|>user\nC<|im_end|>\n\
             <|im_start|>user\nD<|im_end|>\n<|im_start|>system\nE<|im_end|>\n{END}"
        )
    );
}

#[tokio::test]
async fn pings_are_answered_while_a_chat_runs() {
    let (gate, mock) = gated();
    let worker = Worker::start(mock);
    let mut client = worker.client().await;
    client.say(chat("1", 3)).await;
    worker.until(1, 0).await;
    for _ in 0..3 {
        assert_eq!(worker.client().await.ask(r#"{"type":"ping","id":"new"}"#).await["type"], "pong");
        client.say(r#"{"type":"ping","id":"same"}"#).await;
        assert_eq!(client.answer().await, json!({"type": "pong", "id": "same", "tag": "1|onnx||"}));
    }
    drop(gate);
    assert_eq!(client.answer().await, json!({"type": "text", "id": "1", "text": words(3)}));
}

#[tokio::test]
async fn a_worker_tells_what_it_is_doing_at_once_and_does_nothing_for_it() {
    const ASK: &str = r#"{"type":"status","id":"s"}"#;
    let worker = Worker::absent(options());
    let mut client = worker.client().await;
    let mut told = client.ask(ASK).await;
    assert!(told["memory_bytes"].as_u64().unwrap() > 1 << 20, "{told}");
    assert!(told["uptime_ms"].is_u64(), "{told}");
    for varies in ["memory_bytes", "uptime_ms"] {
        told.as_object_mut().unwrap().remove(varies);
    }
    let expected = json!({
        "type": "status", "id": "s", "key": "tiny", "tag": "1|onnx||", "pid": std::process::id(), "model": "mock/one", "state": "absent",
        "in_flight": 0, "connections": 1, "counts": {
            "completed": 0, "incomplete": 0, "failed": 0, "cancelled": 0, "refused": 0, "queue_full": 0,
            "prompt_tokens": 0, "cached_tokens": 0, "output_tokens": 0,
        },
    });
    assert_eq!(told, expected);

    let mut other = worker.client().await;
    let mut status = async |expected: &str, in_flight: u64, connections: u64| {
        let told = other.ask(r#"{"type":"ping","status":true,"id":7}"#).await;
        assert_eq!((told["type"].as_str().unwrap(), &told["id"]), ("status", &json!(7)));
        let numbers = (told["in_flight"].as_u64().unwrap(), told["connections"].as_u64().unwrap());
        assert_eq!((told["state"].as_str().unwrap(), numbers), (expected, (in_flight, connections)));
    };
    client.say(chat("1", 3)).await;
    let launch = worker.next_launch().await;
    status("loading", 1, 2).await;
    launch.port.fail("no weights");
    assert_eq!(client.answer().await["type"], "error");
    status("failed", 0, 2).await;
    let (gate, mock) = gated();
    worker.launch(mock);
    client.say(chat("2", 3)).await;
    worker.until(1, 0).await;
    status("ready", 1, 2).await;
    drop(gate);
    assert_eq!(client.answer().await["text"], words(3));
    status("ready", 0, 2).await;
    drop(client);
    let alone = async { while other.ask(ASK).await["connections"] != 1 {} };
    tokio::time::timeout(PATIENCE, alone).await.expect("the one that has gone is not counted");
}

#[tokio::test]
async fn pings_are_answered_while_the_model_is_loading() {
    let worker = Worker::absent(options());
    let mut client = worker.client().await;
    client.say(r#"{"type":"load","id":"1"}"#).await;
    let launch = worker.next_launch().await;
    assert_eq!(worker.client().await.ask(r#"{"type":"ping","id":"new"}"#).await["type"], "pong");
    assert_eq!(client.ask(r#"{"type":"ping","id":"same"}"#).await["type"], "pong");
    Mock::default().spawn(launch.port, launch.settings).unwrap();
    assert_eq!(client.next().await["event"]["status"], "ready");
    assert_eq!(client.next().await, json!({"type": "loaded", "id": "1"}));
}

#[tokio::test]
async fn one_load_serves_all_who_ask_and_each_gets_an_answer_of_its_kind() {
    let worker = Worker::absent(options());
    let (mut first, mut second) = (worker.client().await, worker.client().await);
    first.say(r#"{"type":"load","id":"1"}"#).await;
    let launch = worker.next_launch().await;
    second.say(r#"{"type":"load","id":"1"}"#).await;
    second.say(chat("2", 1)).await;
    // The worker has read both lines once it has answered a third.
    assert_eq!(second.ask(r#"{"type":"ping","id":"3"}"#).await["type"], "pong");
    Mock::default().spawn(launch.port, launch.settings).unwrap();
    let ready = json!({"modelKey": "tiny", "status": "ready", "task": "text-generation", "model": "mock/one"});
    let ready = json!({"type": "progress", "id": "1", "event": ready});
    let loaded = json!({"type": "loaded", "id": "1"});
    assert_eq!([first.next().await, first.next().await], [ready.clone(), loaded.clone()]);
    // A load and a chat of one connection run beside each other: their answers come in any order.
    let mut heard = [second.next().await, second.next().await, second.next().await];
    heard.sort_by_key(|reply| reply["type"].as_str().unwrap().to_owned());
    assert_eq!(heard, [loaded, ready, json!({"type": "text", "id": "2", "text": words(1)})]);
}

#[tokio::test]
async fn chats_of_one_connection_run_together() {
    let (gate, mock) = gated();
    let worker = Worker::start(mock);
    let mut client = worker.client().await;
    for (id, tokens) in [("long", 5), ("short", 2), ("middle", 3)] {
        client.say(chat(id, tokens)).await;
    }
    worker.until_asked(3).await;
    gate.send(()).unwrap(); // Whatever the mock had taken before this step, it takes the others after it.
    worker.until(3, 0).await;
    drop(gate);
    let mut texts = Vec::new();
    for _ in 0..3 {
        let reply = client.answer().await;
        texts.push((reply["id"].as_str().unwrap().to_owned(), reply["text"].as_str().unwrap().to_owned()));
    }
    texts.sort();
    assert_eq!(texts, [("long".to_owned(), words(5)), ("middle".into(), words(3)), ("short".into(), words(2))]);
}

#[tokio::test]
async fn a_connection_may_have_so_many_requests_in_flight_and_hears_of_the_limit() {
    let (gate, mock) = gated();
    let worker = Worker::absent(Options { max_in_flight: 2, ..options() });
    worker.launch(mock);
    let mut client = worker.client().await;
    client.say(chat("1", 1)).await;
    client.say(chat("2", 1)).await;
    worker.until_asked(2).await;
    client.say(chat("3", 1)).await;
    let error = client.answer().await;
    assert_eq!(
        error,
        json!({"type": "error", "id": "3", "error": "this connection has 2 requests in flight, the limit (hint: wait for an answer first, or raise --max-in-flight)"})
    );
    drop(gate);
    assert_eq!((client.answer().await["type"].clone(), client.answer().await["type"].clone()), (json!("text"), json!("text")));
    assert_eq!(client.ask(chat("4", 1)).await["type"], "text");
}

#[tokio::test]
async fn requests_that_wait_for_the_model_are_bounded_over_all_connections() {
    let worker = Worker::absent(Options { max_waiting: 3, ..options() });
    let (mut first, mut second) = (worker.client().await, worker.client().await);
    first.say(chat("1", 1)).await;
    first.say(chat("2", 1)).await;
    let launch = worker.next_launch().await;
    assert_eq!(first.ask(r#"{"type":"ping","id":"p"}"#).await["type"], "pong");
    second.say(r#"{"type":"load","id":"3"}"#).await;
    let error = second.ask(chat("4", 1)).await;
    let limit = "3 requests wait for the model to be loaded, the limit (hint: try again when it is loaded, or raise --queue)";
    assert_eq!(error, json!({"type": "error", "id": "4", "error": limit}));
    Mock::default().spawn(launch.port, launch.settings).unwrap();
    assert_eq!([second.answer().await["type"].clone(), first.answer().await["type"].clone()], [json!("loaded"), json!("text")]);
    assert_eq!(second.ask(chat("5", 1)).await["type"], "text");
}

#[tokio::test]
async fn a_title_does_not_wait_for_the_long_jobs_of_another_connection() {
    let (gate, mock) = gated();
    let worker = Worker::start(Mock { max_batch: 8, ..mock });
    let (mut jobs, mut title) = (worker.client().await, worker.client().await);
    for id in 0..8 {
        jobs.say(chat(&format!("job{id}"), 1024)).await;
    }
    worker.until_asked(8).await;
    gate.send(()).unwrap(); // Whatever the mock had taken before this step, it takes the others after it.
    worker.until(7, 1).await;
    title.say(chat("title", 20)).await;
    worker.until_asked(9).await;
    // Eight jobs in seven places take 2048 steps: a tenth of that is 204.
    for _ in 0..204 {
        gate.send(()).unwrap();
    }
    assert_eq!(title.answer().await, json!({"type": "text", "id": "title", "text": words(20)}));
    drop(gate);
    for _ in 0..8 {
        assert_eq!(jobs.answer().await["text"], words(1024));
    }
}

#[tokio::test]
async fn lines_too_long_to_be_parsed_by_the_reader_are_answered_like_short_ones() {
    let worker = Worker::start(Mock { context_length: 8_000_000, ..Mock::default() });
    let mut client = worker.client().await;
    let padded = |line: &str| format!("{}{line}", " ".repeat(600_000));
    for (line, wanted) in [
        (r#"{"type":"ping","id":{"a":1}}"#, json!({"type": "pong", "id": {"a": 1}, "tag": "1|onnx||"})),
        (r#"{"type":"chat","id":"c","messages":[],"maxNewTokens":2}"#, json!({"type": "text", "id": "c", "text": words(2)})),
    ] {
        client.say(padded(line)).await;
        assert_eq!(client.answer().await, wanted);
    }
    let text = "word ".repeat(120_000);
    client.say(json!({"type": "chat", "id": 7, "messages": [{"role": "user", "content": text}], "maxNewTokens": 3}).to_string()).await;
    client.say(r#"{"type":"ping","id":"behind"}"#).await;
    assert_eq!(client.next().await["type"], "pong", "it does not wait for the line before it");
    assert_eq!(client.answer().await, json!({"type": "text", "id": 7, "text": words(3)}));
    client.say(format!("{}\n{}", padded(r#"{"type":"ping","id":1}"#), padded(r#"{"type":"ping","id":2}"#))).await;
    client.say(format!("{}\n{}", padded(r#"{"type":"ping","id":3}"#), r#"{"type":"ping","id":4}"#)).await;
    let mut ids: Vec<Value> = Vec::new();
    for _ in 0..4 {
        ids.push(client.next().await["id"].clone());
    }
    ids.sort_by_key(Value::as_u64);
    assert_eq!(ids, [1, 2, 3, 4]);
    let error = client.ask(padded("{oops")).await;
    assert!(error["error"].as_str().unwrap().starts_with("the line is not JSON"), "{error}");
    client.say(padded(r#"{"type":"shutdown","id":"s"}"#)).await;
    assert_eq!(client.line().await, None);
}

#[tokio::test]
async fn a_long_line_is_refused_under_its_own_id_and_a_long_ping_never_is() {
    let (gate, mock) = gated();
    let worker = Worker::absent(Options { max_in_flight: 1, ..options() });
    worker.launch(mock);
    let mut client = worker.client().await;
    client.say(chat("1", 1)).await;
    worker.until_asked(1).await;
    client.say(format!("{}{}", " ".repeat(600_000), chat("2", 1))).await;
    let error = client.answer().await;
    assert_eq!((&error["type"], &error["id"]), (&json!("error"), &json!("2")), "{error}");
    let pong = client.ask(format!("{}{}", " ".repeat(600_000), r#"{"type":"ping","id":"3"}"#)).await;
    assert_eq!((&pong["type"], &pong["id"]), (&json!("pong"), &json!("3")));
    drop(gate);
    assert_eq!(client.answer().await["id"], "1");
}

#[tokio::test]
async fn a_long_last_line_needs_no_newline() {
    let worker = Worker::start(Mock::default());
    let mut client = worker.client().await;
    let padding = " ".repeat(600_000);
    let text = format!("{padding}{}\n{padding}{}\n{padding}{}", chat("1", 1), chat("2", 1), chat("3", 1));
    client.writer.write_all(text.as_bytes()).await.unwrap();
    client.writer.shutdown().await.unwrap();
    let mut ids = [client.answer().await["id"].clone(), client.answer().await["id"].clone(), client.answer().await["id"].clone()];
    ids.sort_by_key(ToString::to_string);
    assert_eq!(ids, ["1", "2", "3"]);
    assert_eq!(client.line().await, None);
}
