//! Routes, and what is refused at the door.

use emberd::engine::mock::{Fault, Mock};
use emberd::http::{Listener, Options, serve};
use http_body_util::Full;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::http_support::{Client, MODEL, Server, gated, models, post, request, until};

fn short() -> Mock {
    Mock { stop_after: 2, ..Mock::default() }
}

#[tokio::test]
async fn unknown_paths_and_wrong_methods_are_told_apart() {
    let server = Server::start(short()).await;
    for path in ["/", "/v1", "/v1/response", "/v1/responses/", "/v1/models/", "/V1/models", "/healthz"] {
        assert_eq!(server.get(path).await.error(), (404, "not_found".into(), None), "{path}");
    }
    let mut client = server.client().await;
    for (method, path, allow) in [
        ("GET", "/v1/responses", "POST"),
        ("PUT", "/v1/responses", "POST"),
        ("OPTIONS", "/v1/responses", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/v1/models/x", "GET, HEAD"),
        ("POST", "/health", "GET, HEAD"),
    ] {
        let reply = client.send(request(method, path).header("origin", "http://example.com").body(Full::default()).unwrap()).await;
        assert_eq!(reply.error(), (405, "method_not_allowed".into(), None), "{method} {path}");
        assert_eq!(reply.header("allow"), allow);
        assert!(!reply.headers.keys().any(|name| name.as_str().starts_with("access-control")), "{method} {path}");
    }
}

#[tokio::test]
async fn only_json_is_taken() {
    let server = Server::start(short()).await;
    let mut client = server.client().await;
    for kind in [None, Some("text/plain"), Some("application/x-www-form-urlencoded"), Some("application/json; charset=utf-16")] {
        let mut builder = request("POST", "/v1/responses");
        if let Some(kind) = kind {
            builder = builder.header("content-type", kind);
        }
        let reply = client.send(builder.body(Full::from(r#"{"input":"hi"}"#)).unwrap()).await;
        assert_eq!(reply.error(), (415, "unsupported_media_type".into(), None), "{kind:?}");
    }
    let zipped = request("POST", "/v1/responses").header("content-type", "application/json").header("content-encoding", "gzip");
    assert_eq!(client.send(zipped.body(Full::from("x")).unwrap()).await.error().0, 415);
    let reply = client.send(post("/v1/responses", "{\"input\":")).await;
    assert_eq!(reply.error(), (400, "invalid_json".into(), None));
    assert_eq!(client.send(post("/v1/responses", r#"{"input":5}"#)).await.error(), (400, "invalid_type".into(), Some("input".into())));
    // The same connection still answers.
    let kind = request("POST", "/v1/responses").header("content-type", "Application/Json; charset=UTF-8");
    assert_eq!(client.send(kind.body(Full::from(r#"{"input":"hi"}"#)).unwrap()).await.status, 200);
}

#[tokio::test]
async fn other_hosts_are_turned_away() {
    let options = Options { allowed_hosts: vec!["box.lan".into()], ..Options::default() };
    let server = Server::with(short(), options, 8).await;
    let mut client = server.client().await;
    for (host, status) in
        [("localhost:8420", 200), ("[::1]", 200), ("box.lan:1", 200), ("example.com", 403), ("127.0.0.1.example.com", 403)]
    {
        let request = hyper::Request::builder().uri("/v1/models").header("host", host).body(Full::default()).unwrap();
        let reply = client.send(request).await;
        assert_eq!(reply.status, status, "{host}");
        if status == 403 {
            assert_eq!(reply.error().1, "invalid_host");
        }
    }
    let none = hyper::Request::builder().uri("/v1/models").body(Full::default()).unwrap();
    assert_eq!(client.send(none).await.error(), (400, "invalid_value".into(), None));
    let two = request("GET", "/v1/models").header("host", "127.0.0.1").body(Full::default()).unwrap();
    assert_eq!(client.send(two).await.error(), (400, "invalid_value".into(), None));
    let absolute = hyper::Request::builder().uri("http://example.com/v1/models").header("host", "localhost").body(Full::default()).unwrap();
    assert_eq!(client.send(absolute).await.error().0, 403);
}

#[tokio::test]
async fn a_server_on_every_address_answers_to_the_unspecified_one() {
    let listener = tokio::net::TcpListener::bind("0.0.0.0:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (models, _launches) = models(8);
    tokio::spawn(serve(vec![Listener::Tcp(listener)], models, Options::default(), std::future::pending()));
    let mut client = Client::over(TcpStream::connect(("127.0.0.1", port)).await.unwrap()).await;
    for (host, status) in [("0.0.0.0", 200), ("[::]:80", 200), ("example.com", 403)] {
        let request = hyper::Request::builder().uri("/v1/models").header("host", host).body(Full::default()).unwrap();
        assert_eq!(client.send(request).await.status, status, "{host}");
    }
}

#[cfg(unix)]
#[tokio::test]
async fn a_unix_socket_serves_whoever_can_open_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("door");
    let listener = tokio::net::UnixListener::bind(&path).unwrap();
    let (models, _launches) = models(8);
    tokio::spawn(serve(vec![Listener::Unix(listener)], models, Options::default(), std::future::pending()));
    let mut client = Client::over(tokio::net::UnixStream::connect(&path).await.unwrap()).await;
    let request = hyper::Request::builder().uri("/v1/models").header("host", "anything.example").body(Full::default()).unwrap();
    assert_eq!(client.send(request).await.status, 200);
}

#[tokio::test]
async fn models_are_listed_and_found_by_name() {
    let server = Server::start(short()).await;
    let list = server.get("/v1/models").await.json();
    assert_eq!(list["object"], "list");
    let model = &list["data"][0];
    assert_eq!(
        *model,
        json!({"id": MODEL, "object": "model", "created": model["created"], "owned_by": "emberd", "context_length": 8192, "loaded": true})
    );
    assert!(model["created"].as_u64().unwrap() > 0);
    for path in ["/v1/models/mock/one", "/v1/models/mock%2Fone", "/v1/models/m%6Fck/one?x=y"] {
        assert_eq!(server.get(path).await.json(), *model, "{path}");
    }
    assert_eq!(server.get("/v1/models/other").await.error(), (404, "model_not_found".into(), Some("model".into())));
    let reply = server.ask(&json!({"model": "other", "input": "hi"})).await;
    assert_eq!(reply.error(), (404, "model_not_found".into(), Some("model".into())));
}

#[tokio::test]
async fn health_tells_whether_the_server_can_serve() {
    let status = async |server: &Server| {
        let reply = server.get("/health").await;
        (reply.status.as_u16(), reply.json()["status"].as_str().unwrap().to_owned())
    };
    // A model that nobody has asked for yet will load when somebody does.
    let mut server = Server::absent(Options::default(), 8).await;
    assert_eq!(status(&server).await, (200, "ok".into()));
    let loading = server.models.find(None).unwrap().load();
    assert_eq!(status(&server).await, (503, "loading".into()));
    assert_eq!(server.get("/health?live").await.status, 200);
    assert_eq!(server.get("/v1/models").await.json()["data"][0]["loaded"], false);
    server.launch(short());
    loading.model().await.unwrap();
    assert_eq!(status(&server).await, (200, "ok".into()));

    let mut server = Server::absent(Options::default(), 8).await;
    server.launch(Mock { fault: Fault::FailLoad, ..Mock::default() });
    let reply = server.ask(&json!({"input": "hi"})).await;
    assert_eq!(reply.error(), (503, "model_load_failed".into(), None));
    assert_eq!(status(&server).await, (503, "failed".into()));
    // Why is for the log: it may hold paths, and what a library says.
    let told = "the model could not be loaded (hint: the server's log says why)";
    assert_eq!(reply.json()["error"]["message"], told);
    assert_eq!(server.get("/health").await.json()["message"], told);
}

#[tokio::test]
async fn an_engine_that_is_stuck_shows_in_the_health() {
    let (_gate, mock) = gated();
    let options = Options { stall: std::time::Duration::ZERO, ..Options::default() };
    let server = Server::with(mock, options, 8).await;
    assert_eq!(server.get("/health").await.status, 200);
    let mut client = server.client().await;
    let _stream = client.begin(post("/v1/responses", r#"{"input":"hi","stream":true}"#)).await;
    until("the engine has the request", || server.load().running == 1).await;
    let reply = server.get("/health").await;
    assert_eq!((reply.status.as_u16(), reply.json()["status"].clone()), (503, json!("stalled")));
    assert_eq!(server.get("/health?live").await.json(), json!({"status": "alive"}));
}

#[tokio::test]
async fn a_full_queue_is_told_when_to_come_back() {
    let (_gate, mock) = gated();
    let server = Server::with(Mock { max_batch: 1, ..mock }, Options::default(), 1).await;
    let mut clients = Vec::new();
    for in_flight in 1..=2 {
        let mut client = server.client().await;
        clients.push((client.begin(post("/v1/responses", r#"{"input":"hi","stream":true}"#)).await, client));
        until("the request is with the engine or waits", || {
            server.load().running + server.load().waiting == in_flight && server.load().running == 1
        })
        .await;
    }
    let reply = server.ask(&json!({"input": "hi", "stream": true})).await;
    assert_eq!(reply.error(), (429, "queue_full".into(), None));
    assert_eq!(reply.header("retry-after"), "1");
}

#[tokio::test]
async fn a_model_that_takes_too_long_to_load_is_told_so() {
    let server = Server::absent(Options { load_wait: std::time::Duration::ZERO, ..Options::default() }, 8).await;
    let reply = server.ask(&json!({"input": "hi"})).await;
    assert_eq!(reply.error(), (503, "model_loading".into(), None));
    assert_eq!(reply.header("retry-after"), "5");
}

#[tokio::test]
async fn a_bad_request_does_not_load_the_model() {
    let server = Server::absent(Options::default(), 8).await;
    assert_eq!(server.ask(&json!({"input": 5})).await.status, 400);
    assert_eq!(server.models.state(), emberd::models::State::Absent);
}

#[tokio::test]
async fn what_is_not_http_is_hung_up_on_and_harms_nobody() {
    let server = Server::start(short()).await;
    for noise in [
        "\0\0\0\0\r\n\r\n",
        "GET\r\n\r\n",
        "{\"type\":\"ping\"}\r\n\r\n",
        "POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-length: x\r\n\r\n",
    ] {
        let mut stream = TcpStream::connect(("127.0.0.1", server.port)).await.unwrap();
        stream.write_all(noise.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 400"), "{noise:?}");
    }
    let response: Value = server.ask(&json!({"input": "hi"})).await.json();
    assert_eq!(response["status"], "completed");
}
