//! Where grammars are compiled: on threads of their own, one at a time, and so that one that does not come to an end holds nobody else up for long.
//!
//! A compile cannot be ended from outside. One that lasts gives its place to the next and goes on beside it, as often as there is room for that; when there is none left
//! those who come are told to come later. What is compiled is the caller's business.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit, oneshot};
use tokio::time::timeout;

use super::refused;
use crate::error::{Code, Error, Result};

/// Room for rules that lead from one to the next as often as the longest text allows; what is not used of it costs nothing.
const STACK: usize = 512 * 1024 * 1024;
/// How many may go on beside the one that has the place.
const OVERDUE: usize = 3;

/// The place of a process, and the room beside it.
pub(super) struct Places {
    place: Semaphore,
    beside: Semaphore,
}

/// The right to compile.
pub(super) struct Place {
    places: &'static Places,
    permit: SemaphorePermit<'static>,
}

impl Places {
    pub(super) const fn new() -> Self {
        Self { place: Semaphore::const_new(1), beside: Semaphore::const_new(OVERDUE) }
    }

    /// Waits for the place.
    ///
    /// # Errors
    /// `queue_full` when it is not free after `most`: the grammars of others are in the way.
    pub(super) async fn take(&'static self, most: Duration) -> Result<Place> {
        match timeout(most, self.place.acquire()).await {
            Ok(permit) => Ok(Place { places: self, permit: permit.map_err(|_| fault())? }),
            Err(_) => {
                let what = format!("other grammars are being compiled, for more than {} s", most.as_secs());
                Err(Error::new(Code::QueueFull, what).hint("try again later"))
            }
        }
    }
}

impl Place {
    /// Does the work on a thread and waits for it for `most`. After `alone` the next may begin beside it. The work ends when it ends, whether anybody waits or not.
    ///
    /// # Errors
    /// `server_error` where there is no thread, and when the work panics; `invalid_value` when it is not done after `most`.
    pub(super) async fn work<T: Send + 'static>(
        self,
        alone: Duration,
        most: Duration,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (done, outcome) = oneshot::channel();
        // The thread gives back what it holds when it is done; until then a longer wait for it may exchange what that is.
        let held = Arc::new(Mutex::new(Some(self.permit)));
        let holds = Holds(Arc::clone(&held));
        let thread = move || {
            let result = work();
            drop(holds);
            _ = done.send(result);
        };
        worker().spawn(thread).map_err(|error| no_thread(&error))?;
        let places = self.places;
        let gives_way = tokio::spawn(async move {
            tokio::time::sleep(alone).await;
            let Ok(beside) = places.beside.acquire().await else { return };
            let mut held = held.lock().unwrap_or_else(PoisonError::into_inner);
            if held.is_some() {
                *held = Some(beside);
            }
        });
        let late = |_| {
            let what = format!("the grammar is not compiled after {} s", most.as_secs());
            refused(what).hint("simplify it")
        };
        let result = timeout(most, outcome).await;
        if result.is_ok() {
            gives_way.abort();
        }
        result.map_err(late)?.map_err(|_| fault())?
    }
}

/// What a thread gives back at its end, however it ends.
struct Holds(Arc<Mutex<Option<SemaphorePermit<'static>>>>);

impl Drop for Holds {
    fn drop(&mut self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// A thread to compile on.
pub(super) fn worker() -> thread::Builder {
    thread::Builder::new().name("grammar".into()).stack_size(STACK)
}

pub(super) fn no_thread(error: &std::io::Error) -> Error {
    Error::new(Code::ServerError, "no thread to compile a grammar on").detail(error.to_string())
}

pub(super) fn fault() -> Error {
    Error::new(Code::ServerError, "a fault while a grammar was compiled")
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Longer than a test lasts.
    const LONG: Duration = Duration::from_secs(600);

    #[tokio::test]
    async fn what_does_not_end_makes_way_until_there_is_no_more_room() {
        static PLACES: Places = Places::new();
        let mut stuck = Vec::new();
        for _ in 0..=OVERDUE {
            let (end, ended) = mpsc::channel::<()>();
            let work = move || {
                _ = ended.recv();
                Ok(())
            };
            // It is charged itself, and the next one has a place.
            let error = PLACES.take(LONG).await.unwrap().work(Duration::ZERO, Duration::from_millis(1), work).await.unwrap_err();
            assert_eq!(error.code, Code::InvalidValue);
            stuck.push(end);
        }
        let error = PLACES.take(Duration::from_millis(1)).await.err().unwrap();
        assert!(error.code == Code::QueueFull && error.hint.is_some(), "{error}");
        drop(stuck);
        for number in 0..8 {
            let place = PLACES.take(LONG).await.unwrap();
            assert_eq!(place.work(LONG, LONG, move || Ok(number)).await, Ok(number));
        }
        let fails = || -> Result<()> { panic!("a fault of the library's") };
        let error = PLACES.take(LONG).await.unwrap().work(LONG, LONG, fails).await.unwrap_err();
        assert_eq!(error.code, Code::ServerError);
        assert!(PLACES.take(LONG).await.is_ok(), "its place is free again");
    }
}
