//! The fastest honest HTTP peer: hyper alone, answering every POST with the same bytes as a chunked stream. It reads the request's
//! body, as any server must, and looks at nothing in it.

use crate::{Failure, print_json};
use clap::{Args, ValueEnum};
use http_body_util::BodyExt;
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::json;
use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::net::{TcpListener, TcpStream};

/// What `serve-bare` takes.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Port on the loopback address; 0 takes a free one
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// The answer's bytes: @FILE or FILE
    #[arg(long)]
    body: String,
    /// How the bytes are cut into frames
    #[arg(long, value_enum, default_value_t = Frames::Whole)]
    frames: Frames,
    /// Worker threads; the machine's cores by default
    #[arg(long)]
    threads: Option<usize>,
}

/// How an answer is cut.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Frames {
    /// One frame: the least work that there is
    Whole,
    /// One frame for each event
    Event,
}

/// Runs `serve-bare`: prints `{"address"}` when it listens, and serves until it is ended.
///
/// # Errors
/// When the file cannot be read or the port not be bound.
pub(crate) fn run(options: Options) -> Result<(), Failure> {
    let path = PathBuf::from(options.body.strip_prefix('@').unwrap_or(&options.body));
    let bytes = std::fs::read(&path).map_err(|error| format!("cannot read '{}': {error}", path.display()))?;
    let frames: Arc<[Bytes]> = cut(bytes.into(), options.frames).into();
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if let Some(threads) = options.threads {
        builder.worker_threads(threads);
    }
    builder.enable_all().build()?.block_on(async {
        let listener = TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, options.port))).await?;
        print_json(&json!({"address": listener.local_addr()?.to_string()}))?;
        loop {
            let (stream, _) = listener.accept().await?;
            stream.set_nodelay(true)?;
            tokio::spawn(serve(stream, Arc::clone(&frames)));
        }
    })
}

async fn serve(stream: TcpStream, frames: Arc<[Bytes]>) {
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        let frames = Arc::clone(&frames);
        async move {
            request.into_body().collect().await?;
            let mut response = Response::new(Fixed { frames, next: 0 });
            response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
            Ok::<_, hyper::Error>(response)
        }
    });
    // A client that leaves is no fault of a peer: the generator tells when an answer was cut short.
    let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

/// The bytes as frames. An event ends with an empty line.
fn cut(mut bytes: Bytes, frames: Frames) -> Vec<Bytes> {
    match frames {
        Frames::Whole => vec![bytes],
        Frames::Event => {
            let mut parts = Vec::new();
            while let Some(end) = memchr::memmem::find(&bytes, b"\n\n") {
                parts.push(bytes.split_to(end + 2));
            }
            if !bytes.is_empty() {
                parts.push(bytes);
            }
            parts
        }
    }
}

/// A body of fixed frames. Its length is not told, so that it is sent chunked like a stream.
struct Fixed {
    frames: Arc<[Bytes]>,
    next: usize,
}

impl Body for Fixed {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let frame = self.frames.get(self.next).cloned();
        self.next += 1;
        Poll::Ready(frame.map(|bytes| Ok(Frame::data(bytes))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_end_with_their_events() {
        let bytes = Bytes::from_static(b"event: a\ndata: 1\n\ndata: 2\n\nrest");
        assert_eq!(cut(bytes.clone(), Frames::Event), ["event: a\ndata: 1\n\n", "data: 2\n\n", "rest"]);
        assert_eq!(cut(bytes.clone(), Frames::Whole), [bytes]);
    }
}
