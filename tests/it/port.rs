//! The boundary: what an engine may do, what a reader sees, and that no request is left without an end.

use std::collections::{HashMap, HashSet};
use std::sync::mpsc::channel;
use std::thread;

use emberd::engine::mock::{Fault, Mock, Pace, vocabulary};
use emberd::engine::port::{Engine, Phase, Port, PortError, Request, port};
use emberd::engine::{Capabilities, Chunk, Client, Finish, Generation, Id, Logprob, Order, Reuse, Sampling, Settings, Step, host};
use emberd::error::Code;
use proptest::prelude::*;

fn capabilities(max_batch: u32) -> Capabilities {
    Capabilities { context_length: 100, max_batch, vocab_size: 50, eos_ids: vec![2], constraints: false }
}

fn ready(max_batch: u32) -> (Engine, Port) {
    let (engine, port) = port(4);
    port.ready(capabilities(max_batch)).unwrap();
    (engine, port)
}

fn request(max_tokens: u32) -> Request {
    Request { prompt: vec![1, 2, 3], max_tokens, ..Request::default() }
}

fn step(id: Id, tokens: &[u32], finish: Option<Finish>) -> Step {
    Step { id, tokens: tokens.to_vec(), finish, logprobs: vec![] }
}

fn admitted(port: &Port) -> Vec<Id> {
    let orders = port.poll().unwrap().unwrap();
    orders.iter().filter_map(|order| if let Order::Admit(admit) = order { Some(admit.id) } else { None }).collect()
}

fn read(generation: &mut Generation) -> Chunk {
    generation.next_blocking().unwrap()
}

#[test]
fn ids_arrive_in_order_and_end_with_the_finish() {
    let (engine, port) = ready(4);
    let mut generation = engine.submit(request(3)).unwrap();
    let id = admitted(&port)[0];
    assert_eq!(port.push(vec![step(id, &[7], None)]).unwrap(), Vec::<u64>::new());
    assert_eq!(read(&mut generation), Chunk { tokens: vec![7], end: None });
    port.push(vec![step(id, &[8], None)]).unwrap();
    port.push(vec![step(id, &[2], Some(Finish::Stop))]).unwrap();
    assert_eq!(read(&mut generation), Chunk { tokens: vec![8, 2], end: Some(Ok(Finish::Stop)) });
    assert!(generation.next_blocking().is_none());
    assert_eq!(generation.timing().tokens, 3);
}

#[test]
fn cached_tokens_are_told_with_the_first_id_and_stay() {
    let (engine, port) = ready(4);
    let mut generation = engine.submit(request(2)).unwrap();
    let id = admitted(&port)[0];
    assert_eq!(generation.timing().cached, 0);
    port.cached(id, 2).unwrap();
    port.push(vec![step(id, &[7], None)]).unwrap();
    assert_eq!(read(&mut generation), Chunk { tokens: vec![7], end: None });
    assert_eq!(generation.timing().cached, 2);
    port.push(vec![step(id, &[2], Some(Finish::Stop))]).unwrap();
    assert_eq!(port.cached(id, 2), Ok(()), "an id that is over is left alone");
    assert_eq!(generation.timing().cached, 2);
    assert_eq!(port.cached(id + 1, 2), Err(PortError::UnknownId(id + 1)));
    engine.close();
    assert_eq!(port.cached(id, 2), Ok(()));
}

#[test]
fn a_prompt_that_is_cached_to_its_end_fails_its_request_alone() {
    let (engine, port) = ready(4);
    let mut generations = [engine.submit(request(2)).unwrap(), engine.submit(request(2)).unwrap()];
    let ids = admitted(&port);
    port.cached(ids[0], 3).unwrap();
    port.cached(ids[1], 0).unwrap();
    assert_eq!(port.push(vec![step(ids[0], &[7], None), step(ids[1], &[7], None)]).unwrap(), [ids[0]]);
    let end = read(&mut generations[0]).end.unwrap().unwrap_err();
    assert_eq!((end.code, &*end.message), (Code::EngineFailed, "the engine says that 3 tokens of a prompt of 3 were cached"));
    assert_eq!(read(&mut generations[1]), Chunk { tokens: vec![7], end: None });
}

