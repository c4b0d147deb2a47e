//! One client of the worker: reads its lines, answers each request once, and ends its work when it has gone.
//!
//! Pings and shutdowns are answered by the reader itself and wait for nothing. Loads and chats run as tasks beside it, which die with the connection.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::value::RawValue;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::error::{Code, Error, Result};
use crate::models::{Ask, Hosted, Loading, Model, PromptOptions};
use crate::shutdown::{Reason, Stop};
use crate::worker::frame::{Frames, Line};
use crate::worker::idle::{Busy, Idle};
use crate::worker::message::{Chat, Event, Reply, Request, parse};

/// Lines from a connection's work that its writer has not taken yet.
const LINES: usize = 64;
/// Where conversations longer than this, in bytes, are tokenised beside the loop that answers pings.
const LONG_TEXT: usize = 8 * 1024;
/// Bytes read at once.
const READ: usize = 64 * 1024;
/// How often a client that will send no more, but waits for answers, is looked at for having gone.
const LOOK: Duration = Duration::from_millis(20);

/// What a worker tells its clients, and what it lets them do.
#[derive(Debug, Clone)]
pub struct Options {
    /// The key under which clients know the model.
    pub model_key: String,
    /// The launch tag, echoed in pongs.
    pub tag: String,
    /// The longest line in bytes.
    pub max_line: usize,
    /// Loads and chats that one connection may have in flight.
    pub max_in_flight: usize,
}

type OwnedId = Option<Box<RawValue>>;

/// Serves one client until it leaves or the worker stops.
pub(super) async fn serve(mut stream: UnixStream, model: Arc<Hosted>, options: Arc<Options>, idle: Idle, stop: Stop) {
    let mut connection = Connection::new(model, options, idle, stop);
    let mut open = true;
    while open || !connection.work.is_empty() {
        let event = tokio::select! {
            biased;
            read = read(&mut stream, connection.frames.buffer()), if open => Happened::Read(read),
            Some(line) = connection.lines.recv() => Happened::Line(line),
            Some(ended) = connection.work.join_next_with_id() => Happened::Ended(ended),
            () = tokio::time::sleep(LOOK), if !open => Happened::Look,
        };
        match event {
            Happened::Read(Err(_)) => return, // Reset: nobody is there to be answered.
            Happened::Read(Ok(0)) => {
                open = false;
                connection.finish_lines();
                if gone(&stream) {
                    return;
                }
            }
            Happened::Read(Ok(_)) => connection.take_lines(),
            Happened::Line(Outgoing::Line(line)) => connection.out.extend_from_slice(&line),
            Happened::Line(Outgoing::HangUp) => return,
            Happened::Ended(ended) => connection.ended(ended),
            Happened::Look if gone(&stream) => return,
            Happened::Look => {}
        }
        if connection.stop.reason().is_some() {
            return;
        }
        if !connection.out.is_empty() {
            if stream.write_all(&connection.out).await.is_err() {
                return;
            }
            connection.out.clear();
        }
    }
}

enum Happened {
    Read(std::io::Result<usize>),
    Line(Outgoing),
    Ended(std::result::Result<(tokio::task::Id, ()), tokio::task::JoinError>),
    Look,
}

/// What a task sends to its connection.
enum Outgoing {
    Line(Vec<u8>),
    /// The trouble is passing: the client should come again, and must not be told that the request itself is at fault.
    HangUp,
}

async fn read(stream: &mut UnixStream, buffer: &mut bytes::BytesMut) -> std::io::Result<usize> {
    buffer.reserve(READ);
    stream.read_buf(buffer).await
}

/// Whether the client has closed both directions, and not only the one it writes to.
fn gone(stream: &UnixStream) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut look = [PollFd::new(stream, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut look, Some(&now)).is_ok_and(|_| look[0].revents().intersects(PollFlags::HUP | PollFlags::ERR))
}

struct Connection {
    model: Arc<Hosted>,
    options: Arc<Options>,
    idle: Idle,
    stop: Stop,
    frames: Frames,
    out: Vec<u8>,
    work: JoinSet<()>,
    /// The requests that tasks have yet to answer.
    owed: HashMap<tokio::task::Id, OwnedId>,
    sender: mpsc::Sender<Outgoing>,
    lines: mpsc::Receiver<Outgoing>,
}

impl Connection {
    fn new(model: Arc<Hosted>, options: Arc<Options>, idle: Idle, stop: Stop) -> Self {
        let (sender, lines) = mpsc::channel(LINES);
        let frames = Frames::new(options.max_line);
        Self { model, options, idle, stop, frames, out: Vec::new(), work: JoinSet::new(), owed: HashMap::new(), sender, lines }
    }

    fn take_lines(&mut self) {
        while let Some(line) = self.frames.next() {
            self.take(&line);
        }
    }

    fn finish_lines(&mut self) {
        if let Some(line) = self.frames.finish() {
            self.take(&line);
        }
    }

    fn take(&mut self, line: &Line) {
        let line = match line {
            Line::Whole(line) => line,
            Line::TooLong(length) => {
                let error = Error::new(Code::BodyTooLarge, format!("the line has {length} bytes, and the limit is {}", self.options.max_line));
                return reply(&mut self.out, &Reply::Error { id: None, error: &error.hint("send less, or raise --max-line").one_line() });
            }
        };
        let (id, request) = parse(line);
        match request {
            Ok(Request::Ping) => reply(&mut self.out, &Reply::Pong { id, tag: &self.options.tag }),
            Ok(Request::Shutdown) => self.stop.stop(Reason::Asked),
            Ok(Request::Load) => self.start(id, None),
            Ok(Request::Chat(chat)) => self.start(id, Some(chat)),
            Err(error) => {
                tracing::debug!(%error, "a line was refused");
                reply(&mut self.out, &Reply::Error { id, error: &error.one_line() });
            }
        }
    }

