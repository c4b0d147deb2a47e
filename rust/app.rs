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

use crate::config::{Command, Config, Engine, EngineName, Serve, Worker};
use crate::engine::host::launcher;
use crate::engine::{Launch, Launcher, Launches};
use crate::error::{Code, Error, Result};
use crate::models::Models;
use crate::models::fetch::Shelf;
use crate::shutdown::Stop;
use crate::{chat, listen, shelf, status, worker};

/// Work on other threads (downloads, tokenising) that a stopping process waits for.
const LAST_WORK: Duration = Duration::from_secs(2);

/// A running process.
pub struct App {
    launches: Option<Launches>,
    doors: Option<JoinHandle<u8>>,
    code: u8,
}

impl App {
    /// Parses the arguments (without the program's name) and starts what they say. `python` is an interpreter that can run pip.
    #[must_use]
    pub fn start(args: Vec<OsString>, python: Option<PathBuf>) -> Self {
        let ended = |code| Self { launches: None, doors: None, code };
        let mut config = match Config::try_parse_from(std::iter::once("emberd".into()).chain(args)) {
            Ok(config) => config,
            Err(error) => {
                let _ = error.print();
                return ended(u8::try_from(error.exit_code()).unwrap_or(2));
            }
        };
        config.python = config.python.or(python);
        if let Err(error) = log(&config) {
            complain(&error);
            return ended(2);
        }
        let queue = match &config.command {
            Command::Serve(serve) => serve.engine.queue,
            Command::Worker(worker) => worker.engine.queue,
            Command::Chat(_) | Command::Status(_) | Command::Models(_) => 0,
        };
        let (launcher, launches) = launcher(queue);
        let doors = std::thread::Builder::new().name("emberd doors".into()).spawn(move || {
            let code = run(&config, &launcher).unwrap_or_else(|error| {
                tracing::debug!(detail = error.detail.as_deref(), "failed");
                complain(&error);
                1
            });
            launcher.close();
            code
        });
        match doors {
            Ok(doors) => Self { launches: Some(launches), doors: Some(doors), code: 0 },
            Err(error) => {
                complain(&Error::new(Code::ServerError, format!("could not start a thread: {error}")));
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

/// Errors go to standard error in the form of the command line's own.
#[allow(clippy::print_stderr)]
fn complain(error: &Error) {
    eprintln!("error: {error}");
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

fn run(config: &Config, launcher: &Launcher) -> Result<u8> {
    // One thread for all sockets: it starts faster and takes less memory, and no wake-up goes from one to another. With two threads on two cores the
    // first event of an answer came after 2.1-2.5 times what bare hyper needs, with one after 1.2-1.4; one sends over a million events a second. What
    // takes longer than some microseconds (long prompts, files) is done on other threads.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Error::new(Code::ServerError, format!("could not start the runtime: {error}")))?;
    let code = runtime.block_on(command(config, launcher));
    runtime.shutdown_timeout(LAST_WORK);
    code
}

async fn command(config: &Config, launcher: &Launcher) -> Result<u8> {
    let stop = Stop::default();
    let on_signals = || stop.on_signals().map_err(|error| Error::new(Code::ServerError, format!("could not listen to signals: {error}")));
    match &config.command {
        Command::Serve(serve) => {
            on_signals()?;
            let models = models(config, &serve.models, &serve.engine, launcher)?;
            http(serve, models, stop).await
        }
        Command::Worker(worker) => {
            on_signals()?;
            let models = models(config, std::slice::from_ref(&worker.model), &worker.engine, launcher);
            tiny(worker, models, stop).await
        }
        Command::Chat(ask) => chat::run(ask).await,
        Command::Status(what) => status::run(what).await,
        Command::Models(what) => {
            on_signals()?;
            shelf::run(what, Shelf::new(config.home()?, config.python.clone()), stop).await
        }
    }
}

fn models(config: &Config, names: &[String], engine: &Engine, launcher: &Launcher) -> Result<Models> {
    let name = match engine.name {
        // ONNX Runtime is the one engine with a model so far; a better one for a machine would be chosen here.
        EngineName::Auto | EngineName::Onnx => "onnx",
        EngineName::Mlx => "mlx",
        EngineName::Echo => "echo",
        EngineName::Mock => "mock",
    };
    let shelf = Shelf::new(config.home()?, config.python.clone());
    Models::new(names, shelf, launcher.clone(), name, engine.settings())
}

async fn http(serve: &Serve, models: Models, stop: Stop) -> Result<u8> {
    let listeners = listen::http(serve).await?;
    crate::serve::run(serve, listeners, models, stop).await
}

async fn tiny(options: &Worker, models: Result<Models>, stop: Stop) -> Result<u8> {
    let (listener, seat) = listen::claim(&options.socket, "tiny worker already listening on", listen::Files::Replaced)?;
    let models = models?;
    // The one line that a worker says there: it is bound. A launcher that does not care to hear it is no reason to end.
    let _ = writeln!(std::io::stdout(), "omp tiny worker listening on {}", seat.path().display());
    let model = Arc::clone(models.default_model());
    let door = worker::Options {
        model_key: options.model_key.clone(),
        tag: options.tag.clone(),
        max_line: options.max_line,
        max_in_flight: options.engine.queue.max(1),
    };
    let reason = worker::serve(listener, model, door, options.idle(), stop).await;
    tracing::info!(?reason, "the worker ends");
    models.close();
    Ok(reason.exit_code())
}
