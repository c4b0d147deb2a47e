//! The HTTP door: the Responses API, Chat Completions, Messages, the list of models and the health of the process, over TCP and Unix sockets.
//!
//! [`serve`] accepts connections and ends them, `patient` those that take nothing of their answer; `routes` answers one request, with `inbound` for its body, `host` for whom it claims to
//! speak to, `auth` for who speaks and `cors` for the web pages that may; `sse` streams events, `outbound` is every other answer, `models`, `health` and `metrics` are small resources, `openapi` tells what all of them take and give. hyper speaks HTTP. What
//! may be asked of a model is not known here but in [`crate::responses`], [`crate::completions`] and `crate::anthropic`.

mod auth;
mod completions;
mod cors;
mod health;
mod host;
mod inbound;
mod messages;
mod metrics;
mod models;
mod openapi;
mod outbound;
mod patient;
mod routes;
pub mod server;
mod sse;

use std::time::Duration;

pub use auth::Keys;
pub use cors::{Cors, Origin};
pub use server::{Listener, serve};

use crate::responses::{ReasoningEvents, Seal};

/// How the door behaves.
#[derive(Debug, Clone)]
pub struct Options {
    /// The largest request body, in bytes.
    pub max_body: usize,
    /// Hosts that a request may name besides loopback names and the address it came in on: exact names, without a port.
    pub allowed_hosts: Vec<String>,
    /// The keys of which a request has to bring one.
    pub keys: Keys,
    /// The web pages that may read answers.
    pub cors: Cors,
    /// The longest answer, in tokens, whatever a request asks for.
    pub max_output_tokens: Option<u32>,
    /// Connections at a time; more wait until one ends.
    pub max_connections: usize,
    /// How long the head of a request may take; also how long a connection may idle between two requests.
    pub header_timeout: Duration,
    /// How long the body of a request may take.
    pub body_timeout: Duration,
    /// How long a client may take nothing of its answer before its connection is closed.
    pub write_timeout: Duration,
    /// How long a request waits for its model to be loaded before it is told to come back. The load goes on.
    pub load_wait: Duration,
    /// A streamed answer that has nothing to say for this long sends a comment.
    pub keep_alive: Duration,
    /// An engine that has work and makes no step for this long counts as stalled.
    pub stall: Duration,
    /// How thoughts go out.
    pub reasoning_events: ReasoningEvents,
    /// What seals thoughts for clients that ask for that.
    pub seal: Seal,
    /// How long answers in flight may go on once the server stops; then they fail.
    pub grace: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            max_body: 32 * 1024 * 1024,
            allowed_hosts: Vec::new(),
            keys: Keys::default(),
            cors: Cors::default(),
            max_output_tokens: None,
            max_connections: 4096,
            header_timeout: Duration::from_secs(60),
            body_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(60),
            load_wait: Duration::from_secs(300),
            keep_alive: Duration::from_secs(10),
            stall: Duration::from_secs(120),
            reasoning_events: ReasoningEvents::default(),
            seal: Seal::default(),
            grace: Duration::from_secs(10),
        }
    }
}
