//! Settings of the HTTP door itself: who may come in, and how much of it.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::RangedU64ValueParser;

use super::at_least_one;
use crate::error::{Code, Error, Result};
use crate::http::{Keys, Origin};

/// The variables that keys may stand in: one, and several.
const KEY: &str = "EMBERD_API_KEY";
const KEYS: &str = "EMBERD_API_KEYS";

/// A time in seconds. Longer than a year is longer than anybody waits.
fn seconds() -> RangedU64ValueParser {
    RangedU64ValueParser::from(1..=31_536_000)
}

/// Settings of the HTTP door.
#[derive(Debug, Clone, Args)]
pub struct Door {
    /// A file with keys, one a line, of which every request has to bring one; keys may stand in EMBERD_API_KEY (one) and EMBERD_API_KEYS (with commas between) as well
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Let web pages of this origin read answers, such as http://localhost:3000, or * for all there are; may be given several times
    #[arg(long = "cors-origin", value_name = "ORIGIN")]
    pub cors_origins: Vec<Origin>,
    /// The longest answer, in tokens, whatever a request asks for [default: what the window has room for]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_output_tokens: Option<u32>,
    /// Connections at a time, on each of which one request is answered after the other; more wait until one ends
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = at_least_one)]
    pub max_connections: usize,
    /// How long the head of a request may take, and a connection be idle, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = seconds())]
    pub header_timeout: u64,
    /// How long the body of a request may take, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = seconds())]
    pub body_timeout: u64,
    /// How long a client may take nothing of its answer before its connection is closed, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = seconds())]
    pub write_timeout: u64,
    /// How long a request waits for its model to be loaded before it is told to come back, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = seconds())]
    pub load_timeout: u64,
}

impl Door {
    /// The keys of the file and of the environment; none where neither names any.
    ///
    /// # Errors
    /// As [`Keys::with_file`]; `invalid_value` for a variable that is set and holds no key: whoever set it meant requests to need one.
    pub fn keys(&self) -> Result<Keys> {
        let variable = |name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        self.keys_of(variable(KEY), variable(KEYS))
    }

    fn keys_of(&self, one: Option<String>, several: Option<String>) -> Result<Keys> {
        let mut keys = Keys::default();
        let empty =
            |name: &str| Error::new(Code::InvalidValue, format!("{name} is set, and holds no key")).hint("unset it, or put a key into it");
        if let Some(one) = one {
            let key = one.trim();
            if key.is_empty() {
                return Err(empty(KEY));
            }
            keys = keys.with([key], KEY)?;
        }
        if let Some(several) = several {
            let each = || several.split(',').map(str::trim).filter(|key| !key.is_empty());
            if each().next().is_none() {
                return Err(empty(KEYS));
            }
            keys = keys.with(each(), KEYS)?;
        }
        match &self.api_key_file {
            Some(path) => keys.with_file(path),
            None => Ok(keys),
        }
    }

    /// A time of these settings.
    #[must_use]
    pub fn time(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }
}

/// The key that `emberd chat` brings, where there is one.
#[must_use]
pub fn own_key() -> Option<String> {
    std::env::var(KEY).ok().map(|key| key.trim().to_owned()).filter(|key| !key.is_empty())
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use hyper::HeaderMap;
    use hyper::header::HeaderValue;

    use super::*;
    use crate::config::{Command, Config};

    fn door(arguments: &[&str]) -> Door {
        let config = Config::try_parse_from(["emberd", "serve"].iter().chain(arguments)).unwrap();
        let Command::Serve(serve) = config.command else { panic!("not serve") };
        serve.door
    }

    #[test]
    fn keys_come_from_both_variables() {
        let keys = door(&[]).keys_of(Some(" one ".to_owned()), Some("two, three,".to_owned())).unwrap();
        for key in ["one", "two", "three"] {
            let headers = HeaderMap::from_iter([("x-api-key".parse().unwrap(), HeaderValue::from_static(key))]);
            assert!(keys.check(&headers).is_ok(), "{key}");
        }
        assert!(door(&[]).keys_of(None, None).unwrap().is_empty());
    }

    #[test]
    fn a_variable_without_a_key_is_no_open_door() {
        for (one, several) in [(Some(" "), None), (None, Some("")), (None, Some(" , "))] {
            let error = door(&[]).keys_of(one.map(str::to_owned), several.map(str::to_owned)).unwrap_err();
            assert!(error.message.ends_with("holds no key"), "{error}");
        }
    }

    #[test]
    fn times_and_counts_of_nothing_are_refused() {
        for option in
            ["--header-timeout", "--body-timeout", "--write-timeout", "--load-timeout", "--max-connections", "--max-output-tokens"]
        {
            assert!(Config::try_parse_from(["emberd", "serve", option, "0"]).is_err(), "{option}");
        }
        assert!(Config::try_parse_from(["emberd", "serve", "--cors-origin", "example.com"]).is_err());
        assert_eq!(door(&["--header-timeout", "5"]).header_timeout, 5);
    }
}
