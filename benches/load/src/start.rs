//! How long a worker takes from being started to its first pong, and how much memory it holds then. A bare interpreter's start is
//! measured in turn with it, so that their difference holds on a noisy machine.

use crate::stats::{self, Durations};
use crate::{Failure, print_json};
use clap::Args;
use serde_json::json;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Time between two tries to connect. It bounds the error of the figure from above.
const RETRY: Duration = Duration::from_micros(200);

/// What `first-pong` takes.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Where the worker will listen
    #[arg(long)]
    socket: PathBuf,
    /// The interpreter whose bare start is the comparison
    #[arg(long)]
    python: Option<PathBuf>,
    /// Starts of each
    #[arg(long, default_value_t = 11)]
    rounds: usize,
    /// Give up on a start, or on an exit, after this many seconds
    #[arg(long, default_value_t = 30)]
    timeout: u64,
    /// The worker's command
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

/// Runs `first-pong` and prints its figures.
///
/// # Errors
/// When the worker does not start, does not answer with a pong, or does not leave when told to.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let limit = Duration::from_secs(options.timeout);
    let (mut pongs, mut bare, mut resident) = (Durations::default(), Durations::default(), Vec::new());
    // The first start of each fills the page cache and is not counted.
    for round in 0..=options.rounds {
        if let Some(python) = &options.python {
            let took = bare_start(python)?;
            if round > 0 {
                bare.push(took);
            }
        }
        let (took, memory) = worker_start(options, limit)?;
        if round > 0 {
            pongs.push(took);
            resident.extend(memory);
        }
    }
    resident.sort_unstable();
    let extra = pongs.percentile(50.0).zip(bare.percentile(50.0));
    print_json(&json!({
        "first_pong_us": pongs.summary(),
        "interpreter_us": bare.summary(),
        "over_interpreter_us": extra.map(|(pong, bare)| stats::rounded((pong.as_secs_f64() - bare.as_secs_f64()) * 1e6)),
        "resident_kib": resident.get(resident.len() / 2),
        "resident_kib_max": resident.last(),
    }))
}

fn bare_start(python: &Path) -> Result<Duration, Failure> {
    let start = Instant::now();
    let status = Command::new(python).args(["-c", "pass"]).status()?;
    let took = start.elapsed();
    if status.success() { Ok(took) } else { Err(format!("'{} -c pass' ended with {status}", python.display()).into()) }
}

/// One start: the time to the pong, and the resident memory at it in KiB where the system tells.
fn worker_start(options: &Options, limit: Duration) -> Result<(Duration, Option<u64>), Failure> {
    let (program, arguments) = options.command.split_first().ok_or("no command")?;
    let start = Instant::now();
    let child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .map_err(|error| format!("cannot start '{program}': {error}"))?;
    let mut worker = Worker(child);
    let mut stream = loop {
        match UnixStream::connect(&options.socket) {
            Ok(stream) => break stream,
            Err(error) if start.elapsed() > limit => {
                return Err(format!("no worker on '{}' after {limit:?}: {error}", options.socket.display()).into());
            }
            Err(_) => {}
        }
        if let Some(status) = worker.0.try_wait()? {
            return Err(format!("'{program}' ended with {status} before it listened").into());
        }
        std::thread::sleep(RETRY);
    };
    stream.set_read_timeout(Some(limit))?;
    stream.write_all(b"{\"type\":\"ping\",\"id\":\"1\"}\n")?;
    let mut reply = String::new();
    BufReader::new(&stream).read_line(&mut reply)?;
    let took = start.elapsed();
    let memory = resident_kib(worker.0.id());
    let kind = serde_json::from_str::<serde_json::Value>(&reply).ok().and_then(|reply| Some(reply.get("type")?.as_str()? == "pong"));
    if kind != Some(true) {
        return Err(format!("expected a pong, got {reply:?}").into());
    }
    stream.write_all(b"{\"type\":\"shutdown\",\"id\":\"2\"}\n")?;
    let told = Instant::now();
    while worker.0.try_wait()?.is_none() {
        if told.elapsed() > limit {
            return Err(format!("the worker was still there {limit:?} after its shutdown").into());
        }
        std::thread::sleep(RETRY);
    }
    Ok((took, memory))
}

/// A worker that does not outlive its measurement.
struct Worker(Child);

impl Drop for Worker {
    fn drop(&mut self) {
        // Both fail only when it has ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Resident memory of a process and its children, in KiB.
fn resident_kib(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let own: u64 = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?.trim().strip_suffix(" kB")?.parse().ok()?;
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    Some(own + children.split_ascii_whitespace().filter_map(|child| resident_kib(child.parse().ok()?)).sum::<u64>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn this_process_holds_memory() {
        assert!(resident_kib(std::process::id()).unwrap() > 100);
    }
}
