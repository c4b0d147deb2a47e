//! An answer's text and end, with the test as the engine.

use std::sync::Arc;

use emberd::engine::port::{Load, port};
use emberd::engine::{Capabilities, Engine, Finish, Logprob, Order, Port, Request, Sampling, Step};
use emberd::error::Code;
use emberd::models::{Answer, Ending, Pieces, TokenLogprob};
use emberd::prompt::Tokenizer;
use emberd::text::{Format, Kind, Parser, Signatures};
use proptest::prelude::*;

use crate::vocab;

struct Rig {
    engine: Engine,
    port: Port,
    tokenizer: Tokenizer,
}

impl Rig {
    fn new() -> Self {
        Self::of(&vocab::byte_level())
    }

    fn of(vocabulary: &serde_json::Value) -> Self {
        let (engine, port) = port(8);
        let tokenizer = Tokenizer::from_parts(vocabulary.to_string().as_bytes(), "").unwrap();
        let vocab_size = u32::try_from(tokenizer.vocab_size()).unwrap();
        port.ready(Capabilities { context_length: 4096, max_batch: 8, vocab_size, eos_ids: vec![], constraints: false }).unwrap();
        Self { engine, port, tokenizer }
    }

    /// An answer that the engine has been told of.
    fn answer(&self, stop: &[&str], include_stop: bool) -> (u64, Answer) {
        let generation = self.engine.submit(Request { prompt: vec![1, 2, 3], max_tokens: 1000, ..Request::default() }).unwrap();
        let orders = self.port.wait().unwrap().unwrap();
        let Order::Admit(admit) = &orders[0] else { panic!("{orders:?}") };
        let stop = stop.iter().map(|stop| (*stop).to_owned()).collect();
        (admit.id, Answer::new(generation, &self.tokenizer, stop, include_stop))
    }

    fn ids(&self, text: &str) -> Vec<u32> {
        self.tokenizer.encode(text, false).unwrap()
    }

    fn push(&self, id: u64, tokens: Vec<u32>, finish: Option<Finish>) -> Vec<u64> {
        self.port.push(vec![Step { id, tokens, finish, logprobs: vec![] }]).unwrap()
    }
}

/// What has come since the last call: the pieces, and how it ended, if it did. `None` when nothing is there.
async fn now(answer: &mut Answer) -> Option<(Vec<String>, Option<Result<Ending, emberd::error::Error>>)> {
    let mut pieces = Pieces::default();
    let end = std::future::poll_fn(|cx| {
        std::task::Poll::Ready(match answer.poll(cx, &mut pieces) {
            std::task::Poll::Ready(end) => Some(end),
            std::task::Poll::Pending => None,
        })
    });
    let end = end.await?;
    assert_eq!(pieces.len(), pieces.iter().count());
    assert_eq!(pieces.text(), pieces.iter().collect::<String>());
    assert!(pieces.iter().all(|piece| !piece.is_empty()));
    Some((pieces.iter().map(str::to_owned).collect(), end))
}

fn said(pieces: &[&str]) -> Vec<String> {
    pieces.iter().map(|piece| (*piece).to_owned()).collect()
}

#[tokio::test]
async fn each_token_that_completes_text_is_a_piece_and_half_a_character_waits() {
    let rig = Rig::new();
    let (id, mut answer) = rig.answer(&[], false);
    assert_eq!(now(&mut answer).await, None);
    let heart = rig.ids("♥");
    assert_eq!(heart.len(), 3, "three bytes, three tokens");
    rig.push(id, vec![rig.ids("a")[0], rig.ids("b")[0], heart[0]], None);
    assert_eq!(now(&mut answer).await, Some((said(&["a", "b"]), None)));
    rig.push(id, vec![heart[1]], None);
    assert_eq!(now(&mut answer).await, None);
    rig.push(id, vec![heart[2]], Some(Finish::Stop));
    assert_eq!(now(&mut answer).await, Some((said(&["♥"]), Some(Ok(Ending::Stop)))));
    assert_eq!(now(&mut answer).await, Some((vec![], None)), "after the end there is nothing");
    assert_eq!((answer.prompt_tokens(), answer.tokens()), (3, 5));
}

#[tokio::test]
async fn a_stop_string_ends_the_answer_and_the_engines_work() {
    for (include, text) in [(false, "one "), (true, "one END")] {
        let rig = Rig::new();
        let (id, mut answer) = rig.answer(&["END"], include);
        rig.push(id, rig.ids("one EN"), None);
        let (pieces, end) = now(&mut answer).await.unwrap();
        assert_eq!((pieces.concat().as_str(), end), ("one ", None), "what may become a stop is held back");
        rig.push(id, rig.ids("D two"), None);
        let (rest, end) = now(&mut answer).await.unwrap();
        assert_eq!((pieces.concat() + &rest.concat(), end), (text.to_owned(), Some(Ok(Ending::StopString))));
        assert_eq!(answer.tokens() as usize, rig.ids("one EN").len() + rig.ids("D").len(), "ids after the stop do not count");
        assert_eq!(rig.push(id, rig.ids("x"), None), [id], "the engine hears of it with its next step");
        assert_eq!(rig.engine.load(), Load { tokens: rig.engine.load().tokens, ..Load::default() });
    }
}

