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
use schemars::JsonSchema;
use serde::Serialize;
use tokio::time::timeout;

use super::inbound::Inbound;
use super::outbound::{self, Body};
use super::server::{App, Local};
use super::sse::{self, Events, Named, Wire};
use super::{completions, health, host, inbound, messages, metrics, models, openapi};
use crate::error::{Code, Error, Result};
use crate::metrics::Door;
use crate::models::{Hosted, Model, beside};
use crate::responses::{self, Arrival, Running};

/// A body up to this many bytes is read where it came in; a longer one takes long enough to hold up other connections.
const INLINE: usize = 128 * 1024;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// How many tokens a request's input is.
#[derive(JsonSchema, Serialize)]
#[schemars(rename = "InputTokens")]
pub(super) struct Counted {
    #[schemars(extend("const" = "response.input_tokens"))]
    object: &'static str,
    /// Of the prompt that a model would get.
    input_tokens: usize,
}

/// What a path stands for.
enum Resource<'a> {
    Responses,
    InputTokens,
    ChatCompletions,
    Messages,
    CountTokens,
    Models,
    Model(&'a str),
    Health,
    Metrics,
    OpenApi,
}

/// What stands for paths that are none, in counts.
const NOWHERE: &str = "other";

impl<'a> Resource<'a> {
    /// All of them.
    const ALL: [Resource<'static>; 10] = [
        Resource::Responses,
        Resource::InputTokens,
        Resource::ChatCompletions,
        Resource::Messages,
        Resource::CountTokens,
        Resource::Models,
        Resource::Model(""),
        Resource::Health,
        Resource::Metrics,
        Resource::OpenApi,
    ];

    /// Its path, as the OpenAPI document and the counts have it.
    const fn template(&self) -> &'static str {
        match self {
            Self::Responses => "/v1/responses",
            Self::InputTokens => "/v1/responses/input_tokens",
            Self::ChatCompletions => "/v1/chat/completions",
            Self::Messages => "/v1/messages",
            Self::CountTokens => "/v1/messages/count_tokens",
            Self::Models => "/v1/models",
            Self::Model(_) => "/v1/models/{id}",
            Self::Health => "/health",
            Self::Metrics => "/metrics",
            Self::OpenApi => "/openapi.json",
        }
    }

    fn at(path: &'a str) -> Option<Self> {
        let fixed = Self::ALL.into_iter().find(|resource| resource.template() == path);
        fixed.filter(|resource| !matches!(resource, Self::Model(_))).or_else(|| {
            // The names of some models have slashes in them.
            path.strip_prefix("/v1/models/").filter(|id| !id.is_empty()).map(Self::Model)
        })
    }

    fn allows(&self, method: &Method) -> bool {
        match self {
            Self::Responses | Self::InputTokens | Self::ChatCompletions | Self::Messages | Self::CountTokens => method == Method::POST,
            _ => method == Method::GET || method == Method::HEAD,
        }
    }

    fn allowed(&self) -> &'static str {
        match self {
            Self::Responses | Self::InputTokens | Self::ChatCompletions | Self::Messages | Self::CountTokens => "POST",
            _ => "GET, HEAD",
        }
    }
}

/// Answers a request.
pub(crate) async fn answer(app: &App, local: Local, request: Request<Incoming>) -> Response<Body> {
    let arrived = Arrived { at: Instant::now(), time: responses::now() };
    let (parts, body) = request.into_parts();
    let mut body = Inbound::new(body, &parts.headers, app.options.max_body, app.options.body_timeout);
    let id = app.request_id();
    let mut response = match dispatch(app, local, &parts, &mut body, arrived, &id).await {
        Ok(response) => response,
        Err(error) => refused(parts.uri.path(), &error, &id),
    };
    if !body.discard().await {
        outbound::close(&mut response);
    }
    let route = Resource::at(parts.uri.path()).map_or(NOWHERE, |resource| resource.template());
    app.answered.count(route, response.status().as_u16());
    named(response, parts.uri.path(), id)
}

