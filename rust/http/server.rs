//! Accepts connections, gives each a task, and ends them all: softly first, then at the deadline.
//!
//! What a request asks for is not looked at here.

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::io;
use std::net::IpAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
#[cfg(unix)]
use tokio::net::UnixListener;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::metrics::Answered;
use super::outbound::Body;
use super::patient::Patient;
use super::{Options, routes};
use crate::models::Models;
use crate::responses::now;

/// After the deadline, this long to write the last events; then connections are cut.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// When accepting fails, mostly for want of descriptors, this long until the next try.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A socket that listens. It is closed when the server begins to drain.
#[derive(Debug)]
pub enum Listener {
    /// On an address.
    Tcp(TcpListener),
    /// On a path: whoever can open it may speak, whatever host the request names.
    #[cfg(unix)]
    Unix(UnixListener),
}

/// How far the server is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Taking requests.
    Serving,
    /// Finishing those in flight.
    Draining,
    /// Failing those in flight.
    Cut,
}

/// What every request may use.
pub(crate) struct App {
    pub(crate) models: Models,
    pub(crate) options: Options,
    pub(crate) phase: watch::Receiver<Phase>,
    pub(crate) answered: Answered,
    pub(crate) started: u64,
    requests: AtomicU64,
}

impl App {
    /// A name for a request, for the logs of both sides: when the server was started, and the request's number.
    pub(crate) fn request_id(&self) -> String {
        format!("req_{:x}_{:x}", self.started, self.requests.fetch_add(1, Ordering::Relaxed))
    }

    /// Waits until answers in flight must end.
    pub(crate) fn cut(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut phase = self.phase.clone();
        async move {
            // A server that is gone without a word has ended its requests just as well.
            let _ = phase.wait_for(|phase| *phase == Phase::Cut).await;
        }
    }
}

/// Where a connection came in.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Local {
    /// At this address of the machine, which the server listens on.
    Address(IpAddr),
    /// At this address of the machine, of which the server listens on every one.
    Any(IpAddr),
    /// Through the file system.
    #[cfg_attr(not(unix), allow(dead_code))] // Nothing listens there on other systems.
    Path,
}

impl Local {
    /// Whether a client that knows no name but this address may mean the server.
    pub(crate) fn is(self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        match self {
            Self::Address(own) => address == own.to_canonical(),
            Self::Any(own) => address == own.to_canonical() || address.is_unspecified(),
            Self::Path => false,
        }
    }
}

/// Serves the models on all listeners until `stop` is ready. Then no connection is accepted any more, answers in flight go on for
/// `options.grace`, what is left ends with `response.failed`, and the connections are closed.
pub async fn serve(listeners: Vec<Listener>, models: Models, options: Options, stop: impl Future<Output = ()>) {
    let grace = options.grace;
    let (phase, receiver) = watch::channel(Phase::Serving);
    let permits = Arc::new(Semaphore::new(options.max_connections.min(Semaphore::MAX_PERMITS)));
    let app =
        Arc::new(App { models, options, phase: receiver, answered: Answered::default(), started: now(), requests: AtomicU64::new(1) });
    let mut acceptors = JoinSet::new();
    for listener in listeners {
        acceptors.spawn(accept(listener, Arc::clone(&app), Arc::clone(&permits)));
    }
    stop.await;
    phase.send_replace(Phase::Draining);
    let mut all = pin!(async { while acceptors.join_next().await.is_some() {} });
    if timeout(grace, &mut all).await.is_err() {
        tracing::warn!(seconds = grace.as_secs(), "answers are still in flight at the deadline; they fail now");
        phase.send_replace(Phase::Cut);
        // Whoever does not take its last words is cut off: dropping the tasks closes their connections.
        let _ = timeout(LAST_WORDS, all).await;
    }
}

/// Waits until no new request is wanted.
async fn drains(phase: &mut watch::Receiver<Phase>) {
    let _ = phase.wait_for(|phase| *phase != Phase::Serving).await;
}

