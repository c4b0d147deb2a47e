//! The doors' side of a port: requests go in, each gives the stream of its ids.
//!
//! A request is checked and queued here; what the engine takes of the queue, and when, is decided on the other side.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::{Capabilities, Client, Phase, Shared, State, Waiting};
use crate::engine::generation::{Generation, Inbox, Tally};
use crate::engine::{Admit, Constraint, Reuse, Sampling, SnapshotId};
use crate::error::{Code, Error, Result};
use crate::metrics::{Door, Meters};

/// A request as the doors make it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Request {
    /// Token ids, at least one.
    pub prompt: Vec<u32>,
    /// How many ids may be made, at least one.
    pub max_tokens: u32,
    /// `None`: plain greedy decoding.
    pub sampling: Option<Sampling>,
    /// What the answer may say; `None` anything.
    pub constraint: Option<Constraint>,
    /// How many ids ahead may be guessed: 0 none, `None` as many as the engine thinks best.
    pub speculation: Option<u32>,
    /// What it may start from, and what it leaves.
    pub reuse: Reuse,
}

/// What an engine is doing now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Load {
    /// Requests that wait for a place in the engine.
    pub waiting: usize,
    /// Requests in the engine.
    pub running: usize,
    /// Ids made since it started.
    pub tokens: u64,
}

/// The doors' side of a port. Cloning it is cheap and gives another handle on the same engine.
#[derive(Clone)]
pub struct Engine {
    pub(super) shared: Arc<Shared>,
}

impl Engine {
    /// Queues a request and gives the stream of its ids. Dropping the stream cancels the request.
    ///
    /// # Errors
    /// Those of [`Engine::place`] and of [`Place::submit`].
    pub fn submit(&self, request: Request) -> Result<Generation> {
        self.place(Client::new())?.submit(request)
    }

    /// Holds a place in the queue for a request of this client that is still being made. Dropping it gives it back.
    ///
    /// # Errors
    /// `queue_full`, `model_loading` before the engine is ready, and the engine's own end when it is over.
    pub fn place(&self, client: Client) -> Result<Place> {
        let mut state = self.shared.lock();
        let capabilities = capabilities(&state)?;
        // Places that are free right now do not count against the queue.
        let free = (capabilities.max_batch as usize).saturating_sub(state.running.len());
        let taken = state.waiting.len() + state.held;
        if taken >= self.shared.queue_limit.saturating_add(free) {
            return Err(Error::new(Code::QueueFull, format!("{taken} requests are waiting already, the limit"))
                .hint("try again later, or raise --queue"));
        }
        state.held += 1;
        Ok(Place { client, since: Instant::now(), shared: Arc::clone(&self.shared) })
    }

    /// Closes the port: what is in flight ends with `shutting_down`, and the engine's loop returns.
    pub fn close(&self) {
        self.shared.end(Phase::Closed, &closed());
    }

    /// Gives up a snapshot: no request will start from it any more. Of an engine that is over, or that has no such snapshot, nothing is asked.
    pub fn forget(&self, snapshot: SnapshotId) {
        let mut state = self.shared.lock();
        if !matches!(state.phase, Phase::Failed(_) | Phase::Closed) {
            state.forgotten.push(snapshot);
            drop(state);
            self.shared.orders.notify_one();
        }
    }

    /// Where the engine is, now and in future.
    #[must_use]
    pub fn phase(&self) -> watch::Receiver<Phase> {
        self.shared.phase.subscribe()
    }

    /// What the engine is doing now.
    #[must_use]
    pub fn load(&self) -> Load {
        let state = self.shared.lock();
        Load { waiting: state.waiting.len(), running: state.running.len(), tokens: state.tokens }
    }

    /// How many requests of a door wait for a place in the engine, and how many are in it.
    #[must_use]
    pub fn load_of(&self, door: Door) -> Load {
        let state = self.shared.lock();
        let waiting = state.waiting.iter().filter(|waiting| waiting.client.door() == door).count();
        let running = state.running.values().filter(|running| running.client.door() == door).count();
        Load { waiting, running, tokens: self.shared.meters.door(door).output_tokens.get() }
    }