#[test]
fn clients_take_turns_however_many_requests_each_has() {
    let (engine, port) = port(64);
    port.ready(capabilities(3)).unwrap();
    let (many, few, late) = (Client::new(), Client::new(), Client::new());
    let ask = |client| engine.place(client).unwrap().submit(request(3)).unwrap();
    let mut asked: Vec<Generation> = (0..5).map(|_| ask(many)).collect();
    asked.push(ask(few));
    asked.push(ask(few));
    asked.push(ask(late));
    let ids: Vec<Id> = asked.iter().map(Generation::id).collect();
    assert_eq!(admitted(&port), [ids[0], ids[5], ids[7]], "one of each");
    // `few` and `late` have one in the engine, `many` has none.
    asked.remove(0);
    assert_eq!(admitted(&port), [ids[1]]);
    assert_eq!(engine.load().waiting, 4);
    // All have one; then it is who came first.
    asked.retain(|asked| asked.id() != ids[7]);
    assert_eq!(admitted(&port), [ids[2]]);
}

#[test]
fn the_last_place_is_kept_for_a_client_that_has_none() {
    let (engine, port) = port(64);
    port.ready(capabilities(4)).unwrap();
    let (many, other) = (Client::new(), Client::new());
    let ask = |client| engine.place(client).unwrap().submit(request(3)).unwrap();
    let _many: Vec<Generation> = (0..5).map(|_| ask(many)).collect();
    assert_eq!(admitted(&port).len(), 3);
    assert_eq!(admitted(&port).len(), 0);
    let title = ask(other);
    assert_eq!(admitted(&port), [title.id()]);
    drop(title);
    assert_eq!(admitted(&port).len(), 0, "it is kept free again");
}

#[test]
fn a_request_that_leaves_the_queue_never_reaches_the_engine() {
    let (engine, port) = ready(1);
    let _running = engine.submit(request(3)).unwrap();
    let queued = engine.submit(request(3)).unwrap();
    assert_eq!(admitted(&port).len(), 1);
    drop(queued);
    assert_eq!(port.poll().unwrap().unwrap(), []);
    assert_eq!(engine.load().waiting, 0);
}

#[test]
fn a_reader_that_leaves_during_prefill_is_told_once_by_poll() {
    let (engine, port) = ready(4);
    let generation = engine.submit(request(3)).unwrap();
    let id = admitted(&port)[0];
    drop(generation);
    assert_eq!(port.poll().unwrap().unwrap(), [Order::Cancel(id)]);
    assert_eq!(port.push(Vec::new()).unwrap(), Vec::<u64>::new());
    assert_eq!(engine.load().running, 0);
}

#[test]
fn a_reader_that_leaves_during_decode_is_told_once_by_push() {
    let (engine, port) = ready(4);
    let generation = engine.submit(request(30)).unwrap();
    let id = admitted(&port)[0];
    port.push(vec![step(id, &[7], None)]).unwrap();
    drop(generation);
    assert_eq!(port.push(vec![step(id, &[8], None)]).unwrap(), [id]);
    assert_eq!(port.poll().unwrap().unwrap(), []);
}

#[test]
fn a_reader_that_leaves_after_the_finish_is_nobodys_business() {
    let (engine, port) = ready(4);
    let generation = engine.submit(request(1)).unwrap();
    let id = admitted(&port)[0];
    port.push(vec![step(id, &[7], Some(Finish::Length))]).unwrap();
    drop(generation);
    assert_eq!(port.push(Vec::new()).unwrap(), Vec::<u64>::new());
    assert_eq!(port.poll().unwrap().unwrap(), []);
}

#[test]
fn a_place_that_is_left_is_given_to_the_next_in_the_same_call() {
    let (engine, port) = ready(1);
    let first = engine.submit(request(3)).unwrap();
    let _second = engine.submit(request(3)).unwrap();
    let id = admitted(&port)[0];
    drop(first);
    let orders = port.poll().unwrap().unwrap();
    assert!(matches!(&orders[..], [Order::Cancel(gone), Order::Admit(admit)] if *gone == id && admit.id == id + 1), "{orders:?}");
}

