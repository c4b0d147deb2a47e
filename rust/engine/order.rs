//! What goes to an engine.

use std::sync::Arc;

use crate::engine::{Constraint, Id, SnapshotId};
use crate::error::{Code, Error, Result};

/// How the next id is chosen from the logits. Every field has a neutral value; [`Sampling::default`] is plain greedy decoding.
///
/// What each does, and in which order, is said in `docs/port.md`.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the highest.
    pub temperature: f32,
    /// Keeps the most likely ids that together reach this mass; in (0, 1].
    pub top_p: f32,
    /// Keeps this many most likely ids; 0 is no limit.
    pub top_k: u32,
    /// Keeps ids that are at least this share as likely as the likeliest; in [0, 1].
    pub min_p: f32,
    /// Weakens the logits of ids of the prompt and of the answer; above 0, neutral at 1.
    pub repetition_penalty: f32,
    /// Taken once from the logits of ids of the answer.
    pub presence_penalty: f32,
    /// Taken from the logits of ids of the answer as often as they have come.
    pub frequency_penalty: f32,
    /// Added to the logits of these ids, each of which stands here once.
    pub logit_bias: Arc<[(u32, f32)]>,
    /// How many of the most likely ids are told with every id, beside its own log probability; `None` asks for neither.
    pub top_logprobs: Option<u32>,
    /// The same seed and prompt give the same ids.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Arc::default(),
            top_logprobs: None,
            seed: 0,
        }
    }
}

impl Sampling {
    /// What is sent to an engine: `None` where this comes to plain greedy decoding, in which filters and seed change nothing.
    #[must_use]
    #[allow(clippy::float_cmp)] // The neutral values are exact.
    pub fn unless_plain(self) -> Option<Self> {
        let plain = self.temperature == 0.0
            && self.repetition_penalty == 1.0
            && self.presence_penalty == 0.0
            && self.frequency_penalty == 0.0
            && self.logit_bias.is_empty()
            && self.top_logprobs.is_none();
        (!plain).then_some(self)
    }

    /// Whether an engine can do this.
    ///
    /// # Errors
    /// `invalid_value`, with the field's name in `param`, for a number outside the ranges that `docs/port.md` gives, and for a bias of an id
    /// outside the vocabulary.
    pub fn check(&self, vocab_size: u32) -> Result<()> {
        let numbers = [
            ("temperature", self.temperature, self.temperature >= 0.0, "at least 0"),
            ("top_p", self.top_p, self.top_p > 0.0 && self.top_p <= 1.0, "above 0 and at most 1"),
            ("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p), "from 0 to 1"),
            ("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0.0, "above 0"),
            ("presence_penalty", self.presence_penalty, (-2.0..=2.0).contains(&self.presence_penalty), "from -2 to 2"),
            ("frequency_penalty", self.frequency_penalty, (-2.0..=2.0).contains(&self.frequency_penalty), "from -2 to 2"),
        ];
        for (name, value, holds, expected) in numbers {
            if !holds || !value.is_finite() {
                let what = format!("`{name}` must be {expected}, not {value}");
                return Err(Error::new(Code::InvalidValue, what).hint(format!("correct `{name}`")).at(name));
            }
        }
        for (id, bias) in self.logit_bias.iter() {
            if *id >= vocab_size {
                let what = format!("`logit_bias` has token id {id}, outside the vocabulary of {vocab_size}");
                let hint = format!("give ids below {vocab_size}");
                return Err(Error::new(Code::InvalidValue, what).hint(hint).at(format!("logit_bias.{id}")));
            }
            if !(-100.0..=100.0).contains(bias) {
                let what = format!("the bias of token id {id} must be from -100 to 100, not {bias}");
                return Err(Error::new(Code::InvalidValue, what).hint("correct `logit_bias`").at(format!("logit_bias.{id}")));
            }
        }
        Ok(())
    }
}

/// What a request may start from, of the keys and values that earlier ones left, and what it leaves for later ones.
///
/// What is kept is found by its ids: it is a prefix of the prompt, whoever left it. These say which of it may be used.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Reuse {
    /// Only what requests of the same salt left is used; the empty one is a salt like any other.
    pub salt: Arc<str>,
    /// Only what this snapshot holds may be used, and nothing where the engine has it no more; `None` allows all of the salt.
    pub start_from: Option<SnapshotId>,
    /// The name under which prompt and answer are kept, from the request's finish until it is forgotten.
    pub save_as: Option<SnapshotId>,
}

/// A new request.
#[derive(Debug, Clone, PartialEq)]
pub struct Admit {
    /// Its number.
    pub id: Id,
    /// Token ids, at least one.
    pub prompt: Vec<u32>,
    /// How many ids may be made, at least one; prompt and this together fit the context.
    pub max_tokens: u32,
    /// `None`: plain greedy decoding.
    pub sampling: Option<Sampling>,
    /// What the answer may say; `None` anything.
    pub constraint: Option<Constraint>,
    /// How many ids ahead may be guessed and checked in one pass: 0 none, `None` as many as the engine thinks best. Changes the pace, never the ids.
    pub speculation: Option<u32>,
    /// What it may start from, and what it leaves.
    pub reuse: Reuse,
}

/// One order to an engine.
#[derive(Debug, Clone, PartialEq)]
pub enum Order {
    /// A new request.
    Admit(Admit),
    /// Nobody reads this request any more.
    Cancel(Id),
    /// Nobody will start from this snapshot any more. What it holds may stay, as long as there is room.
    Forget(SnapshotId),
}
