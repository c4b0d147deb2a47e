//! `emberd status`: the workers of this user, wherever their sockets are.
//!
//! It looks and does no more: it starts no worker, loads no model, keeps no idle worker and removes no socket. What it asks is a ping to every worker
//! that speaks this protocol, so that those of other programs may be asked as well.

use std::ffi::OsString;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::task::JoinSet;

use crate::config::{self, Status as Options};
use crate::error::{Code, Error, Result};
use crate::shelf::{say, size};
use crate::worker::message::Status;

/// A worker answers within microseconds; one that takes longer than this is shown as silent.
const PATIENCE: Duration = Duration::from_secs(1);
/// The longest answer in bytes; more comes from something else than a worker.
const LONGEST: u64 = 64 * 1024;
/// Characters of a cell that are shown: as many as the longest path of a socket has.
const CELL: usize = 107;
/// A ping to those who do not know what else it asks.
const QUESTION: &[u8] = b"{\"type\":\"ping\",\"id\":\"status\",\"status\":true}\n";
/// What stands where nothing is known.
const NONE: &str = "-";

/// Runs the command; the exit code, which is 0 also when there are no workers.
///
/// # Errors
/// A folder that was asked for and cannot be read.
pub async fn run(options: &Options) -> Result<u8> {
    let folders = folders(options, |name| std::env::var_os(name));
    let rows = look(sockets(&folders, &options.folders)?).await;
    if options.json {
        let workers = serde_json::to_string(&List { workers: &rows })
            .map_err(|error| Error::new(Code::ServerError, format!("could not write the list: {error}")))?;
        return say(&workers);
    }
    if rows.is_empty() {
        let places: Vec<String> = folders.iter().chain(&options.folders).map(|folder| folder.display().to_string()).collect();
        let _ = writeln!(std::io::stderr(), "no workers in {}", places.join(", "));
        return Ok(0);
    }
    say(&table(&rows))
}

/// Where workers of this user have their sockets, given the environment: emberd's own folders, then those of the omp coding agent with all its
/// profiles. Not all of them need to be there.
fn folders(options: &Options, variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let absolute = |name: &str| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let mut found: Vec<PathBuf> = absolute("XDG_RUNTIME_DIR").map(|runtime| runtime.join("emberd")).into_iter().collect();
    // Whoever has no XDG_RUNTIME_DIR (a job of cron's, a macOS) starts workers here.
    found.extend(config::cache(&variable).map(|cache| cache.join("run")));
    let mut roots = Vec::new();
    if let Some(home) = absolute("HOME") {
        roots.push(home.join(".omp"));
        let named = variable("PI_CONFIG_DIR").filter(|name| !name.is_empty());
        roots.extend(named.map(|name| crate::folders::joined(&home, Path::new(&name))));
    }
    roots.extend(absolute("XDG_STATE_HOME").map(|state| state.join("omp")));
    for root in roots {
        let mut profiles: Vec<PathBuf> =
            std::fs::read_dir(root.join("profiles")).into_iter().flatten().flatten().map(|profile| profile.path()).collect();
        profiles.sort();
        found.extend(std::iter::once(root).chain(profiles).map(|root| root.join("run/tiny")));
    }
    // Two names of one folder would show its workers twice.
    let real = |path: &PathBuf| path.canonicalize().unwrap_or_else(|_| path.clone());
    let mut seen: Vec<PathBuf> = options.folders.iter().map(real).collect();
    found.retain(|folder| {
        let folder = real(folder);
        let fresh = !seen.contains(&folder);
        seen.push(folder);
        fresh
    });
    found
}