#[test]
fn the_engine_never_holds_more_than_its_batch() {
    let (engine, port) = ready(2);
    let generations: Vec<_> = (0..5).map(|_| engine.submit(request(1)).unwrap()).collect();
    let mut seen = 0;
    while seen < 5 {
        let ids = admitted(&port);
        assert!(ids.len() <= 2);
        seen += ids.len();
        port.push(ids.iter().map(|id| step(*id, &[7], Some(Finish::Length))).collect()).unwrap();
    }
    drop(generations);
}

#[test]
fn a_full_queue_refuses_and_names_its_limit() {
    let (engine, port) = ready(1);
    let _running = engine.submit(request(3)).unwrap();
    admitted(&port);
    let _waiting: Vec<_> = (0..4).map(|_| engine.submit(request(3)).unwrap()).collect();
    let error = engine.submit(request(3)).err().unwrap();
    assert_eq!(error.code, Code::QueueFull);
    assert!(error.message.contains('4'), "{error}");
}

#[test]
fn requests_that_cannot_be_are_refused_before_they_queue() {
    let (engine, _port) = ready(1);
    let of = |prompt: Vec<u32>, max_tokens| engine.submit(Request { prompt, max_tokens, ..Request::default() }).err().unwrap();
    assert_eq!(of(vec![], 1).code, Code::InvalidValue);
    assert_eq!(of(vec![1], 0).code, Code::InvalidValue);
    assert_eq!(of(vec![50], 1).code, Code::InvalidValue);
    let long = of(vec![1; 90], 11);
    assert_eq!(long.code, Code::ContextLengthExceeded);
    assert!(long.message.contains("90") && long.message.contains("100"), "{long}");
}

#[test]
fn an_engine_that_ends_without_a_finish_ends_every_request() {
    let (engine, port) = ready(1);
    let mut running = engine.submit(request(3)).unwrap();
    let mut queued = engine.submit(request(3)).unwrap();
    admitted(&port);
    drop(port);
    for generation in [&mut running, &mut queued] {
        let end = read(generation).end.unwrap().unwrap_err();
        assert!(end.message.contains("ended without a finish"), "{end}");
    }
    assert_eq!(engine.submit(request(3)).err().unwrap().code, Code::EngineFailed);
}

#[test]
fn an_engine_that_fails_ends_every_request_with_its_first_line() {
    let (engine, port) = ready(1);
    let mut running = engine.submit(request(3)).unwrap();
    admitted(&port);
    port.fail("out of memory; hint: use a smaller model\nTraceback: ...");
    let end = read(&mut running).end.unwrap().unwrap_err();
    assert_eq!((end.message.as_ref(), end.hint.as_deref()), ("out of memory", Some("use a smaller model")));
    assert!(end.detail.unwrap().contains("Traceback"));
    assert_eq!(port.poll(), Err(PortError::AfterFailure("poll")));
    assert_eq!(port.push(Vec::new()), Err(PortError::AfterFailure("push")));
    assert!(matches!(&*engine.phase().borrow(), Phase::Failed(_)));
}

#[test]
fn a_request_that_fails_leaves_the_others_alone() {
    let (engine, port) = ready(2);
    let mut bad = engine.submit(request(3)).unwrap();
    let mut good = engine.submit(request(1)).unwrap();
    let ids = admitted(&port);
    port.fail_request(ids[0], "its numbers are not numbers").unwrap();
    port.push(vec![step(ids[1], &[7], Some(Finish::Length))]).unwrap();
    assert!(read(&mut bad).end.unwrap().is_err());
    assert_eq!(read(&mut good).end, Some(Ok(Finish::Length)));
}

