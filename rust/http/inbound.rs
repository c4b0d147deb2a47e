//! The body of a request: read within bounds of size and time, or thrown away so that the client gets to read why it was refused.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::HeaderMap;
use hyper::body::{Body as _, Incoming};
use hyper::header::{CONTENT_ENCODING, CONTENT_TYPE, EXPECT};
use tokio::time::timeout;

use crate::error::{Code, Error, Result};

/// A body that is too long is read and thrown away up to this many times the limit: a client that still writes would else find the connection
/// reset, and never see the answer.
const DRAIN: u64 = 4;
/// Room made at once for a body whose length is said; a lie costs no more than this.
const ROOM: usize = 1024 * 1024;

/// A request's body.
pub(crate) struct Inbound {
    body: Incoming,
    limit: usize,
    time: Duration,
    /// The client sends nothing before it is told to go on, which reading does.
    waits: bool,
}

impl Inbound {
    pub(crate) fn new(body: Incoming, headers: &HeaderMap, limit: usize, time: Duration) -> Self {
        let waits = headers.get(EXPECT).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"));
        Self { body, limit, time, waits }
    }

    /// All of it.
    ///
    /// # Errors
    /// `body_too_large`, `request_timeout`.
    pub(crate) async fn read(&mut self) -> Result<Bytes> {
        let said = self.body.size_hint().exact().and_then(|length| usize::try_from(length).ok());
        if said.is_some_and(|length| length > self.limit) {
            return Err(self.too_large());
        }
        self.waits = false;
        match timeout(self.time, self.collect(said.unwrap_or(0).min(ROOM))).await {
            Ok(read) => read,
            Err(_) => Err(Error::new(Code::RequestTimeout, format!("the body did not arrive within {} s", self.time.as_secs()))
                .hint("send the whole body at once")),
        }
    }

    async fn collect(&mut self, room: usize) -> Result<Bytes> {
        let mut whole = BytesMut::new();
        while let Some(frame) = self.body.frame().await {
            let frame = frame.map_err(|error| {
                Error::new(Code::InvalidJson, "the body ended early").hint("send as much as the head announces").detail(error.to_string())
            })?;
            let Ok(data) = frame.into_data() else { continue };
            if whole.len() + data.len() > self.limit {
                return Err(self.too_large());
            }
            if whole.is_empty() && self.body.is_end_stream() {
                return Ok(data); // Most bodies come in one piece.
            }
            if whole.is_empty() {
                whole.reserve(room.max(data.len()));
            }
            whole.extend_from_slice(&data);
        }
        Ok(whole.freeze())
    }

    fn too_large(&self) -> Error {
        Error::new(Code::BodyTooLarge, format!("the body is larger than {} bytes", self.limit)).hint("send less, or raise --max-body")
    }

    /// Throws away what has not been read. False when there is more than that is worth: the connection must then be closed.
    pub(crate) async fn discard(mut self) -> bool {
        if self.body.is_end_stream() {
            return true;
        }
        let most = (self.limit as u64).saturating_mul(DRAIN);
        if self.waits || self.body.size_hint().lower() > most {
            return false;
        }
        let drained = timeout(self.time, async {
            let mut left = most;
            while let Some(frame) = self.body.frame().await {
                let length = frame.ok()?.data_ref().map_or(0, Bytes::len) as u64;
                left = left.checked_sub(length)?;
            }
            Some(())
        });
        matches!(drained.await, Ok(Some(())))
    }
}

/// Checks that a body is said to be JSON. A web page may send `text/plain` to any machine without asking it first, but not this.
///
/// # Errors
/// `unsupported_media_type`.
pub(crate) fn json(headers: &HeaderMap) -> Result<()> {
    let refused = |message: String| Error::new(Code::UnsupportedMediaType, message).hint("send JSON with content-type: application/json");
    let Some(value) = headers.get(CONTENT_TYPE) else { return Err(refused("the request has no content type".into())) };
    let value = value.to_str().unwrap_or_default();
    let mut parts = value.split(';').map(str::trim);
    let utf8 = |parameter: &str| match parameter.split_once('=') {
        Some((name, charset)) if name.trim().eq_ignore_ascii_case("charset") => {
            let charset = charset.trim().trim_matches('"');
            ["utf-8", "utf8", "us-ascii"].iter().any(|known| known.eq_ignore_ascii_case(charset))
        }
        _ => true,
    };
    if !parts.next().is_some_and(|kind| kind.eq_ignore_ascii_case("application/json")) || !parts.all(utf8) {
        return Err(refused(format!("the content type is {value:?}")));
    }
    match headers.get(CONTENT_ENCODING) {
        Some(encoding) if !encoding.as_bytes().eq_ignore_ascii_case(b"identity") => {
            Err(Error::new(Code::UnsupportedMediaType, format!("the content encoding is {:?}", encoding.to_str().unwrap_or_default()))
                .hint("send the body as it is"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(value: &'static str) -> Result<()> {
        json(&HeaderMap::from_iter([(CONTENT_TYPE, hyper::header::HeaderValue::from_static(value))]))
    }

    #[test]
    fn json_in_utf8_passes_and_nothing_else() {
        for value in ["application/json", "Application/JSON; charset=utf-8", "application/json;charset=\"UTF-8\"", "application/json; x=y"]
        {
            assert!(kind(value).is_ok(), "{value}");
        }
        for value in ["text/plain", "application/jsonx", "application/x-www-form-urlencoded", "", "application/json; charset=latin1"] {
            assert_eq!(kind(value).unwrap_err().code, Code::UnsupportedMediaType, "{value}");
        }
        assert_eq!(json(&HeaderMap::new()).unwrap_err().code, Code::UnsupportedMediaType);
    }
}
