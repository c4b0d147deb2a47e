//! Models of a Hugging Face hub: found on this machine, or fetched into the user's hub cache by a process of Python.
//!
//! The hub's protocol, the cache's layout and the transfer are `py/emberd/hub.py`, over `huggingface_hub`; here that process is run, heard and ended. What it
//! fetched is written down with all sizes, so that the next load looks at the files and asks nobody.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use serde::Deserialize;

use crate::error::{Code, Error, Result};
use crate::models::onnx::frame::{EXPECTED, unknown_input};
use crate::models::places::{self, Env};
use crate::models::progress::{Part, Progress, Sink, Stage, Throttle};
use crate::models::records::{Listed, Record, Records};
use crate::models::table::{Dtype, Form};
use crate::models::whole;

/// How often a fetch in progress is looked at for having been cancelled.
const LOOK: Duration = Duration::from_millis(50);
/// Lines of the fetching process's log that are kept.
const LOG: usize = 200;

/// The files of a repository that make a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repo {
    /// `ORG/NAME`.
    pub name: String,
    /// Which of its files.
    pub form: Form,
    /// A folder that may hold them already, laid out as omp lays out its MLX models.
    pub dir: Option<PathBuf>,
}

/// What fetching needs to know besides the repository.
pub struct Fetcher<'a> {
    /// What has been fetched before.
    pub records: Records,
    /// The Python that emberd and `huggingface_hub` are installed in; without it, the first `python3` on the path.
    pub python: Option<&'a Path>,
    /// How the weights of ONNX repositories are stored.
    pub dtype: Dtype,
    /// Ends the work when set.
    pub cancelled: &'a AtomicBool,
    /// Where the caches of hubs and of omp are, and whether hubs may be asked.
    pub env: Env<'a>,
}

