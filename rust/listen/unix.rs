//! A Unix socket as a place of meeting: bound under a lock, mode 0600, removed by its owner alone.
//!
//! The lock ([`crate::election`]) keeps two starts apart; within it, whatever is at the path is asked whether it answers. Only what does not answer
//! is replaced, and only one's own socket is ever removed.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener as StdListener;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
use tokio::net::{UnixListener, UnixStream};

use super::Files;
use crate::election;
use crate::error::{Code, Error, Result};

/// A local socket that listens.
pub type LocalListener = UnixListener;
/// A connection to one.
pub type LocalStream = UnixStream;

/// The next connection.
///
/// # Errors
/// When the process has no descriptor left, for one.
pub async fn accept(listener: &mut LocalListener) -> std::io::Result<LocalStream> {
    Ok(listener.accept().await?.0)
}

/// Whether the other side has closed both directions, and not only the one it writes to.
#[must_use]
pub fn gone(stream: &LocalStream) -> bool {
    // Where poll tells only of what it is asked for, this is asked for the end of the direction that is ours to write.
    let mut look = [PollFd::new(stream, PollFlags::OUT)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut look, Some(&now)).is_ok_and(|_| look[0].revents().intersects(PollFlags::HUP | PollFlags::ERR))
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
        // A start that is under way clears the path by itself; between looking and removing there must be none.
        let Ok(_lock) = election::try_lock(&self.path) else { return };
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
