//! One answer as text: ids in from the engine, whole characters out, until the engine or a stop string ends it.
//!
//! Dropping an [`Answer`] cancels the request.

use std::sync::Arc;
use std::task::{Context, Poll};

use crate::engine::{Finish, Generation, Timing};
use crate::error::Result;
use crate::models::logprobs::{Held, TokenLogprob};
use crate::prompt::Tokenizer;
use crate::text::{DecodeStream, Detokeniser, StopMatcher};

/// How an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The model said that it is done.
    Stop,
    /// As many tokens as were asked for.
    Length,
    /// A stop string came.
    StopString,
}

/// Text that has come: one piece for each token that released any. Reused from call to call.
#[derive(Debug, Default)]
pub struct Pieces {
    text: String,
    logprobs: Vec<TokenLogprob>,
    /// Where each piece ends, in the text and in the log probabilities.
    ends: Vec<(usize, usize)>,
}

impl Pieces {
    /// Everything in one piece.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// How many pieces there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no text.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The pieces, in order; none is empty.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.told().map(|(text, _)| text)
    }

    /// The pieces, in order, each with its tokens, where log probabilities were asked for and given.
    pub fn told(&self) -> impl Iterator<Item = (&str, &[TokenLogprob])> {
        let starts = std::iter::once((0, 0)).chain(self.ends.iter().copied());
        starts.zip(&self.ends).filter_map(|(start, end)| Some((self.text.get(start.0..end.0)?, self.logprobs.get(start.1..end.1)?)))
    }

    /// The tokens of all pieces.
    #[must_use]
    pub fn logprobs(&self) -> &[TokenLogprob] {
        &self.logprobs
    }

    /// Forgets the text, keeps the room.
    pub fn clear(&mut self) {
        self.text.clear();
        self.logprobs.clear();
        self.ends.clear();
    }

    /// Ends a piece, if there is text for one; the tokens of that text go along.
    fn close(&mut self, held: &mut Held) {
        let start = self.ends.last().map_or(0, |(text, _)| *text);
        if self.text.len() > start {
            held.release(self.text.len() - start, &mut self.logprobs);
            self.ends.push((self.text.len(), self.logprobs.len()));
        }
    }
}

/// A stream of text.
pub struct Answer {
    generation: Option<Generation>,
    prompt_tokens: usize,
    timing: Timing,
    decoder: DecodeStream,
    detokeniser: Arc<Detokeniser>,
    held: Held,
    stop: StopMatcher,
    ids: Vec<u32>,
    decoded: String,
    /// Ids whose text has been looked at; ids after a stop string do not count as output.
    tokens: u32,
}

impl Answer {
    /// The text of this generation. It ends exactly before (or, with `include_stop`, right after) the earliest of the `stop` strings.
    #[must_use]
    pub fn new(generation: Generation, tokenizer: &Tokenizer, stop: Vec<String>, include_stop: bool) -> Self {
        Self {
            prompt_tokens: generation.prompt_tokens(),
            timing: generation.timing(),
            generation: Some(generation),
            decoder: tokenizer.detokeniser().stream(),
            detokeniser: Arc::clone(tokenizer.detokeniser()),
            held: Held::default(),
            stop: StopMatcher::new(stop).keep_stop(include_stop),
            ids: Vec::new(),
            decoded: String::new(),
            tokens: 0,
        }
    }

    /// Tokens of the prompt.
    #[must_use]
    pub fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// Tokens of the answer so far, the end-of-sequence token included.
    #[must_use]
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// When the stages so far were reached.
    #[must_use]
    pub fn timing(&self) -> Timing {
        self.generation.as_ref().map_or(self.timing, Generation::timing)
    }

    /// What has come since the last call, added to `into`. Ready with `Some` once, at the end; ready with `None` when more will follow (and after
    /// the end).
    pub fn poll(&mut self, cx: &mut Context<'_>, into: &mut Pieces) -> Poll<Option<Result<Ending>>> {
        loop {
            let Some(generation) = &mut self.generation else { return Poll::Ready(None) };
            self.ids.clear();
            let Poll::Ready(end) = generation.poll_chunk(cx, &mut self.ids) else { return Poll::Pending };
            self.timing = generation.timing();
            let mut logprobs = generation.take_logprobs().into_iter();
            let before = into.len();
            for at in 0..self.ids.len() {
                let Some(id) = self.ids.get(at).copied() else { break };
                self.tokens += 1;
                if let Some(logprob) = logprobs.next() {
                    self.held.push(id, logprob, &self.detokeniser);
                }
                self.decoded.clear();
                self.decoder.push(id, &mut self.decoded);
                self.held.decoded(self.decoded.len());
                if !self.decoded.is_empty() && self.stop.push(&self.decoded, &mut into.text).is_some() {
                    into.close(&mut self.held);
                    self.generation = None;
                    return Poll::Ready(Some(Ok(Ending::StopString)));
                }
                into.close(&mut self.held);
            }
            if let Some(end) = end {
                self.generation = None;
                return Poll::Ready(Some(end.map(|finish| self.finish(finish, into))));
            }
            if into.len() > before {
                return Poll::Ready(None);
            }
            // Ids came, but no text yet: half a character, or what may become a stop string. Ask again, so that the reader is woken for more.
        }
    }

    /// The text that was held back, now that nothing follows.
    fn finish(&mut self, finish: Finish, into: &mut Pieces) -> Ending {
        self.decoded.clear();
        self.decoder.finish(&mut self.decoded);
        self.held.decoded(self.decoded.len());
        let stopped = self.stop.push(&self.decoded, &mut into.text).is_some();
        if !stopped {
            self.stop.finish(&mut into.text);
        }
        into.close(&mut self.held);
        match finish {
            _ if stopped => Ending::StopString,
            Finish::Stop => Ending::Stop,
            Finish::Length => Ending::Length,
        }
    }

    /// The whole rest of the answer.
    ///
    /// # Errors
    /// The engine's failure.
    pub async fn rest(&mut self) -> Result<(String, Ending)> {
        let mut pieces = Pieces::default();
        loop {
            if let Some(end) = std::future::poll_fn(|cx| self.poll(cx, &mut pieces)).await {
                return end.map(|ending| (pieces.text, ending));
            }
        }
    }
}
