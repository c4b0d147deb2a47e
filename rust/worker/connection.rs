//! One client of the worker: reads its lines, answers each request once, and ends its work when it has gone.
//!
//! Pings, shutdowns and questions for the status are answered by the reader itself and wait for nothing. Loads and chats run as tasks beside it, which
//! die with the connection; so does reading a line that is long enough to hold up the pings of others.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use serde_json::value::RawValue;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::{JoinError, JoinSet};

use crate::engine::Client;
use crate::error::{Code, Error, Result};
use crate::linger;
use crate::listen::{LocalStream, gone};
use crate::memory;
use crate::metrics::{Door, Outcome};
use crate::models::Hosted;
use crate::shutdown::{Reason, Stop};
use crate::worker::about::Guest;
use crate::worker::frame::{Frames, Line};
use crate::worker::idle::{Idle, Pause};
use crate::worker::message::{Chat, Reply, Request, head_id, parse};
use crate::worker::task::{Answer, OwnedId, Task};

/// News of loads that a connection has not taken yet.
const NEWS: usize = 64;
/// Bytes that a client may leave unread before it is neither read from nor told news.
const BACKLOG: usize = 1024 * 1024;
/// Memory that an emptied outgoing buffer may keep.
const KEEP: usize = 64 * 1024;
/// Lines longer than this, in bytes, are parsed beside the loop that answers pings.
const LONG_LINE: usize = 256 * 1024;
/// The bytes of such lines that one connection may have waiting, in lines of the greatest length; then it is not read from.
const LONG_LINES: usize = 4;
/// Long lines that are parsed at once, of all connections.
static PARSERS: Semaphore = Semaphore::const_new(2);
/// What a connection may cost before others have their turn, in pings, and what anything else costs.
const TURN: usize = 2048;
const REQUEST: usize = 32;
/// Bytes read at once.
const READ: usize = 64 * 1024;
/// How often a client that is not read from, but waits for answers, is looked at for having gone.
const LOOK: Duration = Duration::from_millis(20);
/// How long a connection that is to be closed waits for the answers that come at the same time.
const LAST_WORDS: Duration = Duration::from_millis(100);
/// Reads, of 4 KiB each, that may precede closing.
const LAST_READS: usize = 64;

/// What a worker tells its clients, and what it lets them do.
#[derive(Debug, Clone)]
pub struct Options {
    /// The key under which clients know the model.
    pub model_key: String,
    /// The launch tag, echoed in pongs.
    pub tag: String,
    /// The longest line in bytes.
    pub max_line: usize,
    /// Requests that one connection may have in flight.
    pub max_in_flight: usize,
    /// Requests, of all connections, that may wait for the model to be loaded.
    pub max_waiting: usize,
}

/// What a client hears of a fault in here.
const FAULT: &str = "a fault of the worker; its log has the detail";

