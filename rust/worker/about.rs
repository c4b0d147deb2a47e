//! What a worker tells of itself when it is asked for its status: since when it runs, and how much is going on.
//!
//! Looking is no work: it neither loads the model nor keeps an idle worker.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::time::Instant;

use crate::metrics::Door;
use crate::models::Hosted;
use crate::worker::connection::Options;
use crate::worker::idle::Idle;
use crate::worker::message::Status;

/// A worker's age and its connections. Cloning gives another handle on the same ones.
#[derive(Debug, Clone)]
pub(super) struct About {
    started: Instant,
    connections: Arc<AtomicUsize>,
}

/// One connection, counted until it is dropped.
#[derive(Debug)]
pub(super) struct Guest(About);

impl About {
    /// A worker that starts now.
    pub(super) fn new() -> Self {
        Self { started: Instant::now(), connections: Arc::default() }
    }

    /// Counts a connection.
    pub(super) fn guest(&self) -> Guest {
        self.connections.fetch_add(1, Ordering::Relaxed);
        Guest(self.clone())
    }
}

impl Guest {
    /// The worker as it is now.
    pub(super) fn status<'a>(&self, options: &'a Options, model: &'a Hosted, idle: &Idle) -> Status<'a> {
        Status {
            key: Cow::Borrowed(&options.model_key),
            tag: Cow::Borrowed(&options.tag),
            pid: std::process::id(),
            uptime_ms: u64::try_from(self.0.started.elapsed().as_millis()).unwrap_or(u64::MAX),
            model: Cow::Borrowed(model.id()),
            state: Cow::Borrowed(model.state().name()),
            in_flight: idle.in_flight(),
            connections: self.0.connections.load(Ordering::Relaxed),
            memory_bytes: memory_stats::memory_stats().map(|memory| memory.physical_mem as u64),
            counts: Some(model.meters().door(Door::Worker).into()),
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}
