//! What comes from an engine.

use crate::engine::Id;

/// Why a sequence is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// Its last id is an end-of-sequence id.
    Stop,
    /// It has made as many ids as it may.
    Length,
}

impl Finish {
    /// The finish with this name on the port (`stop`, `length`).
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "stop" => Some(Self::Stop),
            "length" => Some(Self::Length),
            _ => None,
        }
    }

    /// The name of this finish on the port.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// How likely the model held one id, and which it held the most likely in its place.
#[derive(Debug, Clone, PartialEq)]
pub struct Logprob {
    /// The natural logarithm of the id's probability, at most 0.
    pub logprob: f32,
    /// The most likely ids in that place, each with its own logarithm; the likeliest first.
    pub top: Vec<(u32, f32)>,
}

/// What one step made for one sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// The sequence.
    pub id: Id,
    /// The new ids, in order; may be empty.
    pub tokens: Vec<u32>,
    /// Set on the last step of a sequence.
    pub finish: Option<Finish>,
    /// One for each of the new ids, or none: the request did not ask, or the engine knows none.
    pub logprobs: Vec<Logprob>,
}
