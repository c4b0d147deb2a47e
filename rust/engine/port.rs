//! The boundary between the doors and an engine: five calls on one side, a stream for each request on the other.
//!
//! The contract in prose is `docs/port.md`. [`Port`] is the engine's side (`ready, wait, poll, push, fail`), [`Engine`] the doors' side.
//! No text passes here, and nothing here waits for a reader.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::engine::generation::{Generation, Inbox};
use crate::engine::{Admit, Id, Order, Sampling, Step};
use crate::error::{Code, Error, Result};

/// What an engine can do, said once by `ready`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// Prompt and answer together, in ids.
    pub context_length: u32,
    /// How many requests may be in the engine at a time; at least 1.
    pub max_batch: u32,
    /// Ids are below this.
    pub vocab_size: u32,
    /// A sequence ends after one of these.
    pub eos_ids: Vec<u32>,
}

/// Where an engine is in its life.
#[derive(Debug, Clone)]
pub enum Phase {
    /// Not ready yet.
    Loading,
    /// Taking requests.
    Ready(Arc<Capabilities>),
    /// Over, by a fault.
    Failed(Error),
    /// Over, as asked.
    Closed,
}

/// A call that the contract does not allow.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PortError {
    /// `wait`, `poll` or `push` before `ready`.
    #[error("the engine called {0} before ready")]
    NotReady(&'static str),
    /// `ready` a second time.
    #[error("the engine called ready twice")]
    ReadyTwice,
    /// Any call after `fail(None, …)`.
    #[error("the engine called {0} after it had failed")]
    AfterFailure(&'static str),
    /// Capabilities that cannot be.
    #[error("the engine says {0}")]
    Capabilities(String),
    /// An id that was never handed out.
    #[error("the engine pushed for request {0}, which was never admitted")]
    UnknownId(Id),
    /// The call panicked; the engine has been failed.
    #[error("a fault in the port: {0}")]
    Panic(String),
}

/// A request as the doors make it.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Token ids, at least one.
    pub prompt: Vec<u32>,
    /// How many ids may be made, at least one.
    pub max_tokens: u32,
    /// `None`: greedy.
    pub sampling: Option<Sampling>,
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

struct Waiting {
    admit: Admit,
    inbox: Arc<Inbox>,
}

struct Running {
    inbox: Arc<Inbox>,
    /// How many ids it may still make.
    left: u32,
}

struct State {
    next_id: Id,
    waiting: VecDeque<Waiting>,
    /// In the engine, the abandoned ones included until the engine has been told.
    running: HashMap<Id, Running>,
    /// Abandoned after they were handed over, and the engine not told yet.
    gone: Vec<Id>,
    /// Places in the queue that are held for requests to come.
    held: usize,
    tokens: u64,
    progress: Instant,
    phase: Phase,
}

pub(crate) struct Shared {
    state: Mutex<State>,
    orders: Condvar,
    phase: watch::Sender<Phase>,
    queue_limit: usize,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic under the lock has already failed the engine (see `Port::guarded`); the state itself is only counters and queues.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, phase: Phase, error: &Error) {
        let (waiting, running) = {
            let mut state = self.lock();
            if matches!(state.phase, Phase::Failed(_) | Phase::Closed) {
                return;
            }
            state.phase = phase.clone();
            state.gone.clear();
            (std::mem::take(&mut state.waiting), std::mem::take(&mut state.running))
        };
        self.orders.notify_all();
        self.phase.send_replace(phase);
        let inboxes = waiting.into_iter().map(|w| w.inbox).chain(running.into_values().map(|r| r.inbox));
        for inbox in inboxes {
            inbox.end(Err(error.clone()));
        }
    }

    /// The reader of `id` has left.
    pub(crate) fn abandon(&self, id: Id) {
        let mut state = self.lock();
        if state.running.contains_key(&id) {
            state.gone.push(id);
            drop(state);
            self.orders.notify_all();
        } else if let Some(at) = state.waiting.iter().position(|w| w.admit.id == id) {
            state.waiting.remove(at);
        }
    }
}

/// Makes the two sides of a port. At most `queue_limit` requests wait for a place in the engine; the next is refused.
#[must_use]
pub fn port(queue_limit: usize) -> (Engine, Port) {
    let (phase, _) = watch::channel(Phase::Loading);
    let shared = Arc::new(Shared {
        state: Mutex::new(State {
            next_id: 1,
            waiting: VecDeque::new(),
            running: HashMap::new(),
            gone: Vec::new(),
            held: 0,
            tokens: 0,
            progress: Instant::now(),
            phase: Phase::Loading,
        }),
        orders: Condvar::new(),
        phase,
        queue_limit,
    });
    (Engine { shared: Arc::clone(&shared) }, Port { shared })
}

/// The doors' side of a port. Cloning it is cheap and gives another handle on the same engine.
#[derive(Clone)]
pub struct Engine {
    shared: Arc<Shared>,
}

impl Engine {
    /// Queues a request and gives the stream of its ids. Dropping the stream cancels the request.
    ///
    /// # Errors
    /// Those of [`Engine::place`] and of [`Place::submit`].
    pub fn submit(&self, request: Request) -> Result<Generation> {
        self.place()?.submit(request)
    }

