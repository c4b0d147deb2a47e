//! Keys: which ones a request may bring, and whether it brings one of them.
//!
//! A key is kept as its SHA-256 alone, so that it cannot get into a log or a message, and is compared in constant time with every one there is. Where keys come from is said in
//! the configuration.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use constant_time_eq::constant_time_eq_32;
use hyper::HeaderMap;
use hyper::header::{AUTHORIZATION, HeaderName};
use sha2::{Digest as _, Sha256};

use crate::error::{Code, Error, Result};

const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
/// The scheme of the `Authorization` header.
const BEARER: &str = "bearer";
/// The longest file of keys, in bytes.
const LONGEST_FILE: u64 = 1024 * 1024;

/// The keys of which a request has to bring one; without any, requests need none.
#[derive(Clone, Default)]
pub struct Keys(Arc<[[u8; 32]]>);

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Keys({})", self.0.len())
    }
}

impl Keys {
    /// These keys besides those that there are.
    ///
    /// # Errors
    /// `invalid_value`, without the key, for one that no header could carry. `source`: where it comes from, for the message.
    pub fn with<'k>(self, keys: impl IntoIterator<Item = &'k str>, source: &str) -> Result<Self> {
        let mut all = self.0.to_vec();
        for (index, key) in keys.into_iter().enumerate() {
            if key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
                let what = format!("key {} of {source} is not made of visible ASCII characters alone", index + 1);
                return Err(Error::new(Code::InvalidValue, what).hint("use letters, digits and punctuation, without blanks"));
            }
            all.push(digest(key.as_bytes()));
        }
        Ok(Self(all.into()))
    }

    /// The keys of a file besides: one a line, with blank lines and lines that begin with `#` passed over.
    ///
    /// # Errors
    /// `invalid_value` for a file that cannot be read, that others than its owner can read or write, or that has no keys; as [`Keys::with`].
    pub fn with_file(self, path: &Path) -> Result<Self> {
        let failed = |error: &std::io::Error| Error::io(Code::InvalidValue, "read the keys in", path, error);
        let mut file = File::open(path).map_err(|error| failed(&error))?;
        private(&file, path)?;
        let mut text = String::new();
        file.by_ref().take(LONGEST_FILE + 1).read_to_string(&mut text).map_err(|error| failed(&error))?;
        let source = path.display().to_string();
        if text.len() as u64 > LONGEST_FILE {
            // Half a key must not become one.
            return Err(Error::new(Code::InvalidValue, format!("{source} is longer than {LONGEST_FILE} bytes"))
                .hint("name a file of keys, one on a line"));
        }
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let before = self.0.len();
        let keys = self.with(lines, &source)?;
        if keys.0.len() == before {
            return Err(Error::new(Code::InvalidValue, format!("{source} has no keys")).hint("write one key on a line"));
        }
        Ok(keys)
    }

    /// Whether requests need none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Checks that a request brings a key, as `Authorization: Bearer KEY` or as `x-api-key: KEY`.
    ///
    /// # Errors
    /// `invalid_api_key`.
    pub(crate) fn check(&self, headers: &HeaderMap) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        let bearer = headers.get_all(AUTHORIZATION).iter().filter_map(|value| bearer(value.as_bytes()));
        let plain = headers.get_all(X_API_KEY).iter().map(|value| value.as_bytes().trim_ascii());
        let mut brought = bearer.chain(plain).peekable();
        let what = if brought.peek().is_none() { "the request brings no API key" } else { "the API key is none of this server's" };
        if brought.any(|key| self.has(key)) {
            return Ok(());
        }
        Err(Error::new(Code::InvalidApiKey, what).hint("send one of the server's keys as authorization: Bearer KEY, or as x-api-key: KEY"))
    }

    /// Whether it is one of them. Every one is compared, so that the time does not tell which.
    fn has(&self, key: &[u8]) -> bool {
        let brought = digest(key);
        self.0.iter().fold(false, |found, known| found | constant_time_eq_32(known, &brought))
    }
}

