//! Load on a streaming door: many connections at once (`sse`), or one request after the other (`first-event`). Connections are
//! opened and warmed before the clock starts, and stay open. Figures are sums over whole answers that were checked to be whole.

use crate::client::{Answer, Connection, Target};
use crate::stats::{self, Durations};
use crate::{Failure, print_json};
use clap::Args;
use serde_json::{Value, json};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// What `sse` takes.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Where to POST, `http://host:port/path`
    #[arg(long)]
    url: String,
    /// The request: JSON, or @FILE
    #[arg(long)]
    body: String,
    /// Connections, each with one stream at a time
    #[arg(long, default_value_t = 1)]
    streams: usize,
    /// Requests on each connection, at least
    #[arg(long, default_value_t = 1)]
    rounds: usize,
    /// Go on with new requests for this long
    #[arg(long, default_value_t = 0.0)]
    seconds: f64,
    /// Requests on each connection before the clock starts
    #[arg(long, default_value_t = 1)]
    warmup: usize,
    /// Threads that drive the connections
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Give up after this many seconds
    #[arg(long, default_value_t = 300)]
    timeout: u64,
}

/// What `first-event` takes.
#[derive(Args, Debug)]
pub(crate) struct FirstEventOptions {
    /// Where to POST, `http://host:port/path`
    #[arg(long)]
    url: String,
    /// The request: JSON, or @FILE
    #[arg(long)]
    body: String,
    /// Requests that are measured
    #[arg(long, default_value_t = 1000)]
    n: usize,
    /// Requests before that
    #[arg(long, default_value_t = 200)]
    warmup: usize,
    /// Give up after this many seconds
    #[arg(long, default_value_t = 300)]
    timeout: u64,
}

/// The answers of some connections, summed.
#[derive(Debug, Default)]
struct Sum {
    requests: u64,
    events: u64,
    deltas: u64,
    tokens: u64,
    prompt_tokens: u64,
    bytes: u64,
    first_event: Durations,
    first_delta: Durations,
    total: Durations,
    /// Of each stream, how its deltas came: only kept when there is one round.
    progress: Vec<Vec<(Instant, u64)>>,
}

impl Sum {
    fn add(&mut self, answer: Answer) {
        self.requests += 1;
        self.events += answer.tally.events;
        self.deltas += answer.tally.deltas;
        self.tokens += answer.tally.output_tokens.unwrap_or(answer.tally.deltas);
        self.prompt_tokens += answer.tally.input_tokens.unwrap_or(0);
        self.bytes += answer.tally.bytes;
        self.first_event.push(answer.first_event);
        self.total.push(answer.total);
        if let Some(first) = answer.first_delta {
            self.first_delta.push(first);
        }
        if !answer.progress.is_empty() {
            self.progress.push(answer.progress);
        }
    }

    fn merge(&mut self, other: Self) {
        self.requests += other.requests;
        self.events += other.events;
        self.deltas += other.deltas;
        self.tokens += other.tokens;
        self.prompt_tokens += other.prompt_tokens;
        self.bytes += other.bytes;
        self.first_event.extend(other.first_event);
        self.first_delta.extend(other.first_delta);
        self.total.extend(other.total);
        self.progress.extend(other.progress);
    }
}

/// What one thread measured.
struct Share {
    sum: Sum,
    start: Instant,
    end: Instant,
    /// Processor time spent between the two.
    busy: Option<Duration>,
}

/// Runs `sse` and prints its figures.
///
/// # Errors
/// When any answer is not one whole response, or time runs out.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let target = Target::new(&options.url, &options.body)?;
    let threads = options.threads.clamp(1, options.streams.max(1));
    let barrier = Arc::new(Barrier::new(threads));
    let mut handles = Vec::new();
    for index in 0..threads {
        let streams = options.streams / threads + usize::from(index < options.streams % threads);
        let (options, target, barrier) = (options.clone(), target.clone(), Arc::clone(&barrier));
        handles.push(std::thread::spawn(move || drive(&options, &target, streams, &barrier)));
    }
    let mut shares = Vec::new();
    for handle in handles {
        shares.push(handle.join().map_err(|_| "a load thread panicked")??);
    }
    let start = shares.iter().map(|share| share.start).min().ok_or("no thread ran")?;
    let end = shares.iter().map(|share| share.end).max().ok_or("no thread ran")?;
    let busy: Option<Duration> = shares.iter().map(|share| share.busy).sum();
    let mut sum = Sum::default();
    for share in shares {
        sum.merge(share.sum);
    }
    let seconds = (end - start).as_secs_f64();
    let rate = |count: u64| stats::rounded(count as f64 / seconds);
    print_json(&json!({
        "streams": options.streams,
        "requests": sum.requests,
        "events": sum.events,
        "deltas": sum.deltas,
        "tokens": sum.tokens,
        "prompt_tokens": sum.prompt_tokens,
        "bytes": sum.bytes,
        "seconds": seconds,
        "events_per_s": rate(sum.events),
        "deltas_per_s": rate(sum.deltas),
        "tokens_per_s": rate(sum.tokens),
        "first_event_us": sum.first_event.summary(),
        "first_delta_us": sum.first_delta.summary(),
        "request_us": sum.total.summary(),
        "steady": steady(&sum),
        // Below one per thread: the generator waited for the server, not the server for it.
        "generator_load": busy.map(|busy| busy.as_secs_f64() / seconds / threads as f64),
    }))
}