    /// What is counted of its model.
    #[must_use]
    pub fn meters(&self) -> &Arc<Meters> {
        &self.shared.meters
    }

    /// How long an engine that has work has made no step; `None` when it has no work.
    #[must_use]
    pub fn stalled(&self) -> Option<Duration> {
        let state = self.shared.lock();
        let busy = !state.running.is_empty() || !state.waiting.is_empty();
        (busy && matches!(state.phase, Phase::Ready(_))).then(|| state.progress.elapsed())
    }
}

/// A place in an engine's queue.
pub struct Place {
    client: Client,
    since: Instant,
    shared: Arc<Shared>,
}

impl Place {
    /// The same, for a request that has been there since then: its time to the first token counts from there.
    #[must_use]
    pub fn since(mut self, arrived: Instant) -> Self {
        self.since = arrived;
        self
    }

    /// Puts a request there and gives the stream of its ids. Dropping the stream cancels the request.
    ///
    /// # Errors
    /// `context_length_exceeded` when prompt and answer do not fit, `invalid_value` for an empty prompt, no ids, an id outside the
    /// vocabulary, or sampling that cannot be, `unsupported_parameter` for a constraint that the engine cannot keep, and the engine's own end when it is over.
    pub fn submit(self, request: Request) -> Result<Generation> {
        let mut state = self.shared.lock();
        check(&request, &*capabilities(&state)?)?;
        let id = state.next_id;
        state.next_id += 1;
        let inbox = Arc::new(Inbox::new(Tally { meters: Arc::clone(&self.shared.meters), door: self.client.door(), since: self.since }));
        if state.running.is_empty() && state.waiting.is_empty() {
            state.progress = Instant::now();
        }
        let prompt_tokens = request.prompt.len();
        let Request { prompt, max_tokens, sampling, constraint, speculation, reuse } = request;
        let admit = Admit { id, prompt, max_tokens, sampling, constraint, speculation, reuse };
        state.waiting.push_back(Waiting { client: self.client, admit, inbox: Arc::clone(&inbox) });
        drop(state);
        self.shared.orders.notify_one();
        Ok(Generation::new(id, prompt_tokens, inbox, Arc::clone(&self.shared)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shared.lock().held -= 1;
    }
}

fn capabilities(state: &State) -> Result<Arc<Capabilities>> {
    match &state.phase {
        Phase::Ready(capabilities) => Ok(Arc::clone(capabilities)),
        Phase::Loading => Err(Error::new(Code::ModelLoading, "the model is still loading").hint("try again in a moment")),
        Phase::Failed(error) => Err(error.clone()),
        Phase::Closed => Err(closed()),
    }
}

fn closed() -> Error {
    Error::new(Code::ShuttingDown, "the server is shutting down").hint("start it again, or connect to the one that replaces it")
}

fn check(request: &Request, capabilities: &Capabilities) -> Result<()> {
    if request.prompt.is_empty() {
        return Err(Error::new(Code::InvalidValue, "the prompt is empty").hint("send at least one token of text"));
    }
    if request.max_tokens == 0 {
        return Err(Error::new(Code::InvalidValue, "no tokens were asked for").hint("ask for at least 1"));
    }
    let window = capabilities.context_length as usize;
    if request.prompt.len().saturating_add(request.max_tokens as usize) > window {
        return Err(Error::new(
            Code::ContextLengthExceeded,
            format!("the prompt has {} tokens and {} are asked for, but the window is {window}", request.prompt.len(), request.max_tokens),
        )
        .hint("shorten the input or ask for fewer tokens"));
    }
    if let Some(id) = request.prompt.iter().find(|id| **id >= capabilities.vocab_size) {
        return Err(Error::new(Code::InvalidValue, format!("token id {id} is outside the vocabulary of {}", capabilities.vocab_size))
            .hint("the tokenizer does not belong to this model; pull the model again"));
    }
    if request.constraint.is_some() && !capabilities.constraints {
        return Err(Error::new(Code::UnsupportedParameter, "this engine cannot hold an answer to a grammar").hint("use plain text"));
    }
    request.sampling.as_ref().map_or(Ok(()), |sampling| sampling.check(capabilities.vocab_size))
}
