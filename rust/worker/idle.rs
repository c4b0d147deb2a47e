//! Decides when nobody needs the worker any more.
//!
//! The window starts anew when work arrives and when it ends; while any is in flight there is no end. Pings and connections are no work: a worker that
//! is only looked at goes as well.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

#[derive(Debug, Clone, Copy)]
struct State {
    in_flight: usize,
    /// What nobody waits for, and goes on.
    unasked: usize,
    since: Instant,
}

impl State {
    fn of(&mut self, asked: bool) -> &mut usize {
        if asked { &mut self.in_flight } else { &mut self.unasked }
    }
}

/// The idle timer. Cloning gives another handle on the same one.
#[derive(Debug, Clone)]
pub struct Idle {
    window: Duration,
    state: Arc<watch::Sender<State>>,
}

/// Something that may turn out to be work; the timer stands still until it is dropped, and goes on from where it was.
#[derive(Debug)]
pub struct Pause(Idle);

/// Work in flight; the timer stands still until it is dropped.
#[derive(Debug)]
pub struct Busy {
    idle: Idle,
    asked: bool,
}

impl Idle {
    /// A timer whose window starts now.
    #[must_use]
    pub fn new(window: Duration) -> Self {
        Self { window, state: Arc::new(watch::Sender::new(State { in_flight: 0, unasked: 0, since: Instant::now() })) }
    }

    /// Work has arrived.
    #[must_use]
    pub fn busy(&self) -> Busy {
        self.hold(true)
    }

    /// Something has arrived that may be work.
    #[must_use]
    pub fn pause(&self) -> Pause {
        self.state.send_modify(|state| state.unasked += 1);
        Pause(self.clone())
    }

    fn hold(&self, asked: bool) -> Busy {
        self.state.send_modify(|state| {
            *state.of(asked) += 1;
            state.since = Instant::now();
        });
        Busy { idle: self.clone(), asked }
    }

    /// How many pieces of work somebody waits for.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.state.borrow().in_flight
    }

    /// Waits until there was no work for a whole window.
    pub async fn over(&self) {
        let mut changes = self.state.subscribe();
        loop {
            let State { in_flight, unasked, since } = *changes.borrow_and_update();
            let changed = changes.changed();
            if in_flight + unasked > 0 {
                // The sender lives as long as `self`.
                let _ = changed.await;
                continue;
            }
            let over = async {
                match since.checked_add(self.window) {
                    Some(end) => sleep_until(end).await,
                    None => std::future::pending().await, // A window longer than clocks count has no end.
                }
            };
            tokio::select! {
                biased;
                _ = changed => {}
                () = over => return,
            }
        }
    }
}

impl Drop for Pause {
    fn drop(&mut self) {
        self.0.state.send_modify(|state| state.unasked -= 1);
    }
}

impl Busy {
    /// Work that this one has started, and that goes on when nobody waits for it any more.
    #[must_use]
    pub fn unasked(&self) -> Self {
        self.idle.hold(false)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.idle.state.send_modify(|state| {
            *state.of(self.asked) -= 1;
            state.since = Instant::now();
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Duration = Duration::from_secs(900);

    /// Fails unless it is over after this many seconds, to 50 ms.
    async fn over_after(idle: &Idle, start: Instant, seconds: u64) {
        idle.over().await;
        let late = start.elapsed().checked_sub(Duration::from_secs(seconds)).unwrap();
        assert!(late <= Duration::from_millis(50), "{late:?} late");
    }

    #[tokio::test(start_paused = true)]
    async fn a_worker_that_is_never_used_goes_after_one_window() {
        let start = Instant::now();
        over_after(&Idle::new(WINDOW), start, 900).await;
    }

    #[tokio::test(start_paused = true)]
    async fn the_window_starts_anew_when_work_arrives_and_when_it_ends() {
        let start = Instant::now();
        let idle = Idle::new(WINDOW);
        let work = idle.clone();
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_secs(600)).await;
            let busy = work.busy();
            tokio::time::sleep(Duration::from_secs(2000)).await; // Longer than the window: nothing ends under work.
            drop(busy);
        });
        over_after(&idle, start, 600 + 2000 + 900).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_window_longer_than_clocks_count_never_ends() {
        let idle = Idle::new(Duration::MAX);
        assert!(tokio::time::timeout(WINDOW, idle.over()).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_of_several_pieces_of_work_counts() {
        let start = Instant::now();
        let idle = Idle::new(WINDOW);
        let (first, second) = (idle.busy(), idle.busy());
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_secs(10)).await;
            drop(first);
            tokio::time::sleep(Duration::from_secs(5)).await;
            drop(second);
        });
        over_after(&idle, start, 15 + 900).await;
    }
}
