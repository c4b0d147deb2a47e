//! A stream whose writes fail when they make no progress for too long: a client that reads nothing would else keep its connection, and the
//! answer on it, for as long as it likes.
//!
//! Reads wait as long as they wait; their bounds are those of the head and the body of a request.

use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

/// The stream with its bound.
pub(super) struct Patient<S> {
    stream: S,
    patience: Duration,
    /// Made when a write first has to wait; most never have to.
    alarm: Option<Pin<Box<Sleep>>>,
    /// A write waits, and the alarm is set for it.
    waits: bool,
}

impl<S> Patient<S> {
    /// The stream, whose writes fail with [`io::ErrorKind::TimedOut`] once nothing of one has been taken for `patience`.
    pub(super) fn new(stream: S, patience: Duration) -> Self {
        Self { stream, patience, alarm: None, waits: false }
    }

    /// What came of a write: as it is when it is ready, a failure when it has waited for too long.
    fn bounded<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.waits = false;
            return written;
        }
        let patience = self.patience;
        let alarm = self.alarm.get_or_insert_with(|| Box::pin(sleep(patience)));
        if !self.waits {
            self.waits = true;
            alarm.as_mut().reset(Instant::now() + patience);
        }
        alarm.as_mut().poll(cx).map(|()| {
            let seconds = patience.as_secs_f64();
            Err(io::Error::new(io::ErrorKind::TimedOut, format!("the client took nothing of its answer for {seconds} s")))
        })
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.bounded(cx, written)
    }

    fn poll_write_vectored(mut self: Pin<&mut Self>, cx: &mut Context<'_>, pieces: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, pieces);
        self.bounded(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    // A socket has nothing to flush: what was taken is with the system, and goes out by itself.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    #[tokio::test(start_paused = true)]
    async fn a_write_that_nobody_takes_fails_after_its_time_and_not_before() {
        let (near, _far) = duplex(4);
        let mut near = Patient::new(near, PATIENCE);
        let start = Instant::now();
        let error = near.write_all(b"12345").await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!((PATIENCE..PATIENCE + Duration::from_secs(1)).contains(&start.elapsed()), "{:?}", start.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_is_slow_but_reads_is_waited_for() {
        let (near, mut far) = duplex(1);
        let mut near = Patient::new(near, PATIENCE);
        let writing = tokio::spawn(async move { near.write_all(b"12345").await });
        let start = Instant::now();
        for _ in 0..5 {
            tokio::time::sleep(PATIENCE - Duration::from_secs(1)).await;
            far.read_u8().await.unwrap();
        }
        writing.await.unwrap().unwrap();
        assert!(start.elapsed() > PATIENCE * 4);
    }

    #[tokio::test(start_paused = true)]
    async fn time_in_which_nothing_is_written_does_not_count() {
        let (near, mut far) = duplex(1);
        let mut near = Patient::new(near, PATIENCE);
        for _ in 0..2 {
            let (written, read) = tokio::join!(near.write_all(b"12"), async {
                tokio::time::sleep(PATIENCE / 2).await;
                (far.read_u8().await.unwrap(), far.read_u8().await.unwrap())
            });
            written.unwrap();
            assert_eq!(read, (b'1', b'2'));
            tokio::time::sleep(PATIENCE * 2).await;
        }
    }
}
