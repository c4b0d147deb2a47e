//! An engine in Rust, without a model: it speaks the real port, so that doors are tested and measured without Python.
//!
//! It answers every prompt with the same run of ids, or each with the next answer of a script, at the pace it is given, and fails on command.

use std::sync::mpsc::Receiver;
use std::thread;
use std::time::Duration;

use crate::engine::host::Settings;
use crate::engine::{Admit, Capabilities, Finish, Id, Order, Port, PortError, Step};
use crate::error::{Code, Error, Result};

/// The ids of the mock's vocabulary: 256 bytes, then the specials, then the words it answers with.
pub mod vocabulary {
    /// The text of the special ids, from 256.
    pub const SPECIALS: [&str; 3] = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"];
    /// Ends a sequence.
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
            constraints: false,
        })?;
        let mut sequences: Vec<Sequence> = Vec::new();
        let mut admitted = 0;
        for step in 0_u32.. {
            let orders = if sequences.is_empty() { port.wait()? } else { port.poll()? };
            let Some(orders) = orders else { return Ok(()) };
            for order in orders {
                match order {
                    Order::Admit(admit) if self.fault == Fault::FailRequest => {
                        port.fail_request(admit.id, "the mock was told to fail this request")?
                    }
                    Order::Admit(admit) => {
                        sequences.push(self.admit(&admit, admitted));
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
            let steps = sequences.iter_mut().filter_map(|sequence| self.step(sequence)).collect();
            let gone = port.push(steps)?;
            sequences.retain(|sequence| sequence.made < sequence.limit && !gone.contains(&sequence.id));
        }
        Ok(())
    }

    fn admit(&self, admit: &Admit, number: usize) -> Sequence {
        Sequence { id: admit.id, number, prefill_left: admit.prompt.len(), made: 0, limit: admit.max_tokens }
    }

    fn step(&self, sequence: &mut Sequence) -> Option<Step> {
        if sequence.prefill_left > self.prefill_chunk {
            sequence.prefill_left -= self.prefill_chunk;
            return None;
        }
        sequence.prefill_left = 0;
        if self.fault == Fault::Overrun {
            let many = sequence.limit as usize + 1;
            return Some(Step { id: sequence.id, tokens: vec![vocabulary::FIRST_WORD; many], finish: None, logprobs: Vec::new() });
        }
        let scripted = self.script.get(sequence.number % self.script.len().max(1));
        let answer = scripted.unwrap_or(&self.answer);
        let next = match answer.get(sequence.made as usize % answer.len().max(1)) {
            Some(id) if scripted.is_some() || sequence.made < self.stop_after => *id,
            _ => vocabulary::EOS,
        };
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
        Some(Step { id: sequence.id, tokens: vec![next], finish, logprobs: Vec::new() })
    }
}
