//! Sealed thoughts: what a client may keep for the next request without being able to read or change it (`reasoning.encrypted_content`).
//!
//! XChaCha20-Poly1305 under a key of 256 random bits, which lies in the file `seal.key` of emberd's home, mode 0600: what was sealed can be opened after a
//! restart, by this installation alone. Where no such file can be kept, the key is the process's own. Who is given sealed thoughts is decided in `stream` and `input`.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD as BASE64;
use chacha20poly1305::aead::{Aead, KeyInit, Payload};
use chacha20poly1305::{XChaCha20Poly1305, XNonce};

use crate::error::{Code, Error, Result};

/// The file of the key within a home.
const FILE: &str = "seal.key";
/// Bytes of a key, and of a nonce. Nonces of this length may be drawn at random for any number of messages.
const KEY: usize = 32;
const NONCE: usize = 24;
/// What is sealed, and in which form: a seal on anything else does not open here.
const PURPOSE: &[u8] = b"emberd reasoning 1";

/// What seals and opens. Costs nothing before it is used; clones are the same.
#[derive(Clone, Default)]
pub struct Seal {
    home: Option<PathBuf>,
    cipher: Arc<OnceLock<XChaCha20Poly1305>>,
}

impl fmt::Debug for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Never the key.
        f.debug_struct("Seal").field("home", &self.home).finish_non_exhaustive()
    }
}

impl Seal {
    /// With the key that is kept in this home, or will be; [`Seal::default`] has one of its own.
    #[must_use]
    pub fn kept(home: PathBuf) -> Self {
        Self { home: Some(home), cipher: Arc::default() }
    }

    /// A text, sealed: ASCII letters, digits, `-` and `_`.
    ///
    /// # Errors
    /// `server_error` when the system has no random bytes.
    pub fn seal(&self, text: &str) -> Result<String> {
        let mut nonce = [0; NONCE];
        random(&mut nonce)?;
        let payload = Payload { msg: text.as_bytes(), aad: PURPOSE };
        let sealed = self.cipher()?.encrypt(&XNonce::from(nonce), payload);
        let sealed = sealed.map_err(|error| Error::new(Code::ServerError, "thoughts could not be sealed").detail(error.to_string()))?;
        let mut bytes = nonce.to_vec();
        bytes.extend(sealed);
        Ok(BASE64.encode(bytes))
    }

    /// The text; `None` for what was not sealed by this, or has been changed since.
    #[must_use]
    pub fn open(&self, sealed: &str) -> Option<String> {
        let bytes = BASE64.decode(sealed).ok()?;
        let (nonce, sealed) = bytes.split_first_chunk::<NONCE>()?;
        let opened = self.cipher().ok()?.decrypt(&XNonce::from(*nonce), Payload { msg: sealed, aad: PURPOSE }).ok()?;
        String::from_utf8(opened).ok()
    }

    fn cipher(&self) -> Result<&XChaCha20Poly1305> {
        if let Some(cipher) = self.cipher.get() {
            return Ok(cipher);
        }
        let key = match &self.home {
            Some(home) => match key(home) {
                Ok(key) => {
                    tracing::info!(file = %home.join(FILE).display(), "thoughts are sealed with the key that is kept here");
                    key
                }
                Err(error) => {
                    let file = home.join(FILE);
                    tracing::warn!(%error, file = %file.display(), "no key can be kept: thoughts that are sealed now cannot be opened after a restart");
                    fresh()?
                }
            },
            None => fresh()?,
        };
        Ok(self.cipher.get_or_init(|| XChaCha20Poly1305::new(&key.into())))
    }
}

fn random(bytes: &mut [u8]) -> Result<()> {
    getrandom::fill(bytes).map_err(|error| Error::new(Code::ServerError, "the system has no random bytes").detail(error.to_string()))
}

fn fresh() -> Result<[u8; KEY]> {
    let mut key = [0; KEY];
    random(&mut key)?;
    Ok(key)
}

/// The key of a home, made if there is none. Of several processes that make it at once, one does, and all have that.
fn key(home: &Path) -> io::Result<[u8; KEY]> {
    let path = home.join(FILE);
    match read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        found => return found,
    }
    fs::create_dir_all(home)?;
    let key = fresh().map_err(io::Error::other)?;
    let mut name = [0; 8];
    random(&mut name).map_err(io::Error::other)?;
    let part = home.join(format!("{FILE}.{:016x}", u64::from_le_bytes(name)));
    let kept = write(&part, &key).and_then(|()| fs::hard_link(&part, &path));
    // Nobody needs the other name; one that stays is of no use to anybody but its owner.
    let _ = fs::remove_file(&part);
    match kept {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => read(&path),
        kept => kept.map(|()| key),
    }
}

fn read(path: &Path) -> io::Result<[u8; KEY]> {
    let bytes = fs::read(path)?;
    let length = bytes.len();
    bytes.try_into().map_err(|_| io::Error::other(format!("{length} bytes instead of {KEY}")))
}

/// Writes a key where nobody else can read it, not even for a moment.
fn write(path: &Path, key: &[u8]) -> io::Result<()> {
    let mut options = File::options();
    options.write(true).create_new(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        options.mode(0o600);
    }
    let mut file = options.open(path)?;
    file.write_all(key)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_sealed_a_text_opens_it_and_only_as_it_was() {
        let (one, other) = (Seal::default(), Seal::default());
        for text in ["", "Hm.", "größer 🙂\n"] {
            let sealed = one.seal(text).unwrap();
            assert!(sealed.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte)), "{sealed}");
            assert_ne!(sealed, one.seal(text).unwrap(), "no two are alike");
            assert_eq!(one.clone().open(&sealed).as_deref(), Some(text));
            assert_eq!(other.open(&sealed), None);
            for at in [0, 20, sealed.len() - 1] {
                let mut changed = sealed.clone().into_bytes();
                changed[at] = if changed[at] == b'A' { b'B' } else { b'A' };
                let changed = String::from_utf8(changed).unwrap();
                assert_eq!(one.open(&changed), None, "{changed}");
            }
            assert_eq!(one.open(&sealed[..sealed.len() - 2]), None);
        }
        for text in ["", "gAAAA", "not base64 at all", &"A".repeat(200)] {
            assert_eq!(one.open(text), None);
        }
    }

    #[test]
    fn a_home_keeps_its_key_for_its_owner_alone() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().join("new");
        let sealed = Seal::kept(home.clone()).seal("Hm.").unwrap();
        assert_eq!(Seal::kept(home.clone()).open(&sealed).as_deref(), Some("Hm."));
        let names: Vec<_> = fs::read_dir(&home).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, [FILE]);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            assert_eq!(fs::metadata(home.join(FILE)).unwrap().permissions().mode() & 0o777, 0o600);
        }
        // Many at once have one key.
        let home = folder.path().join("together");
        let sealed: Vec<String> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| Seal::kept(home.clone()).seal("Hm.").unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(sealed.iter().all(|sealed| Seal::kept(home.clone()).open(sealed).is_some()));
    }

    #[test]
    fn where_no_key_can_be_kept_the_process_has_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "x").unwrap();
        let seal = Seal::kept(file.clone());
        assert_eq!(seal.open(&seal.seal("Hm.").unwrap()).as_deref(), Some("Hm."));
        fs::write(folder.path().join(FILE), "too short").unwrap();
        let seal = Seal::kept(folder.path().to_owned());
        assert_eq!(seal.open(&seal.seal("Hm.").unwrap()).as_deref(), Some("Hm."));
        assert_eq!(fs::read(folder.path().join(FILE)).unwrap(), b"too short", "what is there is not touched");
    }
}
