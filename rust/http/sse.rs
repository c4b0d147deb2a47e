//! Events as bytes. Everything that is ready goes out as one piece; an event is never split over two; silence is broken by comments.
//!
//! Which events there are is the response's business.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::time::{Instant, Sleep, sleep};

use crate::error::{Code, Error};
use crate::responses::{Event, Running, Sink};

/// A line that clients skip.
const COMMENT: &[u8] = b": keep-alive\n\n";
/// Room for the first two events with a short request; the buffer grows to what a reader's pace needs and stays there.
const ROOM: usize = 4096;

/// A response as a body of server-sent events. Dropping it cancels the answer.
pub(crate) struct Events {
    running: Running,
    buffer: BytesMut,
    over: bool,
    every: Duration,
    quiet_since: Instant,
    alarm: Pin<Box<Sleep>>,
    cut: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl Events {
    /// The events of an answer, a comment after each `every` of silence. When `cut` is ready the response fails: the server is going away.
    pub(crate) fn new(mut running: Running, every: Duration, cut: impl Future<Output = ()> + Send + 'static) -> Self {
        let mut buffer = BytesMut::with_capacity(ROOM);
        running.begin(&mut Writer(&mut buffer));
        Self { running, buffer, over: false, every, quiet_since: Instant::now(), alarm: Box::pin(sleep(every)), cut: Box::pin(cut) }
    }

    /// Whether the last bytes have been given.
    pub(crate) fn over(&self) -> bool {
        self.over
    }

    /// What there is to send; `None` after the end.
    pub(crate) fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        if self.over {
            return Poll::Ready(None);
        }
        match self.running.poll(cx, &mut Writer(&mut self.buffer)) {
            Poll::Ready(over) => self.over = over,
            // The first events wait for nothing, least of all for the prompt to be read.
            Poll::Pending if !self.buffer.is_empty() => {}
            Poll::Pending if self.cut.as_mut().poll(cx).is_ready() => {
                let error = Error::new(Code::ShuttingDown, "the server is going away").hint("try again");
                self.running.fail(&error, &mut Writer(&mut self.buffer));
                self.over = true;
            }
            Poll::Pending => {
                // Set once for many events: when it rings early it is put off, which costs less than to put it off at each event.
                ready!(self.alarm.as_mut().poll(cx));
                while self.quiet_since.elapsed() < self.every {
                    self.alarm.as_mut().reset(self.quiet_since + self.every);
                    ready!(self.alarm.as_mut().poll(cx));
                }
                self.alarm.as_mut().reset(Instant::now() + self.every);
                self.buffer.extend_from_slice(COMMENT);
            }
        }
        self.quiet_since = Instant::now();
        Poll::Ready(Some(self.buffer.split().freeze()))
    }
}

/// Writes events into a buffer.
struct Writer<'a>(&'a mut BytesMut);

impl Sink for Writer<'_> {
    fn event(&mut self, event: Event<'_>) {
        self.0.extend_from_slice(b"event: ");
        self.0.extend_from_slice(event.name().as_bytes());
        self.0.extend_from_slice(b"\ndata: ");
        if let Err(error) = serde_json::to_writer(&mut *self, &event) {
            tracing::error!(%error, event = event.name(), "an event could not be written"); // The buffer takes everything.
        }
        self.0.extend_from_slice(b"\n\n");
        if event.terminal() {
            self.0.extend_from_slice(b"data: [DONE]\n\n");
        }
    }
}

impl io::Write for Writer<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
