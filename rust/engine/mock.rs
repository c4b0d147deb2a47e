//! An engine in Rust, without a model: it speaks the real port, so that doors are tested and measured without Python.
//!
//! It answers every prompt with the same run of ids, or each with the next answer of a list, or with what the rules of a script say, at the pace it is
//! given, and fails on command.

use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::thread;
use std::time::Duration;

use crate::engine::host::Settings;
use crate::engine::script::{Rule, Script, Trouble};
use crate::engine::{Admit, Capabilities, Constraint, Finish, Id, Order, Port, PortError, Step};
use crate::error::{Code, Error, Result};

/// The ids of the mock's vocabulary: 256 bytes, then the specials, then the words it answers with.
pub mod vocabulary {
    /// The text of the special ids, from 256.
    pub const SPECIALS: [&str; 3] = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"];
    /// Begins a turn.
    pub const START: u32 = 256;
    /// Ends a turn, and a sequence.
    pub const EOS: u32 = 257;
    /// The first word.
    pub const FIRST_WORD: u32 = 259;
    /// The words of an answer, one id each, in this order and over again.
    pub const WORDS: [&str; 8] = [" a", " small", " model", " keeps", " warm", " and", " answers", " now"];
    /// Ids are below this.
    pub const SIZE: u32 = FIRST_WORD + WORDS.len() as u32;

    /// The ids of an answer with this text, its end included: one for each byte.
    #[must_use]
    pub fn answer(text: &str) -> Vec<u32> {
        text.bytes().map(u32::from).chain([EOS]).collect()
    }