impl Fetcher<'_> {
    /// The folder of the model if it is on this machine, whole, without asking anybody: what was fetched before, the folder that was given, then omp's.
    #[must_use]
    pub fn here(&self, repo: &Repo) -> Option<PathBuf> {
        if let Some(record) = self.records.find(repo, self.dtype) {
            match record.check() {
                Ok(()) => return Some(record.folder),
                Err(reason) => tracing::warn!(repo = repo.name, reason, "what was fetched is not whole any more"),
            }
        }
        let omp = places::omp(self.env, &repo.name, repo.form);
        let folder = repo.dir.iter().cloned().chain(omp).filter(|folder| folder.is_dir()).find(|folder| {
            let marked = if repo.form == Form::Mlx { places::marked(folder, &repo.name) } else { Ok(()) };
            let sound = marked.and_then(|()| whole::check(folder, repo.form, self.dtype));
            sound.inspect_err(|reason| tracing::warn!(repo = repo.name, reason, "a folder of omp's is not used")).is_ok()
        })?;
        tracing::info!(repo = repo.name, folder = %folder.display(), "the model is in omp's cache");
        Some(folder)
    }

    /// The snapshot in the user's hub cache, if it is whole by itself: for when the hub cannot be asked.
    ///
    /// # Errors
    /// Why it is not.
    fn snapshot(&self, repo: &Repo) -> std::result::Result<PathBuf, String> {
        let cache = places::hub_cache(self.env).ok_or("there is no folder for a hub cache")?;
        let folder = places::snapshot(&cache, &repo.name).ok_or_else(|| format!("{} has none of it", cache.display()))?;
        if let Some(record) = self.records.find(repo, self.dtype).filter(|record| record.folder == folder) {
            record.check()?;
        }
        whole::check(&folder, repo.form, self.dtype).map(|()| folder)
    }

    /// The folder of the model, whole: found on this machine, else fetched.
    ///
    /// # Errors
    /// What went wrong, with which file, and what to do: `download_failed` where another attempt may do better, `model_load_failed` where it will not;
    /// `shutting_down` when it was cancelled.
    pub fn ensure(&self, repo: &Repo, sink: Sink<'_>) -> Result<PathBuf> {
        if let Some(folder) = self.here(repo) {
            return Ok(folder);
        }
        let snapshot = self.snapshot(repo);
        if places::offline(self.env) {
            return snapshot.map_err(|reason| {
                Error::new(Code::ModelLoadFailed, format!("{} is not on this machine, and HF_HUB_OFFLINE is set: {reason}", repo.name))
                    .hint("unset HF_HUB_OFFLINE, or fetch the model where there is a network")
            });
        }
        let error = match self.download(repo, snapshot.is_ok(), sink) {
            Ok(record) => {
                self.records.write(repo, self.dtype, &record);
                return Ok(record.folder);
            }
            Err(error) => error,
        };
        // Looked at anew: what was there may have been found damaged, and be gone.
        match self.snapshot(repo) {
            Ok(folder) if error.code != Code::ShuttingDown => {
                tracing::warn!(repo = repo.name, %error, "the hub could not be asked; what is in its cache is whole, and is used");
                Ok(folder)
            }
            _ => Err(error),
        }
    }

    /// Runs the process that fetches; where a `whole` model is in the cache, it is not to wait long for the hub.
    fn download(&self, repo: &Repo, whole: bool, sink: Sink<'_>) -> Result<Record> {
        let python = self.python.unwrap_or(Path::new(if cfg!(windows) { "python" } else { "python3" }));
        let mut child = start(python, repo, self.dtype, whole)?;
        let (sender, lines) = sync_channel(16);
        let output = child.process.stdout.take();
        let reading = std::thread::spawn(move || {
            for line in output.into_iter().flat_map(|output| BufReader::new(output).split(b'\n').map_while(std::result::Result::ok)) {
                if sender.send(line).is_err() {
                    return; // Nobody listens any more: the process is being ended.
                }
            }
        });
        let mut heard = Heard::new(&repo.name, sink);
        loop {
            if self.cancelled.load(Ordering::Relaxed) {
                return Err(Error::new(Code::ShuttingDown, "stopped before the model had come").hint("pull again to go on"));
            }
            match lines.recv_timeout(LOOK) {
                Ok(line) => match serde_json::from_slice(&line) {
                    Ok(said) => {
                        heard.take(said);
                        heard.refuse(&self.dtype.graphs())?;
                    }
                    Err(_) => tracing::debug!(line = %String::from_utf8_lossy(&line), "the fetching process said"),
                },
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        let _ = reading.join();
        let (status, log) = child.ended();
        if let Some(error) = heard.error {
            return Err(error.detail(log));
        }
        match heard.record {
            Some(record) if heard.ready && status == Some(0) => Ok(record),
            _ => Err(broken(python, &repo.name, status, &log)),
        }
    }
}

/// What the process says, one JSON object a line.
#[derive(Debug, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
enum Said {
    /// Which files there are, and how much of each is here. Comes before any byte.
    Plan { commit: String, folder: PathBuf, files: Vec<Planned> },
    /// A file is about to be fetched.
    File { name: String },
    /// How much of it is here.
    Bytes { name: String, done: u64 },
    /// It is here, whole.
    Done { name: String },
    /// All are.
    Ready,
    /// A request that failed is made again, in so many seconds.
    Again { message: String, seconds: f64 },
    /// It did not work. What lasts stays until a person does something about it: a name that is none, a licence that was not accepted.
    Error {
        message: String,
        hint: String,
        #[serde(default)]
        lasting: bool,
    },
}

#[derive(Debug, Deserialize)]
struct Planned {
    name: String,
    bytes: u64,
    done: u64,
}

/// Turns what the process says into news and, at the end, a record.
struct Heard<'a> {
    repo: &'a str,
    sink: Sink<'a>,
    throttle: Throttle,
    parts: Vec<Part>,
    record: Option<Record>,
    ready: bool,
    /// Whether its graph has been looked at.
    judged: bool,
    error: Option<Error>,
}

impl<'a> Heard<'a> {
    fn new(repo: &'a str, sink: Sink<'a>) -> Self {
        Self { repo, sink, throttle: Throttle::new(), parts: Vec::new(), record: None, ready: false, judged: false, error: None }
    }

