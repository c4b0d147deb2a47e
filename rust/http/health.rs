//! Whether the server can serve: for supervisors and load balancers, in a status code first and in words second.

use std::time::Duration;

use hyper::StatusCode;
use serde::Serialize;

use crate::models::{Models, State};
use crate::responses::told;

/// What is said of it.
#[derive(Serialize)]
pub(crate) struct Health {
    /// `ok`, `loading`, `failed`, `stalled` or, when only asked for that, `alive`.
    status: &'static str,
    /// Why not.
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<String>,
}

/// The process runs: nothing else is looked at.
pub(crate) const ALIVE: Health = Health { status: "alive", message: None };

/// Whether the default model answers, or will load when it is asked to, and no engine is stuck for longer than `stall`.
pub(crate) fn check(models: &Models, stall: Duration) -> (StatusCode, Health) {
    if let Some(time) = models.stalled().filter(|time| *time >= stall) {
        let message = format!("an engine has had work for {} s and made no step", time.as_secs());
        return (StatusCode::SERVICE_UNAVAILABLE, Health { status: "stalled", message: Some(message) });
    }
    match models.state() {
        State::Absent | State::Ready => (StatusCode::OK, Health { status: "ok", message: None }),
        State::Loading => (StatusCode::SERVICE_UNAVAILABLE, Health { status: "loading", message: None }),
        State::Failed(error) => (StatusCode::SERVICE_UNAVAILABLE, Health { status: "failed", message: Some(told(&error)) }),
    }
}