/// What is told where the answer to a request to this path came to a panic.
pub(super) fn fault(path: &str, id: String) -> Response<Body> {
    let error = Error::new(Code::ServerError, "a fault in the server").hint("the server's log says more");
    named(refused(path, &error, &id), path, id)
}

/// The response with the request's name, for the logs of both sides.
fn named(mut response: Response<Body>, path: &str, id: String) -> Response<Body> {
    if let Ok(id) = HeaderValue::try_from(id) {
        if messages::has(path) {
            response.headers_mut().insert(messages::REQUEST_ID, id.clone());
        }
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

/// An error in the form of the API that the path belongs to.
fn refused(path: &str, error: &Error, id: &str) -> Response<Body> {
    if messages::has(path) { messages::error(error, id) } else { outbound::error(error) }
}

/// When the head of a request was read.
#[derive(Clone, Copy)]
pub(super) struct Arrived {
    at: Instant,
    /// In seconds since 1970.
    pub(super) time: u64,
}

async fn dispatch(app: &App, local: Local, parts: &Parts, body: &mut Inbound, arrived: Arrived, id: &str) -> Result<Response<Body>> {
    host::check(parts, local, &app.options.allowed_hosts)?;
    let path = parts.uri.path();
    let resource = Resource::at(path);
    if parts.method == Method::OPTIONS {
        // A browser asks without a key whether a page may send one.
        let methods = resource.as_ref().map_or("GET, HEAD, POST", Resource::allowed);
        if let Some(response) = app.options.cors.grant(&parts.headers).preflight(parts, methods) {
            return Ok(response);
        }
    }
    let known = match app.options.keys.check(&parts.headers) {
        // Those who supervise servers have no keys.
        Err(error) if !matches!(resource, Some(Resource::Health)) => return Err(error),
        known => known.is_ok(),
    };
    let Some(resource) = resource else {
        return Err(Error::new(Code::NotFound, format!("there is no {path:?} here"))
            .hint("the API is under /v1: POST /v1/responses, GET /v1/models"));
    };
    if !resource.allows(&parts.method) {
        let allowed = resource.allowed();
        let error = Error::new(Code::MethodNotAllowed, format!("{} is not for {path}", parts.method)).hint(format!("use {allowed}"));
        let mut response = refused(path, &error, id);
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
            let (model, request, (), _) = asked(app, body, arrived, plain(app)).await?;
            let counted = Counted { object: "response.input_tokens", input_tokens: responses::count(model, request).await? };
            Ok(outbound::json(StatusCode::OK, &counted))
        }
        Resource::ChatCompletions => {
            inbound::json(&parts.headers)?;
            completions::create(app, body, arrived).await
        }
        Resource::Messages => {
            inbound::json(&parts.headers)?;
            messages::create(app, body, arrived, id).await
        }
        Resource::CountTokens => {
            inbound::json(&parts.headers)?;
            messages::count(app, body, arrived).await
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
            Ok(outbound::json(status, &if known { health } else { health.in_public() }))
        }
        Resource::Metrics => {
            let page = metrics::page(&app.models, &app.answered, app.started);
            Ok(outbound::with(StatusCode::OK, HeaderValue::from_static(metrics::TYPE), Body::Whole(Some(page.into()))))
        }
        Resource::OpenApi => {
            Ok(outbound::with(StatusCode::OK, HeaderValue::from_static("application/json"), Body::Whole(Some(openapi::document()))))
        }
    }
}

/// Creates a response: everything about the request is checked before a model is loaded or a place in its queue taken, and everything that can
/// be refused is refused before the first byte of a stream.
async fn create(app: &App, body: &mut Inbound, arrived: Arrived) -> Result<Response<Body>> {
    let (model, request, (), arrival) = asked(app, body, arrived, plain(app)).await?;
    let stream = request.stream;
    let mut running = Running::start(model, request, arrival, arrived.time, app.options.reasoning_events).await?;
    if stream {
        return Ok(streamed(app, running, Box::new(Named)));
    }
    tokio::select! {
        whole = running.whole() => Ok(outbound::json(StatusCode::OK, whole?)),
        () = app.cut() => Err(going_away()),
    }
}

/// An answer as a stream of events in this form.
pub(super) fn streamed(app: &App, running: Running, wire: Box<dyn Wire>) -> Response<Body> {
    let body = Body::Events(Box::new(Events::new(running, wire, app.options.keep_alive, app.cut())));
    let mut response = outbound::with(StatusCode::OK, HeaderValue::from_static(sse::TYPE), body);
    let headers = response.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(ACCEL_BUFFERING, HeaderValue::from_static("no"));
    response
}

/// Reads a request of the Responses API.
fn plain(app: &App) -> impl FnOnce(&[u8]) -> Result<(responses::Request, ())> + Send + 'static {
    let seal = app.options.seal.clone();
    move |body| Ok((responses::Request::read(body, &seal)?, ()))
}

