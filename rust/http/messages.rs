//! The routes of the Messages API: the same path as a response takes, with the request and the answer in another form.
//!
//! What that form is, is said in [`crate::anthropic`].

use hyper::header::HeaderName;
use hyper::{Response, StatusCode};
use schemars::JsonSchema;
use serde::Serialize;

use super::inbound::Inbound;
use super::outbound::{self, Body};
use super::routes::{Arrived, asked, going_away, streamed};
use super::server::App;
use super::sse::{self, Wire};
use crate::anthropic::{Envelope, Message, Request, Stream};
use crate::error::{Error, Result};
use crate::responses::{self, Event, ReasoningEvents, Running};

/// The header that names a request, as clients of this API look for it.
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
/// What breaks silence.
const PING: &[u8] = b"event: ping\ndata: {\"type\":\"ping\"}\n\n";

/// How many tokens a request's input is.
#[derive(JsonSchema, Serialize)]
#[schemars(rename = "MessageTokens")]
pub(super) struct Counted {
    /// Of the prompt that a model would get.
    input_tokens: usize,
}

/// Whether a path belongs to this API, be there anything at it or not.
pub(super) fn has(path: &str) -> bool {
    path.strip_prefix("/v1/messages").is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// An error in this API's envelope, with the status and the headers that it has everywhere.
pub(super) fn error(error: &Error, id: &str) -> Response<Body> {
    let mut response = outbound::error(error);
    // Strings alone cannot fail to be written.
    let bytes = serde_json::to_vec(&Envelope::of(error, id)).unwrap_or_default();
    *response.body_mut() = Body::Whole(Some(bytes.into()));
    response
}

/// Creates a message.
pub(super) async fn create(app: &App, body: &mut Inbound, arrived: Arrived, id: &str) -> Result<Response<Body>> {
    let read = |body: &[u8]| Request::create(body).map(|Request { asked, stream }| (asked, stream));
    let (model, request, stream, arrival) = asked(app, body, arrived, read).await?;
    let mut running = Running::start(model, request, arrival, arrived.time, ReasoningEvents::Text).await?;
    if stream {
        let stream = Stream::new(&running, id.to_owned())?;
        return Ok(streamed(app, running, Box::new(Named(stream))));
    }
    tokio::select! {
        whole = running.whole() => Ok(outbound::json(StatusCode::OK, &Message::of(whole?))),
        () = app.cut() => Err(going_away()),
    }
}

/// Counts what [`create`] would read.
pub(super) async fn count(app: &App, body: &mut Inbound, arrived: Arrived) -> Result<Response<Body>> {
    let read = |body: &[u8]| Request::count(body).map(|request| (request.asked, ()));
    let (model, request, (), _) = asked(app, body, arrived, read).await?;
    let input_tokens = responses::count(model, request).await?;
    Ok(outbound::json(StatusCode::OK, &Counted { input_tokens }))
}

/// Events under their names.
struct Named(Stream);

impl Wire for Named {
    fn write(&mut self, event: Event<'_>, into: &mut Vec<u8>) {
        self.0.event(event, |event| {
            into.extend_from_slice(b"event: ");
            into.extend_from_slice(event.name().as_bytes());
            into.push(b'\n');
            sse::data(&event, into);
        });
    }

    fn silence(&self) -> &'static [u8] {
        PING
    }
}
