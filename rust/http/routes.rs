//! One request: where it goes, what stands in its way, and its answer.
//!
//! A match over a handful of paths and hyper itself do here what a web framework would: that keeps the body in our hands until the answer is
//! known (so that a refusal is read by the client instead of lost with a reset connection) and adds nothing to the time of the first event.

use std::sync::Arc;
use std::time::Instant;

use hyper::body::Incoming;
use hyper::header::{ALLOW, CACHE_CONTROL, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Method, Request, Response, StatusCode};
use percent_encoding::percent_decode_str;
use serde::Serialize;
use tokio::time::timeout;

use super::inbound::Inbound;
use super::outbound::{self, Body};
use super::server::{App, Local};
use super::sse::Events;
use super::{health, host, inbound, models};
use crate::error::{Code, Error, Result};
use crate::models::{Hosted, Model, beside};
use crate::responses::{self, Arrival, Running};

/// A body up to this many bytes is read where it came in; a longer one takes long enough to hold up other connections.
const INLINE: usize = 128 * 1024;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// How many tokens a request's input is.
#[derive(Serialize)]
struct Counted {
    object: &'static str,
    input_tokens: usize,
}

/// What a path stands for.
enum Resource<'a> {
    Responses,
    InputTokens,
    Models,
    Model(&'a str),
    Health,
}

impl<'a> Resource<'a> {
    fn at(path: &'a str) -> Option<Self> {
        match path {
            "/v1/responses" => Some(Self::Responses),
            "/v1/responses/input_tokens" => Some(Self::InputTokens),
            "/v1/models" => Some(Self::Models),
            "/health" => Some(Self::Health),
            _ => path.strip_prefix("/v1/models/").filter(|id| !id.is_empty()).map(Self::Model),
        }
    }

    fn allows(&self, method: &Method) -> bool {
        match self {
            Self::Responses | Self::InputTokens => method == Method::POST,
            _ => method == Method::GET || method == Method::HEAD,
        }
    }

    fn allowed(&self) -> &'static str {
        match self {
            Self::Responses | Self::InputTokens => "POST",
            _ => "GET, HEAD",
        }
    }
}

