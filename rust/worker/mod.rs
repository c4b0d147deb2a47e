//! The worker door: one model behind a local socket, newline-delimited JSON, shared by all programs of a user, gone by itself when idle.
//!
//! [`message`] has the wire types, [`frame`] cuts a byte stream into lines, [`connection`] serves one client, [`task`] does one load or chat, [`about`] tells who looks what is going
//! on, [`idle`] decides when nobody needs the worker any more. [`launch`] understands how omp starts its workers, [`daemon`] does what such a launcher
//! expects. Nothing is loaded before a client asks for it.

mod about;
mod connection;
pub mod daemon;
mod frame;
mod idle;
pub mod launch;
pub mod message;
mod request;
mod task;

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

pub use connection::Options;
pub use frame::{Frames, Line};
pub use idle::Idle;
pub use message::{Event, Reply, Request};

use crate::listen::{LocalListener, accept};
use crate::models::Hosted;
use crate::shutdown::{Reason, Stop};

/// Accepting is tried again after this long when the process has no descriptor left.
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);

/// Serves the socket until a client, a signal or idleness stops it; connections end with it.
pub async fn serve(mut listener: LocalListener, model: Arc<Hosted>, options: Options, idle_window: Duration, stop: Stop) -> Reason {
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
            accepted = accept(&mut listener) => match accepted {
                Ok(stream) => {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Settings;
    use crate::engine::host::launcher;
    use crate::listen::{Files, claim};
    use crate::models::Models;
    use crate::models::fetch::Shelf;
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};

    #[cfg(unix)]
    fn place(folder: &tempfile::TempDir) -> std::path::PathBuf {
        folder.path().join("w.sock")
    }

    #[cfg(windows)]
    fn place(folder: &tempfile::TempDir) -> std::path::PathBuf {
        let unique = folder.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
        format!(r"\\.\pipe\emberd-{}-{unique}", std::process::id()).into()
    }

    #[cfg(unix)]
    async fn connect(place: &std::path::Path) -> tokio::net::UnixStream {
        tokio::net::UnixStream::connect(place).await.unwrap()
    }

    #[cfg(windows)]
    async fn connect(place: &std::path::Path) -> tokio::net::windows::named_pipe::NamedPipeClient {
        loop {
            match tokio::net::windows::named_pipe::ClientOptions::new().open(place) {
                // The worker has yet to take the client before this one: a client waits.
                Err(error) if error.raw_os_error() == Some(231) => tokio::task::yield_now().await,
                opened => return opened.unwrap(),
            }
        }
    }

    /// The same conversation on every system, whatever its local sockets are.
    #[tokio::test]
    async fn a_worker_serves_two_clients_and_goes_when_it_is_told_to() {
        let folder = tempfile::tempdir().unwrap();
        let place = place(&folder);
        let (listener, _seat) = claim(&place, "taken:", Files::Replaced).unwrap();
        let (launcher, _launches) = launcher(8);
        let models = Models::new(&["m".to_owned()], Shelf::new("unused".into(), None), launcher, "mock", Settings::default()).unwrap();
        let options = Options { model_key: "m".into(), tag: "t".into(), max_line: 1000, max_in_flight: 8, max_waiting: 8 };
        let model = Arc::clone(models.default_model());
        let worker = tokio::spawn(serve(listener, model, options, Duration::from_secs(900), Stop::default()));
        let mut first = BufReader::new(connect(&place).await);
        let mut second = BufReader::new(connect(&place).await);
        for client in [&mut second, &mut first] {
            client
                .write_all(b"{\"type\":\"ping\",\"id\":\"1\"}\n{\"type\":\"chat\",\"id\":2,\"messages\":[],\"maxNewTokens\":2}\n")
                .await
                .unwrap();
            let mut heard = String::new();
            while !heard.contains("\"text\",") {
                assert!(client.read_line(&mut heard).await.unwrap() > 0, "{heard}");
            }
            assert!(heard.starts_with("{\"type\":\"pong\",\"id\":\"1\",\"tag\":\"t\"}\n"), "{heard}");
            assert!(heard.ends_with("{\"type\":\"text\",\"id\":2,\"text\":\" a small\"}\n"), "{heard}");
        }
        first.write_all(b"{\"type\":\"shutdown\"}\n").await.unwrap();
        assert_eq!(worker.await.unwrap(), Reason::Asked);
        let mut rest = String::new();
        // The end of a stream, or a broken pipe: both say that nobody is there.
        assert!(second.read_line(&mut rest).await.map_or(true, |read| read == 0));
    }
}