    /// Starts a load or a chat beside the reader.
    fn start(&mut self, id: Option<&RawValue>, chat: Option<Chat>) {
        let limit = self.options.max_in_flight;
        if self.owed.len() >= limit {
            let error = Error::new(Code::QueueFull, format!("this connection has {limit} requests in flight, the limit"));
            return reply(&mut self.out, &Reply::Error { id, error: &error.hint("wait for an answer first").one_line() });
        }
        let id = id.map(ToOwned::to_owned);
        let task = Task {
            id: id.clone(),
            model: Arc::clone(&self.model),
            options: Arc::clone(&self.options),
            sender: self.sender.clone(),
            _busy: self.idle.busy(),
        };
        let handle = self.work.spawn(task.run(chat));
        self.owed.insert(handle.id(), id);
    }

    fn ended(&mut self, ended: std::result::Result<(tokio::task::Id, ()), tokio::task::JoinError>) {
        // What the task still had to say comes before what is said of its end.
        while let Ok(Outgoing::Line(line)) = self.lines.try_recv() {
            self.out.extend_from_slice(&line);
        }
        match ended {
            Ok((task, ())) => {
                self.owed.remove(&task);
            }
            Err(error) => {
                tracing::error!(%error, "a request ended by a fault");
                let id = self.owed.remove(&error.id()).flatten();
                reply(&mut self.out, &Reply::Error { id: id.as_deref(), error: "a fault of the worker; its log has the detail" });
            }
        }
    }
}

fn reply(out: &mut Vec<u8>, reply: &Reply<'_>) {
    // A vector takes everything, and no reply holds what JSON cannot say.
    if serde_json::to_writer(&mut *out, reply).is_ok() {
        out.push(b'\n');
    }
}

/// One load or chat.
struct Task {
    id: OwnedId,
    model: Arc<Hosted>,
    options: Arc<Options>,
    sender: mpsc::Sender<Outgoing>,
    _busy: Busy,
}

impl Task {
    async fn run(self, chat: Option<Chat>) {
        let outcome = match chat {
            None => self.load(true).await.map(|_| None),
            Some(chat) => self.chat(chat).await.map(Some),
        };
        let id = self.id.as_deref();
        match outcome {
            Ok(None) => self.send(&Reply::Loaded { id }).await,
            Ok(Some(text)) => self.send(&Reply::Text { id, text: &text }).await,
            Err(error) if error.code == Code::ShuttingDown => _ = self.sender.send(Outgoing::HangUp).await,
            Err(error) => {
                tracing::warn!(%error, detail = error.detail.as_deref(), "a request failed");
                self.send(&Reply::Error { id, error: &error.one_line() }).await;
            }
        }
    }

    async fn send(&self, what: &Reply<'_>) {
        let mut line = Vec::with_capacity(128);
        reply(&mut line, what);
        let _ = self.sender.send(Outgoing::Line(line)).await; // A client that has gone is told nothing.
    }

    /// The model, loaded first if need be; whoever starts the load hears how it goes, and `asked` for it, that it is ready.
    async fn load(&self, asked: bool) -> Result<Arc<Model>> {
        let loading = match self.model.loaded() {
            Some(model) if !asked => return Ok(model),
            _ => self.model.load(),
        };
        let started = loading.started;
        let model = if started { self.watch(loading).await? } else { loading.model().await? };
        if started || asked {
            let event = Event::ready(&self.options.model_key, self.model.id());
            self.send(&Reply::Progress { id: self.id.as_deref(), event }).await;
        }
        Ok(model)
    }

    async fn watch(&self, mut loading: Loading) -> Result<Arc<Model>> {
        let model = loading.model();
        tokio::pin!(model);
        loop {
            let news = tokio::select! {
                biased;
                news = loading.news.recv() => news,
                model = &mut model => return model,
            };
            match news {
                Ok(news) => {
                    for event in Event::of(&self.options.model_key, &news).into_iter().flatten() {
                        self.send(&Reply::Progress { id: self.id.as_deref(), event }).await;
                    }
                }
                Err(RecvError::Lagged(_)) => {} // Newer news follows.
                Err(RecvError::Closed) => return model.await,
            }
        }
    }

    async fn chat(&self, chat: Chat) -> Result<String> {
        let model = self.load(false).await?;
        let options = PromptOptions { enable_thinking: Some(false), prefill: chat.prefill };
        let length = chat.turns.iter().map(|turn| turn.text.len()).sum::<usize>() + options.prefill.as_ref().map_or(0, String::len);
        let prompt = if length > LONG_TEXT {
            let model = Arc::clone(&model);
            match tokio::task::spawn_blocking(move || model.prompt(&chat.turns, &options)).await {
                Ok(prompt) => prompt?,
                Err(error) => return Err(Error::new(Code::ServerError, "a fault while tokenising").detail(error.to_string())),
            }
        } else {
            model.prompt(&chat.turns, &options)?
        };
        let max_tokens = chat.max_new_tokens.min(model.room(prompt.len())?);
        let stop = chat.stop.into_iter().collect();
        let mut answer = model.answer(prompt, Ask { max_tokens, sampling: None, stop, include_stop: true })?;
        let (text, ending) = answer.rest().await?;
        tracing::debug!(prompt = answer.prompt_tokens(), tokens = answer.tokens(), ?ending, "answered");
        Ok(text)
    }
}