#[test]
fn an_engine_that_overruns_a_request_fails_that_request_alone() {
    let (engine, port) = ready(2);
    let mut greedy = engine.submit(request(2)).unwrap();
    let mut good = engine.submit(request(2)).unwrap();
    let ids = admitted(&port);
    let gone = port.push(vec![step(ids[0], &[7, 7, 7], None), step(ids[1], &[7], None)]).unwrap();
    assert_eq!(gone, [ids[0]]);
    assert!(read(&mut greedy).end.unwrap().is_err());
    assert_eq!(read(&mut good).tokens, [7]);
}

#[test]
fn an_id_outside_the_vocabulary_fails_its_request_alone() {
    let (engine, port) = ready(2);
    let mut bad = engine.submit(request(2)).unwrap();
    let mut good = engine.submit(request(2)).unwrap();
    let ids = admitted(&port);
    assert_eq!(port.push(vec![step(ids[0], &[50], None), step(ids[1], &[49], None)]).unwrap(), vec![ids[0]]);
    assert!(read(&mut bad).end.unwrap().unwrap_err().message.contains("outside its vocabulary"));
    assert_eq!(read(&mut good).tokens, [49]);
}

#[test]
fn an_engine_that_does_not_end_what_is_complete_fails_that_request() {
    let (engine, port) = ready(2);
    let mut generation = engine.submit(request(1)).unwrap();
    let id = admitted(&port)[0];
    assert_eq!(port.push(vec![step(id, &[7], None)]).unwrap(), vec![id]);
    assert!(read(&mut generation).end.unwrap().unwrap_err().message.contains("did not end"));
    assert_eq!(engine.load().running, 0);
}

#[test]
fn closing_ends_what_is_in_flight_and_the_loop() {
    let (engine, port) = ready(1);
    let mut running = engine.submit(request(3)).unwrap();
    let mut queued = engine.submit(request(3)).unwrap();
    let id = admitted(&port)[0];
    engine.close();
    for generation in [&mut running, &mut queued] {
        assert_eq!(read(generation).end.unwrap().unwrap_err().code, Code::ShuttingDown);
    }
    assert_eq!(port.wait(), Ok(None));
    assert_eq!(port.poll(), Ok(None));
    assert_eq!(port.push(vec![step(id, &[7], None)]), Ok(vec![id]));
    drop(port); // After the close this is the ordinary end.
    assert!(matches!(&*engine.phase().borrow(), Phase::Closed));
}

#[test]
fn calls_out_of_order_are_refused() {
    let (_engine, port) = port(4);
    assert_eq!(port.wait(), Err(PortError::NotReady("wait")));
    assert_eq!(port.push(Vec::new()), Err(PortError::NotReady("push")));
    port.ready(capabilities(1)).unwrap();
    assert_eq!(port.ready(capabilities(1)), Err(PortError::ReadyTwice));
    assert_eq!(port.push(vec![step(9, &[7], None)]), Err(PortError::UnknownId(9)));
    assert_eq!(port.fail_request(9, "no"), Err(PortError::UnknownId(9)));
}

#[test]
fn capabilities_that_cannot_be_are_refused() {
    let (_engine, port) = port(4);
    for impossible in [
        Capabilities { context_length: 1, ..capabilities(1) },
        capabilities(0),
        Capabilities { vocab_size: 0, ..capabilities(1) },
        Capabilities { eos_ids: vec![50], ..capabilities(1) },
    ] {
        assert!(matches!(port.ready(impossible), Err(PortError::Capabilities(_))));
    }
}

#[test]
fn wait_sleeps_until_there_is_an_order() {
    let (engine, port) = ready(1);
    let (sender, orders) = channel();
    let waiter = thread::spawn(move || {
        while let Ok(Some(orders)) = port.wait() {
            sender.send(orders).unwrap();
        }
    });
    let generation = engine.submit(request(3)).unwrap();
    let admit = orders.recv().unwrap();
    assert!(matches!(&admit[..], [Order::Admit(_)]));
    drop(generation);
    assert!(matches!(&orders.recv().unwrap()[..], [Order::Cancel(_)]));
    engine.close();
    waiter.join().unwrap();
}

