//! The worker door: one model behind a Unix socket, newline-delimited JSON, shared by all programs of a user, gone by itself when idle.
//!
//! [`message`] has the wire types, [`frame`] cuts a byte stream into lines, [`connection`] serves one client, [`about`] tells who looks what is going
//! on, [`idle`] decides when nobody needs the worker any more. Nothing is loaded before a client asks for it.

mod about;
mod connection;
mod frame;
mod idle;
pub mod message;

use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixListener;
use tokio::task::JoinSet;

pub use connection::Options;
pub use frame::{Frames, Line};
pub use idle::Idle;
pub use message::{Event, Reply, Request};

use crate::models::Hosted;
use crate::shutdown::{Reason, Stop};

/// Accepting is tried again after this long when the process has no descriptor left.
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);

/// Serves the socket until a client, a signal or idleness stops it; connections end with it.
#[cfg(unix)]
pub async fn serve(listener: UnixListener, model: Arc<Hosted>, options: Options, idle_window: Duration, stop: Stop) -> Reason {
    let idle = Idle::new(idle_window);
    let options = Arc::new(options);
    let about = about::About::new();
    let mut connections = JoinSet::new();
    let reason = loop {
        tokio::select! {
            biased;
            reason = stop.stopped() => break reason,
            () = idle.over() => {
                stop.stop(Reason::Idle);
            }
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    let (model, options, guest) = (Arc::clone(&model), Arc::clone(&options), about.guest());
                    connections.spawn(connection::serve(stream, model, options, guest, idle.clone(), stop.clone()));
                }
                Err(error) => {
                    tracing::warn!(%error, "could not accept a connection");
                    tokio::time::sleep(ACCEPT_AGAIN).await;
                }
            },
            Some(ended) = connections.join_next() => {
                if let Err(error) = ended {
                    tracing::error!(%error, "a connection ended by a fault");
                }
            }
        }
    };
    connections.shutdown().await;
    reason
}
