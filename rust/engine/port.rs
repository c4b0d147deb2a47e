//! The boundary between the doors and an engine: five calls on one side, a stream for each request on the other.
//!
//! The contract in prose is `docs/port.md`. [`Port`] is the engine's side (`ready, wait, poll, push, fail`), [`Engine`] the doors' side, which
//! `doors` holds.
//! No text passes here, and nothing here waits for a reader.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::watch;

use crate::engine::generation::Inbox;
use crate::engine::{Admit, Id, Order, SnapshotId, Step};
use crate::error::{Code, Error, Result};
use crate::metrics::Meters;

mod doors;
mod turns;

pub use doors::{Engine, Load, Place, Request};
pub use turns::Client;

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
    /// Whether it holds answers to a [`crate::engine::Constraint`].
    pub constraints: bool,
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
struct Waiting {
    client: Client,
    admit: Admit,
    inbox: Arc<Inbox>,
}

struct Running {
    client: Client,
    inbox: Arc<Inbox>,
    /// How many ids its prompt has.
    prompt: usize,
    /// How many ids it may still make.
    left: u32,
    /// Whether its ids come with log probabilities, once any have come.
    told: Option<bool>,
    /// Whether the reader asked for log probabilities.
    logprobs: bool,
}

struct State {
    next_id: Id,
    waiting: VecDeque<Waiting>,
    /// In the engine, the abandoned ones included until the engine has been told.
    running: HashMap<Id, Running>,
    /// Abandoned after they were handed over, and the engine not told yet.
    gone: Vec<Id>,
    /// Snapshots that have been given up, and the engine not told yet.
    forgotten: Vec<SnapshotId>,
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
    meters: Arc<Meters>,
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
            state.forgotten.clear();
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
    metered(queue_limit, Arc::default())
}

/// As [`port`], and counts what passes there.
#[must_use]
pub fn metered(queue_limit: usize, meters: Arc<Meters>) -> (Engine, Port) {
    let (phase, _) = watch::channel(Phase::Loading);
    let shared = Arc::new(Shared {
        state: Mutex::new(State {
            next_id: 1,
            waiting: VecDeque::new(),
            running: HashMap::new(),
            gone: Vec::new(),
            forgotten: Vec::new(),
            held: 0,
            tokens: 0,
            progress: Instant::now(),
            phase: Phase::Loading,
        }),
        orders: Condvar::new(),
        phase,
        queue_limit,
        meters,
    });
    (Engine { shared: Arc::clone(&shared) }, Port { shared })
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
    /// A step with more ids than the request may still make, with the last of them but no finish, with one outside the vocabulary, or with log
    /// probabilities for another number of ids, fails that request alone.
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
        let mut batch = 0;
        for mut step in steps {
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
            } else if !step.logprobs.is_empty() && step.logprobs.len() != step.tokens.len() {
                Some(format!("the engine made {made} tokens and gave log probabilities for {}", step.logprobs.len()))
            } else if made > 0 && *running.told.get_or_insert(!step.logprobs.is_empty()) == step.logprobs.is_empty() {
                Some("the engine gave log probabilities for some tokens of a request and not for others".to_owned())
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
            batch += u64::from(made > 0);
            if !running.logprobs {
                step.logprobs.clear();
            }
            wakers.push(running.inbox.deliver(&step.tokens, step.logprobs, step.finish, now));
            if step.finish.is_some() {
                state.running.remove(&step.id);
            }
            state.tokens += u64::from(made);
        }
        drop(state);
        if batch > 0 {
            self.shared.meters.batch.add(batch);
        }
        wakers.into_iter().flatten().for_each(std::task::Waker::wake);
        Ok(gone)
    }

    /// Says how many ids of a prompt were not read because an earlier request had left what they come to. An id that is already over is left alone;
    /// a count that is not below the length of the prompt fails the request.
    ///
    /// # Errors
    /// A call before `ready` or after a failure, or an id that was never admitted.
    pub fn cached(&self, id: Id, tokens: u32) -> Result<(), PortError> {
        let state = self.shared.lock();
        match &state.phase {
            Phase::Ready(_) => {}
            Phase::Closed => return Ok(()),
            Phase::Loading => return Err(PortError::NotReady("push")),
            Phase::Failed(_) => return Err(PortError::AfterFailure("push")),
        }
        if id == 0 || id >= state.next_id {
            return Err(PortError::UnknownId(id));
        }
        let Some(running) = state.running.get(&id) else { return Ok(()) };
        let prompt = running.prompt;
        if (tokens as usize) < prompt {
            running.inbox.cached(tokens);
            return Ok(());
        }
        drop(state);
        self.fail_request(id, &format!("the engine says that {tokens} tokens of a prompt of {prompt} were cached"))
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

/// What the engine has not been told yet: cancellations and given-up snapshots first, since they make room, then as many requests as it has places.
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
    orders.extend(std::mem::take(&mut state.forgotten).into_iter().map(Order::Forget));
    for Waiting { client, admit, inbox } in turns::next(state, capabilities.max_batch as usize) {
        inbox.taken(admit.prompt.len());
        let logprobs = admit.sampling.as_ref().is_some_and(|sampling| sampling.top_logprobs.is_some());
        let running = Running { client, inbox, prompt: admit.prompt.len(), left: admit.max_tokens, logprobs, told: None };
        state.running.insert(admit.id, running);
        orders.push(Order::Admit(admit));
    }
    Ok(Some(orders))
}
