//! The reader's end of one request: a stream of ids, whose drop is the cancellation.
//!
//! The engine's thread delivers into an [`Inbox`] under its own small lock; a slow reader finds what has gathered in one piece.

use std::future::{Future, poll_fn};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Instant;

use crate::engine::port::Shared;
use crate::engine::{Finish, Id, Logprob};
use crate::error::Result;
use crate::metrics::{Door, Meter, Meters};

/// When the stages of a request were reached.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// When it was queued.
    pub submitted: Instant,
    /// When the engine took it.
    pub taken: Option<Instant>,
    /// When its first id came.
    pub first: Option<Instant>,
    /// When its newest id came.
    pub last: Option<Instant>,
    /// How many ids have come.
    pub tokens: u32,
    /// Ids of the prompt that the engine did not read, because an earlier request had left what they come to.
    pub cached: u32,
}

struct Held {
    tokens: Vec<u32>,
    logprobs: Vec<Logprob>,
    end: Option<Result<Finish>>,
    waker: Option<Waker>,
    timing: Timing,
}

/// Where a request counts, and since when it is there.
pub(crate) struct Tally {
    pub(crate) meters: Arc<Meters>,
    pub(crate) door: Door,
    pub(crate) since: Instant,
}

/// Where the engine puts what the reader has not taken yet. Bounded by the request's own token limit.
pub(crate) struct Inbox {
    held: Mutex<Held>,
    tally: Tally,
}

impl Inbox {
    pub(crate) fn new(tally: Tally) -> Self {
        let timing = Timing { submitted: Instant::now(), taken: None, first: None, last: None, tokens: 0, cached: 0 };
        Self { held: Mutex::new(Held { tokens: Vec::new(), logprobs: Vec::new(), end: None, waker: None, timing }), tally }
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn meter(&self) -> &Meter {
        self.tally.meters.door(self.tally.door)
    }

    /// The engine has the request, with a prompt of so many ids.
    pub(crate) fn taken(&self, prompt: usize) {
        self.meter().prompt_tokens.add(prompt as u64);
        self.lock().timing.taken = Some(Instant::now());
    }

    pub(crate) fn cached(&self, tokens: u32) {
        let before = std::mem::replace(&mut self.lock().timing.cached, tokens);
        self.meter().cached_tokens.add(u64::from(tokens.saturating_sub(before)));
    }

    /// Adds ids; gives the reader's waker, to be woken outside the port's lock.
    pub(crate) fn deliver(&self, tokens: &[u32], logprobs: Vec<Logprob>, finish: Option<Finish>, now: Instant) -> Option<Waker> {
        let mut held = self.lock();
        held.logprobs.extend(logprobs);
        if !tokens.is_empty() {
            held.tokens.extend_from_slice(tokens);
            let meter = self.meter();
            meter.output_tokens.add(tokens.len() as u64);
            match held.timing.last.replace(now) {
                Some(last) => meter.between_tokens.add_time(now.saturating_duration_since(last)),
                None => meter.first_token.add_time(now.saturating_duration_since(self.tally.since)),
            }
            held.timing.first.get_or_insert(now);
            held.timing.tokens += u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        } else if finish.is_none() {
            return None;
        }
        if held.end.is_none() {
            held.end = finish.map(Ok);
        }
        held.waker.take()
    }

    /// Ends the stream; gives the reader's waker. A stream that has ended keeps its first end.
    pub(crate) fn finish(&self, end: Result<Finish>) -> Option<Waker> {
        let mut held = self.lock();
        held.end.get_or_insert(end);
        held.waker.take()
    }

    /// Ends the stream and wakes the reader.
    pub(crate) fn end(&self, end: Result<Finish>) {
        if let Some(waker) = self.finish(end) {
            waker.wake();
        }
    }
}

/// What a reader finds: the ids since it last looked, and the end if it has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// New ids, in order; empty only beside an end.
    pub tokens: Vec<u32>,
    /// `Some` exactly once, with the last chunk.
    pub end: Option<Result<Finish>>,
}

/// The stream of one request's ids. Dropping it cancels the request.
pub struct Generation {
    id: Id,
    prompt_tokens: usize,
    inbox: Arc<Inbox>,
    shared: Arc<Shared>,
    /// Those of the ids that have been read, and that nobody has asked for yet.
    logprobs: Vec<Logprob>,
    over: bool,
}

impl Generation {
    pub(crate) fn new(id: Id, prompt_tokens: usize, inbox: Arc<Inbox>, shared: Arc<Shared>) -> Self {
        Self { id, prompt_tokens, inbox, shared, logprobs: Vec::new(), over: false }
    }

    /// The request's number.
    #[must_use]
    pub fn id(&self) -> Id {
        self.id
    }

    /// How many ids the prompt has.
    #[must_use]
    pub fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// When the stages so far were reached.
    #[must_use]
    pub fn timing(&self) -> Timing {
        self.inbox.lock().timing
    }

    /// Everything that has come since the last call, added to `into`. Ready with `Some(end)` when the stream is over, with `None` when ids
    /// came and more will follow. After the end it is ready with `None` and adds nothing.
    pub fn poll_chunk(&mut self, cx: &mut Context<'_>, into: &mut Vec<u32>) -> Poll<Option<Result<Finish>>> {
        if self.over {
            return Poll::Ready(None);
        }
        let mut held = self.inbox.lock();
        if held.tokens.is_empty() && held.end.is_none() {
            match &mut held.waker {
                Some(waker) => waker.clone_from(cx.waker()),
                none => *none = Some(cx.waker().clone()),
            }
            return Poll::Pending;
        }
        into.append(&mut held.tokens);
        self.logprobs.append(&mut held.logprobs);
        let end = held.end.take();
        self.over = end.is_some();
        Poll::Ready(end)
    }

    /// The log probabilities of the ids that have been read since the last call, in order: one for each, or none at all where the request did
    /// not ask for them or the engine knows none.
    pub fn take_logprobs(&mut self) -> Vec<Logprob> {
        std::mem::take(&mut self.logprobs)
    }

    /// The next chunk; `None` after the end.
    pub async fn next(&mut self) -> Option<Chunk> {
        if self.over {
            return None;
        }
        let mut tokens = Vec::new();
        let end = poll_fn(|cx| self.poll_chunk(cx, &mut tokens)).await;
        Some(Chunk { tokens, end })
    }

    /// The next chunk, for a thread that may sleep; `None` after the end.
    pub fn next_blocking(&mut self) -> Option<Chunk> {
        struct Unpark(Thread);
        impl Wake for Unpark {
            fn wake(self: Arc<Self>) {
                self.0.unpark();
            }
        }
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let mut next = std::pin::pin!(self.next());
        loop {
            match next.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(chunk) => return chunk,
                Poll::Pending => thread::park(),
            }
        }
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        if !self.over && self.inbox.lock().end.is_none() {
            self.shared.abandon(self.id);
        }
    }
}