#[test]
fn a_panic_in_a_call_becomes_the_engines_failure() {
    let (engine, port) = port(4);
    Mock { fault: Fault::PanicAfter(1), ..Mock::default() }.spawn(port, Settings::default()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(host::ready(engine.phase())).unwrap();
    let mut generation = engine.submit(request(50)).unwrap();
    loop {
        if let Some(end) = read(&mut generation).end {
            assert!(end.unwrap_err().message.contains("told to panic"));
            break;
        }
    }
}

#[test]
fn every_fault_of_an_engine_reaches_the_reader() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for fault in [Fault::FailAfter(2), Fault::EndAfter(2), Fault::Overrun, Fault::FailRequest, Fault::PanicAfter(2)] {
        let (engine, port) = port(4);
        Mock { fault, ..Mock::default() }.spawn(port, Settings::default()).unwrap();
        runtime.block_on(host::ready(engine.phase())).unwrap();
        let mut generation = engine.submit(request(50)).unwrap();
        let end = std::iter::from_fn(|| generation.next_blocking()).find_map(|chunk| chunk.end);
        assert_eq!(end.unwrap().unwrap_err().code, Code::EngineFailed, "{fault:?}");
    }
    let (engine, port) = port(4);
    Mock { fault: Fault::FailLoad, ..Mock::default() }.spawn(port, Settings::default()).unwrap();
    assert!(runtime.block_on(host::ready(engine.phase())).is_err());
}

#[test]
fn two_engines_run_side_by_side() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let engines: Vec<Engine> = (0..2)
        .map(|_| {
            let (engine, port) = port(4);
            Mock::default().spawn(port, Settings::default()).unwrap();
            runtime.block_on(host::ready(engine.phase())).unwrap();
            engine
        })
        .collect();
    let mut generations: Vec<_> = engines.iter().map(|engine| engine.submit(request(20)).unwrap()).collect();
    engines[0].close();
    let end = std::iter::from_fn(|| generations[1].next_blocking()).find_map(|chunk| chunk.end);
    assert_eq!(end, Some(Ok(Finish::Length)));
}

#[test]
fn the_mock_steps_as_its_gate_lets_it() {
    let (gate, steps) = channel();
    let (engine, port) = port(4);
    Mock { pace: Pace::Gate(steps), ..Mock::default() }.spawn(port, Settings::default()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(host::ready(engine.phase())).unwrap();
    let mut generation = engine.submit(request(2)).unwrap();
    gate.send(()).unwrap();
    assert_eq!(read(&mut generation).tokens, [vocabulary::FIRST_WORD]);
    gate.send(()).unwrap();
    assert_eq!(read(&mut generation).end, Some(Ok(Finish::Length)));
}

/// What happens at a port, in any order.
#[derive(Debug, Clone)]
enum Act {
    Submit,
    Leave(prop::sample::Index),
    Poll,
    Step,
    Finish(prop::sample::Index),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        3 => Just(Act::Submit),
        2 => any::<prop::sample::Index>().prop_map(Act::Leave),
        3 => Just(Act::Poll),
        3 => Just(Act::Step),
        1 => any::<prop::sample::Index>().prop_map(Act::Finish),
    ];
    prop::collection::vec(act, 1..80)
}

