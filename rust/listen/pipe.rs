//! A named pipe as a place of meeting. The system gives its name to one process at a time, and takes it back when that ends.
//!
//! Other users of the machine may not write to it, and programs on other machines may not reach it.

use std::path::{Path, PathBuf};

use tokio::net::windows::named_pipe::{ClientOptions, NamedPipeServer, ServerOptions};

use super::Files;
use crate::error::{Code, Error, Result};

/// Where the names of pipes begin.
const PREFIX: &str = r"\\.\pipe\";

/// What the system says when another process owns the name.
const ACCESS_DENIED: i32 = 5;
/// What it says to a client while every instance of a pipe is taken.
const PIPE_BUSY: i32 = 231;

/// A connection to a pipe.
pub type LocalStream = NamedPipeServer;

/// A pipe that waits for clients: the instance that the next one will get.
#[derive(Debug)]
pub struct LocalListener {
    name: PathBuf,
    next: NamedPipeServer,
}

/// The name of a pipe. It goes with the last of its instances; nothing is left to be removed.
#[derive(Debug)]
pub struct Seat {
    name: PathBuf,
}

impl Seat {
    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.name
    }
}

/// Creates the pipe, unless another process has it; `taken` says so, followed by the name. Must be called within a runtime. There are no files among
/// pipes, so what becomes of one need not be said.
///
/// # Errors
/// When another process has the name, when it is no name of a pipe, or when the operating system refuses.
pub fn claim(path: &Path, taken: &str, _: Files) -> Result<(LocalListener, Seat)> {
    if !path.as_os_str().to_string_lossy().to_lowercase().starts_with(PREFIX) {
        return Err(Error::new(Code::InvalidValue, format!("{} is no name of a pipe", path.display()))
            .hint(format!("give a name that begins with {PREFIX}")));
    }
    let refused = || Error::new(Code::ServerError, format!("{taken} {}", path.display()));
    match ClientOptions::new().open(path) {
        Ok(_) => return Err(refused()),
        Err(error) if error.raw_os_error() == Some(PIPE_BUSY) => return Err(refused()),
        Err(_) => {} // Nobody, or what creating it will say.
    }
    let next = ServerOptions::new().first_pipe_instance(true).create(path).map_err(|error| match error.raw_os_error() {
        Some(ACCESS_DENIED) => refused(),
        _ => Error::io(Code::ServerError, "create", path, &error),
    })?;
    Ok((LocalListener { name: path.to_path_buf(), next }, Seat { name: path.to_path_buf() }))
}

/// The next connection.
///
/// # Errors
/// When the system gives no further instance of the pipe.
pub async fn accept(listener: &mut LocalListener) -> std::io::Result<LocalStream> {
    listener.next.connect().await?;
    // The next instance is there before this one is served, so that no client finds the name without one.
    let next = ServerOptions::new().create(&listener.name)?;
    Ok(std::mem::replace(&mut listener.next, next))
}

/// Whether the other side has closed the connection. A pipe has no half that could be closed alone, so its end is the end.
#[must_use]
pub fn gone(_: &LocalStream) -> bool {
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    fn name(what: &str) -> PathBuf {
        format!("{PREFIX}emberd-test-{}-{what}", std::process::id()).into()
    }

    #[tokio::test]
    async fn a_pipe_has_one_owner_at_a_time() {
        let name = name("owner");
        let (listener, seat) = claim(&name, "taken:", Files::Replaced).unwrap();
        let refused = claim(&name, "taken:", Files::Replaced).unwrap_err();
        assert_eq!(refused.to_string(), format!("taken: {}", name.display()));
        drop((listener, seat));
        claim(&name, "taken:", Files::Replaced).unwrap();
    }

    #[tokio::test]
    async fn clients_are_accepted_one_after_the_other() {
        let name = name("clients");
        let (mut listener, _seat) = claim(&name, "taken:", Files::Replaced).unwrap();
        for word in [*b"one", *b"two"] {
            let mut client = ClientOptions::new().open(&name).unwrap();
            let mut server = accept(&mut listener).await.unwrap();
            client.write_all(&word).await.unwrap();
            let mut heard = [0; 3];
            server.read_exact(&mut heard).await.unwrap();
            assert_eq!(heard, word);
        }
    }

    #[test]
    fn a_path_of_a_file_is_no_pipe() {
        assert!(claim(Path::new(r"C:\tiny.sock"), "taken:", Files::Replaced).unwrap_err().message.contains("no name of a pipe"));
    }
}
