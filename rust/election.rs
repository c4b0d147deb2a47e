//! Keeps two starts at one socket apart: whoever holds the lock may look at the socket's path, clear it and bind.
//!
//! Workers of other makes take one of two locks for the same socket: on Linux a name in the abstract socket namespace, which goes with its process and
//! leaves no file; elsewhere `flock` on a file beside the socket. Both are taken here, the name first, so that a start is kept apart from each of them.

use std::fs::{File, TryLockError};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::{Code, Error, Result};

/// How long another start may hold a lock: a start takes milliseconds.
const WAIT: Duration = Duration::from_secs(5);
const AGAIN: Duration = Duration::from_millis(20);

/// Held while binding. The file stays behind: removing it would let two starts hold two locks.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: Option<File>,
    #[cfg(target_os = "linux")]
    _name: std::os::fd::OwnedFd,
}

/// Takes the lock of the socket at `path`, waiting for other starts.
///
/// # Errors
/// When another start holds it for too long, or the lock file cannot be made.
pub(crate) fn lock(path: &Path) -> Result<Lock> {
    by(path, Instant::now() + WAIT, true)
}

/// As [`lock`], but only if nobody holds it now, and without making the file: where it is gone, somebody is clearing the folder up.
pub(crate) fn try_lock(path: &Path) -> Result<Lock> {
    by(path, Instant::now(), false)
}

fn by(path: &Path, deadline: Instant, make: bool) -> Result<Lock> {
    let file = beside(path)?;
    #[cfg(target_os = "linux")]
    let name = name::take(&file, deadline)?;
    Ok(Lock {
        _file: if make || file.exists() { Some(flock(&file, deadline, make)?) } else { None },
        #[cfg(target_os = "linux")]
        _name: name,
    })
}

/// The absolute path of the lock file, which the abstract name is made of as well.
fn beside(socket: &Path) -> Result<PathBuf> {
    let socket = std::path::absolute(socket).map_err(|error| Error::io(Code::InvalidValue, "use the path", socket, &error))?;
    let mut name = socket.into_os_string();
    name.push(".bind.lock");
    Ok(name.into())
}

fn held(what: &str) -> Error {
    Error::new(Code::ServerError, format!("another start has held {what} for {} s", WAIT.as_secs()))
        .hint("end the process that hangs, and start again")
}

fn flock(path: &Path, deadline: Instant, make: bool) -> Result<File> {
    let io = |error: &std::io::Error| {
        Error::io(Code::ServerError, "lock", path, error).hint("the folder of the socket must exist and be writable")
    };
    let file = File::options().create(make).truncate(false).write(true).mode(0o600).open(path).map_err(|error| io(&error))?;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => std::thread::sleep(AGAIN),
            Err(TryLockError::WouldBlock) => return Err(held(&path.display().to_string())),
            Err(TryLockError::Error(error)) => return Err(io(&error)),
        }
    }
}

/// The lock that is a name: a socket bound to it, and nobody else can be.
#[cfg(target_os = "linux")]
mod name {
    use std::os::fd::OwnedFd;
    use std::os::unix::ffi::OsStrExt;
    use std::path::Path;
    use std::time::Instant;

    use rustix::io::Errno;
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    use twox_hash::XxHash64;

    use super::{AGAIN, held};
    use crate::error::{Code, Error, Result};

    /// The seeds of the name's two halves.
    const SEEDS: [u64; 2] = [0x4f4d_502d_4c4f_434b, 0x5049_2d46_494c_454c];

    /// The name for a lock file that is not made.
    pub(super) fn of(path: &Path) -> String {
        let [first, second] = SEEDS.map(|seed| XxHash64::oneshot(seed, path.as_os_str().as_bytes()));
        format!("omp-file-lock-{first:016x}{second:016x}")
    }

    /// Binds the name; sleeps while another process has it.
    pub(super) fn take(path: &Path, deadline: Instant) -> Result<OwnedFd> {
        let name = of(path);
        let failed = |error: Errno| Error::new(Code::ServerError, format!("could not take the lock @{name}: {error}"));
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(failed)?;
        loop {
            let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).map_err(failed)?;
            match rustix::net::bind(&socket, &address) {
                Ok(()) => return Ok(socket),
                Err(Errno::ADDRINUSE) if Instant::now() < deadline => std::thread::sleep(AGAIN),
                Err(Errno::ADDRINUSE) => return Err(held(&format!("@{name}"))),
                Err(error) => return Err(failed(error)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn the_name_is_the_one_that_others_use() {
        let path = Path::new("/home/ada/.omp/run/tiny/lfm2.5-230m-onnx.sock.bind.lock");
        assert_eq!(name::of(path), "omp-file-lock-d68b58e5e14e4d09dfd33d849ff22e5c");
    }

    #[test]
    fn each_of_the_two_locks_keeps_others_out() {
        let folder = tempfile::tempdir().unwrap();
        let file = beside(&folder.path().join("w.sock")).unwrap();
        let over = Instant::now();
        let held = lock(&folder.path().join("w.sock")).unwrap();
        assert!(flock(&file, over, true).unwrap_err().message.contains("another start has held"));
        #[cfg(target_os = "linux")]
        assert!(name::take(&file, over).unwrap_err().message.contains("another start has held @omp-file-lock-"));
        drop(held);
        flock(&file, over, true).unwrap();
        #[cfg(target_os = "linux")]
        name::take(&file, over).unwrap();
    }

    #[test]
    fn at_the_end_no_file_is_made() {
        let folder = tempfile::tempdir().unwrap();
        try_lock(&folder.path().join("w.sock")).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_relative_path_is_the_same_lock_as_its_absolute_one() {
        let absolute = std::env::current_dir().unwrap().join("w.sock.bind.lock");
        assert_eq!(beside(Path::new("w.sock")).unwrap(), absolute);
    }
}