/// One thread's part: opens `streams` connections, warms them, waits for the other threads, and streams.
fn drive(options: &Options, target: &Target, streams: usize, barrier: &Barrier) -> Result<Share, Failure> {
    let runtime = runtime()?;
    let limit = Duration::from_secs(options.timeout);
    let opened = runtime.block_on(async {
        tokio::time::timeout(limit, async {
            let mut connections = Vec::new();
            for _ in 0..streams {
                connections.push(Connection::open(target).await?);
            }
            together(connections, target, options.warmup, Duration::ZERO, false).await
        })
        .await
    });
    // A thread that failed must come here too, or the others would wait for it.
    barrier.wait();
    let (connections, _) = opened.map_err(|_| timed_out(options.timeout))??;
    let (start, used) = (Instant::now(), stats::thread_time());
    let keep_progress = options.rounds == 1 && options.seconds == 0.0;
    let span = Duration::try_from_secs_f64(options.seconds)?;
    let (_, sum) = runtime
        .block_on(async { tokio::time::timeout(limit, together(connections, target, options.rounds, span, keep_progress)).await })
        .map_err(|_| timed_out(options.timeout))??;
    let busy = used.zip(stats::thread_time()).map(|(before, after)| after.saturating_sub(before));
    Ok(Share { sum, start, end: Instant::now(), busy })
}

/// Streams on all connections at once, on each at least `rounds` answers and for at least `span`.
async fn together(
    connections: Vec<Connection>,
    target: &Target,
    rounds: usize,
    span: Duration,
    keep_progress: bool,
) -> Result<(Vec<Connection>, Sum), Failure> {
    let target = Arc::new(target.clone());
    let until = Instant::now() + span;
    let mut tasks = JoinSet::new();
    for mut connection in connections {
        let target = Arc::clone(&target);
        tasks.spawn(async move {
            let mut sum = Sum::default();
            let mut round = 0;
            while round < rounds || (span > Duration::ZERO && Instant::now() < until) {
                sum.add(connection.stream(&target, keep_progress).await?);
                round += 1;
            }
            Ok::<_, Failure>((connection, sum))
        });
    }
    let (mut connections, mut sum) = (Vec::new(), Sum::default());
    while let Some(joined) = tasks.join_next().await {
        let (connection, part) = joined??;
        connections.push(connection);
        sum.merge(part);
    }
    Ok((connections, sum))
}

/// The rate while all streams were decoding: from when the last had its first delta until the first had its last one. `null` when
/// there was no such time.
fn steady(sum: &Sum) -> Value {
    let begin = sum.progress.iter().filter_map(|stream| stream.first()).map(|&(at, _)| at).max();
    let end = sum.progress.iter().filter_map(|stream| stream.last()).map(|&(at, _)| at).min();
    let (Some(begin), Some(end)) = (begin, end) else {
        return Value::Null;
    };
    if end <= begin || sum.deltas == 0 {
        return Value::Null;
    }
    let count_at = |stream: &[(Instant, u64)], when| {
        let later = stream.partition_point(|&(at, _)| at <= when);
        later.checked_sub(1).map_or(0, |last| stream[last].1)
    };
    let deltas: u64 = sum.progress.iter().map(|stream| count_at(stream, end) - count_at(stream, begin)).sum();
    let seconds = (end - begin).as_secs_f64();
    // A delta may hold more than one token, or less: over whole answers the ratio is known.
    let tokens = deltas as f64 * sum.tokens as f64 / sum.deltas as f64;
    json!({"seconds": seconds, "deltas": deltas, "tokens_per_s": stats::rounded(tokens / seconds)})
}

/// Runs `first-event` and prints its figures.
///
/// # Errors
/// When any answer is not one whole response, or time runs out.
pub(crate) fn run_first_event(options: &FirstEventOptions) -> Result<(), Failure> {
    let target = Target::new(&options.url, &options.body)?;
    let limit = Duration::from_secs(options.timeout);
    let measured = async {
        let mut connection = Connection::open(&target).await?;
        for _ in 0..options.warmup {
            connection.stream(&target, false).await?;
        }
        let mut sum = Sum::default();
        for _ in 0..options.n {
            sum.add(connection.stream(&target, false).await?);
        }
        Ok::<_, Failure>(sum)
    };
    let mut sum = runtime()?.block_on(async { tokio::time::timeout(limit, measured).await }).map_err(|_| timed_out(options.timeout))??;
    print_json(&json!({
        "requests": sum.requests,
        "events": sum.events,
        "bytes": sum.bytes,
        "first_event_us": sum.first_event.summary(),
        "request_us": sum.total.summary(),
    }))
}

fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

fn timed_out(seconds: u64) -> Failure {
    format!("not done after {seconds} s\nhint: raise --timeout, or ask for less").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_steady_rate_counts_only_while_all_streams_decode() {
        let zero = Instant::now();
        let at = |millis| zero + Duration::from_millis(millis);
        let stream = |offset: u64| (0..10).map(|index| (at(offset + index * 100), index + 1)).collect::<Vec<_>>();
        // One decodes from 0 to 900 ms, the other from 500 to 1400: four steps of each lie between.
        let sum = Sum { deltas: 20, tokens: 40, progress: vec![stream(0), stream(500)], ..Sum::default() };
        let steady = steady(&sum);
        assert_eq!(steady["deltas"], 8);
        assert_eq!(steady["tokens_per_s"], 40.0);
    }

    #[test]
    fn there_is_no_steady_rate_without_an_overlap() {
        let zero = Instant::now();
        let later = zero + Duration::from_secs(1);
        let sum = Sum { deltas: 2, progress: vec![vec![(zero, 1)], vec![(later, 1)]], ..Sum::default() };
        assert_eq!(steady(&sum), Value::Null);
    }
}