    /// The text of ids, specials left out.
    #[must_use]
    pub fn text(ids: &[u32]) -> String {
        let mut bytes = Vec::with_capacity(ids.len());
        for id in ids {
            match u8::try_from(*id) {
                Ok(byte) => bytes.push(byte),
                Err(_) => {
                    let word = id.checked_sub(FIRST_WORD).and_then(|at| WORDS.get(at as usize));
                    bytes.extend_from_slice(word.copied().unwrap_or_default().as_bytes());
                }
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// How fast the mock steps.
#[derive(Debug)]
pub enum Pace {
    /// As fast as it can.
    Free,
    /// One step in this time, as if it computed.
    Every(Duration),
    /// One step for each message; when the sender is gone, as fast as it can.
    Gate(Receiver<()>),
}

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    None,
    /// The engine fails after this many steps.
    FailAfter(u32),
    /// Its thread ends after this many steps, without a word.
    EndAfter(u32),
    /// It makes more ids than asked for.
    Overrun,
    /// It fails the newest request instead of answering it.
    FailRequest,
    /// It never becomes ready: loading fails.
    FailLoad,
    /// It panics inside a port call after this many steps.
    PanicAfter(u32),
}

/// The mock engine.
#[derive(Debug)]
pub struct Mock {
    /// The answer to every prompt; run through again when it is short. An eos in it ends the sequence.
    pub answer: Vec<u32>,
    /// Answers in the place of that one: the first request gets the first, and so on, and over again. Empty: there are none.
    pub script: Vec<Vec<u32>>,
    /// Rules in the place of both: a request is answered as the first that fits its prompt says, and fails where none does. With rules, answers may be
    /// held to constraints: one that says what its constraint does not allow fails there.
    pub rules: Script,
    /// A sequence ends by itself after this many ids.
    pub stop_after: u32,
    /// Ids of prompt taken in a step.
    pub prefill_chunk: usize,
    /// Requests at a time.
    pub max_batch: u32,
    /// Window in ids.
    pub context_length: u32,
    /// How fast it steps.
    pub pace: Pace,
    /// What goes wrong.
    pub fault: Fault,
}

impl Default for Mock {
    fn default() -> Self {
        Self {
            answer: (vocabulary::FIRST_WORD..vocabulary::SIZE).collect(),
            script: Vec::new(),
            rules: Script::default(),
            stop_after: 1024,
            prefill_chunk: 4096,
            max_batch: 1024,
            context_length: 8192,
            pace: Pace::Free,
            fault: Fault::None,
        }
    }
}

struct Sequence {
    id: Id,
    /// Which request it is, from 0.
    number: usize,
    prefill_left: usize,
    made: u32,
    limit: u32,
    constraint: Option<Constraint>,
    /// What the rules say of it.
    rule: Option<Arc<Rule>>,
}

impl Sequence {
    /// Whether it goes wrong now, and how.
    fn trouble(&self) -> Option<Trouble> {
        self.rule.as_ref().filter(|rule| self.prefill_left == 0 && self.made >= rule.after).and_then(|rule| rule.fault)
    }

    /// Whether nothing comes of it any more.
    fn stalled(&self) -> bool {
        self.trouble() == Some(Trouble::Stall)
    }

    /// How long a step of it takes.
    fn pause(&self) -> Duration {
        Duration::from_millis(self.rule.as_ref().filter(|_| !self.stalled()).map_or(0, |rule| rule.step_ms))
    }
}

/// What a step comes to for one sequence.
enum Made {
    /// Nothing that is told.
    Nothing,
    /// Ids.
    Step(Step),
    /// It fails.
    Failed(String),
    /// The engine ends.
    Death,
}

impl Mock {
    /// The engine's name in launches.
    pub const NAME: &'static str = "mock";

    /// Runs it on a thread of its own.
    ///
    /// # Errors
    /// `server_error` when the thread cannot be started.
    pub fn spawn(mut self, port: Port, settings: Settings) -> Result<()> {
        if !settings.script.is_empty() {
            self.script = settings.script.iter().map(|text| vocabulary::answer(text)).collect();
        }
        if !settings.rules.is_empty() {
            self.rules = settings.rules;
        }
        self.max_batch = settings.max_batch.unwrap_or(self.max_batch);
        // It has no window of its own that this could exceed.
        self.context_length = settings.context_length.unwrap_or(self.context_length);
        thread::Builder::new()
            .name("mock engine".into())
            .spawn(move || {
                if let Err(error) = self.run(&port) {
                    port.fail(&error.to_string());
                }
            })
            .map(drop)
            .map_err(|error| Error::new(Code::ServerError, format!("could not start the mock engine's thread: {error}")))
    }

    fn run(&self, port: &Port) -> Result<(), PortError> {
        if self.fault == Fault::FailLoad {
            port.fail("the mock was told to fail while loading");
            return Ok(());
        }
        port.ready(Capabilities {
            context_length: self.context_length,
            max_batch: self.max_batch,
            vocab_size: vocabulary::SIZE,
            eos_ids: vec![vocabulary::EOS],
            constraints: !self.rules.is_empty(),
        })?;
        let mut sequences: Vec<Sequence> = Vec::new();
        let mut admitted = 0;
        for step in 0_u32.. {
            let idle = sequences.iter().all(Sequence::stalled);
            let orders = if idle { port.wait()? } else { port.poll()? };
            let Some(orders) = orders else { return Ok(()) };
            for order in orders {
                match order {
                    Order::Admit(admit) if self.fault == Fault::FailRequest => {
                        port.fail_request(admit.id, "the mock was told to fail this request")?
                    }
                    Order::Admit(admit) => {
                        let rule = self.rules.rule(&admit.prompt);
                        if rule.is_none() && !self.rules.is_empty() {
                            port.fail_request(admit.id, "the mock's script has no rule for this prompt")?;
                            continue;
                        }
                        sequences.push(Self::admit(admit, admitted, rule));
                        admitted += 1;
                    }
                    Order::Cancel(id) => sequences.retain(|sequence| sequence.id != id),
                    Order::Forget(_) => {}
                }
            }
            match self.fault {
                Fault::FailAfter(steps) if step >= steps => {
                    port.fail("the mock was told to fail");
                    return Ok(());
                }
                Fault::EndAfter(steps) if step >= steps => return Ok(()),
                Fault::PanicAfter(steps) if step >= steps => {
                    return port.guarded(|_| std::panic::panic_any("the mock was told to panic".to_owned()));
                }
                _ => {}
            }
            match &self.pace {
                Pace::Free => {}
                Pace::Every(time) => thread::sleep(*time),
                Pace::Gate(gate) => _ = gate.recv(),
            }
            if !self.rules.is_empty() {
                thread::sleep(sequences.iter().map(Sequence::pause).max().unwrap_or_default());
            }
            let mut steps = Vec::with_capacity(sequences.len());
            for sequence in &mut sequences {
                match self.step(sequence) {
                    Made::Nothing => {}
                    Made::Step(step) => steps.push(step),
                    Made::Failed(why) => {
                        port.fail_request(sequence.id, &why)?;
                        sequence.made = sequence.limit;
                    }
                    Made::Death => return Ok(()),
                }
            }
            let gone = port.push(steps)?;
            sequences.retain(|sequence| sequence.made < sequence.limit && !gone.contains(&sequence.id));
        }
        Ok(())
    }

    fn admit(admit: Admit, number: usize, rule: Option<Arc<Rule>>) -> Sequence {
        let Admit { id, prompt, max_tokens: limit, constraint, .. } = admit;
        Sequence { id, number, prefill_left: prompt.len(), made: 0, limit, constraint, rule }
    }

    fn step(&self, sequence: &mut Sequence) -> Made {
        if sequence.prefill_left > self.prefill_chunk {
            sequence.prefill_left -= self.prefill_chunk;
            return Made::Nothing;
        }
        sequence.prefill_left = 0;
        let trouble = sequence.trouble().or((self.fault == Fault::Overrun).then_some(Trouble::Overrun));
        let id = sequence.id;
        match trouble {
            Some(Trouble::Stall) => return Made::Nothing,
            Some(Trouble::Fail) => return Made::Failed("the mock was told to fail this request".to_owned()),
            Some(Trouble::Die) => return Made::Death,
            Some(Trouble::Overrun) => {
                let many = (sequence.limit - sequence.made) as usize + 1;
                return Made::Step(Step { id, tokens: vec![vocabulary::FIRST_WORD; many], finish: None, logprobs: Vec::new() });
            }
            None => {}
        }
        let next = self.next(sequence);
        if let Some(Err(error)) = sequence.constraint.as_mut().map(|constraint| constraint.accept(next)) {
            return Made::Failed(format!("the mock's script says what this answer may not: {error}"));
        }
        sequence.made += 1;
        let finish = if next == vocabulary::EOS {
            Some(Finish::Stop)
        } else if sequence.made == sequence.limit {
            Some(Finish::Length)
        } else {
            None
        };
        if finish.is_some() {
            sequence.made = sequence.limit;
        }
        Made::Step(Step { id, tokens: vec![next], finish, logprobs: Vec::new() })
    }

    /// The next id of an answer.
    fn next(&self, sequence: &Sequence) -> u32 {
        let made = sequence.made as usize;
        if let Some(rule) = &sequence.rule {
            let at = if rule.endless { made.checked_rem(rule.answer.len()) } else { Some(made) };
            return at.and_then(|at| rule.answer.as_bytes().get(at)).map_or(vocabulary::EOS, |byte| u32::from(*byte));
        }
        let scripted = self.script.get(sequence.number % self.script.len().max(1));
        let answer = scripted.unwrap_or(&self.answer);
        match answer.get(made % answer.len().max(1)) {
            Some(id) if scripted.is_some() || sequence.made < self.stop_after => *id,
            _ => vocabulary::EOS,
        }
    }
}
