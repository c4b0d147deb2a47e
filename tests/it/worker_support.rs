//! A worker behind a real Unix socket, and a client that says exactly the lines that a test wants to say.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use emberd::engine::host::Launches;
use emberd::engine::mock::{Mock, vocabulary};
use emberd::engine::port::Load;
use emberd::engine::{Capabilities, Finish, Launch, Order, Port, Step};
use emberd::listen::{Files, Seat, claim};
use emberd::models::Models;
use emberd::shutdown::{Reason, Stop};
use emberd::worker::{Options, serve};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::task::JoinHandle;

use crate::http_support::{PATIENCE, models, until};

/// The default idle window.
pub const WINDOW: Duration = Duration::from_secs(900);

pub struct Worker {
    pub models: Models,
    pub stop: Stop,
    pub task: JoinHandle<Reason>,
    launches: Arc<std::sync::Mutex<Launches>>,
    seat: Seat,
    _folder: tempfile::TempDir,
}

pub fn options() -> Options {
    Options { model_key: "tiny".into(), tag: "1|onnx||".into(), max_line: 1 << 20, max_in_flight: 64, max_waiting: 64 }
}

impl Worker {
    /// A worker whose model this mock will be, once a client asks for it.
    pub fn start(mock: Mock) -> Self {
        let worker = Self::absent(options());
        worker.launch(mock);
        worker
    }

    /// A worker whose engine nobody has started.
    pub fn absent(options: Options) -> Self {
        let (models, launches) = models(64);
        Self::over(models, launches, options)
    }

    pub fn over(models: Models, launches: Launches, options: Options) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (listener, seat) = claim(&folder.path().join("tiny.sock"), "taken:", Files::Replaced).unwrap();
        let stop = Stop::default();
        let task = tokio::spawn(serve(listener, Arc::clone(models.default_model()), options, WINDOW, stop.clone()));
        Self { models, stop, task, launches: Arc::new(std::sync::Mutex::new(launches)), seat, _folder: folder }
    }

    /// Serves the next launch by this mock.
    pub fn launch(&self, mock: Mock) {
        self.engine(move |launch| mock.spawn(launch.port, launch.settings).unwrap());
    }

    /// Gives the next launch to `run`, on a thread of its own.
    pub fn engine(&self, run: impl FnOnce(Launch) + Send + 'static) {
        let launches = Arc::clone(&self.launches);
        std::thread::spawn(move || {
            let launch = launches.lock().unwrap().next();
            launch.map(run)
        });
    }

    /// The next launch, for a test that plays the engine itself.
    pub async fn next_launch(&self) -> Launch {
        let launches = Arc::clone(&self.launches);
        aside(move || launches.lock().unwrap().next().unwrap()).await
    }

    pub fn path(&self) -> PathBuf {
        self.seat.path().to_path_buf()
    }

    pub async fn client(&self) -> Client {
        Client::over(UnixStream::connect(self.seat.path()).await.unwrap())
    }

    /// What the engine does; nothing when there is none.
    pub fn load(&self) -> Load {
        self.models.default_model().loaded().map(|model| model.engine.load()).unwrap_or_default()
    }

    /// Waits until this many requests are in the engine and this many wait for a place in it.
    pub async fn until(&self, running: usize, waiting: usize) {
        let what = format!("{running} running and {waiting} waiting");
        until(&what, || (self.load().running, self.load().waiting) == (running, waiting)).await;
    }

    /// Waits until the engine has, or will get, this many requests.
    pub async fn until_asked(&self, requests: usize) {
        until(&format!("{requests} requests"), || self.load().running + self.load().waiting == requests).await;
    }

    /// How the worker ended.
    pub async fn ended(&mut self) -> Reason {
        tokio::time::timeout(PATIENCE, &mut self.task).await.unwrap().unwrap()
    }
}

/// One connection.
pub struct Client {
    reader: BufReader<OwnedReadHalf>,
    pub writer: OwnedWriteHalf,
}

impl Client {
    pub fn over(stream: UnixStream) -> Self {
        let (reader, writer) = stream.into_split();
        Self { reader: BufReader::new(reader), writer }
    }

