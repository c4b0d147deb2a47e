//! Where a process listens: TCP addresses, and a local socket of which there is one owner.
//!
//! A local socket is a Unix socket, or a named pipe on Windows; both are a [`LocalListener`] that gives [`LocalStream`]s, which are read and written
//! by the same calls.

#[cfg(windows)]
mod pipe;
#[cfg(unix)]
mod unix;

use std::net::SocketAddr;

use tokio::net::TcpListener;

#[cfg(windows)]
pub use pipe::{LocalListener, LocalStream, Seat, accept, claim, gone};
#[cfg(unix)]
pub use unix::{LocalListener, LocalStream, Seat, accept, claim, gone};

use crate::config::Serve;
use crate::error::{Code, Error, Result};

/// What `emberd serve` listens on.
#[derive(Debug)]
pub struct Http {
    /// The TCP address.
    pub tcp: TcpListener,
    /// The Unix socket beside it, and what removes it at the end.
    #[cfg(unix)]
    pub unix: Option<(LocalListener, Seat)>,
}

/// Binds what `emberd serve` listens on. Must be called within a runtime. `keyed`: whether requests need a key.
///
/// # Errors
/// An address that other machines reach, unless they need a key or it is insisted on; one that is taken or not ours.
pub async fn http(serve: &Serve, keyed: bool) -> Result<Http> {
    let (host, port) = (serve.host.as_str(), serve.port);
    let found = tokio::net::lookup_host((host.trim_matches(['[', ']']), port)).await.map_err(|error| {
        Error::new(Code::InvalidValue, format!("{host} is no address of this machine: {error}"))
            .hint("listen on 127.0.0.1, or give another --host")
    })?;
    let addresses: Vec<SocketAddr> = found.collect();
    if !addresses.iter().all(|address| address.ip().is_loopback()) && !keyed && !serve.insecure {
        return Err(Error::new(Code::InvalidValue, format!("{host} can be reached from other machines, and nothing asks them for a key"))
            .hint("listen on 127.0.0.1, or say --insecure if you mean it; with keys (--api-key-file or EMBERD_API_KEY) it is allowed"));
    }
    let tcp = TcpListener::bind(addresses.as_slice()).await.map_err(|error| {
        Error::new(Code::ServerError, format!("could not listen on {host}, port {port}: {error}"))
            .hint("another emberd may run already; give another --port")
    })?;
    Ok(Http {
        tcp,
        #[cfg(unix)]
        unix: serve.uds.as_deref().map(|path| claim(path, "a server is already listening on", Files::Kept)).transpose()?,
    })
}

/// What becomes of a regular file where a socket is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Files {
    /// It is replaced: the path is known to be a worker's.
    Replaced,
    /// It is somebody's, and the start is refused.
    Kept,
}
