//! One answer as text: ids in from the engine, whole characters out, until the engine or a stop string ends it. With a parser, thoughts and calls
//! are told apart from words; stop strings are looked for among the words alone.
//!
//! Dropping an [`Answer`] cancels the request.

use std::sync::Arc;
use std::task::{Context, Poll};

use crate::engine::{Finish, Generation, Timing};
use crate::error::Result;
use crate::models::logprobs::{Held, TokenLogprob};
use crate::prompt::Tokenizer;
use crate::text::decode::Visible;
use crate::text::parsed::Passed;
use crate::text::{DecodeStream, Detokeniser, Kind, Parsed, Parser, StopMatcher};

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

/// What has come: a piece for each token that released any text, or for each thing that a parser told apart. Reused from call to call.
#[derive(Debug, Default)]
pub struct Pieces {
    text: String,
    logprobs: Vec<TokenLogprob>,
    /// What each piece is, and where it ends, in the text and in the log probabilities.
    ends: Vec<(Kind, usize, usize)>,
}

/// A piece of an answer.
#[derive(Debug, Clone, Copy)]
pub struct Piece<'a> {
    /// What it is.
    pub kind: Kind,
    /// Its text; only that of a call's end is empty.
    pub text: &'a str,
    /// Its tokens, where it is words and log probabilities were asked for and given.
    pub logprobs: &'a [TokenLogprob],
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

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The texts of the pieces, in order.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.told().map(|piece| piece.text)
    }

    /// The pieces, in order.
    pub fn told(&self) -> impl Iterator<Item = Piece<'_>> {
        let starts = std::iter::once((0, 0)).chain(self.ends.iter().map(|(_, text, logprobs)| (*text, *logprobs)));
        starts.zip(&self.ends).filter_map(|(start, (kind, text, logprobs))| {
            Some(Piece { kind: *kind, text: self.text.get(start.0..*text)?, logprobs: self.logprobs.get(start.1..*logprobs)? })
        })
    }

    /// The pieces, in order, with neighbours that go on in the same kind as one.
    pub fn merged(&self) -> impl Iterator<Item = Piece<'_>> {
        let ends = self.ends.iter().enumerate();
        let last = |at: usize, kind: Kind| {
            let goes_on = matches!(kind, Kind::Text | Kind::Reasoning | Kind::Arguments);
            !goes_on || self.ends.get(at + 1).is_none_or(|(next, ..)| *next != kind)
        };
        let mut start = (0, 0);
        ends.filter(move |(at, (kind, ..))| last(*at, *kind)).filter_map(move |(_, (kind, text, logprobs))| {
            let from = std::mem::replace(&mut start, (*text, *logprobs));
            Some(Piece { kind: *kind, text: self.text.get(from.0..*text)?, logprobs: self.logprobs.get(from.1..*logprobs)? })
        })
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

    fn start(&self) -> usize {
        self.ends.last().map_or(0, |(_, text, _)| *text)
    }

    /// Ends a piece of words, if there is text for one; the tokens of that text go along.
    fn close(&mut self, held: &mut Held) {
        let start = self.start();
        if self.text.len() > start {
            held.release(self.text.len() - start, &mut self.logprobs);
            self.ends.push((Kind::Text, self.text.len(), self.logprobs.len()));
        }
    }

    /// Adds a piece that is no words.
    fn add(&mut self, kind: Kind, text: &str) {
        self.text.push_str(text);
        self.ends.push((kind, self.text.len(), self.logprobs.len()));
    }
}

