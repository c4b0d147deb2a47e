//! `emberd chat`: talks to a running server and streams the answer to the terminal.
//!
//! A client of the HTTP door like any other: it knows the address, the request and the events it shows, and nothing of the server's inside.

use std::io::{BufRead, IsTerminal, Write};
use std::path::Path;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::Uri;
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::HeaderValue;
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use tokio::net::TcpStream;

use crate::config::{self, Chat};
use crate::error::{Code, Error, Result};

/// The longest event that is read; longer ones come from something else than a Responses server.
const MAX_EVENT: usize = 16 * 1024 * 1024;

#[derive(Serialize)]
struct Ask<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    instructions: Option<&'a str>,
    input: &'a [Said],
    stream: bool,
    store: bool,
    max_output_tokens: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    temperature: Option<f32>,
}

#[derive(Serialize)]
struct Said {
    role: &'static str,
    content: String,
}

/// The parts of events that are shown; everything else passes by.
#[derive(Deserialize)]
#[serde(tag = "type")]
enum Event {
    #[serde(rename = "response.output_text.delta")]
    Delta { delta: String },
    #[serde(rename = "response.completed")]
    Completed,
    #[serde(rename = "response.incomplete")]
    Incomplete,
    #[serde(rename = "response.failed")]
    Failed { response: Failed },
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
struct Failed {
    error: Option<Fault>,
}

#[derive(Deserialize)]
struct Envelope {
    error: Fault,
}

#[derive(Deserialize)]
struct Fault {
    message: String,
}

/// Runs the command: one question from the arguments, or a conversation from standard input. The exit code.
///
/// # Errors
/// A server that cannot be reached, or that refuses.
pub async fn run(chat: &Chat) -> Result<u8> {
    let mut said = Vec::new();
    if !chat.prompt.is_empty() {
        say(chat, &mut said, chat.prompt.join(" ")).await?;
        return Ok(0);
    }
    let terminal = std::io::stdin().is_terminal();
    loop {
        if terminal {
            let _ = write!(std::io::stderr(), "> ");
        }
        // Reading blocks this thread, which has nothing else to do meanwhile.
        let mut line = Vec::new();
        let read = std::io::stdin()
            .lock()
            .read_until(b'\n', &mut line)
            .map_err(|error| Error::io(Code::ServerError, "read", Path::new("standard input"), &error))?;
        if read == 0 {
            return Ok(0);
        }
        let line = String::from_utf8_lossy(&line).trim().to_owned();
        if line.is_empty() {
            continue;
        }
        match say(chat, &mut said, line).await {
            // A person can say it again in another way; a script should see that it failed.
            Err(error) if terminal => {
                said.pop();
                let _ = writeln!(std::io::stderr(), "error: {error}");
            }
            outcome => outcome?,
        }
    }
}

async fn say(chat: &Chat, said: &mut Vec<Said>, text: String) -> Result<()> {
    said.push(Said { role: "user", content: text });
    let ask = Ask {
        model: chat.model.as_deref(),
        instructions: chat.system.as_deref(),
        input: said,
        stream: true,
        store: false,
        max_output_tokens: chat.max_tokens,
        temperature: chat.temperature,
    };
    let body = serde_json::to_vec(&ask).map_err(|error| Error::new(Code::InvalidValue, format!("could not write the request: {error}")))?;
    let answer = stream(&chat.url, body).await?;
    said.push(Said { role: "assistant", content: answer });
    Ok(())
}

async fn connect(url: &str) -> Result<(SendRequest<Full<Bytes>>, String, String)> {
    let wrong = |why: &str| {
        Error::new(Code::InvalidValue, format!("{url} is no address of a server: {why}")).hint("give --url http://127.0.0.1:8420")
    };
    let uri: Uri = url.parse().map_err(|error| wrong(&format!("{error}")))?;
    if uri.scheme_str() != Some("http") {
        return Err(wrong("it does not begin with http://"));
    }
    let authority = uri.authority().ok_or_else(|| wrong("it has no host"))?;
    let address = (authority.host().trim_matches(['[', ']']).to_owned(), authority.port_u16().unwrap_or(80));
    let unreachable = |error: &dyn std::fmt::Display| {
        Error::new(Code::ServerError, format!("could not reach {url}: {error}")).hint("start a server with emberd serve, or give --url")
    };
    let stream = TcpStream::connect(address).await.map_err(|error| unreachable(&error))?;
    let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(|error| unreachable(&error))?;
    tokio::spawn(connection);
    let base = uri.path().trim_end_matches('/');
    let path = format!("{}/responses", if base.ends_with("/v1") { base.to_owned() } else { format!("{base}/v1") });
    Ok((sender, authority.to_string(), path))
}

async fn stream(url: &str, body: Vec<u8>) -> Result<String> {
    let lost = |error: hyper::Error| Error::new(Code::ServerError, format!("the connection to {url} broke: {error}"));
    let (mut sender, host, path) = connect(url).await?;
    let request =
        hyper::Request::post(path).header("host", host).header("content-type", "application/json").header("accept", "text/event-stream");
    let request = match config::own_key() {
        Some(key) => request.header("authorization", bearer(&key)?),
        None => request,
    };
    let request = request
        .body(Full::new(Bytes::from(body)))
        .map_err(|error| Error::new(Code::InvalidValue, format!("could not write the request: {error}")))?;
    let response = sender.send_request(request).await.map_err(lost)?;
    if !response.status().is_success() {
        let status = response.status();
        let body = response.into_body().collect().await.map_err(lost)?.to_bytes();
        let message = serde_json::from_slice(&body).map_or_else(|_| status.to_string(), |envelope: Envelope| envelope.error.message);
        return Err(Error::new(Code::ServerError, message));
    }
    show(response.into_body(), url).await
}

/// The key as the header carries it.
fn bearer(key: &str) -> Result<HeaderValue> {
    let mut value = HeaderValue::try_from(format!("Bearer {key}"))
        .map_err(|_| Error::new(Code::InvalidValue, "EMBERD_API_KEY has characters that no header can carry"))?;
    value.set_sensitive(true);
    Ok(value)
}

async fn show(mut body: Incoming, url: &str) -> Result<String> {
    let mut answer = String::new();
    let mut held: Vec<u8> = Vec::new();
    let mut out = std::io::stdout();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| Error::new(Code::ServerError, format!("the connection to {url} broke: {error}")))?;
        let Ok(data) = frame.into_data() else { continue };
        held.extend_from_slice(&data);
        if held.len() > MAX_EVENT {
            return Err(Error::new(Code::ServerError, format!("{url} sent {} bytes without an event", held.len())));
        }
        while let Some(at) = memchr::memchr(b'\n', &held) {
            let line: Vec<u8> = held.drain(..=at).collect();
            let Some(data) = line.strip_prefix(b"data:") else { continue };
            match serde_json::from_slice(data) {
                Ok(Event::Delta { delta }) => {
                    answer.push_str(&delta);
                    let _ = out.write_all(delta.as_bytes()).and_then(|()| out.flush());
                }
                Ok(Event::Completed | Event::Incomplete) => {
                    let _ = writeln!(out);
                    return Ok(answer);
                }
                Ok(Event::Failed { response }) => {
                    let _ = writeln!(out);
                    return Err(Error::new(
                        Code::ServerError,
                        response.error.map_or_else(|| "the answer failed".to_owned(), |fault| fault.message),
                    ));
                }
                Ok(Event::Other) | Err(_) => {} // Other events, and the final [DONE].
            }
        }
    }
    Err(Error::new(Code::ServerError, format!("{url} ended the stream in the middle of an answer")))
}