proptest! {
    /// Whatever the order of events: each reader gets exactly what was pushed for it, the engine hears of each leaver once, and of nobody else.
    #[test]
    fn leaving_is_told_exactly_once_and_no_id_is_lost(acts in acts()) {
        let (engine, port) = port(1000);
        port.ready(Capabilities { context_length: 100_000, max_batch: 3, vocab_size: 50, eos_ids: vec![], constraints: false }).unwrap();
        let mut readers: HashMap<Id, (Generation, u32)> = HashMap::new();
        let mut left: HashSet<Id> = HashSet::new();
        let mut told: HashSet<Id> = HashSet::new();
        let mut inside: HashSet<Id> = HashSet::new();
        let tell = |told: &mut HashSet<Id>, left: &HashSet<Id>, inside: &mut HashSet<Id>, id: Id| {
            assert!(left.contains(&id) && told.insert(id), "{id} was told twice, or had not left");
            inside.remove(&id);
        };
        for act in acts {
            match act {
                Act::Submit => {
                    let generation = engine.submit(request(1000)).unwrap();
                    readers.insert(generation.id(), (generation, 0));
                }
                Act::Leave(which) if !readers.is_empty() => {
                    let mut ids: Vec<Id> = readers.keys().copied().collect();
                    ids.sort_unstable();
                    let id = ids[which.index(ids.len())];
                    readers.remove(&id);
                    left.insert(id);
                }
                Act::Poll => {
                    for order in port.poll().unwrap().unwrap() {
                        match order {
                            Order::Admit(admit) => {
                                prop_assert!(!left.contains(&admit.id));
                                inside.insert(admit.id);
                            }
                            Order::Cancel(id) => tell(&mut told, &left, &mut inside, id),
                            Order::Forget(snapshot) => panic!("nobody gave up {snapshot}"),
                        }
                    }
                    prop_assert!(inside.len() <= 3);
                }
                Act::Step => {
                    let steps: Vec<Step> = inside.iter().map(|id| step(*id, &[7], None)).collect();
                    for id in &inside {
                        if let Some((_, pushed)) = readers.get_mut(id) {
                            *pushed += 1;
                        }
                    }
                    for id in port.push(steps).unwrap() {
                        tell(&mut told, &left, &mut inside, id);
                    }
                }
                Act::Finish(which) if !inside.is_empty() => {
                    let mut ids: Vec<Id> = inside.iter().copied().collect();
                    ids.sort_unstable();
                    let id = ids[which.index(ids.len())];
                    let gone = port.push(vec![step(id, &[8], Some(Finish::Stop))]).unwrap();
                    for id in gone {
                        tell(&mut told, &left, &mut inside, id);
                    }
                    inside.remove(&id);
                    if let Some((mut generation, pushed)) = readers.remove(&id) {
                        let chunk = generation.next_blocking().unwrap();
                        prop_assert_eq!(chunk.tokens.len() as u32, pushed + 1);
                        prop_assert_eq!(chunk.end, Some(Ok(Finish::Stop)));
                    }
                }
                _ => {}
            }
        }
    }
}

#[test]
fn log_probabilities_reach_the_reader_that_asked_and_no_other() {
    let (engine, port) = ready(4);
    let asked = Sampling { top_logprobs: Some(1), ..Sampling::default() };
    let mut curious = engine.submit(Request { sampling: Some(asked), ..request(3) }).unwrap();
    let mut other = engine.submit(request(3)).unwrap();
    let ids = admitted(&port);
    let told = |logprob| Logprob { logprob, top: vec![(7, -0.25)] };
    for (tokens, logprobs) in [(vec![7, 8], vec![told(-0.25), told(-3.0)]), (vec![], vec![])] {
        let each = |id: &Id| Step { id: *id, tokens: tokens.clone(), finish: None, logprobs: logprobs.clone() };
        assert_eq!(port.push(ids.iter().map(each).collect()).unwrap(), Vec::<Id>::new());
    }
    assert_eq!(curious.take_logprobs(), [], "they come with the ids");
    assert_eq!((read(&mut curious).tokens, read(&mut other).tokens), (vec![7, 8], vec![7, 8]));
    assert_eq!((curious.take_logprobs(), other.take_logprobs()), (vec![told(-0.25), told(-3.0)], vec![]));
    assert_eq!(curious.take_logprobs(), [], "each is told once");
    port.push(ids.iter().map(|id| Step { logprobs: vec![told(-1.0)], ..step(*id, &[2], Some(Finish::Stop)) }).collect()).unwrap();
    assert_eq!(read(&mut curious), Chunk { tokens: vec![2], end: Some(Ok(Finish::Stop)) });
    assert_eq!(curious.take_logprobs(), [told(-1.0)]);
}

