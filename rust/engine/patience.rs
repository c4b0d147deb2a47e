//! Ends work on grammars that takes too long.
//!
//! The library bounds its work by counting, but not all of it: a text that is certain for millions of bytes is followed to its end. It looks at a flag as it goes,
//! so one thread of this process sets that flag where work has lasted longer than it may. The thread sleeps while there is nothing to watch.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use llguidance::CancellationHandle;

/// How often running work is looked at.
const LOOK: Duration = Duration::from_millis(100);

struct Work {
    number: u64,
    end: Instant,
    handle: CancellationHandle,
}

struct Watched {
    work: Vec<Work>,
    started: u64,
    /// Whether the thread is there, and whether it sleeps until it is woken.
    running: bool,
    asleep: bool,
}

static WATCHED: Mutex<Watched> = Mutex::new(Watched { work: Vec::new(), started: 0, running: false, asleep: false });
static WAKE: Condvar = Condvar::new();

fn watched() -> MutexGuard<'static, Watched> {
    WATCHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does work that is cancelled through `handle` when it lasts longer than `most` (and up to a tenth of a second more).
pub(crate) fn within<T>(handle: &CancellationHandle, most: Duration, work: impl FnOnce() -> T) -> T {
    let number = begin(handle, most);
    let _end = End { number };
    work()
}

/// Forgets the work, however it ends.
struct End {
    number: u64,
}

impl Drop for End {
    fn drop(&mut self) {
        watched().work.retain(|work| work.number != self.number);
    }
}

fn begin(handle: &CancellationHandle, most: Duration) -> u64 {
    let mut watched = watched();
    watched.started += 1;
    let number = watched.started;
    watched.work.push(Work { number, end: Instant::now() + most, handle: handle.clone() });
    if !watched.running {
        // Without a thread the work is only as bounded as the library makes it.
        watched.running = thread::Builder::new().name("grammar watch".into()).spawn(watch).is_ok();
    } else if watched.asleep {
        WAKE.notify_one();
    }
    number
}

fn watch() {
    let mut watched = watched();
    let mut seen = 0;
    loop {
        let now = Instant::now();
        for work in watched.work.iter().filter(|work| work.end <= now) {
            work.handle.cancel();
        }
        // It goes on looking while there is work now and then: to be woken for each would cost more than the work.
        watched.asleep = watched.work.is_empty() && watched.started == seen;
        seen = watched.started;
        watched = if watched.asleep {
            WAKE.wait(watched).unwrap_or_else(PoisonError::into_inner)
        } else {
            WAKE.wait_timeout(watched, LOOK).unwrap_or_else(PoisonError::into_inner).0
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_lasts_is_cancelled_and_other_work_is_not() {
        let (long, short) = (CancellationHandle::default(), CancellationHandle::default());
        for _ in 0..2 {
            within(&short, Duration::from_secs(3600), || {
                // Ends by being cancelled, or not at all.
                within(&long, Duration::ZERO, || {
                    while !long.is_cancelled() {
                        thread::yield_now();
                    }
                });
            });
        }
        assert!(!short.is_cancelled());
        assert!(!watched().work.iter().any(|work| work.end < Instant::now()), "what is over is forgotten");
    }
}
