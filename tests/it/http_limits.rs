//! Bodies that are too long, too slow, or not what was announced.

use std::time::Duration;

use bytes::Bytes;
use emberd::engine::mock::Mock;
use emberd::http::Options;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::http_support::{Server, post};

const LIMIT: usize = 64 * 1024;

async fn server(options: Options) -> Server {
    Server::with(Mock { stop_after: 2, ..Mock::default() }, options, 8).await
}

fn limited() -> Options {
    Options { max_body: LIMIT, ..Options::default() }
}

fn body(length: usize) -> Bytes {
    let text = json!({"input": "hi", "wibble": ""}).to_string();
    text.replace("\"\"", &format!("\"{}\"", "x".repeat(length - text.len()))).into()
}

/// Speaks on a connection of its own, and reads until the server hangs up.
async fn raw(server: &Server, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", server.port)).await.unwrap();
    stream.write_all(request).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    String::from_utf8(answer).unwrap()
}

#[tokio::test]
async fn a_body_over_the_limit_is_refused_and_its_connection_stays_usable() {
    let server = server(limited()).await;
    let mut client = server.client().await;
    assert_eq!(client.send(post("/v1/responses", body(LIMIT))).await.status, 200);
    for length in [LIMIT + 1, LIMIT * 4] {
        let reply = client.send(post("/v1/responses", body(length))).await;
        assert_eq!(reply.error(), (413, "body_too_large".into(), None));
        assert_eq!(reply.header("connection"), "");
    }
    assert_eq!(client.send(post("/v1/responses", body(100))).await.status, 200);
}

#[tokio::test]
async fn a_body_of_unknown_length_is_refused_once_it_is_over_the_limit() {
    let server = server(limited()).await;
    let mut request = b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
    for _ in 0..10 {
        request.extend_from_slice(b"4000\r\n");
        request.extend(std::iter::repeat_n(b' ', 0x4000));
        request.extend_from_slice(b"\r\n");
    }
    request.extend_from_slice(b"0\r\n\r\n");
    assert!(raw(&server, &request).await.starts_with("HTTP/1.1 413"));
}

#[tokio::test]
async fn a_body_that_is_far_too_long_is_not_even_read() {
    let server = server(limited()).await;
    let head = "POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100000000000\r\n\r\n";
    let answer = raw(&server, head.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 413") && answer.contains("connection: close"), "{answer}");
}

#[tokio::test]
async fn a_client_that_asks_first_is_told_before_it_sends() {
    let server = server(limited()).await;
    let head = "POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nexpect: 100-continue\r\ncontent-length: 100000\r\n\r\n";
    assert!(raw(&server, head.as_bytes()).await.starts_with("HTTP/1.1 413"));
    let text = r#"{"input":"hi"}"#;
    let head = format!(
        "POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\nexpect: 100-continue\r\ncontent-length: {}\r\n\r\n",
        text.len()
    );
    let mut stream = TcpStream::connect(("127.0.0.1", server.port)).await.unwrap();
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut told = [0; 25];
    stream.read_exact(&mut told).await.unwrap();
    assert_eq!(&told, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(text.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn a_refusal_is_read_even_by_a_client_that_writes_its_body_later() {
    let server = server(limited()).await;
    let mut stream = TcpStream::connect(("127.0.0.1", server.port)).await.unwrap();
    stream.write_all(b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 50000\r\n\r\n").await.unwrap();
    stream.write_all(&[b'x'; 50_000]).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 404"));
}

#[tokio::test]
async fn a_body_that_does_not_arrive_is_not_waited_for_forever() {
    let server = server(Options { body_timeout: Duration::from_millis(20), ..limited() }).await;
    let head = "POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{\"input\":";
    let answer = raw(&server, head.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("request_timeout"), "{answer}");
}

#[tokio::test]
async fn a_head_that_does_not_arrive_is_not_waited_for_forever() {
    let server = server(Options { header_timeout: Duration::from_millis(20), ..limited() }).await;
    assert_eq!(raw(&server, b"GET /v1/models HTTP/1.1\r\nhost: loc").await, "");
}

#[tokio::test]
async fn connections_over_the_limit_wait_for_one_to_end() {
    let server = server(Options { max_connections: 1, ..Options::default() }).await;
    let mut first = server.client().await;
    assert_eq!(first.send(crate::http_support::get("/health")).await.status, 200);
    let second = server.get("/health");
    tokio::pin!(second);
    tokio::select! {
        biased;
        reply = &mut second => panic!("served beside the first: {reply:?}"),
        reply = first.send(crate::http_support::get("/health")) => assert_eq!(reply.status, 200),
    }
    drop(first);
    assert_eq!(second.await.status, 200);
}
