//! Percentiles of durations, and the processor time of this process.

use serde_json::{Value, json};
use std::time::Duration;

/// Durations of one thing, measured many times.
#[derive(Debug, Default)]
pub(crate) struct Durations(Vec<Duration>);

impl Durations {
    /// Adds one.
    pub(crate) fn push(&mut self, duration: Duration) {
        self.0.push(duration);
    }

    /// Adds all of another.
    pub(crate) fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// The `percent`-th percentile by nearest rank; `None` of nothing.
    pub(crate) fn percentile(&mut self, percent: f64) -> Option<Duration> {
        self.0.sort_unstable();
        let rank = (percent / 100.0 * self.0.len() as f64).ceil() as usize;
        self.0.get(rank.saturating_sub(1)).copied()
    }

    /// `{"n", "min", "p50", "p99", "max"}`, in microseconds.
    pub(crate) fn summary(&mut self) -> Value {
        let mut at = |percent| self.percentile(percent).map(|duration| rounded(duration.as_secs_f64() * 1e6));
        json!({"min": at(0.0), "p50": at(50.0), "p99": at(99.0), "max": at(100.0), "n": self.0.len()})
    }
}

/// A figure with one digit behind the point: more would be noise.
pub(crate) fn rounded(figure: f64) -> f64 {
    (figure * 10.0).round() / 10.0
}

/// Processor time that the calling thread has used; `None` where the system does not tell.
pub(crate) fn thread_time() -> Option<Duration> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    text.split_ascii_whitespace().next()?.parse().ok().map(Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_the_nearest_rank() {
        let mut durations = Durations::default();
        assert_eq!(durations.percentile(50.0), None);
        for millis in (1..=200).rev() {
            durations.push(Duration::from_millis(millis));
        }
        assert_eq!(durations.percentile(0.0), Some(Duration::from_millis(1)));
        assert_eq!(durations.percentile(50.0), Some(Duration::from_millis(100)));
        assert_eq!(durations.percentile(99.0), Some(Duration::from_millis(198)));
        assert_eq!(durations.percentile(100.0), Some(Duration::from_millis(200)));
    }
}
