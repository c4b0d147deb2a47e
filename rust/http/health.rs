//! Whether the server can serve: for supervisors and load balancers, in a status code first and in words and counts second.

use std::time::Duration;

use hyper::StatusCode;
use schemars::JsonSchema;
use serde::Serialize;

use crate::metrics::Door;
use crate::models::{Hosted, Models, State};
use crate::responses::told;

/// What is said of it.
#[derive(Debug, JsonSchema, Serialize)]
pub(crate) struct Health {
    /// `alive` when only asked for that.
    #[schemars(extend("enum" = ["ok", "loading", "failed", "stalled", "alive"]))]
    status: &'static str,
    /// Why not.
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<String>,
    /// What is going on, of all models together; absent when only asked whether the process is alive.
    #[serde(flatten)]
    load: Option<Load>,
    /// Each model that is served.
    #[serde(skip_serializing_if = "Option::is_none")]
    models: Option<Vec<ModelHealth>>,
}

/// What is going on.
#[derive(Debug, Clone, Copy, Default, JsonSchema, Serialize)]
pub(crate) struct Load {
    /// Requests that have been taken and are not over.
    in_flight: u64,
    /// Requests that wait for a place in an engine.
    queue_length: usize,
    /// Requests in an engine.
    batch_size: usize,
}

/// One model.
#[derive(Debug, JsonSchema, Serialize)]
pub(crate) struct ModelHealth {
    /// The name it is served under.
    id: String,
    /// Where it is in its life.
    #[schemars(extend("enum" = ["absent", "loading", "ready", "failed"]))]
    state: &'static str,
    /// What is going on in it.
    #[serde(flatten)]
    load: Load,
}

/// The process runs: nothing else is looked at.
pub(crate) const ALIVE: Health = Health { status: "alive", message: None, load: None, models: None };

impl Health {
    /// What anybody may know who can reach the server: whether it can serve.
    pub(crate) fn in_public(self) -> Self {
        Self { status: self.status, message: None, load: None, models: None }
    }
}

/// Whether the default model answers, or will load when it is asked to, and no engine is stuck for longer than `stall`.
pub(crate) fn check(models: &Models, stall: Duration) -> (StatusCode, Health) {
    let each: Vec<ModelHealth> = models.all().iter().map(|hosted| of(hosted)).collect();
    let load = each.iter().fold(Load::default(), |all, ModelHealth { load, .. }| Load {
        in_flight: all.in_flight + load.in_flight,
        queue_length: all.queue_length + load.queue_length,
        batch_size: all.batch_size + load.batch_size,
    });
    let (status, word, message) = judge(models, stall);
    (status, Health { status: word, message, load: Some(load), models: Some(each) })
}

fn judge(models: &Models, stall: Duration) -> (StatusCode, &'static str, Option<String>) {
    const UNWELL: StatusCode = StatusCode::SERVICE_UNAVAILABLE;
    if let Some(time) = models.stalled().filter(|time| *time >= stall) {
        return (UNWELL, "stalled", Some(format!("an engine has had work for {} s and made no step", time.as_secs())));
    }
    match models.state() {
        State::Absent | State::Ready => (StatusCode::OK, "ok", None),
        State::Loading => (UNWELL, "loading", None),
        State::Failed(error) => (UNWELL, "failed", Some(told(&error))),
    }
}

fn of(hosted: &Hosted) -> ModelHealth {
    let in_flight = Door::ALL.map(|door| hosted.meters().door(door).in_flight()).iter().sum();
    let engine = hosted.loaded().map(|model| model.engine.load()).unwrap_or_default();
    let load = Load { in_flight, queue_length: engine.waiting, batch_size: engine.running };
    ModelHealth { id: hosted.id().to_owned(), state: hosted.state().name(), load }
}