fn digest(key: &[u8]) -> [u8; 32] {
    Sha256::digest(key).into()
}

/// What follows the scheme.
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = value.split_at_checked(BEARER.len())?;
    let key = key.strip_prefix(b" ")?;
    scheme.eq_ignore_ascii_case(BEARER.as_bytes()).then(|| key.trim_ascii())
}

/// Refuses a file that is not its owner's alone.
#[cfg(unix)]
fn private(file: &File, path: &Path) -> Result<()> {
    use std::os::unix::fs::MetadataExt;
    let metadata = file.metadata().map_err(|error| Error::io(Code::InvalidValue, "read the keys in", path, &error))?;
    let mode = metadata.mode() & 0o777;
    if mode & 0o077 != 0 {
        let what = format!("{} holds keys, and others than its owner may use it (mode {mode:04o})", path.display());
        return Err(Error::new(Code::InvalidValue, what).hint(format!("chmod 600 {}", path.display())));
    }
    Ok(())
}

#[cfg(not(unix))]
#[allow(clippy::unnecessary_wraps)] // Others have modes.
fn private(_: &File, _: &Path) -> Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    fn headers(pairs: &[(HeaderName, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(name.clone(), HeaderValue::from_static(value));
        }
        headers
    }

    #[test]
    fn one_of_the_keys_lets_a_request_in_by_either_header() {
        let keys = Keys::default().with(["first-key", "second"], "a test").unwrap();
        for good in [
            [(AUTHORIZATION, "Bearer first-key")].as_slice(),
            &[(AUTHORIZATION, "bearer  second ")],
            &[(X_API_KEY, "second")],
            &[(AUTHORIZATION, "Bearer none"), (X_API_KEY, "first-key")],
        ] {
            assert!(keys.check(&headers(good)).is_ok(), "{good:?}");
        }
        for bad in [
            [].as_slice(),
            &[(AUTHORIZATION, "Bearer")],
            &[(AUTHORIZATION, "Bearer ")],
            &[(AUTHORIZATION, "first-key")],
            &[(AUTHORIZATION, "Basic first-key")],
            &[(AUTHORIZATION, "Bearer first-ke")],
            &[(AUTHORIZATION, "Bearer first-key second")],
            &[(X_API_KEY, "Bearer second")],
            &[(X_API_KEY, "")],
        ] {
            assert_eq!(keys.check(&headers(bad)).unwrap_err().code, Code::InvalidApiKey, "{bad:?}");
        }
        assert!(Keys::default().check(&headers(&[])).is_ok());
        assert_eq!(format!("{keys:?}"), "Keys(2)");
    }

    #[test]
    fn what_is_no_key_is_refused_without_being_shown() {
        for bad in ["", "a b", "clé", "a\tb"] {
            let error = Keys::default().with(["good", bad], "a test").unwrap_err();
            assert!(error.message.starts_with("key 2 of a test") && (bad.is_empty() || !error.message.contains(bad)), "{error}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_file_of_keys_is_its_owners_alone() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        let write = |text: &str, mode: u32| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            Keys::default().with_file(&path)
        };
        let keys = write("# of the laptop\nfirst\n\n  second  \r\n", 0o600).unwrap();
        assert!(keys.has(b"first") && keys.has(b"second") && !keys.has(b"# of the laptop") && !keys.has(b""));
        assert!(write("first", 0o400).is_ok());
        for mode in [0o640, 0o604, 0o620, 0o602] {
            let error = write("first", mode).unwrap_err();
            assert!(error.message.contains(&format!("mode {mode:04o}")) && error.hint.unwrap().starts_with("chmod 600"));
        }
        assert!(write("# nothing\n\n", 0o600).unwrap_err().message.ends_with("has no keys"));
        assert!(Keys::default().with_file(&folder.path().join("absent")).is_err());
    }
}
