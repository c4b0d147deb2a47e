//! The process: parses its arguments, starts what they say, and hands out engines to load until it ends.
//!
//! The doors live on a thread of their own with its own runtime; the thread that called [`App::start`] is free to load engines.

use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use clap::Parser;
use tracing_subscriber::EnvFilter;

use crate::config::{self, Command, Config, Engine, EngineName, Serve, Worker};
use crate::engine::host::launcher;
use crate::engine::{Launch, Launcher, Launches};
use crate::error::{Code, Error, Result};
use crate::models::Models;
use crate::models::catalog::{self, Asked, Source};
use crate::models::fetch::Shelf;
use crate::models::table::Form;
use crate::responses::Seal;
use crate::shutdown::Stop;
use crate::worker::launch;
use crate::{chat, linger, listen, shelf, worker};

/// Work on other threads (downloads, tokenising) that a stopping process waits for.
const LAST_WORK: Duration = Duration::from_secs(2);

/// Descriptors are not asked for beyond this: there are systems whose own limit is none.
#[cfg(unix)]
const MOST_DESCRIPTORS: u64 = if cfg!(target_os = "macos") { 10_240 } else { 65_536 };

/// A running process.
pub struct App {
    launches: Option<Launches>,
    doors: Option<JoinHandle<u8>>,
    code: u8,
}

impl App {
    /// Parses the arguments (without the program's name) and starts what they say. `python` is the interpreter that this runs in; it can run pip.
    /// `mlx`: whether MLX is the best engine on this machine.
    /// Must be called on the process's first thread, which gives the process its name.
    #[must_use]
    pub fn start(args: Vec<OsString>, python: Option<PathBuf>, mlx: bool) -> Self {
        let ended = |code| Self { launches: None, doors: None, code };
        let launch = match launch::read(&args, |name| std::env::var_os(name)) {
            Ok(launch) => launch,
            Err(error) => {
                complain(&error, true);
                return ended(1);
            }
        };
        let (args, warnings) = launch.map_or((args, Vec::new()), |launch| (launch.arguments, launch.warnings));
        let mut config = match Config::try_parse_from(std::iter::once("emberd".into()).chain(args)) {
            Ok(config) => config,
            Err(error) => {
                let _ = error.print();
                return ended(u8::try_from(error.exit_code()).unwrap_or(2));
            }
        };
        if mlx {
            config.best = EngineName::Mlx;
        }
        let program = python.clone();
        config.python = config.python.or(python);
        if let Err(error) = log(&config) {
            complain(&error, false);
            return ended(2);
        }
        for warning in warnings {
            tracing::warn!("{warning}");
        }
        let detached = match &config.command {
            Command::Worker(worker) if worker.detached => {
                worker::daemon::detach(&worker.model_key);
                true
            }
            _ => false,
        };
        let queue = match &config.command {
            Command::Serve(serve) => serve.engine.queue,
            Command::Worker(worker) => worker.engine.queue,
            Command::Chat(_) | Command::Models(_) => 0,
            #[cfg(unix)]
            Command::Status(_) | Command::Omp(_) => 0,
        };
        let (launcher, launches) = launcher(queue);
        let doors = std::thread::Builder::new().name("emberd doors".into()).spawn(move || {
            let code = run(&config, program, &launcher).unwrap_or_else(|error| {
                tracing::debug!(detail = error.detail.as_deref(), "failed");
                complain(&error, detached);
                1
            });
            launcher.close();
            code
        });
        match doors {
            Ok(doors) => Self { launches: Some(launches), doors: Some(doors), code: 0 },
            Err(error) => {
                complain(&Error::new(Code::ServerError, format!("could not start a thread: {error}")), detached);
                ended(1)
            }
        }
    }

    /// The next engine to load; sleeps until there is one. `None` when the process ends.
    pub fn next_launch(&self) -> Option<Launch> {
        self.launches.as_ref().and_then(Launches::next)
    }

    /// Waits until everything here has ended; the exit code.
    pub fn finish(&mut self) -> u8 {
        self.launches = None;
        if let Some(doors) = self.doors.take() {
            self.code = doors.join().unwrap_or(101);
        }
        self.code
    }
}

/// Errors go to standard error in the form of the command line's own; to a program that launches workers, in nothing but their words.
#[allow(clippy::print_stderr)]
fn complain(error: &Error, plain: bool) {
    eprintln!("{}{error}", if plain { "" } else { "error: " });
}

fn log(config: &Config) -> Result<()> {
    let filter = EnvFilter::try_new(&config.log).map_err(|error| {
        Error::new(Code::InvalidValue, format!("{:?} is no filter for the log: {error}", config.log))
            .hint("give a level, such as info or debug")
    })?;
    let subscriber =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(std::io::stderr().is_terminal());
    let _ = subscriber.with_target(false).try_init(); // A second process in one interpreter keeps the first one's log.
    Ok(())
}

fn run(config: &Config, program: Option<PathBuf>, launcher: &Launcher) -> Result<u8> {
    // One thread for all sockets: it starts faster and takes less memory, and no wake-up goes from one to another. With two threads on two cores the
    // first event of an answer came after 2.1-2.5 times what bare hyper needs, with one after 1.2-1.4; one sends over a million events a second. What
    // takes longer than some microseconds (long prompts, files) is done on other threads.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Error::new(Code::ServerError, format!("could not start the runtime: {error}")))?;
    runtime.spawn(linger::run());
    let code = runtime.block_on(command(config, program, launcher));
    runtime.shutdown_timeout(LAST_WORK);
    code
}

