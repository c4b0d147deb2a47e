//! A server on a free port with a mock engine behind it, and a client that says exactly what a test wants to say.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use bytes::Bytes;
use emberd::engine::host::{Launches, launcher};
use emberd::engine::mock::{Mock, Pace, vocabulary};
use emberd::engine::port::Load;
use emberd::engine::{Engine, Settings};
use emberd::http::{Listener, Options, serve};
use emberd::models::Models;
use emberd::models::fetch::Shelf;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::SendRequest;
use hyper::header::HeaderMap;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// The server's only model.
pub const MODEL: &str = "mock/one";
/// No test waits longer than this for anything.
pub const PATIENCE: Duration = Duration::from_secs(30);

pub struct Server {
    pub port: u16,
    pub models: Models,
    launches: Option<Launches>,
    stop: Option<oneshot::Sender<()>>,
    pub task: JoinHandle<()>,
}

/// A model whose engine is started by the test, which gets the launches.
pub fn models(queue_limit: usize) -> (Models, Launches) {
    let (launcher, launches) = launcher(queue_limit);
    let shelf = Shelf::new(PathBuf::from("unused"), None);
    // The engine's name says only that nobody but the test starts it.
    (Models::new(&[MODEL.to_owned()], shelf, launcher, "echo", Settings::default()).unwrap(), launches)
}

impl Server {
    /// A server whose model is ready.
    pub async fn start(mock: Mock) -> Self {
        Self::with(mock, Options::default(), 64).await
    }

    pub async fn with(mock: Mock, options: Options, queue_limit: usize) -> Self {
        let mut server = Self::absent(options, queue_limit).await;
        server.launch(mock);
        server.models.find(None).unwrap().ready().await.unwrap();
        server
    }

    /// A server whose model nobody has started yet.
    pub async fn absent(options: Options, queue_limit: usize) -> Self {
        let (models, launches) = models(queue_limit);
        Self::of(models, launches, options).await
    }

    /// A server of these models.
    pub async fn of(models: Models, launches: Launches, options: Options) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (stop, stopped) = oneshot::channel();
        let serving = serve(vec![Listener::Tcp(listener)], models.clone(), options, async {
            let _ = stopped.await;
        });
        Self { port, models, launches: Some(launches), stop: Some(stop), task: tokio::spawn(serving) }
    }

    /// The launches, for a test that is the engine itself.
    pub fn launches(&mut self) -> Launches {
        self.launches.take().unwrap()
    }

    /// Starts the mock as soon as a request, or the test, makes the model load.
    pub fn launch(&mut self, mock: Mock) {
        let launches = self.launches.take().unwrap();
        std::thread::spawn(move || {
            if let Some(launch) = launches.next() {
                mock.spawn(launch.port, launch.settings).unwrap();
            }
        });
    }

    /// Lets the test be the engine, on a thread of its own.
    pub fn launch_engine(&mut self, engine: impl FnOnce(emberd::engine::Launch) + Send + 'static) {
        let launches = self.launches.take().unwrap();
        std::thread::spawn(move || {
            if let Some(launch) = launches.next() {
                engine(launch);
            }
        });
    }

    pub fn stop(&mut self) {
        drop(self.stop.take());
    }

    pub fn engine(&self) -> Engine {
        self.models.find(None).unwrap().loaded().unwrap().engine.clone()
    }

    pub fn load(&self) -> Load {
        self.engine().load()
    }

    pub async fn client(&self) -> Client {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).await.unwrap();
        Client::over(stream).await
    }

    pub async fn get(&self, path: &str) -> Reply {
        self.client().await.send(get(path)).await
    }

    /// Posts to `/v1/responses`.
    pub async fn ask(&self, body: &Value) -> Reply {
        self.client().await.send(post("/v1/responses", body.to_string())).await
    }
}

/// One connection. Dropping it closes it.
pub struct Client {
    sender: SendRequest<Full<Bytes>>,
    connection: JoinHandle<()>,
}

impl Client {
    pub async fn over(stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static) -> Self {
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        let connection = tokio::spawn(async move {
            let _ = connection.await;
        });
        Self { sender, connection }
    }

    /// The answer's head; its body is read by whoever wants it.
    pub async fn begin(&mut self, request: Request<Full<Bytes>>) -> Response<Incoming> {
        self.sender.ready().await.unwrap();
        tokio::time::timeout(PATIENCE, self.sender.send_request(request)).await.unwrap().unwrap()
    }

    pub async fn send(&mut self, request: Request<Full<Bytes>>) -> Reply {
        Reply::of(self.begin(request).await).await
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

/// A whole answer.
#[derive(Debug)]
pub struct Reply {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Reply {
    pub async fn of(response: Response<Incoming>) -> Self {
        let (parts, body) = response.into_parts();
        let body = tokio::time::timeout(PATIENCE, body.collect()).await.unwrap().unwrap().to_bytes();
        Self { status: parts.status, headers: parts.headers, body }
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub fn json(&self) -> Value {
        assert_eq!(self.header("content-type"), "application/json");
        serde_json::from_slice(&self.body).unwrap()
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map(|value| value.to_str().unwrap()).unwrap_or_default()
    }

    /// Status, code and param of an error.
    pub fn error(&self) -> (u16, String, Option<String>) {
        let json = self.json();
        let error = json["error"].as_object().unwrap();
        assert_eq!(error.keys().collect::<Vec<_>>(), ["message", "type", "param", "code"]);
        assert!(!error["message"].as_str().unwrap().is_empty());
        (self.status.as_u16(), error["code"].as_str().unwrap().to_owned(), error["param"].as_str().map(str::to_owned))
    }

    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, StatusCode::OK, "{}", self.text());
        events(self.text())
    }
}

/// The events of a stream; each must be framed as it should be, and the end marked.
pub fn events(stream: &str) -> Vec<Value> {
    let mut events: Vec<Value> = Vec::new();
    let blocks: Vec<&str> = stream.split_terminator("\n\n").filter(|block| !block.starts_with(':')).collect();
    let (last, blocks) = blocks.split_last().unwrap();
    assert_eq!(*last, "data: [DONE]");
    for block in blocks {
        let (name, data) = block.split_once('\n').unwrap();
        let event: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: "), event["type"].as_str());
        events.push(event);
    }
    events
}

pub fn get(path: &str) -> Request<Full<Bytes>> {
    request("GET", path).body(Full::default()).unwrap()
}

pub fn request(method: &str, path: &str) -> hyper::http::request::Builder {
    Request::builder().method(method).uri(path).header("host", "localhost")
}

pub fn post(path: &str, body: impl Into<Bytes>) -> Request<Full<Bytes>> {
    request("POST", path).header("content-type", "application/json").body(Full::new(body.into())).unwrap()
}

/// An engine that gives these answers in order.
pub fn script(answers: &[&str]) -> Mock {
    Mock { script: answers.iter().map(|text| vocabulary::answer(text)).collect(), ..Mock::default() }
}

/// A call as the model of the mock's template writes it.
pub fn call(name: &str, arguments: &str) -> String {
    format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>\n")
}

/// A mock that makes a step for each message.
pub fn gated() -> (SyncSender<()>, Mock) {
    let (gate, steps): (_, Receiver<()>) = sync_channel(1 << 16);
    (gate, Mock { pace: Pace::Gate(steps), ..Mock::default() })
}

/// Waits, without sleeping, for something that other threads bring about.
pub async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let waiting = async {
        while !condition() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, waiting).await.unwrap_or_else(|_| panic!("it never came about: {what}"));
}
