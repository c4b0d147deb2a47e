//! What is counted while requests are served: for each model, apart by the door that they came through.
//!
//! These are plain atomic numbers in the hands of whoever serves a request: nothing is looked up, locked or allocated to count, and a token costs three
//! additions. What can be asked for when somebody looks (how many wait, how many run) is not kept here. How the numbers are written is the HTTP
//! door's business, what they are called stands in `docs/metrics.md`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::error::{Code, Error};

/// Where a request came in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Door {
    /// Over HTTP, in whichever API.
    Http,
    /// Over the worker's socket.
    Worker,
}

impl Door {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Http, Self::Worker];

    /// Its name in labels.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Worker => "worker",
        }
    }
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The model said all it had to say.
    Completed,
    /// The answer was cut at its limit.
    Incomplete,
    /// The model, the engine or the server failed.
    Failed,
    /// The client left before the end.
    Cancelled,
    /// The request itself was at fault.
    Refused,
    /// As many requests were waiting as may.
    QueueFull,
}

impl Outcome {
    /// All of them.
    pub const ALL: [Self; 6] = [Self::Completed, Self::Incomplete, Self::Failed, Self::Cancelled, Self::Refused, Self::QueueFull];

    /// Its name in labels.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Incomplete => "incomplete",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
            Self::Refused => "refused",
            Self::QueueFull => "queue_full",
        }
    }

    /// What an error makes of the request that it ends.
    #[must_use]
    pub const fn of(error: &Error) -> Self {
        match error.code {
            Code::QueueFull => Self::QueueFull,
            code if code.row().status < 500 => Self::Refused,
            _ => Self::Failed,
        }
    }
}

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds to it.
    pub fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    /// What it has come to.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// How values are spread: how many lie at or below each of some bounds, and what they come to together.
#[derive(Debug)]
pub struct Histogram {
    bounds: &'static [u64],
    /// One for each bound, and one for what is above the last.
    counts: Box<[AtomicU64]>,
    sum: AtomicU64,
}

impl Histogram {
    /// An empty one. The bounds grow.
    #[must_use]
    pub fn new(bounds: &'static [u64]) -> Self {
        Self { bounds, counts: std::iter::repeat_with(AtomicU64::default).take(bounds.len() + 1).collect(), sum: AtomicU64::default() }
    }

    /// Adds a value.
    pub fn add(&self, value: u64) {
        let at = self.bounds.partition_point(|bound| *bound < value);
        if let Some(count) = self.counts.get(at) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        self.sum.fetch_add(value, Ordering::Relaxed);
    }

    /// Adds a time, in microseconds.
    pub fn add_time(&self, time: Duration) {
        self.add(u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
    }

    /// Each bound with how many values are at or below it, then `None` with how many there are.
    pub fn buckets(&self) -> impl Iterator<Item = (Option<u64>, u64)> {
        let bounds = self.bounds.iter().copied().map(Some).chain([None]);
        bounds.zip(&self.counts).scan(0, |total, (bound, count)| {
            *total += count.load(Ordering::Relaxed);
            Some((bound, *total))
        })
    }

    /// All values together.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.sum.load(Ordering::Relaxed)
    }
}

/// Bounds of the time to the first token, in microseconds: from a short prompt that is in the cache to a load and a long prefill.
const FIRST: &[u64] = &[
    1_000,
    2_500,
    5_000,
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    30_000_000,
    60_000_000,
    300_000_000,
];
/// Bounds of the time between two tokens, in microseconds.
const BETWEEN: &[u64] =
    &[100, 250, 500, 1_000, 2_500, 5_000, 7_500, 10_000, 15_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 5_000_000];
/// Bounds of how many sequences a step went on with.
const BATCH: &[u64] = &[1, 2, 4, 8, 16, 32, 64, 128, 256, 512];

/// What is counted of one model's requests through one door.
#[derive(Debug)]
pub struct Meter {
    outcomes: [Counter; Outcome::ALL.len()],
    in_flight: AtomicU64,
    /// Tokens of prompts that the engine has taken.
    pub prompt_tokens: Counter,
    /// Those of them that it did not have to read, because an earlier request had left what they come to.
    pub cached_tokens: Counter,
    /// Tokens of answers, as the engine made them.
    pub output_tokens: Counter,
    /// From when the request was there to its first token, in microseconds.
    pub first_token: Histogram,
    /// Between two steps that brought one request tokens, in microseconds.
    pub between_tokens: Histogram,
}