/// Lets this process have as many connections as the system allows it at most: the usual limit, 1024 descriptors or fewer, is for programs that have
/// a few. Where that is refused, the usual limit holds.
#[cfg(unix)]
fn more_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let most = limit.maximum.unwrap_or(MOST_DESCRIPTORS).min(MOST_DESCRIPTORS);
    if limit.current.is_some_and(|current| current < most) {
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(most), maximum: limit.maximum });
    }
}

#[cfg(not(unix))]
fn more_descriptors() {}

#[cfg_attr(not(unix), allow(unused_variables))] // Of use to commands that are not everywhere.
async fn command(config: &Config, program: Option<PathBuf>, launcher: &Launcher) -> Result<u8> {
    let stop = Stop::default();
    let on_signals = || stop.on_signals().map_err(|error| Error::new(Code::ServerError, format!("could not listen to signals: {error}")));
    match &config.command {
        Command::Serve(serve) => {
            more_descriptors();
            on_signals()?;
            let models = models(config, &serve.models, &serve.engine, launcher)?;
            // Without a place for files the key is the process's own.
            let seal = config.home().map(Seal::kept).unwrap_or_default();
            http(serve, models, seal, stop).await
        }
        Command::Worker(worker) => {
            more_descriptors();
            on_signals()?;
            let models = worker_model(config, worker, launcher);
            tiny(worker, models, stop).await
        }
        Command::Chat(ask) => chat::run(ask).await,
        #[cfg(unix)]
        Command::Omp(what) => crate::omp::run(what, &config.home()?, program).await,
        #[cfg(unix)]
        Command::Status(what) => crate::status::run(what).await,
        Command::Models(what) => {
            on_signals()?;
            let engine = engine_name(config, EngineName::Auto);
            shelf::run(what, models_shelf(config, engine)?, Form::of(engine), stop).await
        }
    }
}

fn models(config: &Config, names: &[String], engine: &Engine, launcher: &Launcher) -> Result<Models> {
    let (name, settings) = (engine_name(config, engine.name), engine.settings());
    let models = Models::new(names, models_shelf(config, name)?, launcher.clone(), name, settings)?;
    if !may_fall_back(engine, name) {
        return Ok(models);
    }
    let sources = names.iter().map(|name| catalog::resolve(name, Form::Onnx)).collect::<Result<_>>()?;
    Ok(models.or(FALLBACK, sources, &models_shelf(config, FALLBACK)?))
}

fn worker_model(config: &Config, worker: &Worker, launcher: &Launcher) -> Result<Models> {
    let engine = engine_name(config, worker.engine.name);
    // A variable that is set to nothing says nothing.
    let model = worker.model.as_deref().filter(|model| !model.is_empty());
    let asked = Asked { model, repo: worker.repo.as_deref(), dir: worker.dir.as_deref(), key: &worker.model_key };
    // An engine without a model has no use for one: nothing is looked for.
    let (name, source) = match engine {
        "mock" | "echo" => (model.unwrap_or(&worker.model_key).to_owned(), Source::Builtin),
        _ => catalog::of_worker(asked, Form::of(engine))?,
    };
    let mut settings = worker.engine.settings();
    settings.cache_bytes.get_or_insert(config::WORKER_CACHE);
    let models = Models::of(vec![(name, source)], models_shelf(config, engine)?, launcher.clone(), engine, settings)?;
    if !may_fall_back(&worker.engine, engine) {
        return Ok(models);
    }
    let (_, other) = catalog::of_worker(asked, Form::of(FALLBACK))?;
    Ok(models.or(FALLBACK, vec![other], &models_shelf(config, FALLBACK)?))
}

/// The engine that takes over where the best one cannot run a model, unless the user chose it.
const FALLBACK: &str = "onnx";

fn may_fall_back(engine: &Engine, name: &str) -> bool {
    engine.name == EngineName::Auto && name != FALLBACK
}

fn engine_name(config: &Config, name: EngineName) -> &'static str {
    match name {
        EngineName::Auto if config.best == EngineName::Mlx => "mlx",
        EngineName::Auto | EngineName::Onnx => "onnx",
        EngineName::Mlx => "mlx",
        EngineName::Echo => "echo",
        EngineName::Mock => "mock",
    }
}

fn models_shelf(config: &Config, engine: &str) -> Result<Shelf> {
    Ok(Shelf::new(config.home()?, config.python.clone()).with_dtype(config::dtype()).with_form(Form::of(engine)))
}

async fn http(serve: &Serve, models: Models, seal: Seal, stop: Stop) -> Result<u8> {
    let keys = serve.door.keys()?;
    let listeners = listen::http(serve, !keys.is_empty()).await?;
    crate::serve::run(serve, listeners, models, (seal, keys), stop).await
}

async fn tiny(options: &Worker, models: Result<Models>, stop: Stop) -> Result<u8> {
    let (listener, seat) = listen::claim(&options.socket, "tiny worker already listening on", listen::Files::Replaced)?;
    let models = models?;
    // The one line that a worker says there: it is bound. A launcher that does not care to hear it is no reason to end.
    let _ = writeln!(std::io::stdout(), "omp tiny worker listening on {}", seat.path().display());
    if options.detached {
        worker::daemon::end_stdout();
    }
    let model = Arc::clone(models.default_model());
    let door = worker::Options {
        model_key: options.model_key.clone(),
        tag: options.tag.clone(),
        max_line: options.max_line,
        max_in_flight: options.max_in_flight,
        max_waiting: options.engine.queue.max(1),
    };
    let reason = worker::serve(listener, model, door, options.idle(), stop).await;
    tracing::info!(?reason, "the worker ends");
    models.close();
    Ok(reason.exit_code())
}
