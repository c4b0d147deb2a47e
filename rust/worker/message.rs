//! The wire types: one JSON object a line, told apart by `type`. How requests are read is in [`request`](super::request).

use std::borrow::Cow;

use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};

use crate::metrics::{Meter, Outcome};
use crate::models::progress::{Part, Progress, Stage};

pub use super::request::{Chat, Id, Parsed, Request, head_id, parse};

/// What a worker says. `id` is the request's own; left out when the line had none.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum Reply<'a> {
    /// Here I am, with the tag I was started with.
    Pong {
        /// The request's.
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<Id<'a>>,
        /// The launch tag.
        tag: &'a str,
    },
    /// This is what I am doing.
    Status {
        /// The request's.
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<Id<'a>>,
        /// What is going on.
        #[serde(flatten)]
        status: Status<'a>,
    },
    /// News of a load.
    Progress {
        /// The request's.
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<Id<'a>>,
        /// The news.
        event: Event<'a>,
    },
    /// The model is loaded.
    Loaded {
        /// The request's.
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<Id<'a>>,
    },
    /// An answer.
    Text {
        /// The request's.
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<Id<'a>>,
        /// What the model said, the stop string included.
        text: &'a str,
    },
    /// It did not work.
    Error {
        /// The request's.
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<Id<'a>>,
        /// Why, on one line.
        error: &'a str,
    },
}

impl Reply<'_> {
    /// Adds the reply's line, with its newline, to what goes out.
    pub fn write(&self, out: &mut Vec<u8>) {
        // A vector takes everything, and no reply holds what JSON cannot say.
        if serde_json::to_writer(&mut *out, self).is_ok() {
            out.push(b'\n');
        }
    }

    /// The reply's line, with its newline.
    #[must_use]
    pub fn line(&self) -> Vec<u8> {
        let mut line = Vec::with_capacity(128);
        self.write(&mut line);
        line
    }
}

/// What a worker is doing. Told at once, whatever it does; asking counts as no work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status<'a> {
    /// The key under which clients know the model.
    pub key: Cow<'a, str>,
    /// The launch tag.
    pub tag: Cow<'a, str>,
    /// The worker's process id.
    pub pid: u32,
    /// How long it has been listening, in milliseconds.
    pub uptime_ms: u64,
    /// The model behind the key.
    pub model: Cow<'a, str>,
    /// `absent`, `loading`, `ready` or `failed`.
    pub state: Cow<'a, str>,
    /// Loads and chats of all connections that have not been answered.
    pub in_flight: usize,
    /// Open connections, the one that asks included.
    pub connections: usize,
    /// The process's resident memory in bytes; `null` where the system does not tell.
    pub memory_bytes: Option<u64>,
    /// What its chats have come to; absent of workers that do not count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counts: Option<Counts>,
}

/// What the chats of a worker have come to since it was started: how many ended in which way, and their tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)] // The names and meanings are those of `metrics`.
pub struct Counts {
    pub completed: u64,
    pub incomplete: u64,
    pub failed: u64,
    pub cancelled: u64,
    pub refused: u64,
    pub queue_full: u64,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u64,
}

impl From<&Meter> for Counts {
    fn from(meter: &Meter) -> Self {
        Self {
            completed: meter.outcomes(Outcome::Completed),
            incomplete: meter.outcomes(Outcome::Incomplete),
            failed: meter.outcomes(Outcome::Failed),
            cancelled: meter.outcomes(Outcome::Cancelled),
            refused: meter.outcomes(Outcome::Refused),
            queue_full: meter.outcomes(Outcome::QueueFull),
            prompt_tokens: meter.prompt_tokens.get(),
            cached_tokens: meter.cached_tokens.get(),
            output_tokens: meter.output_tokens.get(),
        }
    }
}

/// News of a load, as clients of transformers.js know it.
#[derive(Debug, PartialEq, Serialize)]
pub struct Event<'a> {
    /// The key under which the client knows the model.
    #[serde(rename = "modelKey")]
    pub model_key: &'a str,
    /// `initiate`, `download`, `progress`, `progress_total`, `done` or `ready`.
    pub status: &'static str,
    /// What the files belong to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<&'a str>,
    /// The file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<&'a str>,
    /// 0 to 100.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress: Option<f64>,
    /// Bytes so far.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loaded: Option<u64>,
    /// Bytes in all: of the file, and with `progress_total` of all files together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total: Option<u64>,
    /// Each file with its bytes so far and in all, with `progress_total`.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "by_name")]
    pub files: Option<&'a [Part]>,
    /// What the model is for, with `ready`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task: Option<&'static str>,
    /// The model, with `ready`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<&'a str>,
}

/// A map from a file's name to `{"loaded","total"}`.
fn by_name<S: Serializer>(parts: &Option<&[Part]>, to: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Bytes {
        loaded: u64,
        total: u64,
    }
    let parts = parts.unwrap_or_default();
    let mut map = to.serialize_map(Some(parts.len()))?;
    for Part { file, done, total } in parts {
        map.serialize_entry(file, &Bytes { loaded: *done, total: *total })?;
    }
    map.end()
}

/// A percentage.
#[allow(clippy::cast_precision_loss)]
fn percent(done: u64, total: u64) -> f64 {
    if total == 0 { 100.0 } else { (done as f64) * 100.0 / (total as f64) }
}

impl<'a> Event<'a> {
    fn bare(model_key: &'a str, status: &'static str) -> Self {
        Self { model_key, status, name: None, file: None, progress: None, loaded: None, total: None, files: None, task: None, model: None }
    }

    /// The model answers from now on.
    #[must_use]
    pub fn ready(model_key: &'a str, model: &'a str) -> Self {
        Self { task: Some("text-generation"), model: Some(model), ..Self::bare(model_key, "ready") }
    }

    /// A piece of news as events, in order. Bytes count while they are downloaded; what follows (verifying, importing) has no event of its own, as the
    /// bytes are all here.
    #[must_use]
    pub fn of(model_key: &'a str, news: &'a Progress) -> [Option<Self>; 2] {
        match news {
            Progress::Initiate { model, file } => {
                let event = |status| Self { name: Some(model), file: Some(file), ..Self::bare(model_key, status) };
                [Some(event("initiate")), Some(event("download"))]
            }
            Progress::Advance { model, file, stage: Stage::Download, done, total } => {
                let event = Self {
                    name: Some(model),
                    file: Some(file),
                    progress: Some(percent(*done, *total)),
                    loaded: Some(*done),
                    total: Some(*total),
                    ..Self::bare(model_key, "progress")
                };
                [Some(event), None]
            }
            Progress::Whole { model, parts } => {
                let (done, total) = parts.iter().fold((0, 0), |(done, total), part| (done + part.done, total + part.total));
                let event = Self {
                    name: Some(model),
                    progress: Some(percent(done, total)),
                    loaded: Some(done),
                    total: Some(total),
                    files: Some(parts),
                    ..Self::bare(model_key, "progress_total")
                };
                [Some(event), None]
            }
            Progress::Advance { .. } => [None, None],
            Progress::Done { model, file } => [Some(Self { name: Some(model), file: Some(file), ..Self::bare(model_key, "done") }), None],
        }
    }
}