/// Reads a request, in the form that `read` knows, and finds its model, loaded. What `read` gives besides is given back.
pub(super) async fn asked<T: Send + 'static>(
    app: &App,
    body: &mut Inbound,
    arrived: Arrived,
    read: impl FnOnce(&[u8]) -> Result<(responses::Request, T)> + Send + 'static,
) -> Result<(Arc<Model>, responses::Request, T, Arrival)> {
    let body = body.read().await?;
    let (mut request, besides) = if body.len() <= INLINE { read(&body)? } else { beside(move || read(&body)).await? };
    let resolving = Instant::now();
    let hosted = app.models.find(request.model.as_deref())?;
    let resolve = resolving.elapsed();
    let mut arrival = Arrival { arrived: arrived.at, resolve: Some(resolve), load_wait: None, load_owner: None };
    let model = match hosted.loaded() {
        Some(model) => model,
        None => {
            // What is wrong with the request is no reason to load a model.
            responses::check(&request).await?;
            load(app, &hosted, &mut arrival).await?
        }
    };
    request.most_tokens = app.options.max_output_tokens;
    Ok((model, request, besides, arrival))
}

/// Waits for the model, which goes on loading whether anybody waits or not.
async fn load(app: &App, hosted: &Arc<Hosted>, arrival: &mut Arrival) -> Result<Arc<Model>> {
    let waiting = Instant::now();
    let mut flight = hosted.flight(Door::Http);
    let loading = hosted.load();
    arrival.load_owner = Some(loading.started);
    let most = app.options.load_wait;
    let loaded = tokio::select! {
        loaded = timeout(most, loading.model()) => loaded,
        () = app.cut() => Ok(Err(going_away())),
    };
    arrival.load_wait = Some(waiting.elapsed());
    let loaded = loaded.unwrap_or_else(|_| {
        let error = Error::new(Code::ModelLoading, format!("the model is still loading after {} s", most.as_secs()));
        Err(error.hint("try again in a moment"))
    });
    match &loaded {
        Ok(_) => flight.hand_over(),
        Err(error) => flight.fail(error),
    }
    loaded
}

pub(super) fn going_away() -> Error {
    Error::new(Code::ShuttingDown, "the server is going away").hint("try again")
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn every_route_is_in_the_document_of_the_api_with_its_methods_and_no_other_is() {
        let document: Value = serde_json::from_slice(&openapi::document()).unwrap();
        let mut documented: Vec<&str> = document["paths"].as_object().unwrap().keys().map(String::as_str).collect();
        let mut known = Resource::ALL.map(|resource| resource.template());
        documented.sort_unstable();
        known.sort_unstable();
        assert_eq!(documented, known);
        for template in known {
            let path = template.replace("{id}", "a/b");
            let resource = Resource::at(&path).unwrap();
            assert_eq!(resource.template(), template);
            for method in [Method::GET, Method::POST, Method::PUT, Method::DELETE, Method::PATCH] {
                let told = document["paths"][template].get(method.as_str().to_lowercase()).is_some();
                assert_eq!(resource.allows(&method), told, "{method} {template}");
                assert_eq!(resource.allowed().split(", ").any(|allowed| allowed == method.as_str()), told, "{method} {template}");
            }
        }
        assert!(Resource::at("/v1/models/{id}").is_some_and(|model| matches!(model, Resource::Model("{id}"))));
    }
}