/// The sockets in these folders by name, folder after folder; those that were asked for must be there.
fn sockets(usual: &[PathBuf], asked: &[PathBuf]) -> Result<Vec<PathBuf>> {
    use std::os::unix::fs::FileTypeExt;
    let mut sockets = Vec::new();
    for (folder, must) in usual.iter().map(|folder| (folder, false)).chain(asked.iter().map(|folder| (folder, true))) {
        let entries = match std::fs::read_dir(folder) {
            Ok(entries) => entries,
            Err(error) if must => {
                return Err(Error::io(Code::InvalidValue, "look into", folder, &error).hint("give --dir a folder of sockets"));
            }
            Err(_) => continue,
        };
        let paths = entries.flatten().map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|end| end == "sock"));
        let mut here: Vec<PathBuf> = paths.filter(|path| path.metadata().is_ok_and(|found| found.file_type().is_socket())).collect();
        here.sort();
        sockets.append(&mut here);
    }
    Ok(sockets)
}

/// What there is to say of one socket. What is not known is left out.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
struct Row {
    #[serde(flatten)]
    status: Option<Status<'static>>,
    /// Of a worker that tells no more than this.
    #[serde(skip_serializing_if = "Option::is_none")]
    tag: Option<String>,
    /// In place of the model's state: `unknown` of a worker that does not tell, `dead` where nobody listens, `silent` where nobody answers,
    /// `unreachable`.
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    socket: String,
}

#[derive(Serialize)]
struct List<'a> {
    workers: &'a [Row],
}

/// Asks all at once, so that a silent one holds up the others no longer than itself; in their order.
async fn look(sockets: Vec<PathBuf>) -> Vec<Row> {
    let mut asking = JoinSet::new();
    for (at, socket) in sockets.into_iter().enumerate() {
        asking.spawn(async move { (at, ask(&socket).await) });
    }
    let mut rows: Vec<(usize, Row)> = Vec::new();
    while let Some(asked) = asking.join_next().await {
        rows.extend(asked.ok().and_then(|(at, row)| row.map(|row| (at, row))));
    }
    rows.sort_by_key(|(at, _)| *at);
    rows.into_iter().map(|(_, row)| row).collect()
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Heard {
    Status(Status<'static>),
    Pong { tag: String },
}

/// What one socket's worker says; `None` when the socket has gone meanwhile.
async fn ask(path: &Path) -> Option<Row> {
    use std::io::ErrorKind;
    let row = Row { socket: path.display().to_string(), ..Row::default() };
    let unreachable =
        |error: String| Row { state: Some("unreachable"), error: Some(error), ..Row { socket: row.socket.clone(), ..Row::default() } };
    Some(match tokio::time::timeout(PATIENCE, talk(path)).await {
        Ok(Ok(line)) => match serde_json::from_slice(&line) {
            Ok(Heard::Status(status)) => Row { status: Some(status), ..row },
            Ok(Heard::Pong { tag }) => Row { tag: Some(tag), state: Some("unknown"), ..row },
            Err(_) if line.is_empty() => unreachable("it hung up without an answer".to_owned()),
            Err(_) => unreachable("what listens there is no worker".to_owned()),
        },
        Ok(Err(error)) if error.kind() == ErrorKind::NotFound => return None,
        Ok(Err(error)) if error.kind() == ErrorKind::ConnectionRefused => Row { state: Some("dead"), ..row },
        // A queue of connections that is full, or nothing said in time.
        Ok(Err(error)) if error.kind() != ErrorKind::WouldBlock => unreachable(error.to_string()),
        Ok(Err(_)) | Err(_) => Row { state: Some("silent"), ..row },
    })
}

/// The first line that is said there.
async fn talk(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut stream = UnixStream::connect(path).await?;
    stream.write_all(QUESTION).await?;
    let mut line = Vec::new();
    BufReader::new(stream).take(LONGEST).read_until(b'\n', &mut line).await?;
    Ok(line)
}

/// The list for people to read, with a heading.
fn table(rows: &[Row]) -> String {
    let heading = ["KEY", "TAG", "PID", "UPTIME", "LOADED", "IN FLIGHT", "MEMORY", "SOCKET"].map(str::to_owned);
    let lines: Vec<[String; 8]> = std::iter::once(heading).chain(rows.iter().map(cells)).collect();
    let mut widths = [0; 8];
    for line in &lines {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = cell.chars().count().max(*width);
        }
    }
    let lines: Vec<String> = lines
        .iter()
        .map(|line| {
            let cells: Vec<String> = line.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
            cells.join("  ").trim_end().to_owned()
        })
        .collect();
    lines.join("\n")
}

fn cells(row: &Row) -> [String; 8] {
    let socket = plain(&row.socket);
    let none = || NONE.to_owned();
    let Some(status) = &row.status else {
        let tag = row.tag.as_deref().map_or_else(none, plain);
        let state = row.state.unwrap_or(NONE).to_owned();
        return [none(), tag, none(), none(), state, none(), none(), socket];
    };
    let loaded = match &*status.state {
        "ready" => "yes".to_owned(),
        "absent" => "no".to_owned(),
        state => plain(state),
    };
    [
        plain(&status.key),
        plain(&status.tag),
        status.pid.to_string(),
        duration(status.uptime_ms),
        loaded,
        status.in_flight.to_string(),
        status.memory_bytes.map_or_else(none, size),
        socket,
    ]
}

/// A text of somebody else's, fit for a terminal: nothing in it moves the cursor or turns the text around, and it is no longer than a cell may be.
fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len().min(CELL));
    for (at, letter) in text.chars().enumerate() {
        if at == CELL {
            plain.push('…');
            break;
        }
        let turns = matches!(letter, '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}');
        if turns {
            plain.extend(letter.escape_unicode());
        } else if letter.is_control() {
            plain.extend(letter.escape_default());
        } else {
            plain.push(letter);
        }
    }
    plain
}