    fn take(&mut self, said: Said) {
        let model = || self.repo.to_owned();
        match said {
            Said::Plan { commit, folder, files } => {
                self.parts =
                    files.iter().map(|file| Part { file: file.name.clone(), done: file.done.min(file.bytes), total: file.bytes }).collect();
                let files = files.into_iter().map(|file| Listed { name: file.name, bytes: file.bytes }).collect();
                self.record = Some(Record { repo: model(), commit, folder, files });
            }
            Said::File { name } => {
                self.throttle = Throttle::new();
                (self.sink)(Progress::Initiate { model: model(), file: name });
            }
            Said::Bytes { name, done } => {
                let Some(part) = self.parts.iter_mut().find(|part| part.file == name) else { return };
                part.done = done.min(part.total);
                let (done, total) = (part.done, part.total);
                if self.throttle.lets(done, total) {
                    (self.sink)(Progress::Advance { model: model(), file: name, stage: Stage::Download, done, total });
                    (self.sink)(Progress::Whole { model: model(), parts: self.parts.as_slice().into() });
                }
            }
            Said::Done { name } => (self.sink)(Progress::Done { model: model(), file: name }),
            Said::Ready => self.ready = true,
            Said::Again { message, seconds } => tracing::warn!(repo = self.repo, "{message}; again in {seconds} s"),
            Said::Error { message, hint, lasting } => {
                let code = if lasting { Code::ModelLoadFailed } else { Code::DownloadFailed };
                self.error = Some(Error::new(code, message).hint(hint));
            }
        }
    }
}

impl Heard<'_> {
    /// Refuses the model once its graph is here and is one that no engine runs, as long as there is more to come: weights are large.
    ///
    /// # Errors
    /// `model_load_failed`, in the engine's words.
    fn refuse(&mut self, graphs: &[String]) -> Result<()> {
        let is_whole = |part: &Part| part.done >= part.total;
        let graph = self.parts.iter().find(|part| graphs.contains(&part.file)).filter(|part| is_whole(part));
        let (Some(graph), Some(record), false) = (graph, &self.record, self.judged) else { return Ok(()) };
        let path = record.folder.join(&graph.file);
        // Its last byte is told of before it has its name.
        if self.parts.iter().all(is_whole) || !path.is_file() {
            return Ok(());
        }
        self.judged = true;
        unknown_input(&path).map_or(Ok(()), |input| {
            Err(Error::new(Code::ModelLoadFailed, format!("{} has an input {input}; expected {EXPECTED}", path.display()))
                .hint("no weights were fetched; give another repository, or the path of a .gguf file"))
        })
    }
}

/// A process that fetches: ended when the caller leaves before it does.
struct Fetching {
    process: Child,
    log: Option<JoinHandle<String>>,
}

fn start(python: &Path, repo: &Repo, dtype: Dtype, whole: bool) -> Result<Fetching> {
    let mut command = Command::new(python);
    // -P: a worker starts in folders of any origin, and must not import what lies in one.
    command.args(["-P", "-m", "emberd.hub", &repo.name, "--form", repo.form.name()]);
    if repo.form == Form::Onnx {
        for graph in dtype.graphs() {
            command.args(["--graph", &graph]);
        }
    }
    if whole {
        command.arg("--whole");
    }
    // Standard input is how the process learns that this one has gone, however it went.
    command.env("PYTHONUTF8", "1").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // Ctrl-C goes to every process of the terminal's group: what it means here is decided in one place.
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut process = command.spawn().map_err(|error| {
        let code = if for_a_while(&error) { Code::DownloadFailed } else { Code::ModelLoadFailed };
        Error::new(code, format!("could not run {} to fetch {}: {error}", python.display(), repo.name))
            .hint("set EMBERD_PYTHON to the Python that emberd is installed in")
    })?;
    let errors = process.stderr.take();
    let log = std::thread::spawn(move || {
        let mut kept = VecDeque::new();
        for line in errors.into_iter().flat_map(|errors| BufReader::new(errors).split(b'\n').map_while(std::result::Result::ok)) {
            if kept.len() == LOG {
                kept.pop_front();
            }
            kept.push_back(String::from_utf8_lossy(&line).into_owned());
        }
        Vec::from(kept).join("\n")
    });
    Ok(Fetching { process, log: Some(log) })
}

