//! Which web pages may read answers (CORS): none, unless their origins are listed. Cookies and the like are allowed to none of them.
//!
//! What a page may ask for is the routes' business.

use std::str::FromStr;
use std::sync::Arc;

use hyper::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_EXPOSE_HEADERS,
    ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS, ACCESS_CONTROL_REQUEST_METHOD, HeaderMap, HeaderName, HeaderValue, ORIGIN,
    VARY,
};
use hyper::http::request::Parts;
use hyper::{Method, Response, StatusCode};

use super::outbound::Body;

const ALLOW_PRIVATE_NETWORK: HeaderName = HeaderName::from_static("access-control-allow-private-network");
const REQUEST_PRIVATE_NETWORK: HeaderName = HeaderName::from_static("access-control-request-private-network");
/// The headers of answers that a page may read.
const EXPOSED: HeaderValue =
    HeaderValue::from_static("x-request-id, request-id, retry-after, www-authenticate, x-session-cache, x-cached-tokens");
/// For how many seconds a browser may remember what it was told.
const MAX_AGE: HeaderValue = HeaderValue::from_static("600");
/// What the answer to a preflight depends on.
const PREFLIGHT_VARY: HeaderValue = HeaderValue::from_static("access-control-request-method, access-control-request-headers");
/// What a user writes who means every page there is.
const ANY: &str = "*";

/// Where a web page comes from: scheme, host and port, as a browser tells them; or `*`, any place at all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin(String);

impl Origin {
    fn is_any(&self) -> bool {
        self.0 == ANY
    }
}

impl FromStr for Origin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == ANY {
            return Ok(Self(ANY.to_owned()));
        }
        let text = text.strip_suffix('/').unwrap_or(text).to_ascii_lowercase();
        let wrong = || "it is no origin, such as http://localhost:3000".to_owned();
        let (scheme, host) = text.split_once("://").ok_or_else(wrong)?;
        let plain = |text: &str, more: &[u8]| {
            !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || more.contains(&byte))
        };
        if !plain(scheme, b"+-.") || !plain(host, b".-_:[]") {
            return Err(wrong());
        }
        // A browser does not tell the port that the scheme has anyway.
        let host = match scheme {
            "http" => host.strip_suffix(":80").unwrap_or(host),
            "https" => host.strip_suffix(":443").unwrap_or(host),
            _ => host,
        };
        Ok(Self(format!("{scheme}://{host}")))
    }
}

/// The origins that are listed.
#[derive(Debug, Clone, Default)]
pub struct Cors(Arc<[Origin]>);

impl From<Vec<Origin>> for Cors {
    fn from(origins: Vec<Origin>) -> Self {
        Self(origins.into())
    }
}

impl Cors {
    /// Whether every page there is may read answers.
    #[must_use]
    pub fn is_any(&self) -> bool {
        self.0.iter().any(Origin::is_any)
    }

    /// What the page is granted that a request comes from.
    pub(crate) fn grant(&self, headers: &HeaderMap) -> Grant {
        let mut brought = headers.get_all(ORIGIN).iter();
        let origin = match (brought.next(), brought.next()) {
            (Some(origin), None) if !self.0.is_empty() => Some(origin),
            _ => None,
        };
        let listed = origin.filter(|origin| self.0.iter().any(|known| known.0.as_bytes().eq_ignore_ascii_case(origin.as_bytes())));
        let any = self.is_any();
        let allowed = match origin {
            Some(_) if any => Some(HeaderValue::from_static(ANY)),
            _ => listed.cloned(),
        };
        Grant { allowed, listed: listed.is_some(), varies: !any && !self.0.is_empty() }
    }
}

/// What one request's page is granted.
pub(crate) struct Grant {
    /// Whom the answer is for; nothing for a page that is not listed, and for what is no page.
    allowed: Option<HeaderValue>,
    /// Whether the page is listed by name.
    listed: bool,
    /// Whether another page would be told something else.
    varies: bool,
}

impl Grant {
    /// Says in the head of an answer who may read it.
    pub(crate) fn mark(&self, headers: &mut HeaderMap) {
        if self.varies {
            headers.append(VARY, HeaderValue::from_static("origin"));
        }
        if let Some(allowed) = &self.allowed {
            headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, allowed.clone());
            headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
        }
    }

    /// The answer to a browser that asks before it sends what a page wants to send; `None` where this is no such question, or none of a listed page's.
    /// `methods`: those of the resource.
    pub(crate) fn preflight(&self, parts: &Parts, methods: &'static str) -> Option<Response<Body>> {
        let asks = parts.method == Method::OPTIONS && parts.headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD);
        if !asks || self.allowed.is_none() {
            return None;
        }
        let mut response = Response::new(Body::Whole(None));
        *response.status_mut() = StatusCode::NO_CONTENT;
        let headers = response.headers_mut();
        headers.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static(methods));
        // Clients send headers of their own (x-stainless-…, anthropic-…), and none of them does anything that would have to be kept from a page.
        if let Some(wanted) = parts.headers.get(ACCESS_CONTROL_REQUEST_HEADERS) {
            headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, wanted.clone());
        }
        headers.insert(ACCESS_CONTROL_MAX_AGE, MAX_AGE);
        headers.append(VARY, PREFLIGHT_VARY);
        if self.listed && parts.headers.get(REQUEST_PRIVATE_NETWORK).is_some_and(|value| value == "true") {
            headers.insert(ALLOW_PRIVATE_NETWORK, HeaderValue::from_static("true"));
        }
        Some(response)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_is_written_as_browsers_write_it() {
        for (given, meant) in [
            ("http://localhost:3000", "http://localhost:3000"),
            ("HTTP://LocalHost:80/", "http://localhost"),
            ("https://a.example:443", "https://a.example"),
            ("https://a.example:80", "https://a.example:80"),
            ("http://[::1]:5173", "http://[::1]:5173"),
            ("chrome-extension://abcdef", "chrome-extension://abcdef"),
            ("*", "*"),
        ] {
            assert_eq!(given.parse::<Origin>(), Ok(Origin(meant.to_owned())), "{given}");
        }
        for wrong in ["", "null", "localhost:3000", "http://", "http://a/b", "http://a?b", "http://a b", "http://*.a.example", "**"] {
            assert!(wrong.parse::<Origin>().is_err(), "{wrong}");
        }
    }
}
