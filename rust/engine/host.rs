//! Starts engines: a launch is queued here and picked up by whoever can run that kind of engine.
//!
//! Engines written in Python are started by the interpreter's main thread, which sleeps in [`Launches::next`]; the mock runs on a thread of
//! its own. No thread of Rust ever calls into Python for this.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use tokio::sync::watch;

use crate::engine::mock::Mock;
use crate::engine::port::{Engine, Phase, Port, metered};
use crate::engine::script::Script;
use crate::error::{Code, Error, Result};
use crate::metrics::Meters;

/// Models being started at once; a process that serves more than this many is not what this is for.
const LAUNCHES: usize = 64;

/// What activations are where they meet the quantized weights of an imported model, in ONNX Runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Activations {
    /// Rounded to 15 bits a block of 32, on the fly, by emberd's own kernels: as near as floats, and faster. Where there are none, as with `Float`: on processors other than x86-64 with AVX2 and,
    /// for codes of 8 bits, without VNNI. The engine's own choice.
    Int16,
    /// 32-bit floats: as near to the model as its weights are. With codes of 8 bits they are rounded to 8 bits even so, for the runtime has no other product.
    Float,
    /// Rounded to 8 bits a block of 32, on the fly, as llama.cpp does it: further from the model.
    Int8,
}

impl Activations {
    /// Its name, as on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Float => "float",
            Self::Int8 => "int8",
            Self::Int16 => "int16",
        }
    }
}

/// Whose operators an imported model is computed with, in ONNX Runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Kernels {
    /// Those of emberd: fewer and faster, and what a text gets does not depend on what is read beside it, where all of a model is computed with them. The engine's own choice.
    Emberd,
    /// Those of ONNX Runtime alone, whose products know no 15 bits: `Int16` is `Float` then.
    Onnxruntime,
}

impl Kernels {
    /// Its name, as on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Emberd => "emberd",
            Self::Onnxruntime => "onnxruntime",
        }
    }
}

/// What can be chosen by a name, on the command line and from Python.
pub use clap::ValueEnum as Choice;

/// A choice by its name, as on the command line.
///
/// # Errors
/// A name that is none, with those that there are. `what`: what is chosen, in the plural.
pub fn named<E: Choice>(what: &str, name: &str) -> std::result::Result<E, String> {
    E::from_str(name, false).map_err(|_| {
        let known: Vec<_> = E::value_variants().iter().filter_map(clap::ValueEnum::to_possible_value).collect();
        let known: Vec<_> = known.iter().map(clap::builder::PossibleValue::get_name).collect();
        let (last, others) = known.split_last().map_or(("", &[][..]), |(last, others)| (*last, others));
        format!("{what} are '{name}'; hint: {} or {last}", others.join(", "))
    })
}

/// What an engine is told when it starts. `None` leaves the choice to the engine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// Compute threads.
    pub threads: Option<u32>,
    /// Requests in the engine at a time.
    pub max_batch: Option<u32>,
    /// Window in ids; never above the model's own.
    pub context_length: Option<u32>,
    /// Ids of a prompt that are taken between two steps of the answers that run.
    pub prefill_chunk: Option<u32>,
    /// Bytes of memory for what is kept of prompts and answers, so that later prompts start where they agree; 0 keeps nothing.
    pub cache_bytes: Option<u64>,
    /// Bytes of memory for the keys and values of the requests that run.
    pub kv_bytes: Option<u64>,
    /// Whether compute threads spin while they wait: for ever or never; the engine's own choice may lie between.
    pub spin: Option<bool>,
    /// What the activations that meet quantized weights are.
    pub activations: Option<Activations>,
    /// Whose operators an imported model is computed with.
    pub kernels: Option<Kernels>,
    /// What the mock engine answers, in order; others do not look at it.
    pub script: Vec<String>,
    /// What the mock engine answers, by rules, which come before that; others do not look at it.
    pub rules: Script,
}

/// An engine to be started.
pub struct Launch {
    /// Its name: `onnx`, `echo`.
    pub engine: String,
    /// The model folder.
    pub folder: PathBuf,
    /// What it is told.
    pub settings: Settings,
    /// Its side of the port.
    pub port: Port,
}

/// The side that asks for engines.
#[derive(Clone)]
pub struct Launcher {
    launches: SyncSender<Option<Launch>>,
    queue_limit: usize,
}

/// The side that starts them.
pub struct Launches {
    launches: Receiver<Option<Launch>>,
}

/// Makes the two sides. `queue_limit`: how many requests may wait for a place in one engine.
#[must_use]
pub fn launcher(queue_limit: usize) -> (Launcher, Launches) {
    let (sender, receiver) = sync_channel(LAUNCHES);
    (Launcher { launches: sender, queue_limit }, Launches { launches: receiver })
}

impl Launcher {
    /// Asks for an engine and returns the doors' side of its port at once; its phase tells when it is ready. What passes there is counted in `meters`.
    ///
    /// # Errors
    /// `shutting_down` when nobody starts engines any more, `queue_full` when too many are being started.
    pub fn launch(&self, engine: &str, folder: &Path, settings: Settings, meters: Arc<Meters>) -> Result<Engine> {
        let (doors, port) = metered(self.queue_limit, meters);
        if engine == Mock::NAME {
            Mock::default().spawn(port, settings)?;
            return Ok(doors);
        }
        let launch = Launch { engine: engine.to_owned(), folder: folder.to_path_buf(), settings, port };
        match self.launches.try_send(Some(launch)) {
            Ok(()) => Ok(doors),
            Err(TrySendError::Full(_)) => Err(Error::new(Code::QueueFull, format!("{LAUNCHES} models are being started already"))),
            Err(TrySendError::Disconnected(_)) => Err(Error::new(Code::ShuttingDown, "the process is shutting down")),
        }
    }

    /// Tells the other side that no launch will follow.
    pub fn close(&self) {
        // Full or gone: in both cases the other side has more to do before it would look here, and ends without it.
        let _ = self.launches.try_send(None);
    }
}

impl Launches {
    /// The next engine to start; sleeps until there is one. `None` when the process ends.
    #[must_use]
    pub fn next(&self) -> Option<Launch> {
        self.launches.recv().ok().flatten()
    }
}

/// Waits until the engine is ready.
///
/// # Errors
/// The engine's own failure, or `shutting_down`.
pub async fn ready(mut phase: watch::Receiver<Phase>) -> Result<Arc<crate::engine::Capabilities>> {
    let settled = phase.wait_for(|phase| !matches!(phase, Phase::Loading)).await;
    match settled.as_deref() {
        Ok(Phase::Ready(capabilities)) => Ok(Arc::clone(capabilities)),
        Ok(Phase::Failed(error)) => Err(error.clone()),
        _ => Err(Error::new(Code::ShuttingDown, "the server is shutting down")),
    }
}