impl Default for Meter {
    fn default() -> Self {
        Self {
            outcomes: Default::default(),
            in_flight: AtomicU64::default(),
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            output_tokens: Counter::default(),
            first_token: Histogram::new(FIRST),
            between_tokens: Histogram::new(BETWEEN),
        }
    }
}

impl Meter {
    /// A request that ended so, without ever having been in flight.
    pub fn count(&self, outcome: Outcome) {
        self.outcome(outcome).add(1);
    }

    /// How many requests ended so.
    #[must_use]
    pub fn outcomes(&self, outcome: Outcome) -> u64 {
        self.outcome(outcome).get()
    }

    fn outcome(&self, outcome: Outcome) -> &Counter {
        &self.outcomes[outcome as usize]
    }

    /// How many requests have been taken and are not over.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Whether nothing has come through here yet.
    #[must_use]
    pub fn is_unused(&self) -> bool {
        self.in_flight() == 0 && Outcome::ALL.iter().all(|outcome| self.outcomes(*outcome) == 0)
    }
}

/// What is counted of one model. It outlives the model's engines.
#[derive(Debug)]
pub struct Meters {
    doors: [Meter; Door::ALL.len()],
    /// How many sequences got tokens in a step.
    pub batch: Histogram,
}

impl Default for Meters {
    fn default() -> Self {
        Self { doors: Default::default(), batch: Histogram::new(BATCH) }
    }
}

impl Meters {
    /// That of one door.
    #[must_use]
    pub fn door(&self, door: Door) -> &Meter {
        &self.doors[door as usize]
    }
}

/// A request in flight. Dropped without a word on how it ended, it counts as cancelled: that is what a client does that leaves.
#[derive(Debug)]
pub struct Flight {
    meters: Arc<Meters>,
    door: Door,
    outcome: Option<Outcome>,
}

impl Flight {
    /// Counts a request from now on.
    #[must_use]
    pub fn begin(meters: &Arc<Meters>, door: Door) -> Self {
        meters.door(door).in_flight.fetch_add(1, Ordering::Relaxed);
        Self { meters: Arc::clone(meters), door, outcome: Some(Outcome::Cancelled) }
    }

    /// How it will have ended, when it is dropped.
    pub fn settle(&mut self, outcome: Outcome) {
        self.outcome = Some(outcome);
    }

    /// It ends with this error.
    pub fn fail(&mut self, error: &Error) {
        self.settle(Outcome::of(error));
    }

    /// It goes on under another count.
    pub fn hand_over(mut self) {
        self.outcome = None;
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        let meter = self.meters.door(self.door);
        meter.in_flight.fetch_sub(1, Ordering::Relaxed);
        if let Some(outcome) = self.outcome {
            meter.count(outcome);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_places_of_doors_and_outcomes_agree() {
        for (at, door) in Door::ALL.into_iter().enumerate() {
            assert_eq!(door as usize, at);
        }
        for (at, outcome) in Outcome::ALL.into_iter().enumerate() {
            assert_eq!(outcome as usize, at);
        }
        for code in Code::ALL {
            let outcome = Outcome::of(&Error::new(code, "x"));
            let expected = match code {
                Code::QueueFull => Outcome::QueueFull,
                code if code.row().status >= 500 => Outcome::Failed,
                _ => Outcome::Refused,
            };
            assert_eq!(outcome, expected, "{code:?}");
        }
    }

    #[test]
    fn a_bound_belongs_to_the_bucket_below_it() {
        let histogram = Histogram::new(&[10, 20]);
        for value in [0, 10, 11, 20, 21, 1000] {
            histogram.add(value);
        }
        let buckets: Vec<_> = histogram.buckets().collect();
        assert_eq!(buckets, [(Some(10), 2), (Some(20), 4), (None, 6)]);
        assert_eq!(histogram.sum(), 1062);
    }

    #[test]
    fn a_flight_counts_once_however_it_ends() {
        let meters = Arc::new(Meters::default());
        let begin = || Flight::begin(&meters, Door::Worker);
        let (left, mut told, handed) = (begin(), begin(), begin());
        assert_eq!(meters.door(Door::Worker).in_flight(), 3);
        told.fail(&Error::new(Code::QueueFull, "x"));
        told.settle(Outcome::Completed);
        drop((left, told));
        handed.hand_over();
        let counts = Outcome::ALL.map(|outcome| meters.door(Door::Worker).outcomes(outcome));
        assert_eq!((counts, meters.door(Door::Worker).in_flight()), ([1, 0, 0, 1, 0, 0], 0));
        assert!(meters.door(Door::Http).is_unused() && !meters.door(Door::Worker).is_unused());
    }
}