/// Whether a process could not be started because the machine lacks something just now: it will be there again, which a Python that is not there will not.
fn for_a_while(error: &std::io::Error) -> bool {
    #[cfg(unix)]
    if matches!(rustix::io::Errno::from_io_error(error), Some(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE)) {
        return true;
    }
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::OutOfMemory | ErrorKind::Interrupted)
}

impl Fetching {
    /// Waits for its end, which is near: it has closed its output. The code it ended with, unless it was killed, and its log.
    fn ended(&mut self) -> (Option<i32>, String) {
        let status = self.process.wait().ok().and_then(|status| status.code());
        let log = self.log.take().and_then(|log| log.join().ok()).unwrap_or_default();
        (status, log)
    }
}

impl Drop for Fetching {
    fn drop(&mut self) {
        if matches!(self.process.try_wait(), Ok(None)) {
            // The whole group: what is called python may be a script that runs it.
            #[cfg(unix)]
            let _ = rustix::process::kill_process_group(rustix::process::Pid::from_child(&self.process), rustix::process::Signal::KILL);
            let _ = self.process.kill();
            let _ = self.process.wait();
        }
    }
}

/// The process ended without saying why: it was killed, which may be over with the next, or it never came to be `emberd.hub`, since that says why.
fn broken(python: &Path, repo: &str, status: Option<i32>, log: &str) -> Error {
    // Shells that run a Python say by a code above 128 that it was killed.
    let code = if status.is_some_and(|code| (0..=128).contains(&code)) { Code::ModelLoadFailed } else { Code::DownloadFailed };
    let reason = log.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it gave no reason").trim();
    Error::new(code, format!("could not fetch {repo}: {} -m emberd.hub failed: {reason}", python.display()))
        .hint("set EMBERD_PYTHON to the Python that emberd is installed in")
        .detail(log)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn what_the_process_says_becomes_news_with_the_totals_of_all_files() {
        let news = Mutex::new(Vec::new());
        let sink = |progress| news.lock().unwrap().push(progress);
        let mut heard = Heard::new("org/name", &sink);
        for line in [
            r#"{"event":"plan","commit":"c","folder":"/f","files":[{"name":"a","bytes":3,"done":3},{"name":"b","bytes":9,"done":0}]}"#,
            r#"{"event":"file","name":"b"}"#,
            r#"{"event":"bytes","name":"b","done":0}"#,
            r#"{"event":"bytes","name":"other","done":1}"#,
            r#"{"event":"bytes","name":"b","done":9}"#,
            r#"{"event":"done","name":"b"}"#,
            r#"{"event":"ready"}"#,
        ] {
            heard.take(serde_json::from_str(line).unwrap());
        }
        assert!(heard.ready && heard.error.is_none());
        assert_eq!(heard.record.map(|record| record.bytes()), Some(12));
        let (model, file) = ("org/name".to_owned(), "b".to_owned());
        let advance = |done| Progress::Advance { model: "org/name".into(), file: "b".into(), stage: Stage::Download, done, total: 9 };
        let whole = |done| Progress::Whole {
            model: "org/name".into(),
            parts: [Part { file: "a".into(), done: 3, total: 3 }, Part { file: "b".into(), done, total: 9 }].into(),
        };
        let expected = [
            Progress::Initiate { model: model.clone(), file: file.clone() },
            advance(0),
            whole(0),
            advance(9),
            whole(9),
            Progress::Done { model, file },
        ];
        assert_eq!(*news.lock().unwrap(), expected);
    }

    #[test]
    fn trouble_is_a_downloads_only_where_another_attempt_may_do_better() {
        let code = |status| broken(Path::new("python"), "org/name", status, "No module named emberd").code;
        assert_eq!([code(Some(1)), code(Some(127)), code(Some(0))], [Code::ModelLoadFailed; 3]);
        assert_eq!([code(None), code(Some(137))], [Code::DownloadFailed; 2]);
        assert!(!for_a_while(&ErrorKind::NotFound.into()) && !for_a_while(&ErrorKind::PermissionDenied.into()));
        assert!(for_a_while(&ErrorKind::WouldBlock.into()));
        #[cfg(unix)]
        assert!(for_a_while(&rustix::io::Errno::MFILE.into()));
    }
}
