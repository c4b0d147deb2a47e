//! Stopping: one signal to everything that runs, and how it came about.
//!
//! Whoever is told decides how softly to end; the deadline is the caller's.

use tokio::sync::watch;

/// Why the process stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// A client asked for it.
    Asked,
    /// Nobody has used it for a while.
    Idle,
    /// A signal, by its number.
    Signal(i32),
}

impl Reason {
    /// The exit status that tells the parent why: 0, or 128 and the signal's number as shells have it.
    #[must_use]
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Asked | Self::Idle => 0,
            Self::Signal(number) => u8::try_from(128 + number).unwrap_or(1),
        }
    }
}

/// Tells everything to stop. Cloning gives another handle; the first reason stays.
#[derive(Debug, Clone)]
pub struct Stop {
    reason: watch::Sender<Option<Reason>>,
    hurry: watch::Sender<bool>,
}

impl Default for Stop {
    fn default() -> Self {
        Self { reason: watch::Sender::new(None), hurry: watch::Sender::new(false) }
    }
}

impl Stop {
    /// Stops, for this reason; later reasons are ignored.
    pub fn stop(&self, reason: Reason) {
        self.reason.send_if_modified(|held| {
            let first = held.is_none();
            if first {
                *held = Some(reason);
            }
            first
        });
    }

    /// Waits until it is time to stop.
    pub async fn stopped(&self) -> Reason {
        let mut reason = self.reason.subscribe();
        match reason.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(reason)) => *reason,
            // The sender lives as long as `self`, so this is never reached.
            _ => Reason::Asked,
        }
    }

    /// Waits until it has been told to stop a second time: whoever does that will not wait for what is in flight.
    pub async fn hurried(&self) {
        let _ = self.hurry.subscribe().wait_for(|hurry| *hurry).await;
    }

    /// Why it stops, if it does.
    #[must_use]
    pub fn reason(&self) -> Option<Reason> {
        *self.reason.borrow()
    }

    fn signal(&self, number: i32) {
        if self.reason().is_some() {
            self.hurry.send_replace(true);
        }
        self.stop(Reason::Signal(number));
    }

    /// Stops on SIGTERM, SIGINT and SIGHUP (Ctrl-C elsewhere); a second one hurries. A SIGHUP that was ignored from the start, as `nohup` has it, stays
    /// ignored. Must be called within a runtime.
    ///
    /// # Errors
    /// When the signals cannot be listened to.
    pub fn on_signals(&self) -> std::io::Result<()> {
        #[cfg(unix)]
        {
            use tokio::signal::unix::{SignalKind, signal};
            for kind in [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()] {
                if kind == SignalKind::hangup() && ignored(kind.as_raw_value()) {
                    continue;
                }
                let mut signals = signal(kind)?;
                let stop = self.clone();
                tokio::spawn(async move {
                    while signals.recv().await.is_some() {
                        stop.signal(kind.as_raw_value());
                    }
                });
            }
        }
        #[cfg(not(unix))]
        {
            let stop = self.clone();
            tokio::spawn(async move {
                while tokio::signal::ctrl_c().await.is_ok() {
                    stop.signal(2);
                }
            });
        }
        Ok(())
    }
}

/// Whether this process ignores a signal, where the system tells (Linux).
#[cfg(unix)]
fn ignored(number: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & (1 << (number - 1)) != 0)
}
