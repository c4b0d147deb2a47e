//! `emberd serve`: brings the model up, opens the HTTP door, and says how to use it.

use std::fmt::Write as _;
use std::io::Write as _;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::broadcast::error::RecvError;

use crate::config::{Door, Serve};
use crate::error::Result;
use crate::http;
use crate::http::{Cors, Keys, Listener, Options};
use crate::listen::Http;
use crate::models::{Hosted, Models};
use crate::responses::Seal;
use crate::shelf::Display;
use crate::shutdown::Stop;

/// Serves until a signal ends it; the exit code is 0, since a server that was told to stop and did has done what it should.
/// `secrets`: what thoughts are sealed with, and the keys of which a request has to bring one.
pub async fn run(serve: &Serve, listeners: Http, models: Models, secrets: (Seal, Keys), stop: Stop) -> Result<u8> {
    let (seal, keys) = secrets;
    let (door, keyed, cors) = (&serve.door, !keys.is_empty(), Cors::from(serve.door.cors_origins.clone()));
    if cors.is_any() && !keyed {
        tracing::warn!(
            "every web page that a browser on this machine opens can use this server: --cors-origin is *, and no key is asked for"
        );
    }
    let options = Options {
        keys,
        cors,
        max_output_tokens: door.max_output_tokens,
        max_connections: door.max_connections,
        header_timeout: Door::time(door.header_timeout),
        body_timeout: Door::time(door.body_timeout),
        write_timeout: Door::time(door.write_timeout),
        load_wait: Door::time(door.load_timeout),
        max_body: serve.max_body,
        allowed_hosts: serve.allowed_hosts.clone(),
        grace: Duration::from_secs(serve.grace),
        reasoning_events: serve.reasoning_events,
        seal,
        ..Options::default()
    };
    let address = listeners.tcp.local_addr().map(reachable).unwrap_or_default();
    #[cfg(unix)]
    let path = listeners.unix.as_ref().map(|(_, seat)| seat.path().display().to_string());
    #[cfg(not(unix))]
    let path: Option<String> = None;
    tracing::info!(address, path, "listening");
    #[cfg_attr(not(unix), allow(unused_mut))]
    let mut open = vec![Listener::Tcp(listeners.tcp)];
    #[cfg(unix)]
    let _seat = {
        let (unix, seat) = listeners.unix.unzip();
        open.extend(unix.map(Listener::Unix));
        seat // Outlives the door: dropping it removes the socket's name.
    };
    let announce = tokio::spawn(announce(Arc::clone(models.default_model()), serve.lazy, Says { address, path, keyed }));
    tokio::select! {
        () = http::serve(open, models.clone(), options, async { _ = stop.stopped().await }) => {}
        () = stop.hurried() => tracing::warn!("told to stop twice: what is in flight is cut off"),
    }
    announce.abort();
    models.close();
    Ok(0)
}

/// Loads the default model, with its progress on the terminal, and then says that the server is ready.
async fn announce(model: Arc<Hosted>, lazy: bool, says: Says) {
    if !lazy {
        let display = Display::new();
        let mut loading = model.load();
        let ready = loading.model();
        let mut following = true;
        tokio::pin!(ready);
        let outcome = loop {
            tokio::select! {
                biased;
                news = loading.news.recv(), if following => match news {
                    Ok(news) => display.show(&news),
                    Err(RecvError::Lagged(_)) => {} // Newer news follows.
                    Err(RecvError::Closed) => following = false,
                },
                outcome = &mut ready => break outcome,
            }
        };
        if outcome.is_err() {
            // Logged where it happened. The door stays open: the next request tries again.
            return;
        }
    }
    say(&hello(model.id(), &says));
}

/// What is said of the server once it is ready.
struct Says {
    address: String,
    path: Option<String>,
    /// Whether requests need a key.
    keyed: bool,
}

fn hello(model: &str, says: &Says) -> String {
    let Says { address, path, keyed } = says;
    let key = if *keyed { " -H \"authorization: Bearer $EMBERD_API_KEY\"" } else { "" };
    let note = if *keyed { "  # with one of the keys in EMBERD_API_KEY\n" } else { "" };
    let mut text = format!("emberd is ready at http://{address}/v1");
    if let Some(path) = path {
        let _ = write!(text, " and on {path}");
    }
    let _ = write!(
        text,
        "\n\n{note}  curl -N http://{address}/v1/responses -H 'content-type: application/json'{key} \\\n    \
         -d '{{\"model\":\"{model}\",\"input\":\"What is the capital of France?\",\"stream\":true}}'\n\n  \
         emberd chat --url http://{address} 'What is the capital of France?'"
    );
    text
}

/// The ready line is this command's output: scripts wait for it. A closed output is no reason not to serve.
fn say(text: &str) {
    let mut out = std::io::stdout();
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}

/// The address as a program on this machine reaches it.
fn reachable(mut address: SocketAddr) -> String {
    if address.ip().is_unspecified() {
        address.set_ip(if address.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() });
    }
    address.to_string()
}
