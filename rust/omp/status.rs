//! How things are: which omp is here, what is installed for it, and which workers answer. Also what asks: a ping, a shutdown, a program of the system.

use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use serde::Deserialize;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

use super::places::{MLX_LM, Places};
use super::runtime::State;
use super::{Variables, keep, runtime};
use crate::error::{Code, Error, Result};

/// How long a worker has for its pong: as long as omp gives it.
const PONG: Duration = Duration::from_secs(3);
/// The longest pong that is read, in bytes.
const LONGEST: u64 = 64 * 1024;
/// How long a worker has to go.
const GONE: Duration = Duration::from_secs(5);
/// How long omp may take to tell its version: it starts a JavaScript engine for it.
const VERSION: Duration = Duration::from_secs(20);
/// How long a worker has to come up: it starts Python, on a machine that may be busy.
const UP: Duration = Duration::from_secs(10);
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// What a worker says to a ping.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pong {
    /// It is there, and this is its tag.
    Tag(String),
    /// Nobody listens.
    Nobody,
    /// Somebody may listen and is no worker, for this reason.
    Strange(String),
}

#[derive(Deserialize)]
struct Said {
    r#type: String,
    tag: Option<String>,
}

/// Pings the worker on a socket.
pub async fn ping(socket: &Path) -> Pong {
    let asked = async {
        let mut stream = match UnixStream::connect(socket).await {
            Ok(stream) => stream,
            Err(error) if [ErrorKind::ConnectionRefused, ErrorKind::NotFound].contains(&error.kind()) => return Pong::Nobody,
            Err(error) => return Pong::Strange(error.to_string()),
        };
        if stream.write_all(b"{\"type\":\"ping\",\"id\":\"status\"}\n").await.is_err() {
            return Pong::Strange("it hangs up".to_owned());
        }
        let mut line = Vec::new();
        let read = BufReader::new(stream.take(LONGEST)).read_until(b'\n', &mut line).await;
        match (read, serde_json::from_slice::<Said>(&line)) {
            (Ok(_), Ok(Said { r#type, tag: Some(tag) })) if r#type == "pong" => Pong::Tag(tag),
            _ => Pong::Strange("it is no worker".to_owned()),
        }
    };
    tokio::time::timeout(PONG, asked).await.unwrap_or_else(|_| Pong::Strange("it says nothing".to_owned()))
}

/// Asks the worker on a socket to end, and waits until it has hung up. Nobody there is as good.
///
/// # Errors
/// When it stays.
pub async fn shut_down(socket: &Path) -> Result<()> {
    let asked = async {
        let Ok(mut stream) = UnixStream::connect(socket).await else { return };
        // A worker that hangs up while it is written to has ended as well.
        let _ = stream.write_all(b"{\"type\":\"shutdown\",\"id\":\"install\"}\n").await;
        let _ = stream.read_to_end(&mut Vec::new()).await;
    };
    tokio::time::timeout(GONE, asked)
        .await
        .map_err(|_| Error::new(Code::ServerError, format!("the worker on {} was asked to end, and stays", socket.display())))
}

/// Waits until a worker answers on a socket with this tag.
///
/// # Errors
/// When none does for ten seconds, and when one with another tag is there.
pub async fn answers(socket: &Path, tag: &str) -> Result<()> {
    let end = tokio::time::Instant::now() + UP;
    let failed = |why: String| Error::new(Code::ServerError, format!("the worker on {} is not up: {why}", socket.display()));
    loop {
        let why = match ping(socket).await {
            Pong::Tag(found) if found == tag => return Ok(()),
            Pong::Tag(found) => return Err(failed(format!("another one is there, with the tag {found}"))),
            Pong::Nobody => "nobody answers".to_owned(),
            Pong::Strange(why) => why,
        };
        if tokio::time::Instant::now() >= end {
            return Err(failed(format!("{why}, {} s after it was started", UP.as_secs())));
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

/// Runs a program to its end, without input; it is killed when it takes longer.
///
/// # Errors
/// When it cannot be started, or takes longer.
pub async fn output(words: &[OsString], limit: Duration) -> Result<Output> {
    let [program, arguments @ ..] = words else { return Err(Error::new(Code::ServerError, "there is no program to run")) };
    let io = |error: &std::io::Error| Error::io(Code::ServerError, "run", Path::new(program), error);
    let mut command = std::process::Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| io(&error))?;
    let start = Instant::now();
    // The programs asked here say less than a pipe holds.
    while child.try_wait().map_err(|error| io(&error))?.is_none() {
        if start.elapsed() > limit {
            let _ = child.kill();
            let _ = child.wait();
            let said = format!("{} did not end within {} s", Path::new(program).display(), limit.as_secs());
            return Err(Error::new(Code::ServerError, said));
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
    child.wait_with_output().map_err(|error| io(&error))
}

/// The omp that is on the PATH.
fn on_path(variable: Variables<'_>) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    let executable = |path: &PathBuf| path.metadata().is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0);
    std::env::split_paths(&variable("PATH")?).map(|folder| folder.join("omp")).find(executable)
}

/// The version of the omp that is on the PATH.
///
/// # Errors
/// When there is none, or it does not tell.
pub async fn version(variable: Variables<'_>) -> Result<String> {
    let hint = "give the tag that omp expects by --tag";
    let Some(omp) = on_path(variable) else {
        return Err(Error::new(Code::InvalidValue, "there is no omp on the PATH").hint(hint));
    };
    let output = output(&[omp.clone().into(), "--version".into()], VERSION).await?;
    let said = String::from_utf8_lossy(&output.stdout);
    first_version(&said).filter(|_| output.status.success()).ok_or_else(|| {
        Error::new(Code::InvalidValue, format!("{} --version tells no version: {:?}", omp.display(), said.trim())).hint(hint)
    })
}

/// The first word that is a version, as in `omp/18.2.3`.
fn first_version(text: &str) -> Option<String> {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || ['.', '-', '+'].contains(&letter);
    let words = text.split(|letter| !plain(letter)).map(|word| word.trim_start_matches('v'));
    let numbers = |word: &&str| {
        let parts: Vec<&str> = word.splitn(3, '.').collect();
        parts.len() == 3 && parts.iter().all(|part| part.starts_with(|letter: char| letter.is_ascii_digit()))
    };
    words.filter(|word| !word.is_empty()).find(numbers).map(str::to_owned)
}

/// Everything there is to tell, line by line.
///
/// # Errors
/// When a folder cannot be read.
pub async fn report(places: &Places, variable: Variables<'_>) -> Result<String> {
    let mut text = String::new();
    let version = version(variable).await;
    let tag = version.as_ref().ok().map(|version| keep::tag(version, variable));
    match (&version, on_path(variable)) {
        (Ok(version), Some(omp)) => {
            let _ = writeln!(text, "omp        {version}, {}", omp.display());
        }
        (Err(error), _) => {
            let _ = writeln!(text, "omp        {}", error.message);
        }
        (Ok(_), None) => {}
    }
    if let Some(tag) = &tag {
        let _ = writeln!(text, "           its ONNX workers' tag is {tag}, if its settings say nothing of the device");
    }
    let state = runtime::state(places)?;
    let what = match &state {
        State::Absent => "nothing".to_owned(),
        State::HalfMade => "a part of what emberd puts there, or an empty folder".to_owned(),
        State::Emberd(command, _) => format!("emberd, by {command}"),
        State::Foreign => "an environment of omp's".to_owned(),
    };
    let _ = writeln!(text, "MLX        {}: {what}", places.runtime.display());
    let _ = writeln!(text, "           would omp start emberd? {}", runtime::started(&state, variable("PI_TINY_DEVICE").as_deref()));
    let _ = writeln!(text, "           this is the place of an omp that pins mlx-lm {MLX_LM}; whether the one here does was not asked");
    for place in runtime::beside(places) {
        let _ = writeln!(text, "           {} is the place of an omp that pins another: it looks there, and not here", place.display());
    }
    if let Some(aside) = runtime::moved_aside(places) {
        let _ = writeln!(text, "           an environment of omp's is aside, until emberd is uninstalled: {}", aside.display());
    }
    let kept = keep::installed(places)?;
    for one in &kept {
        let right = match &tag {
            _ if !one.is_of(places) => "for another profile",
            Some(tag) if *tag == one.tag => "as omp expects it",
            Some(_) => "which omp does not expect; install again",
            None => "whatever omp expects",
        };
        let _ = writeln!(text, "kept       {}: tag {}, {right}", one.path.display(), one.tag);
    }
    if kept.is_empty() {
        let _ = writeln!(text, "kept       nothing");
    }
    let sockets = sockets(&places.run)?;
    for socket in &sockets {
        let said = match ping(socket).await {
            Pong::Tag(tag) => format!("answers, tag {tag}"),
            Pong::Nobody => "nobody answers".to_owned(),
            Pong::Strange(why) => format!("does not answer as a worker: {why}"),
        };
        let _ = writeln!(text, "worker     {}: {said}", socket.display());
    }
    if sockets.is_empty() {
        let _ = writeln!(text, "worker     none in {}", places.run.display());
    }
    Ok(text)
}

/// The sockets in omp's folder for them.
fn sockets(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::io(Code::ServerError, "look into", folder, &error)),
    };
    let socket = |entry: &std::fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_socket());
    let named = |path: &PathBuf| path.extension() == Some(OsStr::new("sock"));
    let mut found: Vec<PathBuf> = entries.flatten().filter(socket).map(|entry| entry.path()).filter(named).collect();
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::UnixListener;

    #[test]
    fn a_version_is_found_in_what_omp_says() {
        for (said, version) in [("omp/18.2.3\n", "18.2.3"), ("omp v19.0.0-beta.1 (bun 1.4.5)", "19.0.0-beta.1"), ("18.3.4", "18.3.4")] {
            assert_eq!(first_version(said).as_deref(), Some(version), "{said:?}");
        }
        for said in ["", "omp", "18.2", "error: no such command"] {
            assert_eq!(first_version(said), None, "{said:?}");
        }
    }

    /// Says this to whoever comes, once a line has come.
    fn stranger(path: &Path, says: &'static [u8]) {
        let listener = UnixListener::bind(path).unwrap();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let mut stream = BufReader::new(stream);
                let _ = stream.read_until(b'\n', &mut Vec::new()).await;
                let _ = stream.write_all(says).await;
            }
        });
    }

    #[tokio::test]
    async fn whoever_is_on_a_socket_is_told_from_nobody() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        stranger(&path("a"), b"{\"type\":\"pong\",\"id\":\"status\",\"tag\":\"18.2.3|onnx||\"}\n");
        stranger(&path("b"), b"HTTP/1.1 400 Bad Request\r\n\r\n");
        stranger(&path("c"), b"");
        std::fs::write(path("d"), "").unwrap();
        assert_eq!(ping(&path("a")).await, Pong::Tag("18.2.3|onnx||".into()));
        assert_eq!(ping(&path("b")).await, Pong::Strange("it is no worker".into()));
        assert_eq!(ping(&path("c")).await, Pong::Strange("it is no worker".into()));
        assert!(matches!(ping(&path(&"long".repeat(40))).await, Pong::Strange(_)));
        assert_eq!(ping(&path("d")).await, Pong::Nobody);
        assert_eq!(ping(&path("e")).await, Pong::Nobody);
        assert!(shut_down(&path("a")).await.is_ok() && shut_down(&path("e")).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn who_says_nothing_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let _mute = UnixListener::bind(&path).unwrap();
        assert_eq!(ping(&path).await, Pong::Strange("it says nothing".into()));
        assert!(shut_down(&path).await.unwrap_err().message.contains("stays"));
        assert!(answers(&path, "t").await.unwrap_err().message.contains("it says nothing"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_worker_is_up_once_it_answers_with_its_tag() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        assert!(answers(&path, "t").await.unwrap_err().message.ends_with("is not up: nobody answers, 10 s after it was started"));
        let late = path.clone();
        tokio::spawn(async move {
            tokio::time::sleep(UP / 2).await;
            stranger(&late, b"{\"type\":\"pong\",\"id\":\"status\",\"tag\":\"t\"}\n");
        });
        assert_eq!(answers(&path, "t").await, Ok(()));
        assert!(answers(&path, "u").await.unwrap_err().message.ends_with("another one is there, with the tag t"));
    }

    #[tokio::test]
    async fn a_program_that_does_not_end_is_ended() {
        let sleep = ["sleep", "1000"].map(OsString::from);
        let error = output(&sleep, Duration::ZERO).await.unwrap_err();
        assert!(error.message.contains("did not end"), "{error}");
        assert!(output(&["/no/such/program".into()], VERSION).await.is_err());
    }
}