/// A stream of text.
pub struct Answer {
    generation: Option<Generation>,
    prompt_tokens: usize,
    timing: Timing,
    decoder: DecodeStream,
    detokeniser: Arc<Detokeniser>,
    parser: Option<Parser>,
    parsed: Parsed,
    /// The answer ends after so many calls: at the end of the last where that is whole, else where another would begin, so that what became of it is shown.
    most_calls: Option<u32>,
    calls: u32,
    held: Held,
    stop: StopMatcher,
    ids: Vec<u32>,
    decoded: String,
    /// Ids whose text has been looked at; ids after a stop string do not count as output.
    tokens: u32,
    /// Those of them that are thoughts.
    thoughts: u32,
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
            parser: None,
            parsed: Parsed::default(),
            most_calls: None,
            calls: 0,
            held: Held::default(),
            stop: StopMatcher::new(stop).keep_stop(include_stop),
            ids: Vec::new(),
            decoded: String::new(),
            tokens: 0,
            thoughts: 0,
        }
    }

    /// The same, told apart by a parser, which sees the text of these special tokens too. It ends after `most_calls` calls.
    #[must_use]
    pub fn parsed(mut self, parser: Parser, visible: Visible, most_calls: Option<u32>) -> Self {
        self.decoder = self.decoder.showing(visible);
        self.parser = Some(parser);
        self.most_calls = most_calls;
        self
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

    /// Those of the tokens that are thoughts.
    #[must_use]
    pub fn reasoning_tokens(&self) -> u32 {
        self.thoughts
    }

    /// The stop string that ended it.
    #[must_use]
    pub fn stopped_by(&self) -> Option<&str> {
        self.stop.stopped().and_then(|index| self.stop.stop(index))
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
                self.thoughts += u32::from(self.parser.as_ref().is_some_and(Parser::thinking));
                if let Some(logprob) = logprobs.next() {
                    self.held.push(id, logprob, &self.detokeniser);
                }
                self.decoded.clear();
                self.decoder.push(id, &mut self.decoded);
                if let Some(ending) = self.take(false, into) {
                    self.generation = None;
                    return Poll::Ready(Some(Ok(ending)));
                }
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

    /// Takes what has been decoded; `Some` where the answer ends with it.
    fn take(&mut self, last: bool, into: &mut Pieces) -> Option<Ending> {
        self.held.decoded(self.decoded.len());
        let Some(parser) = &mut self.parser else {
            self.held.show(self.decoded.len());
            let stopped = !self.decoded.is_empty() && self.stop.push(&self.decoded, &mut into.text).is_some();
            into.close(&mut self.held);
            return stopped.then_some(Ending::StopString);
        };
        if last {
            parser.push(&self.decoded, &mut self.parsed);
            parser.finish(&mut self.parsed);
        } else if self.decoded.is_empty() {
            return None;
        } else {
            parser.push(&self.decoded, &mut self.parsed);
        }
        for passed in self.parsed.passed() {
            match *passed {
                Passed::Shown(bytes) => self.held.show(bytes),
                Passed::Hidden(bytes) => self.held.hide(bytes),
            }
        }
        let mut ending = None;
        let mut calls = self.calls;
        for (kind, text) in self.parsed.spans() {
            let enough = self.most_calls.is_some_and(|most| calls >= most);
            if kind == Kind::Call && enough {
                self.stop.finish(&mut into.text);
                into.close(&mut self.held);
                ending = Some(Ending::Stop);
                break;
            }
            if kind != Kind::Text {
                // What was held back for a stop is not going to be one: words do not go on over a call or a thought.
                self.stop.finish(&mut into.text);
                into.close(&mut self.held);
                into.add(kind, text);
                if let Kind::End { whole } = kind {
                    calls += 1;
                    if whole && self.most_calls.is_some_and(|most| calls >= most) {
                        ending = Some(Ending::Stop);
                        break;
                    }
                }
                continue;
            }
            let stopped = self.stop.push(text, &mut into.text).is_some();
            into.close(&mut self.held);
            if stopped {
                ending = Some(Ending::StopString);
                break;
            }
        }
        self.calls = calls;
        self.parsed.clear();
        ending
    }

    /// The text that was held back, now that nothing follows.
    fn finish(&mut self, finish: Finish, into: &mut Pieces) -> Ending {
        self.decoded.clear();
        self.decoder.finish(&mut self.decoded);
        if let Some(ending) = self.take(true, into) {
            return ending;
        }
        self.stop.finish(&mut into.text);
        into.close(&mut self.held);
        match finish {
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
