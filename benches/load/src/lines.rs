//! Lines over a Unix socket: the bare echo peer, and the client that times round trips and pipelined lines against it or against a
//! worker. The client is blocking and has no runtime, so that what it measures is the server.

use crate::stats::{self, Durations};
use crate::{Failure, print_json};
use clap::Args;
use serde_json::json;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt};
use tokio::net::UnixListener;

/// What `echo-line` takes.
#[derive(Args, Debug)]
pub(crate) struct EchoOptions {
    /// Where to listen
    #[arg(long)]
    socket: PathBuf,
    /// Write once for all lines that one read brought, not once for each line
    #[arg(long)]
    coalesce: bool,
}

/// What `ping` takes.
#[derive(Args, Debug)]
pub(crate) struct PingOptions {
    /// Where the server listens
    #[arg(long)]
    socket: PathBuf,
    /// Round trips, or pipelined lines
    #[arg(long, default_value_t = 20_000)]
    n: usize,
    /// Lines that are under way at once; 1 times single round trips
    #[arg(long, default_value_t = 1)]
    pipeline: usize,
    /// The line to send
    #[arg(long, default_value = r#"{"type":"ping","id":"1"}"#)]
    line: String,
    /// What every reply must contain
    #[arg(long, default_value = "")]
    expect: String,
    /// Lines before the clock starts
    #[arg(long, default_value_t = 1000)]
    warmup: usize,
    /// Give up on a reply after this many seconds
    #[arg(long, default_value_t = 30)]
    timeout: u64,
}

/// Runs `echo-line`: prints `{"socket"}` when it listens, and serves until it is ended.
///
/// # Errors
/// When the socket cannot be bound.
pub(crate) fn run_echo(options: &EchoOptions) -> Result<(), Failure> {
    let coalesce = options.coalesce;
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(async {
        let listener = UnixListener::bind(&options.socket)?;
        print_json(&json!({"socket": options.socket}))?;
        loop {
            let (stream, _) = listener.accept().await?;
            // A client that leaves ends its connection, not the server.
            tokio::spawn(async move { echo(stream, coalesce).await });
        }
    })
}

async fn echo(mut stream: tokio::net::UnixStream, coalesce: bool) -> io::Result<()> {
    let (read, mut write) = stream.split();
    let mut read = tokio::io::BufReader::new(read);
    let mut out = Vec::new();
    while read.read_until(b'\n', &mut out).await? > 0 {
        if coalesce && memchr::memchr(b'\n', read.buffer()).is_some() {
            continue;
        }
        write.write_all(&out).await?;
        out.clear();
    }
    Ok(())
}

/// Runs `ping` and prints its figures.
///
/// # Errors
/// When a reply is missing or not what it should be.
pub(crate) fn run_ping(options: &PingOptions) -> Result<(), Failure> {
    let mut client = Client::connect(options)?;
    let window = options.pipeline.max(1);
    if window == 1 {
        client.round_trips(options.warmup)?;
        let mut durations = client.round_trips(options.n)?;
        return print_json(&json!({"round_trip_us": durations.summary()}));
    }
    client.pipelined(options.warmup, window)?;
    let start = Instant::now();
    client.pipelined(options.n, window)?;
    let seconds = start.elapsed().as_secs_f64();
    print_json(&json!({
        "lines": options.n,
        "pipeline": window,
        "seconds": seconds,
        "lines_per_s": stats::rounded(options.n as f64 / seconds),
    }))
}

/// A connection, with the one line that is sent on it and the one reply to it.
struct Client {
    write: UnixStream,
    read: BufReader<UnixStream>,
    line: Vec<u8>,
    reply: Vec<u8>,
}

impl Client {
    /// Connects and makes the first round trip: all replies to the same line must be the same.
    fn connect(options: &PingOptions) -> Result<Self, Failure> {
        let write =
            UnixStream::connect(&options.socket).map_err(|error| format!("cannot connect to '{}': {error}", options.socket.display()))?;
        write.set_read_timeout(Some(Duration::from_secs(options.timeout)))?;
        write.set_write_timeout(Some(Duration::from_secs(options.timeout)))?;
        let read = BufReader::with_capacity(64 * 1024, write.try_clone()?);
        let mut client = Self { write, read, line: format!("{}\n", options.line).into_bytes(), reply: Vec::new() };
        client.write.write_all(&client.line)?;
        client.read.read_until(b'\n', &mut client.reply)?;
        if client.reply.last() != Some(&b'\n') {
            return Err("the server closed the connection".into());
        }
        if memchr::memmem::find(&client.reply, options.expect.as_bytes()).is_none() {
            let reply = String::from_utf8_lossy(&client.reply);
            return Err(format!("the reply {reply:?} does not contain {:?}", options.expect).into());
        }
        Ok(client)
    }

    fn round_trips(&mut self, count: usize) -> Result<Durations, Failure> {
        let mut durations = Durations::default();
        let mut got = vec![0; self.reply.len()];
        for _ in 0..count {
            let start = Instant::now();
            self.write.write_all(&self.line)?;
            self.read.read_exact(&mut got)?;
            durations.push(start.elapsed());
            self.check(&got)?;
        }
        Ok(durations)
    }

    /// Sends `count` lines with up to `window` under way: a second thread reads while this one writes, and lets it go on.
    fn pipelined(&mut self, count: usize, window: usize) -> Result<(), Failure> {
        let batch = (window / 2).max(1);
        let (grant, granted) = std::sync::mpsc::channel::<usize>();
        // Two batches of half the window may be under way from the start; each that has been answered grants another.
        grant.send(batch)?;
        grant.send(batch)?;
        let lines = self.line.repeat(batch);
        let length = self.line.len();
        let mut write = self.write.try_clone()?;
        std::thread::scope(|scope| {
            let writer = scope.spawn(move || {
                let mut left = count;
                while left > 0 {
                    // The reader is gone only when it failed: it tells why.
                    let Ok(allowed) = granted.recv() else {
                        return Ok(());
                    };
                    let now = allowed.min(left);
                    write.write_all(&lines[..now * length])?;
                    left -= now;
                }
                Ok::<_, io::Error>(())
            });
            let read = self.read_replies(count, batch, &grant);
            drop(grant);
            if read.is_err() {
                // Frees a writer that waits for a server which no longer reads.
                self.write.shutdown(std::net::Shutdown::Both)?;
            }
            let wrote = writer.join().map_err(|_| "the writing thread panicked")?;
            read?;
            Ok(wrote?)
        })
    }

    fn read_replies(&mut self, count: usize, batch: usize, grant: &std::sync::mpsc::Sender<usize>) -> Result<(), Failure> {
        let expected = self.reply.repeat(batch);
        let mut got = vec![0; expected.len()];
        let mut left = count;
        while left > 0 {
            let now = batch.min(left);
            let part = &mut got[..now * self.reply.len()];
            self.read.read_exact(part)?;
            if part != &expected[..part.len()] {
                return Err("a pipelined reply differs from the first one".into());
            }
            left -= now;
            // The writer has gone when all lines are written.
            let _ = grant.send(batch);
        }
        Ok(())
    }

    fn check(&self, got: &[u8]) -> Result<(), Failure> {
        if got == self.reply {
            return Ok(());
        }
        Err(format!("the reply {:?} differs from the first one", String::from_utf8_lossy(got)).into())
    }
}
