//! Keeps the doors' thread awake for a moment after work, because the next request often comes right behind the last.
//!
//! A thread that sleeps has to be woken, on a core that may sleep as well: on small virtual machines that takes longer than a request. For the
//! length of the window the runtime looks for news without sleeping; then it sleeps as ever.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// How long the thread stays awake after work. Some wake-ups take 25 to 50 µs; a program that answers an event needs as long.
pub(crate) const WINDOW: Duration = Duration::from_micros(100);

thread_local! {
    static UNTIL: Cell<Option<Instant>> = const { Cell::new(None) };
    static NEWS: Arc<Notify> = Arc::new(Notify::new());
}

/// There was work on this thread: it stays awake from now.
pub(crate) fn touch() {
    let slept = UNTIL.replace(Some(Instant::now() + WINDOW)).is_none();
    if slept {
        NEWS.with(|news| news.notify_one());
    }
}

/// Runs beside the doors on their thread, and is what stays awake. With one core it would only take time from the program that is to ask.
pub(crate) async fn run() {
    if std::thread::available_parallelism().is_ok_and(|cores| cores.get() == 1) {
        return;
    }
    let news = NEWS.with(Arc::clone);
    loop {
        news.notified().await;
        while UNTIL.get().is_some_and(|until| Instant::now() < until) {
            tokio::task::yield_now().await;
        }
        UNTIL.set(None);
    }
}
