//! What goes to an engine.

use crate::engine::Id;

/// How the next id is chosen from the logits, when not greedily.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Divides the logits; above 0.
    pub temperature: f32,
    /// Keeps the most likely ids that together reach this mass; in (0, 1].
    pub top_p: f32,
    /// Keeps this many most likely ids; 0 is no limit.
    pub top_k: u32,
    /// The same seed and prompt give the same ids.
    pub seed: u64,
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
    /// `None`: greedy.
    pub sampling: Option<Sampling>,
}

/// One order to an engine.
#[derive(Debug, Clone, PartialEq)]
pub enum Order {
    /// A new request.
    Admit(Admit),
    /// Nobody reads this request any more.
    Cancel(Id),
}
