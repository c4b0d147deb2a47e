//! The smallest HTTP/1.1 client that can stream: one keep-alive TCP connection, requests made ready beforehand, answers read into a
//! buffer that all connections of a thread share and counted where they lie. No general client: it takes chunked answers with
//! status 200 and nothing else, because every other answer is a failed benchmark.

use crate::Failure;
use crate::chunked::Decoder;
use crate::events::{Scanner, Tally};
use std::cell::RefCell;
use std::io;
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

/// Bytes asked for by one read.
const READ: usize = 128 * 1024;
/// Longest head of an answer that is accepted, in bytes.
const MAX_HEAD: usize = 64 * 1024;

thread_local! {
    // One buffer a thread and not one a connection: 512 of them would not stay in the cache.
    static BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; READ]);
}

/// Where to send, and the request's bytes.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    authority: String,
    request: Vec<u8>,
}

impl Target {
    /// A streaming POST of `body` to `url` (`http://host:port/path`). `body` is JSON, or `@` and the path of a file that holds it.
    ///
    /// # Errors
    /// When the URL is not of that form or the file cannot be read.
    pub(crate) fn new(url: &str, body: &str) -> Result<Self, Failure> {
        let rest = url.strip_prefix("http://").ok_or_else(|| format!("'{url}' does not start with http://"))?;
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        if authority.rsplit_once(':').is_none_or(|(_, port)| port.parse::<u16>().is_err()) {
            return Err(format!("'{url}' names no port").into());
        }
        let path = if path.is_empty() { "/" } else { path };
        let body = match body.strip_prefix('@') {
            Some(file) => std::fs::read(file).map_err(|error| format!("cannot read the body from '{file}': {error}"))?,
            None => body.as_bytes().to_vec(),
        };
        let mut request = format!(
            "POST {path} HTTP/1.1\r\nHost: {authority}\r\nContent-Type: application/json\r\nAccept: text/event-stream\r\n\
             Content-Length: {}\r\n\r\n",
            body.len()
        )
        .into_bytes();
        request.extend_from_slice(&body);
        Ok(Self { authority: authority.to_owned(), request })
    }
}

/// What one streamed answer was, and when its parts came.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) tally: Tally,
    /// From the request's first byte to the end of the first event.
    pub(crate) first_event: Duration,
    /// From the request's first byte to the end of the first delta.
    pub(crate) first_delta: Option<Duration>,
    /// From the request's first byte to the answer's last.
    pub(crate) total: Duration,
    /// After each read that brought deltas: when, and how many had come in all.
    pub(crate) progress: Vec<(Instant, u64)>,
}

/// A connection that takes one request after the other.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: TcpStream,
}

impl Connection {
    /// Connects.
    ///
    /// # Errors
    /// When the server does not take the connection.
    pub(crate) async fn open(target: &Target) -> Result<Self, Failure> {
        let stream =
            TcpStream::connect(&target.authority).await.map_err(|error| format!("cannot connect to {}: {error}", target.authority))?;
        stream.set_nodelay(true)?;
        Ok(Self { stream })
    }

    /// Sends the request and reads its answer to the end. With `keep_progress` every read that brings deltas is noted.
    ///
    /// # Errors
    /// When the answer is not 200, not chunked, cut short, or its events are not one whole response.
    pub(crate) async fn stream(&mut self, target: &Target, keep_progress: bool) -> Result<Answer, Failure> {
        let start = Instant::now();
        self.stream.write_all(&target.request).await?;
        let mut exchange = Exchange::default();
        let (mut first_event, mut first_delta, mut progress) = (None, None, Vec::new());
        loop {
            self.stream.readable().await?;
            let before = exchange.scanner.tally().deltas;
            let read = BUFFER.with_borrow_mut(|buffer| match self.stream.try_read(buffer) {
                Ok(0) => Err("the server closed the connection within an answer".into()),
                Ok(length) => Ok(Some((Instant::now(), exchange.feed(&buffer[..length])?))),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
                Err(error) => Err(Failure::from(error)),
            })?;
            let Some((now, done)) = read else { continue };
            let tally = exchange.scanner.tally();
            if tally.events > 0 {
                first_event.get_or_insert(now - start);
            }
            if tally.deltas > before {
                first_delta.get_or_insert(now - start);
                if keep_progress {
                    progress.push((now, tally.deltas));
                }
            }
            if done {
                let tally = exchange.scanner.finish()?;
                let first_event = first_event.ok_or("the stream has no event")?;
                return Ok(Answer { tally, first_event, first_delta, total: now - start, progress });
            }
        }
    }
}

/// One answer while it is read.
#[derive(Debug, Default)]
struct Exchange {
    head: Vec<u8>,
    body: Option<Decoder>,
    scanner: Scanner,
}

impl Exchange {
    /// Takes what was read; `true` when the answer is whole.
    fn feed(&mut self, bytes: &[u8]) -> Result<bool, Failure> {
        let Some(decoder) = &mut self.body else {
            self.head.extend_from_slice(bytes);
            let Some(end) = memchr::memmem::find(&self.head, b"\r\n\r\n") else {
                return if self.head.len() > MAX_HEAD { Err("the answer's head is too long".into()) } else { Ok(false) };
            };
            let body = self.head.split_off(end + 4);
            check_head(&self.head, &body)?;
            self.body = Some(Decoder::new());
            return if body.is_empty() { Ok(false) } else { self.feed(&body) };
        };
        let used = decoder.feed(bytes, |payload| self.scanner.feed(payload))?;
        if used < bytes.len() {
            return Err("bytes follow the end of an answer".into());
        }
        Ok(decoder.done())
    }
}

fn check_head(head: &[u8], body: &[u8]) -> Result<(), Failure> {
    let head = String::from_utf8_lossy(head);
    let status = head.lines().next().unwrap_or_default();
    if status.split(' ').nth(1) != Some("200") {
        let shown = String::from_utf8_lossy(&body[..body.len().min(512)]);
        return Err(format!("the server answered '{status}': {shown}").into());
    }
    let chunked = head.lines().any(|line| {
        line.split_once(':')
            .is_some_and(|(name, value)| name.eq_ignore_ascii_case("transfer-encoding") && value.trim().eq_ignore_ascii_case("chunked"))
    });
    if chunked { Ok(()) } else { Err("the answer is not chunked, so it does not stream".into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n\
        24\r\ndata: {\"type\":\"response.completed\"}\n\r\n1\r\n\n\r\n0\r\n\r\n";

    #[test]
    fn an_answer_reads_the_same_however_it_is_cut() {
        for cut in 1..ANSWER.len() {
            let mut exchange = Exchange::default();
            assert!(!exchange.feed(&ANSWER[..cut]).unwrap(), "cut at {cut}");
            assert!(exchange.feed(&ANSWER[cut..]).unwrap(), "cut at {cut}");
            assert_eq!(exchange.scanner.finish().unwrap().events, 1);
        }
    }

    #[test]
    fn another_status_is_told_with_the_body() {
        let mut exchange = Exchange::default();
        let refusal = exchange.feed(b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}").unwrap_err();
        assert_eq!(refusal.to_string(), "the server answered 'HTTP/1.1 404 Not Found': {}");
    }

    #[test]
    fn a_url_without_a_port_is_refused() {
        assert!(Target::new("http://127.0.0.1/v1", "{}").is_err());
        assert!(Target::new("https://127.0.0.1:1/v1", "{}").is_err());
        assert_eq!(Target::new("http://127.0.0.1:80", "{}").unwrap().authority, "127.0.0.1:80");
    }
}