/// Serves one client until it leaves or the worker stops.
pub(super) async fn serve(stream: LocalStream, model: Arc<Hosted>, options: Arc<Options>, guest: Guest, idle: Idle, stop: Stop) {
    let mut connection = Connection::new(model, options, guest, idle, stop);
    let stream = Closing(stream);
    let mut taken = 0;
    let mut last_words = None;
    while !connection.ended || connection.owes() {
        // Reading goes on while the client is slow to read, so that one that writes all its requests before it reads is not waited for in vain.
        let room = connection.out.len() < BACKLOG;
        let wanted = room && !connection.hang_up && connection.long <= LONG_LINES * connection.options.max_line;
        let reads = wanted && !connection.ended && !connection.more;
        tokio::select! {
            biased;
            Some(line) = connection.news.recv(), if room => connection.out.extend_from_slice(&line),
            Some(ended) = connection.work.join_next_with_id() => connection.ended(ended),
            Some(parsed) = connection.parsing.join_next() => connection.parsed(parsed),
            () = std::future::ready(()), if wanted && connection.more => connection.take_lines(),
            read = read(&stream.0, connection.frames.buffer()), if reads => match read {
                Err(_) => return, // Reset: nobody is there to be answered.
                Ok(0) => {
                    connection.ended = true;
                    connection.take_lines();
                    if gone(&stream.0) {
                        return;
                    }
                }
                Ok(bytes) => {
                    connection.take_lines();
                    taken += bytes + READ / 64;
                }
            },
            // Readiness, or a fault that the next write meets as well.
            _ = stream.0.writable(), if !connection.out.is_empty() => {}
            () = tokio::time::sleep(LOOK), if !reads => {
                // Of a pipe only reading tells, or the next write.
                if cfg!(unix) && gone(&stream.0) {
                    return;
                }
            }
        }
        if !connection.out.is_empty() {
            match stream.0.try_write(&connection.out) {
                Ok(written) => {
                    connection.written(written);
                    linger::touch();
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
        }
        if connection.stop.reason().is_some() {
            return;
        }
        if connection.hang_up {
            // Whoever else is about to be answered hears that first.
            let end = *last_words.get_or_insert_with(|| Instant::now() + LAST_WORDS);
            if !connection.owes() || Instant::now() >= end {
                return;
            }
        }
        if taken >= READ || connection.more {
            // A client that never stops is one of many.
            taken = 0;
            tokio::task::yield_now().await;
        }
    }
}

/// A connection that is closed so that the client sees its end. Closed with bytes unread, it would be a reset to the client.
struct Closing(LocalStream);

impl Drop for Closing {
    fn drop(&mut self) {
        let mut rest = [0; 4096];
        for _ in 0..LAST_READS {
            if !self.0.try_read(&mut rest).is_ok_and(|read| read > 0) {
                return;
            }
        }
    }
}

/// Waits for bytes and adds them to the buffer; nothing is added at the end of the stream.
async fn read(stream: &LocalStream, buffer: &mut BytesMut) -> std::io::Result<usize> {
    buffer.reserve(READ);
    loop {
        stream.readable().await?;
        match stream.try_read_buf(buffer) {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            read => return read,
        }
    }
}

/// A long line: how many bytes it had, what keeps the worker from being idle meanwhile, and what it says.
type Parsed = (usize, Pause, Result<(OwnedId, Result<Request>), JoinError>);

struct Connection {
    client: Client,
    model: Arc<Hosted>,
    options: Arc<Options>,
    guest: Guest,
    idle: Idle,
    stop: Stop,
    frames: Frames,
    /// The client sends no more.
    ended: bool,
    out: Vec<u8>,
    work: JoinSet<Answer>,
    /// Long lines that are being parsed, or wait for that.
    parsing: JoinSet<Parsed>,
    /// Their bytes.
    long: usize,
    /// There are lines that have been read and not been looked at.
    more: bool,
    /// The requests that tasks have yet to answer.
    owed: HashMap<tokio::task::Id, OwnedId>,
    sender: mpsc::Sender<Vec<u8>>,
    /// Lines that tasks say before their answers.
    news: mpsc::Receiver<Vec<u8>>,
    /// The client is to come again.
    hang_up: bool,
}

impl Connection {
    fn new(model: Arc<Hosted>, options: Arc<Options>, guest: Guest, idle: Idle, stop: Stop) -> Self {
        let (sender, news) = mpsc::channel(NEWS);
        let frames = Frames::new(options.max_line);
        let (out, work, owed) = (Vec::new(), JoinSet::new(), HashMap::new());
        Self {
            client: Client::at(Door::Worker),
            model,
            options,
            guest,
            idle,
            stop,
            frames,
            ended: false,
            out,
            work,
            parsing: JoinSet::new(),
            long: 0,
            more: false,
            owed,
            sender,
            news,
            hang_up: false,
        }
    }

    fn written(&mut self, bytes: usize) {
        self.out.drain(..bytes);
        if self.out.is_empty() && self.out.capacity() > KEEP {
            self.out = Vec::new();
        }
    }

    /// Whether the client is to hear anything more.
    fn owes(&self) -> bool {
        self.more || !(self.work.is_empty() && self.parsing.is_empty() && self.out.is_empty())
    }

    /// Takes the lines that have been read, as many as one turn has room for.
    fn take_lines(&mut self) {
        let mut cost = 0;
        self.more = false;
        while self.stop.reason().is_none() {
            if cost >= TURN {
                self.more = true;
                return;
            }
            let Some(line) = self.frames.line() else { break };
            cost += self.take(line);
        }
        // When the client sends no more, what is left is a line too.
        if self.ended
            && let Some(line) = self.frames.finish()
        {
            self.take(line);
        }
    }

    /// Takes one line; what that costs.
    fn take(&mut self, line: Line) -> usize {
        match line {
            Line::Whole(line) if line.len() > LONG_LINE => {
                let (bytes, pause) = (line.len(), self.idle.pause());
                self.long += bytes;
                self.parsing.spawn(async move {
                    let place = PARSERS.acquire().await; // It is never closed.
                    let parsed = tokio::task::spawn_blocking(move || {
                        let _place = place; // Kept until it is done, whether the client waits for it or not.
                        let (id, request) = parse(&line);
                        (id.map(Cow::into_owned), request)
                    });
                    (bytes, pause, parsed.await)
                });
            }
            Line::Whole(line) => {
                let (id, request) = parse(&line);
                let cost = if matches!(request, Ok(Request::Ping)) { 1 } else { REQUEST };
                self.request(id.as_deref(), request);
                return cost;
            }
            Line::TooLong { length, head } => {
                let error =
                    Error::new(Code::BodyTooLarge, format!("the line has {length} bytes, and the limit is {}", self.options.max_line));
                let error = error.hint("send less, or raise --max-line").one_line();
                self.count(Outcome::Refused);
                Reply::Error { id: head_id(&head).as_deref(), error: &error }.write(&mut self.out);
            }
        }
        REQUEST
    }

    /// A long line has been parsed.
    fn parsed(&mut self, parsed: Result<Parsed, JoinError>) {
        let (bytes, _pause, outcome) = match parsed {
            Ok(parsed) => parsed,
            Err(error) => return tracing::error!(%error, "a line was lost, by a fault"),
        };
        self.long -= bytes;
        if self.hang_up {
            return; // Nobody would hear of it.
        }
        match outcome {
            Ok((id, request)) => self.request(id.as_deref(), request),
            Err(error) => {
                tracing::error!(%error, "a line could not be parsed, by a fault");
                Reply::Error { id: None, error: FAULT }.write(&mut self.out);
            }
        }
        memory::give_back();
    }

    fn request(&mut self, id: Option<&RawValue>, request: Result<Request>) {
        match request {
            Ok(Request::Ping) => Reply::Pong { id, tag: &self.options.tag }.write(&mut self.out),
            Ok(Request::Status) => {
                let status = self.guest.status(&self.options, &self.model, &self.idle);
                Reply::Status { id, status }.write(&mut self.out);
            }
            Ok(Request::Shutdown) => self.stop.stop(Reason::Asked),
            Ok(Request::Load) => self.start(id, None),
            Ok(Request::Chat(chat)) => self.start(id, Some(chat)),
            Err(error) => {
                tracing::debug!(%error, "a line was refused");
                self.count(Outcome::Refused);
                Reply::Error { id, error: &error.one_line() }.write(&mut self.out);
            }
        }
    }

    /// Starts a load or a chat beside the reader.
    fn start(&mut self, id: Option<&RawValue>, chat: Option<Chat>) {
        if let Err(error) = self.room() {
            if chat.is_some() {
                self.count(Outcome::of(&error));
            }
            return Reply::Error { id, error: &error.one_line() }.write(&mut self.out);
        }
        let id = id.map(ToOwned::to_owned);
        let task = Task {
            client: self.client,
            id: id.clone(),
            model: Arc::clone(&self.model),
            options: Arc::clone(&self.options),
            sender: self.sender.clone(),
            busy: self.idle.busy(),
        };
        let handle = self.work.spawn(task.run(chat));
        self.owed.insert(handle.id(), id);
    }

    /// Counts a request that gets no further than this.
    fn count(&self, outcome: Outcome) {
        self.model.meters().door(Door::Worker).count(outcome);
    }

    /// Whether one more request may be in flight.
    fn room(&self) -> Result<()> {
        let limit = self.options.max_in_flight;
        if self.owed.len() >= limit {
            return Err(Error::new(Code::QueueFull, format!("this connection has {limit} requests in flight, the limit"))
                .hint("wait for an answer first, or raise --max-in-flight"));
        }
        let waiting = self.options.max_waiting;
        // Once the model is loaded, the engine's own queue has the limit.
        if self.idle.in_flight() >= waiting && self.model.loaded().is_none() {
            return Err(Error::new(Code::QueueFull, format!("{waiting} requests wait for the model to be loaded, the limit"))
                .hint("try again when it is loaded, or raise --queue"));
        }
        Ok(())
    }

    fn ended(&mut self, ended: Result<(tokio::task::Id, Answer), JoinError>) {
        // What the task said while it ran comes before its answer.
        while let Ok(line) = self.news.try_recv() {
            self.out.extend_from_slice(&line);
        }
        match ended {
            Ok((task, answer)) => {
                self.owed.remove(&task);
                match answer {
                    Answer::Line(line) => self.out.extend_from_slice(&line),
                    Answer::HangUp => self.hang_up = true,
                }
            }
            Err(error) => {
                tracing::error!(%error, "a request ended by a fault");
                let id = self.owed.remove(&error.id()).flatten();
                Reply::Error { id: id.as_deref(), error: FAULT }.write(&mut self.out);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Settings;
    use crate::engine::host::launcher;
    use crate::models::Models;
    use crate::models::fetch::Shelf;
    use crate::worker::about::About;

    /// A connection whose model is never asked for.
    fn connection() -> Connection {
        let (launcher, _) = launcher(1);
        let models = Models::new(&["m".to_owned()], Shelf::new("unused".into(), None), launcher, "mock", Settings::default()).unwrap();
        let options = Options { model_key: "m".into(), tag: "t".into(), max_line: 1000, max_in_flight: 8, max_waiting: 8 };
        let (model, idle) = (Arc::clone(models.default_model()), Idle::new(Duration::MAX));
        Connection::new(model, Arc::new(options), About::new().guest(), idle, Stop::default())
    }

    async fn after(work: impl Future<Output = Answer> + Send + 'static) -> Connection {
        let mut connection = connection();
        connection.sender.send(b"news\n".to_vec()).await.unwrap();
        let task = connection.work.spawn(work);
        connection.owed.insert(task.id(), Some(RawValue::from_string("7".into()).unwrap()));
        let ended = connection.work.join_next_with_id().await.unwrap();
        connection.ended(ended);
        assert!(connection.owed.is_empty());
        connection
    }

    #[tokio::test]
    async fn an_answer_follows_the_news_that_came_before_it() {
        let connection = after(async { Answer::Line(b"answer\n".to_vec()) }).await;
        assert_eq!((connection.out.as_slice(), connection.hang_up), (&b"news\nanswer\n"[..], false));
        assert!(after(async { Answer::HangUp }).await.hang_up);
    }

    #[tokio::test]
    async fn a_task_that_panics_is_answered_with_an_error() {
        let connection = after(async { panic!("a fault") }).await;
        let said = String::from_utf8(connection.out).unwrap();
        assert_eq!(said, "news\n{\"type\":\"error\",\"id\":7,\"error\":\"a fault of the worker; its log has the detail\"}\n");
    }

    #[tokio::test]
    async fn an_emptied_buffer_gives_its_memory_back() {
        let mut connection = connection();
        connection.out = vec![b'x'; 10 * KEEP];
        connection.written(KEEP);
        assert_eq!(connection.out.len(), 9 * KEEP);
        connection.written(9 * KEEP);
        assert_eq!(connection.out.capacity(), 0);
    }
}
