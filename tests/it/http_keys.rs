//! Who may come in: keys, and web pages of other origins.

use emberd::engine::mock::Mock;
use emberd::http::{Cors, Keys, Options};
use hyper::Request;
use serde_json::{Value, json};

use crate::http_support::{Reply, Server, get, post, request};

const KEY: &str = "sk-of-a-test";
const PAGE: &str = "http://localhost:3000";

fn keyed() -> Options {
    Options { keys: Keys::default().with([KEY, "another"], "a test").unwrap(), ..Options::default() }
}

fn open_to(origins: &[&str]) -> Options {
    Options { cors: Cors::from(origins.iter().map(|origin| origin.parse().unwrap()).collect::<Vec<_>>()), ..keyed() }
}

async fn server(options: Options) -> Server {
    Server::with(Mock { stop_after: 2, ..Mock::default() }, options, 8).await
}

fn with<B>(mut request: Request<B>, headers: &[(&'static str, &'static str)]) -> Request<B> {
    for (name, value) in headers {
        request.headers_mut().insert(*name, value.parse().unwrap());
    }
    request
}

fn preflight(path: &str, headers: &[(&'static str, &'static str)]) -> Request<http_body_util::Full<bytes::Bytes>> {
    let question = request("OPTIONS", path).header("access-control-request-method", "POST").body(http_body_util::Full::default()).unwrap();
    with(question, headers)
}

fn granted(reply: &Reply) -> bool {
    reply.headers.keys().any(|name| name.as_str().starts_with("access-control-"))
}

#[tokio::test]
async fn a_request_without_a_key_is_refused_on_every_route_but_health() {
    let server = server(keyed()).await;
    let bodies = [post("/v1/responses", "{}"), post("/v1/responses/input_tokens", "{}"), post("/v1/chat/completions", "{}")];
    for request in bodies.into_iter().chain([get("/v1/models"), get("/v1/models/a"), get("/metrics"), get("/openapi.json"), get("/no")]) {
        let path = request.uri().path().to_owned();
        let reply = server.client().await.send(with(request, &[("authorization", "Bearer sk-of-a-tesx")])).await;
        assert_eq!(reply.error(), (401, "invalid_api_key".to_owned(), None), "{path}");
        assert_eq!(reply.header("www-authenticate"), "Bearer realm=\"emberd\"");
        assert!(!reply.text().contains("sk-of"), "{}", reply.text());
    }
    let reply = server.client().await.send(post("/v1/messages", "{}")).await;
    assert_eq!(reply.status, 401);
    assert_eq!(reply.json()["error"]["type"], "authentication_error");
    assert_eq!(server.get("/health").await.json(), json!({"status": "ok"}));
    assert_eq!(server.get("/health?live").await.json(), json!({"status": "alive"}));
}

#[tokio::test]
async fn any_of_the_keys_opens_the_door_in_either_header() {
    let server = server(keyed()).await;
    for headers in [[("authorization", "Bearer sk-of-a-test")], [("x-api-key", "another")]] {
        let reply = server.client().await.send(with(post("/v1/responses", json!({"input": "hi"}).to_string()), &headers)).await;
        assert_eq!(reply.json()["status"], "completed");
        let health = server.client().await.send(with(get("/health"), &headers)).await;
        assert!(health.json()["models"].is_array());
    }
}

#[tokio::test]
async fn a_listed_page_may_ask_and_read_answers_errors_and_streams() {
    let server = server(open_to(&[PAGE, "https://a.example"])).await;
    let asks = [("origin", PAGE), ("access-control-request-headers", "authorization,content-type,x-stainless-os")];
    let reply = server.client().await.send(preflight("/v1/responses", &asks)).await;
    assert_eq!((reply.status.as_u16(), reply.body.len()), (204, 0));
    assert_eq!(reply.header("access-control-allow-origin"), PAGE);
    assert_eq!(reply.header("access-control-allow-methods"), "POST");
    assert_eq!(reply.header("access-control-allow-headers"), "authorization,content-type,x-stainless-os");
    assert_eq!(reply.header("access-control-max-age"), "600");
    assert!(!reply.headers.contains_key("access-control-allow-private-network"));
    let private = [("origin", PAGE), ("access-control-request-private-network", "true")];
    let reply = server.client().await.send(preflight("/v1/responses", &private)).await;
    assert_eq!(reply.header("access-control-allow-private-network"), "true");
    for (body, key, status) in [
        (json!({"input": "hi"}), KEY, 200),
        (json!({"input": "hi", "stream": true}), KEY, 200),
        (json!({}), "none", 401),
        (json!(1), KEY, 400),
    ] {
        let mut asked = with(post("/v1/responses", body.to_string()), &[("origin", PAGE)]);
        asked.headers_mut().insert("x-api-key", key.parse().unwrap());
        let reply = server.client().await.send(asked).await;
        assert_eq!(reply.status, status, "{body}");
        assert_eq!((reply.header("access-control-allow-origin"), reply.header("vary")), (PAGE, "origin"));
        assert!(reply.header("access-control-expose-headers").contains("retry-after"));
        assert!(!reply.headers.contains_key("access-control-allow-credentials"));
    }
}

#[tokio::test]
async fn a_page_that_is_not_listed_is_granted_nothing() {
    let (listed, off) = (server(open_to(&[PAGE])).await, server(keyed()).await);
    for (server, origin) in
        [(&listed, "http://localhost:3001"), (&listed, "null"), (&listed, "http://localhost:3000.evil.example"), (&off, PAGE)]
    {
        let headers = [("origin", origin), ("access-control-request-private-network", "true"), ("x-api-key", KEY)];
        let reply = server.client().await.send(preflight("/v1/responses", &headers)).await;
        assert!(reply.status == 405 && !granted(&reply), "{origin}: {reply:?}");
        let reply = server.client().await.send(with(get("/v1/models"), &headers)).await;
        assert!(reply.status == 200 && !granted(&reply), "{origin}: {reply:?}");
    }
}

#[tokio::test]
async fn a_star_is_for_every_page_but_opens_no_private_network() {
    let server = server(open_to(&["*"])).await;
    let headers = [("origin", "https://b.example"), ("access-control-request-private-network", "true")];
    let reply = server.client().await.send(preflight("/v1/models", &headers)).await;
    assert_eq!((reply.status.as_u16(), reply.header("access-control-allow-origin")), (204, "*"));
    assert!(!reply.headers.contains_key("access-control-allow-private-network"));
}

#[tokio::test]
async fn no_answer_is_longer_than_the_server_allows() {
    let server = Server::with(Mock::default(), Options { max_output_tokens: Some(3), ..Options::default() }, 8).await;
    for asked in [json!({"input": "hi"}), json!({"input": "hi", "max_output_tokens": 100})] {
        let response = server.ask(&asked).await.json();
        assert_eq!((&response["status"], &response["usage"]["output_tokens"]), (&json!("incomplete"), &json!(3)));
        assert_eq!(
            response["max_output_tokens"],
            *asked.get("max_output_tokens").unwrap_or(&Value::Null),
            "what was asked for is repeated"
        );
    }
    let shorter = server.ask(&json!({"input": "hi", "max_output_tokens": 2})).await.json();
    assert_eq!(shorter["usage"]["output_tokens"], 2);
}