/// Answers a request.
pub(crate) async fn answer(app: &App, local: Local, request: Request<Incoming>) -> Response<Body> {
    let arrived = Arrived { at: Instant::now(), time: responses::now() };
    let (parts, body) = request.into_parts();
    let mut body = Inbound::new(body, &parts.headers, app.options.max_body, app.options.body_timeout);
    let mut response = match dispatch(app, local, &parts, &mut body, arrived).await {
        Ok(response) => response,
        Err(error) => outbound::error(&error),
    };
    if !body.discard().await {
        outbound::close(&mut response);
    }
    if let Ok(id) = HeaderValue::try_from(app.request_id()) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

/// When the head of a request was read.
#[derive(Clone, Copy)]
struct Arrived {
    at: Instant,
    /// In seconds since 1970.
    time: u64,
}

async fn dispatch(app: &App, local: Local, parts: &Parts, body: &mut Inbound, arrived: Arrived) -> Result<Response<Body>> {
    host::check(parts, local, &app.options.allowed_hosts)?;
    let path = parts.uri.path();
    let Some(resource) = Resource::at(path) else {
        return Err(Error::new(Code::NotFound, format!("there is no {path:?} here"))
            .hint("the API is under /v1: POST /v1/responses, GET /v1/models"));
    };
    if !resource.allows(&parts.method) {
        let allowed = resource.allowed();
        let error = Error::new(Code::MethodNotAllowed, format!("{} is not for {path}", parts.method)).hint(format!("use {allowed}"));
        let mut response = outbound::error(&error);
        response.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
        return Ok(response);
    }
    match resource {
        Resource::Responses => {
            inbound::json(&parts.headers)?;
            create(app, body, arrived).await
        }
        Resource::InputTokens => {
            inbound::json(&parts.headers)?;
            let (model, request, _) = asked(app, body, arrived).await?;
            let counted = Counted { object: "response.input_tokens", input_tokens: responses::count(model, request).await? };
            Ok(outbound::json(StatusCode::OK, &counted))
        }
        Resource::Models => Ok(outbound::json(StatusCode::OK, &models::list(&app.models))),
        Resource::Model(id) => {
            let id = percent_decode_str(id).decode_utf8_lossy();
            let model = models::one(&app.models, &id).ok_or_else(|| {
                Error::new(Code::ModelNotFound, format!("no model is called {id:?} here"))
                    .at("model")
                    .hint("GET /v1/models lists those that are")
            })?;
            Ok(outbound::json(StatusCode::OK, &model))
        }
        Resource::Health => {
            if parts.uri.query().is_some_and(|query| query.split('&').any(|pair| pair == "live" || pair.starts_with("live="))) {
                return Ok(outbound::json(StatusCode::OK, &health::ALIVE));
            }
            let (status, health) = health::check(&app.models, app.options.stall);
            Ok(outbound::json(status, &health))
        }
    }
}

/// Creates a response: everything about the request is checked before a model is loaded or a place in its queue taken, and everything that can
/// be refused is refused before the first byte of a stream.
async fn create(app: &App, body: &mut Inbound, arrived: Arrived) -> Result<Response<Body>> {
    let (model, request, arrival) = asked(app, body, arrived).await?;
    let stream = request.stream;
    let mut running = Running::start(model, request, arrival, arrived.time, app.options.reasoning_events).await?;
    if stream {
        let events = Events::new(running, app.options.keep_alive, app.cut());
        let body = Body::Events(Box::new(events));
        let mut response = outbound::with(StatusCode::OK, HeaderValue::from_static("text/event-stream"), body);
        let headers = response.headers_mut();
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        headers.insert(ACCEL_BUFFERING, HeaderValue::from_static("no"));
        return Ok(response);
    }
    tokio::select! {
        whole = running.whole() => Ok(outbound::json(StatusCode::OK, whole?)),
        () = app.cut() => Err(going_away()),
    }
}

/// Reads a request and finds its model, loaded.
async fn asked(app: &App, body: &mut Inbound, arrived: Arrived) -> Result<(Arc<Model>, responses::Request, Arrival)> {
    let body = body.read().await?;
    let request = if body.len() <= INLINE {
        responses::Request::read(&body, &app.options.seal)?
    } else {
        let seal = app.options.seal.clone();
        beside(move || responses::Request::read(&body, &seal)).await?
    };
    let resolving = Instant::now();
    let hosted = app.models.find(request.model.as_deref())?;
    let resolve = resolving.elapsed();
    let mut arrival = Arrival { arrived: arrived.at, resolve: Some(resolve), load_wait: None, load_owner: None };
    let model = match hosted.loaded() {
        Some(model) => model,
        None => load(app, &hosted, &mut arrival).await?,
    };
    Ok((model, request, arrival))
}

/// Waits for the model, which goes on loading whether anybody waits or not.
async fn load(app: &App, hosted: &Arc<Hosted>, arrival: &mut Arrival) -> Result<Arc<Model>> {
    let waiting = Instant::now();
    let loading = hosted.load();
    arrival.load_owner = Some(loading.started);
    let most = app.options.load_wait;
    let loaded = tokio::select! {
        loaded = timeout(most, loading.model()) => loaded,
        () = app.cut() => return Err(going_away()),
    };
    arrival.load_wait = Some(waiting.elapsed());
    loaded.map_err(|_| {
        Error::new(Code::ModelLoading, format!("the model is still loading after {} s", most.as_secs())).hint("try again in a moment")
    })?
}

fn going_away() -> Error {
    Error::new(Code::ShuttingDown, "the server is going away").hint("try again")
}
