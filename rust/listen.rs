//! Where a process listens: TCP addresses and Unix sockets.
//!
//! A Unix socket has one owner. A lock beside it ([`crate::election`]) keeps two starts apart; within it, whatever is at the path is asked whether it
//! answers. Only what does not answer is replaced, and only one's own socket is ever removed.

use std::fs;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener as StdListener;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
use tokio::net::{TcpListener, UnixListener};

use crate::config::Serve;
use crate::election;
use crate::error::{Code, Error, Result};

/// What `emberd serve` listens on.
#[derive(Debug)]
pub struct Http {
    /// The TCP address.
    pub tcp: TcpListener,
    /// The Unix socket beside it, and what removes it at the end.
    pub unix: Option<(UnixListener, Seat)>,
}

/// Binds what `emberd serve` listens on. Must be called within a runtime.
///
/// # Errors
/// An address that other machines reach, unless it is insisted on; one that is taken or not ours.
pub async fn http(serve: &Serve) -> Result<Http> {
    let (host, port) = (serve.host.as_str(), serve.port);
    let found = tokio::net::lookup_host((host.trim_matches(['[', ']']), port)).await.map_err(|error| {
        Error::new(Code::InvalidValue, format!("{host} is no address of this machine: {error}"))
            .hint("listen on 127.0.0.1, or give another --host")
    })?;
    let addresses: Vec<SocketAddr> = found.collect();
    if !addresses.iter().all(|address| address.ip().is_loopback()) && !serve.insecure {
        return Err(Error::new(Code::InvalidValue, format!("{host} can be reached from other machines, and nothing asks them for a key"))
            .hint("listen on 127.0.0.1, or say --insecure if you mean it"));
    }
    let tcp = TcpListener::bind(addresses.as_slice()).await.map_err(|error| {
        Error::new(Code::ServerError, format!("could not listen on {host}, port {port}: {error}"))
            .hint("another emberd may run already; give another --port")
    })?;
    let unix = serve.uds.as_deref().map(|path| claim(path, "a server is already listening on", Files::Kept)).transpose()?;
    Ok(Http { tcp, unix })
}

/// What becomes of a regular file where a socket is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Files {
    /// It is replaced: the path is known to be a worker's.
    Replaced,
    /// It is somebody's, and the start is refused.
    Kept,
}

/// The longest path a socket address holds, without its final zero byte.
const MAX_PATH: usize = if cfg!(target_os = "linux") { 107 } else { 103 };

/// A socket's name in the file system; dropping it removes the name, if it still is this socket's.
#[derive(Debug)]
pub struct Seat {
    path: PathBuf,
    identity: Identity,
}

/// Tells a socket from its successor. File systems give a removed socket's inode to the next one, so its time of birth belongs to it.
#[derive(Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    born: Option<SystemTime>,
}

impl Identity {
    fn of(path: &Path) -> std::io::Result<Self> {
        let found = fs::symlink_metadata(path)?;
        Ok(Self { device: found.dev(), inode: found.ino(), born: found.created().ok() })
    }
}

impl Seat {
    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if Identity::of(&self.path).is_ok_and(|found| found == self.identity) {
            let _ = fs::remove_file(&self.path); // Gone already is as good.
        }
    }
}

/// Binds the socket, unless somebody answers on it; `taken` says so, followed by the path. Must be called within a runtime.
///
/// # Errors
/// When somebody answers at the path, when the path is too long for a socket, or when the operating system refuses.
pub fn claim(path: &Path, taken: &str, files: Files) -> Result<(UnixListener, Seat)> {
    let length = path.as_os_str().len();
    if length > MAX_PATH {
        return Err(Error::new(
            Code::InvalidValue,
            format!("the socket path has {length} bytes, and the system allows {MAX_PATH}: {}", path.display()),
        )
        .hint("give a shorter path"));
    }
    let _lock = election::lock(path)?;
    clear(path, taken, files)?;
    let io = |doing: &str, error: &std::io::Error| Error::io(Code::ServerError, doing, path, error);
    let listener = bind(path).map_err(|error| io("bind", &error))?;
    let identity = Identity::of(path).map_err(|error| io("look at", &error))?;
    listener.set_nonblocking(true).map_err(|error| io("listen on", &error))?;
    let listener = UnixListener::from_std(listener).map_err(|error| io("listen on", &error))?;
    Ok((listener, Seat { path: path.to_path_buf(), identity }))
}

/// Binds with a mode of 0600. The mode is set before the socket listens, so no other user ever connects.
fn bind(path: &Path) -> std::io::Result<StdListener> {
    let socket = socket()?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    rustix::net::listen(&socket, 1024)?;
    Ok(StdListener::from(socket))
}

/// Connects for a moment, without waiting for a place in the listener's queue.
fn connect(path: &Path) -> Result<(), Errno> {
    let socket = socket()?;
    rustix::io::ioctl_fionbio(&socket, true)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)
}

/// A Unix stream socket that child processes do not inherit.
fn socket() -> Result<OwnedFd, Errno> {
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None)?;
    rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC)?;
    Ok(socket)
}

/// Makes room at the path: a socket that nobody answers, or a file in its place, is removed; a live one is not.
fn clear(path: &Path, taken: &str, files: Files) -> Result<()> {
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(Error::io(Code::ServerError, "look at", path, &error)),
    };
    if found.is_dir() {
        return Err(
            Error::new(Code::InvalidValue, format!("{} is a folder, not a place for a socket", path.display())).hint("give another path")
        );
    }
    if found.is_file() && files == Files::Kept {
        return Err(Error::new(Code::InvalidValue, format!("{} is a file, not a socket", path.display())).hint("give another path"));
    }
    match connect(path) {
        // Full: somebody is there, and slow to accept.
        Ok(()) | Err(Errno::AGAIN) => return Err(Error::new(Code::ServerError, format!("{taken} {}", path.display()))),
        // Nobody; so is a file that is no socket.
        Err(Errno::CONNREFUSED | Errno::NOENT) => {}
        // Forbidden, for one: not ours to judge.
        Err(error) => return Err(Error::io(Code::ServerError, "tell whether anybody answers on", path, &error.into())),
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::io(Code::ServerError, "replace", path, &error)),
        _ => Ok(()),
    }
}