#[tokio::test]
async fn a_stop_that_comes_with_the_engines_own_end_is_the_ending() {
    let rig = Rig::new();
    let (id, mut answer) = rig.answer(&["b"], true);
    rig.push(id, rig.ids("abc"), Some(Finish::Length));
    assert_eq!(answer.rest().await, Ok(("ab".to_owned(), Ending::StopString)));
}

#[tokio::test]
async fn what_was_held_back_for_a_stop_comes_with_the_end() {
    let rig = Rig::new();
    let (id, mut answer) = rig.answer(&["abcdef"], false);
    rig.push(id, rig.ids("xabc"), None);
    rig.push(id, rig.ids("de"), Some(Finish::Length));
    assert_eq!(answer.rest().await, Ok(("xabcde".to_owned(), Ending::Length)));
}

#[tokio::test]
async fn an_engine_that_fails_in_the_middle_is_an_error_and_no_ending() {
    let rig = Rig::new();
    let (id, mut answer) = rig.answer(&[], false);
    rig.push(id, rig.ids("ab"), None);
    rig.port.fail("out of memory");
    assert_eq!(answer.rest().await.unwrap_err().code, Code::EngineFailed);
    assert_eq!(now(&mut answer).await, Some((vec![], None)));
}

#[tokio::test]
async fn dropping_an_answer_cancels_it() {
    let rig = Rig::new();
    let (id, answer) = rig.answer(&[], false);
    drop(answer);
    assert_eq!(rig.port.poll().unwrap().unwrap(), [Order::Cancel(id)]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn the_text_is_the_same_however_the_ids_come(text in "[abé🙂 ]{0,20}", stop in "[ab]{1,3}", sizes in prop::collection::vec(1_usize..5, 1..6)) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let rig = Rig::new();
        let expected = text.find(&stop).map_or(text.as_str(), |at| &text[..at]);
        let (id, mut answer) = rig.answer(&[&stop], false);
        let ids = rig.ids(&text);
        let mut rest = &ids[..];
        let mut found = String::new();
        for size in sizes.iter().cycle() {
            let (chunk, after) = rest.split_at(rest.len().min(*size));
            rest = after;
            rig.push(id, chunk.to_vec(), rest.is_empty().then_some(Finish::Stop));
            if let Some((pieces, _)) = runtime.block_on(now(&mut answer)) {
                found.push_str(&pieces.concat());
            }
            if rest.is_empty() { break }
        }
        prop_assert_eq!(found, expected);
    }
}

/// What a reader is told of an answer with these tokens, each step read before the next: the pieces, each with its tokens.
async fn told(stop: &[&str], steps: &[&[u32]], finish: Option<Finish>, rig: &Rig) -> Vec<(String, Vec<String>)> {
    let sampling = Some(Sampling { top_logprobs: Some(1), ..Sampling::default() });
    let generation = rig.engine.submit(Request { prompt: vec![1], max_tokens: 1000, sampling, ..Request::default() }).unwrap();
    rig.port.wait().unwrap();
    let (id, mut answer) =
        (generation.id(), Answer::new(generation, &rig.tokenizer, stop.iter().map(|s| (*s).to_owned()).collect(), false));
    let mut found = Vec::new();
    for (at, tokens) in steps.iter().enumerate() {
        let each = |token: &u32| Logprob { logprob: -0.5, top: vec![(*token, -0.5)] };
        let finish = finish.filter(|_| at + 1 == steps.len());
        rig.port.push(vec![Step { id, tokens: tokens.to_vec(), finish, logprobs: tokens.iter().map(each).collect() }]).unwrap();
        let mut pieces = Pieces::default();
        std::future::poll_fn(|cx| std::task::Poll::Ready(answer.poll(cx, &mut pieces).is_ready())).await;
        let name = |token: &TokenLogprob| {
            assert_eq!((token.chosen.logprob, &token.top_logprobs[..]), (-0.5, std::slice::from_ref(&token.chosen)));
            token.chosen.bytes.escape_ascii().to_string()
        };
        found.extend(pieces.told().map(|piece| (piece.text.to_owned(), piece.logprobs.iter().map(name).collect())));
        assert_eq!(pieces.logprobs().len(), pieces.told().map(|piece| piece.logprobs.len()).sum::<usize>());
    }
    found
}

fn pair(text: &str, tokens: &[&str]) -> (String, Vec<String>) {
    (text.to_owned(), tokens.iter().map(|token| (*token).to_owned()).collect())
}

