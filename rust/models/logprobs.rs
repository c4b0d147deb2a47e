//! The tokens of an answer as texts, with how likely the model held each: told together with the text they stand for.
//!
//! A token goes out with the text in which its own first byte is. A token without such text (the end of the answer, what a stop string cut off, special
//! tokens) does not go out, so that the tokens told are those of the text.

use std::collections::VecDeque;

use schemars::JsonSchema;
use serde::Serialize;

use crate::engine::Logprob;
use crate::text::Detokeniser;

/// A token and the natural logarithm of its probability.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize)]
pub struct Likely {
    /// Its text, with U+FFFD for bytes that are no whole character.
    pub token: String,
    /// At most 0.
    pub logprob: f32,
    /// Its bytes: those of neighbouring tokens together are whole characters.
    pub bytes: Vec<u8>,
}

/// A token of an answer, and those that were the most likely in its place.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize)]
pub struct TokenLogprob {
    /// The token itself.
    #[serde(flatten)]
    pub chosen: Likely,
    /// The likeliest first; as many as were asked for.
    pub top_logprobs: Vec<Likely>,
}

/// Tokens whose text has not gone out yet.
#[derive(Debug, Default)]
pub(super) struct Held {
    /// Each with where its text starts, in bytes from the start of what was decoded.
    tokens: VecDeque<(usize, TokenLogprob)>,
    /// How much text has been decoded, and how much of that is known to be words or not.
    decoded: usize,
    passed: usize,
    /// Those of them that are words, each with where its text starts among the words.
    words: VecDeque<(usize, TokenLogprob)>,
    /// How many words there are, and how much of them has gone out.
    shown: usize,
    released: usize,
}

impl Held {
    /// A new token, before its text is decoded.
    pub(super) fn push(&mut self, id: u32, logprob: Logprob, detokeniser: &Detokeniser) {
        if detokeniser.is_special(id) {
            return;
        }
        let likely = |id, logprob| {
            let bytes = detokeniser.bytes(id);
            Likely { token: String::from_utf8_lossy(&bytes).into_owned(), logprob, bytes }
        };
        let top_logprobs = logprob.top.into_iter().map(|(id, logprob)| likely(id, logprob)).collect();
        self.tokens.push_back((self.decoded, TokenLogprob { chosen: likely(id, logprob.logprob), top_logprobs }));
    }

    /// So many bytes of text have been decoded.
    pub(super) fn decoded(&mut self, bytes: usize) {
        self.decoded += bytes;
    }

    /// So many of the decoded bytes are words: the tokens that begin in them will go out with them.
    pub(super) fn show(&mut self, bytes: usize) {
        let start = self.passed;
        self.passed += bytes;
        while let Some((at, token)) = self.tokens.pop_front_if(|(at, _)| *at < self.passed) {
            self.words.push_back((self.shown + at.saturating_sub(start), token));
        }
        self.shown += bytes;
    }

    /// So many of the decoded bytes are no words: the tokens that begin in them do not go out.
    pub(super) fn hide(&mut self, bytes: usize) {
        self.passed += bytes;
        while self.tokens.pop_front_if(|(at, _)| *at < self.passed).is_some() {}
    }

    /// So many bytes of words have gone out: the tokens that begin in them go to `into`.
    pub(super) fn release(&mut self, bytes: usize, into: &mut Vec<TokenLogprob>) {
        self.released += bytes;
        while let Some((_, token)) = self.words.pop_front_if(|(at, _)| *at < self.released) {
            into.push(token);
        }
    }
}