    /// Holds a place in the queue for a request that is still being made. Dropping it gives it back.
    ///
    /// # Errors
    /// `queue_full`, `model_loading` before the engine is ready, and the engine's own end when it is over.
    pub fn place(&self) -> Result<Place> {
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
        Ok(Place { shared: Arc::clone(&self.shared) })
    }

    /// Closes the port: what is in flight ends with `shutting_down`, and the engine's loop returns.
    pub fn close(&self) {
        self.shared.end(Phase::Closed, &closed());
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
    shared: Arc<Shared>,
}

impl Place {
    /// Puts a request there and gives the stream of its ids. Dropping the stream cancels the request.
    ///
    /// # Errors
    /// `context_length_exceeded` when prompt and answer do not fit, `invalid_value` for an empty prompt, no ids, or an id outside the
    /// vocabulary, and the engine's own end when it is over.
    pub fn submit(self, request: Request) -> Result<Generation> {
        let mut state = self.shared.lock();
        check(&request, &*capabilities(&state)?)?;
        let id = state.next_id;
        state.next_id += 1;
        let inbox = Arc::new(Inbox::new());
        if state.running.is_empty() && state.waiting.is_empty() {
            state.progress = Instant::now();
        }
        let prompt_tokens = request.prompt.len();
        let admit = Admit { id, prompt: request.prompt, max_tokens: request.max_tokens, sampling: request.sampling };
        state.waiting.push_back(Waiting { admit, inbox: Arc::clone(&inbox) });
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
    Ok(())
}

/// The engine's side of a port. Dropping it before it is closed fails the engine.
pub struct Port {
    shared: Arc<Shared>,
}

impl Port {
    /// Says, once, that the model is loaded and what it can do.
    ///
    /// # Errors
    /// A second `ready`, a `ready` after a failure, or capabilities that cannot be.
    pub fn ready(&self, capabilities: Capabilities) -> Result<(), PortError> {
        let impossible = if capabilities.context_length < 2 {
            Some(format!("its context length is {}, below 2", capabilities.context_length))
        } else if capabilities.max_batch == 0 {
            Some("its batch is 0".to_owned())
        } else if capabilities.vocab_size == 0 {
            Some("its vocabulary is empty".to_owned())
        } else {
            capabilities
                .eos_ids
                .iter()
                .find(|id| **id >= capabilities.vocab_size)
                .map(|id| format!("{id} ends a sequence, outside its vocabulary of {}", capabilities.vocab_size))
        };
        if let Some(impossible) = impossible {
            return Err(PortError::Capabilities(impossible));
        }
        let phase = Phase::Ready(Arc::new(capabilities));
        let mut state = self.shared.lock();
        match state.phase {
            Phase::Loading => state.phase = phase.clone(),
            Phase::Ready(_) => return Err(PortError::ReadyTwice),
            Phase::Failed(_) => return Err(PortError::AfterFailure("ready")),
            Phase::Closed => return Ok(()), // Closed while it loaded: the next wait says so.
        }
        drop(state);
        self.shared.phase.send_replace(phase);
        Ok(())
    }