/// Accepts on one listener until the server drains; then waits for its connections.
async fn accept(listener: Listener, app: Arc<App>, permits: Arc<Semaphore>) {
    let mut connections = JoinSet::new();
    let mut phase = app.phase.clone();
    {
        let mut draining = pin!(drains(&mut phase));
        loop {
            let permit = tokio::select! {
                biased;
                () = &mut draining => break,
                Some(_) = connections.join_next() => continue, // Frees what an ended task still holds.
                Ok(permit) = Arc::clone(&permits).acquire_owned() => permit,
            };
            let accepted = loop {
                tokio::select! {
                    biased;
                    () = &mut draining => break None,
                    Some(_) = connections.join_next() => {}
                    accepted = one(&listener) => break Some(accepted),
                }
            };
            match accepted {
                None => break,
                Some(Ok(stream)) => {
                    let app = Arc::clone(&app);
                    connections.spawn(async move {
                        match stream {
                            Stream::Tcp(stream, local) => connection(stream, local, app).await,
                            #[cfg(unix)]
                            Stream::Unix(stream) => connection(stream, Local::Path, app).await,
                        }
                        drop(permit);
                    });
                }
                Some(Err(error)) => {
                    tracing::warn!(%error, "could not accept a connection");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

enum Stream {
    Tcp(tokio::net::TcpStream, Local),
    #[cfg(unix)]
    Unix(tokio::net::UnixStream),
}

async fn one(listener: &Listener) -> io::Result<Stream> {
    match listener {
        Listener::Tcp(listener) => {
            let (stream, _) = listener.accept().await?;
            // An event waits for no other: without this, a small one may be held back for as long as the last is unacknowledged.
            stream.set_nodelay(true)?;
            let local = stream.local_addr()?.ip();
            let any = listener.local_addr()?.ip().is_unspecified();
            Ok(Stream::Tcp(stream, if any { Local::Any(local) } else { Local::Address(local) }))
        }
        #[cfg(unix)]
        Listener::Unix(listener) => Ok(Stream::Unix(listener.accept().await?.0)),
    }
}

/// Speaks HTTP/1 on one connection until it ends.
async fn connection(stream: impl AsyncRead + AsyncWrite + Unpin + 'static, local: Local, app: Arc<App>) {
    let mut phase = app.phase.clone();
    let header_timeout = app.options.header_timeout;
    let stream = Patient::new(stream, app.options.write_timeout);
    let service = service_fn(move |request: Request<Incoming>| {
        let app = Arc::clone(&app);
        async move {
            Ok::<_, Infallible>({
                let uri = request.uri().clone();
                let grant = app.options.cors.grant(request.headers());
                let fault = || routes::fault(uri.path(), app.request_id());
                let mut response = guarded(routes::answer(&app, local, request), fault).await;
                grant.mark(response.headers_mut());
                response
            })
        }
    });
    let mut connection = pin!(
        http1::Builder::new().timer(TokioTimer::new()).header_read_timeout(header_timeout).serve_connection(TokioIo::new(stream), service)
    );
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = drains(&mut phase) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        // A client that left, or spoke something else: nothing that the server could do about.
        tracing::debug!(%error, "a connection ended");
    }
}

/// A panic while a request is answered is that request's failure alone, told by `fault`.
async fn guarded(answer: impl Future<Output = Response<Body>>, fault: impl Fn() -> Response<Body>) -> Response<Body> {
    let mut answer = pin!(answer);
    poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| answer.as_mut().poll(cx))) {
        Ok(poll) => poll,
        // The panic's own message has gone to the log through the hook.
        Err(_) => Poll::Ready(fault()),
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_is_an_answer_of_its_own() {
        for (path, form) in [
            ("/v1/responses", "{\"error\":{"),
            ("/v1/messages", "{\"type\":\"error\","),
            ("/v1/messages/count_tokens", "{\"type\":\"error\","),
        ] {
            let response = guarded(async { panic!("a test's panic") }, || routes::fault(path, "req_1".to_owned())).await;
            assert_eq!((response.status().as_u16(), response.headers()["x-request-id"].to_str().unwrap()), (500, "req_1"));
            assert_eq!(response.headers().contains_key("request-id"), path.starts_with("/v1/messages"));
            let Body::Whole(Some(body)) = response.body() else { panic!("no body") };
            let body = String::from_utf8_lossy(body);
            assert!(body.starts_with(form) && body.contains("(hint: the server's log says more)"), "{body}");
        }
    }
}