#[test]
fn log_probabilities_for_some_ids_and_not_for_others_fail_their_request_alone() {
    let (engine, port) = ready(4);
    let (mut bad, mut good) = (engine.submit(request(3)).unwrap(), engine.submit(request(3)).unwrap());
    let ids = admitted(&port);
    port.push(ids.iter().map(|id| step(*id, &[7], None)).collect()).unwrap();
    let logprobs = vec![Logprob { logprob: -1.0, top: vec![] }];
    let steps = vec![Step { logprobs, ..step(ids[0], &[8], None) }, step(ids[1], &[8], None)];
    assert_eq!(port.push(steps).unwrap(), [ids[0]]);
    let error = read(&mut bad).end.unwrap().unwrap_err();
    assert!(error.message.contains("for some tokens of a request and not for others"), "{error}");
    assert_eq!(read(&mut good).tokens, [7, 8]);
}

#[test]
fn log_probabilities_for_another_number_of_ids_fail_their_request_alone() {
    let (engine, port) = ready(4);
    let (mut bad, mut good) = (engine.submit(request(3)).unwrap(), engine.submit(request(3)).unwrap());
    let ids = admitted(&port);
    let logprobs = vec![Logprob { logprob: -1.0, top: vec![] }];
    let steps = vec![Step { id: ids[0], tokens: vec![7, 8], finish: None, logprobs }, step(ids[1], &[7], None)];
    assert_eq!(port.push(steps).unwrap(), [ids[0]]);
    let error = read(&mut bad).end.unwrap().unwrap_err();
    assert!(error.message.contains("2 tokens and gave log probabilities for 1"), "{error}");
    assert_eq!(read(&mut good).tokens, [7]);
}

#[test]
fn sampling_that_cannot_be_never_reaches_the_engine() {
    let (engine, port) = ready(4);
    let plain = Sampling::default;
    for (sampling, param) in [
        (Sampling { temperature: -0.5, ..plain() }, "temperature"),
        (Sampling { temperature: f32::NAN, ..plain() }, "temperature"),
        (Sampling { temperature: f32::INFINITY, ..plain() }, "temperature"),
        (Sampling { top_p: 0.0, ..plain() }, "top_p"),
        (Sampling { min_p: 1.5, ..plain() }, "min_p"),
        (Sampling { repetition_penalty: 0.0, ..plain() }, "repetition_penalty"),
        (Sampling { presence_penalty: 2.5, ..plain() }, "presence_penalty"),
        (Sampling { frequency_penalty: f32::NAN, ..plain() }, "frequency_penalty"),
        (Sampling { logit_bias: [(50, 1.0)].into(), ..plain() }, "logit_bias.50"),
        (Sampling { logit_bias: [(3, f32::NEG_INFINITY)].into(), ..plain() }, "logit_bias.3"),
    ] {
        let error = engine.submit(Request { sampling: Some(sampling), ..request(3) }).err().unwrap();
        assert_eq!((error.code, error.param.as_deref()), (Code::InvalidValue, Some(param)), "{error}");
        assert!(error.hint.is_some(), "{error}");
    }
    assert_eq!(admitted(&port), [] as [Id; 0]);
    let edge = Sampling { temperature: 2.0, min_p: 1.0, logit_bias: [(49, 100.0)].into(), ..plain() };
    engine.submit(Request { sampling: Some(edge), ..request(3) }).unwrap();
}

#[test]
fn what_a_request_may_reuse_and_what_is_given_up_reaches_the_engine() {
    let (engine, port) = ready(1);
    let reuse = Reuse { salt: "a".into(), start_from: Some(3), save_as: Some(4) };
    let _reading = engine.submit(Request { speculation: Some(0), reuse: reuse.clone(), ..request(2) }).unwrap();
    engine.forget(3);
    let orders = port.wait().unwrap().unwrap();
    let [Order::Forget(3), Order::Admit(admit)] = orders.as_slice() else { panic!("{orders:?}") };
    assert_eq!((&admit.reuse, admit.speculation), (&reuse, Some(0)));
    // Nothing waits for what is given up of an engine that is over.
    engine.close();
    engine.forget(4);
    assert_eq!(port.poll().unwrap(), None);
}
