//! `emberd-load`: the compiled half of the benchmarks. Load generators (`sse`, `first-event`, `ping`, `first-pong`) and the bare
//! peers they are held against (`serve-bare`, `echo-line`). Every generator prints one JSON object on stdout and exits non-zero
//! when an answer was not what it should be. Which server runs when, the medians and the table are `benches/run.py`'s.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod bare;
mod chunked;
mod client;
mod events;
mod sse;
mod stats;

#[cfg(unix)]
mod lines;
#[cfg(unix)]
mod start;

use clap::{Parser, Subcommand};
use std::io::{self, Write};

/// Any failure of a run: its text is what the user reads.
pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

#[derive(Parser)]
#[command(name = "emberd-load", about = "Load generator and bare peers for emberd's benchmarks")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Stream answers over many connections at once and count their events
    Sse(sse::Options),
    /// Time from a request to its first event, one request after the other
    FirstEvent(sse::FirstEventOptions),
    /// Answer every POST with fixed bytes, by hyper alone
    ServeBare(bare::Options),
    /// Send every line back as it came, by tokio alone
    #[cfg(unix)]
    EchoLine(lines::EchoOptions),
    /// Round trips and pipelined lines over a Unix socket
    #[cfg(unix)]
    Ping(lines::PingOptions),
    /// Time from starting a worker to its first pong, and its memory then
    #[cfg(unix)]
    FirstPong(start::Options),
}

fn main() -> std::process::ExitCode {
    let outcome = match Args::parse().command {
        Command::Sse(options) => sse::run(&options),
        Command::FirstEvent(options) => sse::run_first_event(&options),
        Command::ServeBare(options) => bare::run(options),
        #[cfg(unix)]
        Command::EchoLine(options) => lines::run_echo(&options),
        #[cfg(unix)]
        Command::Ping(options) => lines::run_ping(&options),
        #[cfg(unix)]
        Command::FirstPong(options) => start::run(&options),
    };
    match outcome {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(failure) => {
            // With stderr gone there is nobody left to tell; the exit status still says it.
            let _ = writeln!(io::stderr(), "error: {failure}");
            std::process::ExitCode::FAILURE
        }
    }
}

/// Writes one JSON object as a line to stdout and flushes it, so that a reader at a pipe has it at once.
///
/// # Errors
/// When stdout is closed.
pub(crate) fn print_json(value: &serde_json::Value) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    writeln!(out, "{value}")?;
    out.flush()?;
    Ok(())
}