    /// Sends a line.
    pub async fn say(&mut self, line: impl AsRef<[u8]>) {
        let line = [line.as_ref(), b"\n"].concat();
        self.writer.write_all(&line).await.unwrap();
    }

    /// The next line as it came, without waiting for ever; `None` at the end.
    pub async fn line(&mut self) -> Option<String> {
        tokio::time::timeout(PATIENCE, self.hear()).await.unwrap()
    }

    /// The same, but for ever: a paused clock would jump to the end of any patience.
    pub async fn hear(&mut self) -> Option<String> {
        let mut line = String::new();
        match self.reader.read_line(&mut line).await {
            Ok(0) => None,
            Ok(_) => Some(line.strip_suffix('\n').expect("a line ends with a newline").to_owned()),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => None,
            Err(error) => panic!("{error}"),
        }
    }

    pub async fn next(&mut self) -> Value {
        serde_json::from_str(&self.line().await.expect("a line, and not the end")).unwrap()
    }

    /// Says a line and hears one.
    pub async fn ask(&mut self, line: impl AsRef<[u8]>) -> Value {
        self.say(line).await;
        self.next().await
    }

    /// The next line that is no news of a load.
    pub async fn answer(&mut self) -> Value {
        loop {
            let reply = self.next().await;
            if reply["type"] != "progress" {
                return reply;
            }
        }
    }

    /// Says a line, and hears what is said until the answer comes; adds both to the transcript.
    pub async fn note(&mut self, line: &str, transcript: &mut String) {
        writeln!(transcript, "> {line}").unwrap();
        self.say(line).await;
        loop {
            let heard = self.line().await.unwrap();
            writeln!(transcript, "< {heard}").unwrap();
            if !heard.starts_with("{\"type\":\"progress\"") {
                return;
            }
        }
    }
}

/// What `work` comes to, on a thread of its own that may sleep: one that never wakes up fails the test instead of holding it.
pub async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, done) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || _ = sender.send(work()));
    tokio::time::timeout(PATIENCE, done).await.expect("it ends").unwrap()
}

/// What an engine that comes to the end of its loading only now is told to do.
pub async fn orders_after_loading(port: Port) -> Option<Vec<Order>> {
    aside(move || {
        port.ready(Capabilities { context_length: 8, max_batch: 1, vocab_size: 8, eos_ids: vec![], constraints: false }).unwrap();
        port.wait().unwrap()
    })
    .await
}

/// A chat that asks for this many tokens.
pub fn chat(id: &str, tokens: u32) -> String {
    format!(r#"{{"type":"chat","id":"{id}","messages":[{{"role":"user","content":"hi"}}],"maxNewTokens":{tokens}}}"#)
}

/// What the mock says in this many tokens.
pub fn words(tokens: usize) -> String {
    vocabulary::WORDS.iter().cycle().take(tokens).copied().collect()
}

/// An engine that answers every request by its end, and hands on the prompts that it is given, as text.
pub fn listening(port: &Port, prompts: &std::sync::mpsc::Sender<String>) {
    let (vocab_size, eos_ids) = (vocabulary::SIZE, vec![vocabulary::EOS]);
    let capabilities = Capabilities { context_length: 8192, max_batch: 8, vocab_size, eos_ids, constraints: false };
    port.ready(capabilities).unwrap();
    while let Some(orders) = port.wait().unwrap() {
        for order in orders {
            let Order::Admit(admit) = order else { continue };
            prompts.send(text_of(&admit.prompt)).unwrap();
            port.push(vec![Step { id: admit.id, tokens: vec![vocabulary::EOS], finish: Some(Finish::Stop), logprobs: vec![] }]).unwrap();
        }
    }
}

fn text_of(ids: &[u32]) -> String {
    let mut bytes = Vec::new();
    for id in ids {
        match *id {
            byte @ 0..256 => bytes.push(u8::try_from(byte).unwrap()),
            special @ 256..vocabulary::FIRST_WORD => bytes.extend(vocabulary::SPECIALS[special as usize - 256].as_bytes()),
            word => bytes.extend(vocabulary::WORDS[(word - vocabulary::FIRST_WORD) as usize].as_bytes()),
        }
    }
    String::from_utf8(bytes).unwrap()
}
