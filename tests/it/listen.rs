//! Who gets a socket: the living keep theirs, the dead are replaced, and nobody removes another's.

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener as StdListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier};

use emberd::error::Code;
use emberd::listen::{Files, Seat, claim};
use tokio::net::{UnixListener, UnixStream};

const TAKEN: &str = "tiny worker already listening on";

fn place() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.sock");
    (folder, path)
}

fn refused(path: &Path) -> emberd::error::Error {
    claim(path, TAKEN, Files::Replaced).expect_err("a refusal")
}

#[tokio::test]
async fn a_socket_is_its_owners_alone_and_goes_with_its_seat() {
    let (_folder, path) = place();
    let (listener, seat) = claim(&path, TAKEN, Files::Replaced).unwrap();
    assert_eq!(seat.path(), path);
    let found = fs::symlink_metadata(&path).unwrap();
    assert!(found.file_type().is_socket());
    assert_eq!(found.permissions().mode() & 0o777, 0o600);
    let (client, accepted) = tokio::join!(UnixStream::connect(&path), listener.accept());
    assert!(client.is_ok() && accepted.is_ok());
    drop(seat);
    assert!(!path.exists());
}

#[tokio::test]
async fn a_living_owner_is_left_alone() {
    let (_folder, path) = place();
    let (listener, _seat) = claim(&path, TAKEN, Files::Replaced).unwrap();
    assert_eq!(refused(&path).to_string(), format!("{TAKEN} {}", path.display()));
    // It still is the first one's: the connection that asked is there, and another gets through.
    let client = UnixStream::connect(&path).await.unwrap();
    listener.accept().await.unwrap();
    listener.accept().await.unwrap();
    drop(client);
}

#[tokio::test]
async fn an_owner_too_busy_to_accept_is_alive() {
    let (_folder, path) = place();
    // A queue of one, filled: a connect that waits would wait for ever.
    let socket = rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &rustix::net::SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&socket, 0).unwrap();
    let _first = std::os::unix::net::UnixStream::connect(&path).unwrap();
    assert_eq!(refused(&path).to_string(), format!("{TAKEN} {}", path.display()));
}

#[tokio::test]
async fn what_nobody_answers_on_is_replaced() {
    let (folder, path) = place();
    drop(StdListener::bind(&path).unwrap()); // As a killed worker leaves it.
    claim(&path, TAKEN, Files::Replaced).unwrap();
    fs::write(&path, "a file").unwrap();
    claim(&path, TAKEN, Files::Replaced).unwrap();
    std::os::unix::fs::symlink(folder.path().join("nowhere"), &path).unwrap();
    claim(&path, TAKEN, Files::Replaced).unwrap();
}

#[tokio::test]
async fn a_link_to_a_living_owner_is_not_replaced() {
    let (folder, path) = place();
    let (_listener, _seat) = claim(&path, TAKEN, Files::Replaced).unwrap();
    let link = folder.path().join("link.sock");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    assert!(refused(&link).message.starts_with(TAKEN));
}

#[tokio::test]
async fn a_folder_is_no_place_for_a_socket() {
    let (folder, _) = place();
    let error = refused(folder.path());
    assert_eq!(error.code, Code::InvalidValue);
    assert!(error.message.contains("is a folder"), "{error}");
    assert!(folder.path().is_dir());
}

#[tokio::test]
async fn a_path_that_no_address_holds_is_refused_with_the_limit() {
    let (folder, _) = place();
    let longest = if cfg!(target_os = "linux") { 107 } else { 103 };
    let room = longest - folder.path().as_os_str().len() - 1;
    claim(&folder.path().join("s".repeat(room)), TAKEN, Files::Replaced).unwrap();
    let error = refused(&folder.path().join("s".repeat(room + 1)));
    assert!(error.message.contains(&format!("{} bytes, and the system allows {longest}", longest + 1)), "{error}");
    assert!(error.hint.is_some());
}

#[tokio::test]
async fn a_missing_folder_is_said_to_be_missing() {
    let (folder, _) = place();
    let error = refused(&folder.path().join("absent/tiny.sock"));
    assert!(error.hint.as_deref().is_some_and(|hint| hint.contains("folder")), "{error}");
}

#[tokio::test]
async fn a_seat_removes_its_own_socket_and_no_successors() {
    let (_folder, path) = place();
    // Many times over, since file systems give a removed file's inode to the next.
    for _ in 0..20 {
        let (listener, seat) = claim(&path, TAKEN, Files::Replaced).unwrap();
        drop(listener); // It has stopped listening, and not left its seat yet.
        let (_successor, successors) = claim(&path, TAKEN, Files::Replaced).unwrap();
        drop(seat);
        UnixStream::connect(&path).await.expect("the successor's socket is still there");
        drop(successors);
        assert!(!path.exists());
    }
    let (_listener, seat) = claim(&path, TAKEN, Files::Replaced).unwrap();
    fs::remove_file(&path).unwrap();
    fs::write(&path, "somebody's").unwrap();
    drop(seat);
    assert_eq!(fs::read_to_string(&path).unwrap(), "somebody's");
}

#[tokio::test]
async fn of_many_who_come_at_once_one_gets_the_socket() {
    const MANY: usize = 8;
    for stale in [false, true] {
        let (_folder, path) = place();
        if stale {
            drop(StdListener::bind(&path).unwrap());
        }
        let start = Arc::new(Barrier::new(MANY));
        let claims: Vec<_> = (0..MANY)
            .map(|_| {
                let (start, path) = (Arc::clone(&start), path.clone());
                tokio::task::spawn_blocking(move || {
                    start.wait();
                    claim(&path, TAKEN, Files::Replaced)
                })
            })
            .collect();
        let mut winners: Vec<(UnixListener, Seat)> = Vec::new();
        for claimed in claims {
            match claimed.await.unwrap() {
                Ok(won) => winners.push(won),
                Err(error) => assert!(error.message.starts_with(TAKEN), "{error}"),
            }
        }
        assert_eq!(winners.len(), 1);
        UnixStream::connect(&path).await.unwrap();
    }
}

#[tokio::test]
async fn a_file_that_may_be_somebodys_is_kept_where_that_is_asked() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notes.txt");
    fs::write(&path, "mine").unwrap();
    let error = claim(&path, TAKEN, Files::Kept).expect_err("a refusal");
    assert!(error.message.ends_with("is a file, not a socket"), "{error}");
    assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
}
