//! Answers in one piece, and what all answers have in common: the body's type, and the form of errors.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Frame, SizeHint};
use hyper::header::{CONNECTION, CONTENT_TYPE, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use hyper::{Response, StatusCode};
use schemars::JsonSchema;
use serde::Serialize;

use super::sse::Events;
use crate::error::{Code, Error};
use crate::linger;
use crate::responses::{log, told};

/// The body of an answer.
pub(crate) enum Body {
    /// In one piece.
    Whole(Option<Bytes>),
    /// Events as they come.
    Events(Box<Events>),
}

impl Drop for Body {
    /// The answer is over, and a client that waited for it may ask again at once.
    fn drop(&mut self) {
        linger::touch();
    }
}

impl hyper::body::Body for Body {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.get_mut() {
            Self::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Events(events) => events.poll_bytes(cx).map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(bytes) => bytes.is_none(),
            Self::Events(events) => events.over(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            Self::Events(_) => SizeHint::default(),
        }
    }
}

/// JSON with a status.
pub(crate) fn json(status: StatusCode, value: &impl Serialize) -> Response<Body> {
    match serde_json::to_vec(value) {
        Ok(bytes) => with(status, HeaderValue::from_static("application/json"), Body::Whole(Some(bytes.into()))),
        Err(fault) => error(&Error::new(Code::ServerError, "the answer could not be written").detail(fault.to_string())),
    }
}

/// A body with its status and type.
pub(crate) fn with(status: StatusCode, kind: HeaderValue, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}

/// An error as clients of the API know it.
#[derive(JsonSchema, Serialize)]
#[schemars(rename = "Error")]
pub(crate) struct Envelope<'a> {
    error: Inner<'a>,
}

impl<'a> Envelope<'a> {
    pub(crate) fn of(error: &'a Error) -> Self {
        let row = error.code.row();
        Self { error: Inner { message: told(error), r#type: row.kind, param: error.param.as_deref(), code: row.name } }
    }
}

#[derive(JsonSchema, Serialize)]
#[schemars(rename = "ErrorDetail")]
struct Inner<'a> {
    /// What happened and what to do.
    message: String,
    #[schemars(extend("enum" = kinds()))]
    r#type: &'static str,
    /// The field at fault: `input[2].content[0].type`.
    param: Option<&'a str>,
    #[schemars(extend("enum" = names()))]
    code: &'static str,
}

/// All codes of errors, and all their types, as the document of the API lists them.
fn names() -> Vec<&'static str> {
    Code::ALL.iter().map(|code| code.row().name).collect()
}

fn kinds() -> BTreeSet<&'static str> {
    Code::ALL.iter().map(|code| code.row().kind).collect()
}

/// An error in the envelope that clients of the API know; the whole of it goes to the log.
pub(crate) fn error(error: &Error) -> Response<Body> {
    let row = error.code.row();
    log(error);
    // Strings alone cannot fail to be written.
    let bytes = serde_json::to_vec(&Envelope::of(error)).unwrap_or_default();
    let status = StatusCode::from_u16(row.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = with(status, HeaderValue::from_static("application/json"), Body::Whole(Some(bytes.into())));
    let seconds = match error.code {
        Code::QueueFull | Code::ShuttingDown => Some("1"),
        Code::ModelLoading => Some("5"),
        _ => None,
    };
    if let Some(seconds) = seconds {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static(seconds));
    }
    if error.code == Code::InvalidApiKey {
        response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"emberd\""));
    }
    if matches!(error.code, Code::ShuttingDown | Code::RequestTimeout) {
        close(&mut response);
    }
    response
}

/// Says that the connection ends with this answer.
pub(crate) fn close(response: &mut Response<Body>) {
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
}