#[tokio::test]
async fn tokens_are_told_with_the_text_they_stand_for() {
    let rig = Rig::new();
    let [a, b] = [rig.ids("a")[0], rig.ids("b")[0]];
    let heart = rig.ids("♥");
    let steps: [&[u32]; 4] = [&[a], &heart[..1], &heart[1..2], &[heart[2], b]];
    let expected = [pair("a", &["a"]), pair("♥", &[r"\xe2", r"\x99", r"\xa5"]), pair("b", &["b"])];
    assert_eq!(told(&[], &steps, Some(Finish::Length), &rig).await, expected);
}

#[tokio::test]
async fn tokens_of_a_stop_string_and_of_the_end_are_not_told() {
    let rig = Rig::new();
    let ids = rig.ids("abcd");
    assert_eq!(ids.len(), 4, "one token a letter");
    let each: Vec<&[u32]> = ids.chunks(1).collect();
    assert_eq!(told(&["cd"], &each, None, &rig).await, [pair("a", &["a"]), pair("b", &["b"])]);
    // What was held back for a stop that did not come goes out with its tokens.
    let steps: [&[u32]; 3] = [&ids[..2], &ids[2..3], &ids[..1]];
    let expected = [pair("a", &["a"]), pair("b", &["b"]), pair("ca", &["c", "a"])];
    assert_eq!(told(&["cd"], &steps, None, &rig).await, expected);
    // A special token ends the answer: it has no text.
    let special = rig.tokenizer.token_to_id("<|im_end|>").unwrap();
    assert_eq!(told(&[], &[&ids[..1], &[special]], Some(Finish::Stop), &rig).await, [pair("a", &["a"])]);
}

/// A rig whose vocabulary has these special tokens besides.
fn special(tokens: &[&str]) -> Rig {
    let mut file = vocab::byte_level();
    let added = file["added_tokens"].as_array_mut().unwrap();
    for (next, content) in (added.len() + 262..).zip(tokens) {
        added.push(serde_json::json!({
            "id": next, "content": content, "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        }));
    }
    Rig::of(&file)
}

#[tokio::test]
async fn special_tokens_that_mark_a_call_are_seen_and_only_words_have_their_tokens_told() {
    let rig = special(&["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"]);
    let text = "[THINK]hm[/THINK]ab [TOOL_CALLS]f[ARGS]{\"a\": 1}";
    let mut ids = rig.ids(text);
    ids.push(rig.tokenizer.token_to_id("<|im_end|>").unwrap());
    assert!(rig.tokenizer.is_special(ids[0]));
    for size in [1, 3, ids.len()] {
        let sampling = Some(Sampling { top_logprobs: Some(0), ..Sampling::default() });
        let generation = rig.engine.submit(Request { prompt: vec![1], max_tokens: 1000, sampling, ..Request::default() }).unwrap();
        rig.port.wait().unwrap();
        let id = generation.id();
        let format = Format::of("[TOOL_CALLS] [THINK]");
        let tools = Arc::new(Signatures::from([("f".to_owned(), serde_json::json!({}))]));
        let visible = rig.tokenizer.detokeniser().specials(&format.marks());
        let mut answer = Answer::new(generation, &rig.tokenizer, vec!["zz".to_owned()], false).parsed(
            Parser::of(format, tools, "").unwrap(),
            visible,
            None,
        );
        let mut found: Vec<(Kind, String)> = Vec::new();
        let mut tokens = String::new();
        for (at, chunk) in ids.chunks(size).enumerate() {
            let finish = ((at + 1) * size >= ids.len()).then_some(Finish::Stop);
            let logprobs = chunk.iter().map(|_| Logprob { logprob: -0.5, top: vec![] }).collect();
            rig.port.push(vec![Step { id, tokens: chunk.to_vec(), finish, logprobs }]).unwrap();
            let mut pieces = Pieces::default();
            std::future::poll_fn(|cx| std::task::Poll::Ready(answer.poll(cx, &mut pieces).is_ready())).await;
            for piece in pieces.told() {
                tokens.extend(piece.logprobs.iter().map(|token| token.chosen.token.as_str()));
                assert!(piece.kind == Kind::Text || piece.logprobs.is_empty());
                match found.last_mut() {
                    Some((kind, text)) if *kind == piece.kind => text.push_str(piece.text),
                    _ => found.push((piece.kind, piece.text.to_owned())),
                }
            }
        }
        let expected = [
            (Kind::Reasoning, "hm"),
            (Kind::Text, "ab"),
            (Kind::Call, "f"),
            (Kind::Arguments, "{\"a\": 1}"),
            (Kind::End { whole: true }, ""),
        ];
        assert_eq!(found, expected.map(|(kind, text)| (kind, text.to_owned())), "{size} at a time");
        assert_eq!(tokens, "ab");
        // What is in the thought and the mark that ends it: `h`, `m`, `[/THINK]`.
        assert_eq!(answer.reasoning_tokens(), 3);
    }
}