    /// The orders since the last call, at least one; sleeps until there is one. `None` once the port is closed.
    ///
    /// # Errors
    /// A call before `ready` or after a failure.
    pub fn wait(&self) -> Result<Option<Vec<Order>>, PortError> {
        let mut state = self.shared.lock();
        loop {
            match take(&mut state, "wait")? {
                Some(orders) if orders.is_empty() => {
                    state = self.shared.orders.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                taken => return Ok(taken),
            }
        }
    }

    /// The orders since the last call, perhaps none. `None` once the port is closed.
    ///
    /// # Errors
    /// A call before `ready` or after a failure.
    pub fn poll(&self) -> Result<Option<Vec<Order>>, PortError> {
        take(&mut self.shared.lock(), "poll")
    }

    /// Hands over what one step made; returns the ids whose reader has left. Never blocks on a reader.
    ///
    /// A step with more ids than the request may still make, with the last of them but no finish, or with one outside the vocabulary, fails that
    /// request alone.
    ///
    /// # Errors
    /// A call before `ready` or after a failure, or an id that was never admitted.
    pub fn push(&self, steps: Vec<Step>) -> Result<Vec<Id>, PortError> {
        let mut state = self.shared.lock();
        let vocab_size = match &state.phase {
            Phase::Ready(capabilities) => capabilities.vocab_size,
            Phase::Closed => return Ok(steps.into_iter().map(|step| step.id).collect()),
            Phase::Loading => return Err(PortError::NotReady("push")),
            Phase::Failed(_) => return Err(PortError::AfterFailure("push")),
        };
        if let Some(step) = steps.iter().find(|step| step.id == 0 || step.id >= state.next_id) {
            return Err(PortError::UnknownId(step.id));
        }
        let now = Instant::now();
        state.progress = now;
        let mut gone = std::mem::take(&mut state.gone);
        for id in &gone {
            state.running.remove(id);
        }
        let mut wakers = Vec::with_capacity(steps.len());
        for step in steps {
            let Some(running) = state.running.get_mut(&step.id) else {
                // Over already, or told as gone before: saying so again costs nothing and frees a confused engine.
                if !gone.contains(&step.id) {
                    gone.push(step.id);
                }
                continue;
            };
            let made = u32::try_from(step.tokens.len()).unwrap_or(u32::MAX);
            let breach = if let Some(token) = step.tokens.iter().find(|token| **token >= vocab_size) {
                Some(format!("the engine made token {token}, outside its vocabulary of {vocab_size}"))
            } else if made > running.left {
                Some("the engine made more tokens than were asked for".to_owned())
            } else if made == running.left && step.finish.is_none() {
                Some("the engine made the last token that was asked for, and did not end the request".to_owned())
            } else {
                None
            };
            if let Some(what) = breach {
                tracing::error!(id = step.id, made, left = running.left, what, "an engine broke its contract");
                let error = Error::new(Code::EngineFailed, what);
                if let Some(running) = state.running.remove(&step.id) {
                    wakers.push(running.inbox.finish(Err(error)));
                }
                gone.push(step.id);
                continue;
            }
            running.left -= made;
            wakers.push(running.inbox.deliver(&step.tokens, step.finish, now));
            if step.finish.is_some() {
                state.running.remove(&step.id);
            }
            state.tokens += u64::from(made);
        }
        drop(state);
        wakers.into_iter().flatten().for_each(std::task::Waker::wake);
        Ok(gone)
    }

    /// Ends one request with an error. An id that is already over is left alone.
    ///
    /// # Errors
    /// A call after a failure, or an id that was never admitted.
    pub fn fail_request(&self, id: Id, message: &str) -> Result<(), PortError> {
        let mut state = self.shared.lock();
        if matches!(state.phase, Phase::Failed(_)) {
            return Err(PortError::AfterFailure("fail"));
        }
        if id == 0 || id >= state.next_id {
            return Err(PortError::UnknownId(id));
        }
        state.progress = Instant::now();
        state.gone.retain(|gone| *gone != id);
        let running = state.running.remove(&id);
        drop(state);
        if let Some(running) = running {
            tracing::error!(id, message, "the engine failed a request");
            running.inbox.end(Err(failure(message)));
        }
        Ok(())
    }

    /// Ends the engine with an error: every request in it, and every one that waits for it, ends with the message's first line.
    pub fn fail(&self, message: &str) {
        tracing::error!(message, "the engine failed");
        let error = failure(message);
        self.shared.end(Phase::Failed(error.clone()), &error);
    }

    /// Runs a call so that a panic in it fails the engine instead of unwinding into foreign frames.
    ///
    /// # Errors
    /// [`PortError::Panic`] when the call panicked, else what the call returns.
    pub fn guarded<T>(&self, call: impl FnOnce(&Self) -> Result<T, PortError>) -> Result<T, PortError> {
        catch_unwind(AssertUnwindSafe(|| call(self))).unwrap_or_else(|panic| {
            let what = panic
                .downcast_ref::<&str>()
                .map(|text| (*text).to_owned())
                .or_else(|| panic.downcast_ref::<String>().cloned())
                .unwrap_or_else(|| "a panic without a message".to_owned());
            self.fail(&format!("a fault in the port: {what}"));
            Err(PortError::Panic(what))
        })
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        let ended = Error::new(Code::EngineFailed, "the engine ended without a finish")
            .hint("see the log for why; the next request loads it again");
        self.shared.end(Phase::Failed(ended.clone()), &ended);
    }
}

/// The first line of an engine's message is what happened, with what to do after `; hint: `; the whole goes to the log.
fn failure(message: &str) -> Error {
    let first = message.lines().find(|line| !line.trim().is_empty()).unwrap_or("the engine failed without saying why").trim();
    let (what, hint) = match first.split_once("; hint: ") {
        Some((what, hint)) => (what, Some(hint.to_owned())),
        None => (first, None),
    };
    let mut error = Error::new(Code::EngineFailed, what.to_owned()).detail(message);
    error.hint = hint.map(Into::into);
    error
}

/// What the engine has not been told yet: cancellations first, since they make room, then as many requests as it has places.
fn take(state: &mut State, call: &'static str) -> Result<Option<Vec<Order>>, PortError> {
    let capabilities = match &state.phase {
        Phase::Ready(capabilities) => Arc::clone(capabilities),
        Phase::Closed => return Ok(None),
        Phase::Loading => return Err(PortError::NotReady(call)),
        Phase::Failed(_) => return Err(PortError::AfterFailure(call)),
    };
    let mut orders = Vec::new();
    for id in std::mem::take(&mut state.gone) {
        state.running.remove(&id);
        orders.push(Order::Cancel(id));
    }
    while state.running.len() < capabilities.max_batch as usize {
        let Some(Waiting { admit, inbox }) = state.waiting.pop_front() else { break };
        inbox.taken();
        state.running.insert(admit.id, Running { inbox, left: admit.max_tokens });
        orders.push(Order::Admit(admit));
    }
    Ok(Some(orders))
}