/// Milliseconds as people say them: the two largest units.
fn duration(milliseconds: u64) -> String {
    let seconds = milliseconds / 1000;
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m {}s", seconds % 60),
        (0, _, _) => format!("{hours}h {}m", minutes % 60),
        _ => format!("{days}d {}h", hours % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_say_neither_turns_the_line_around_nor_fills_the_screen() {
        assert_eq!(plain("a\u{202e}b\u{200b}"), r"a\u{202e}b\u{200b}");
        assert_eq!(plain(&"x".repeat(3000)), format!("{}…", "x".repeat(CELL)));
        assert_eq!(plain("größer 🙂"), "größer 🙂");
    }

    use crate::worker::message::Counts;
    use std::collections::HashMap;
    use std::os::unix::net::UnixListener as StdListener;

    fn status() -> Status<'static> {
        Status {
            key: "tiny".into(),
            tag: "1|onnx||".into(),
            pid: 77,
            uptime_ms: 65_000,
            model: "m".into(),
            state: "ready".into(),
            in_flight: 3,
            connections: 2,
            memory_bytes: Some(150_000_000),
            counts: Some(Counts { completed: 5, ..Counts::default() }),
        }
    }

    #[test]
    fn folders_are_those_of_emberd_and_of_omp_with_all_its_profiles_each_once() {
        let place = tempfile::tempdir().unwrap();
        let home = place.path().join("home");
        for profile in ["wren", "play"] {
            std::fs::create_dir_all(home.join(".omp/profiles").join(profile)).unwrap();
        }
        let given = |pairs: &[(&str, &str)], folders: &[&Path]| {
            let variables: HashMap<String, OsString> = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).into())).collect();
            let options = Options { json: false, folders: folders.iter().map(|folder| folder.to_path_buf()).collect() };
            super::folders(&options, |name| variables.get(name).cloned())
        };
        let home_text = home.to_str().unwrap();
        let usual = ["run/tiny", "profiles/play/run/tiny", "profiles/wren/run/tiny"].map(|end| home.join(".omp").join(end));
        let all = [("HOME", home_text), ("XDG_RUNTIME_DIR", "/run/user/7"), ("XDG_CACHE_HOME", "/c"), ("PI_CONFIG_DIR", "mine")];
        let expected = [&[PathBuf::from("/run/user/7/emberd"), "/c/emberd/run".into()], &usual[..], &[home.join("mine/run/tiny")]].concat();
        assert_eq!(given(&all, &[]), expected);
        assert_eq!(given(&[("XDG_STATE_HOME", "/s")], &[]), [Path::new("/s/omp/run/tiny")]);
        assert_eq!(given(&[("HOME", "nowhere"), ("XDG_RUNTIME_DIR", "relative")], &[]), [] as [&Path; 0]);
        // What is asked for by name is not looked at twice.
        std::fs::create_dir_all(&usual[0]).unwrap();
        std::os::unix::fs::symlink(&usual[0], place.path().join("link")).unwrap();
        assert!(!given(&all, &[&place.path().join("link")]).contains(&usual[0]));
    }

    #[tokio::test]
    async fn sockets_are_asked_and_the_dead_the_silent_and_the_strange_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let answers = |name: &str, line: &'static [u8]| {
            let listener = tokio::net::UnixListener::bind(path(name)).unwrap();
            tokio::spawn(async move {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut asked = vec![0; QUESTION.len()];
                stream.read_exact(&mut asked).await.unwrap();
                assert_eq!(asked, QUESTION);
                stream.write_all(line).await.unwrap();
            });
        };
        answers("a.sock", b"{\"type\":\"pong\",\"id\":\"status\",\"tag\":\"18.3.4|onnx||\"}\n");
        answers("b.sock", b"HTTP/1.1 400 Bad Request\r\n\r\n");
        answers("c.sock", b"");
        drop(StdListener::bind(path("d.sock")).unwrap());
        let _silent = StdListener::bind(path("e.sock")).unwrap();
        std::fs::write(path("f.sock"), "no socket").unwrap();
        let _elsewhere = StdListener::bind(path("g.other")).unwrap();
        let mut told = serde_json::to_string(&status()).unwrap();
        told.insert_str(1, "\"type\":\"status\",\"id\":\"status\",\"later\":1,");
        answers("h.sock", format!("{told}\n").leak().as_bytes());

        let found = sockets(&[path("absent")], &[folder.path().to_path_buf()]).unwrap();
        let rows = look(found).await;
        let states: Vec<(&str, Option<&str>)> = rows.iter().map(|row| (row.socket.rsplit('/').next().unwrap(), row.state)).collect();
        let expected = [("a", "unknown"), ("b", "unreachable"), ("c", "unreachable"), ("d", "dead"), ("e", "silent")];
        let expected: Vec<(String, Option<&str>)> = expected.iter().map(|(name, state)| (format!("{name}.sock"), Some(*state))).collect();
        assert_eq!(states[..5], expected.iter().map(|(name, state)| (name.as_str(), *state)).collect::<Vec<_>>());
        assert_eq!(rows[0].tag.as_deref(), Some("18.3.4|onnx||"));
        assert_eq!((states.len(), rows[5].status.clone()), (6, Some(status())));
        assert!(ask(&path("gone.sock")).await.is_none());
        assert!(sockets(&[], &[path("absent")]).unwrap_err().message.contains("could not look into"));
    }

    #[test]
    fn a_table_has_a_line_for_each_and_shows_no_control_characters() {
        let known = Row { status: Some(status()), socket: "/r/tiny.sock".into(), ..Row::default() };
        let other = Row { tag: Some("a\u{1b}[2J\nb".into()), state: Some("unknown"), socket: "/r/b.sock".into(), ..Row::default() };
        let dead = Row { state: Some("dead"), socket: "/r/c.sock".into(), ..Row::default() };
        let expected = "\
KEY   TAG            PID  UPTIME  LOADED   IN FLIGHT  MEMORY    SOCKET
tiny  1|onnx||       77   1m 5s   yes      3          150.0 MB  /r/tiny.sock
-     a\\u{1b}[2J\\nb  -    -       unknown  -          -         /r/b.sock
-     -              -    -       dead     -          -         /r/c.sock";
        assert_eq!(table(&[known, other, dead]), expected);
    }

    #[test]
    fn times_have_their_two_largest_units() {
        let said = [999, 59_999, 60_000, 3_599_000, 3_600_000, 90_000_000, u64::MAX].map(duration);
        assert_eq!(said[..6], ["0s", "59s", "1m 0s", "59m 59s", "1h 0m", "1d 1h"]);
    }
}
