//! Whom a request claims to speak to. A web page can make a browser resolve its own name to this machine (DNS rebinding); the Host header then
//! still holds that name, and that is how such a request is known.

use std::net::IpAddr;

use hyper::header::HOST;
use hyper::http::request::Parts;
use hyper::http::uri::Authority;

use super::server::Local;
use crate::error::{Code, Error, Result};

/// Checks the Host header, and the authority of the request's target where it has one.
///
/// # Errors
/// `invalid_host`; `invalid_value` where there is not exactly one Host header.
pub(crate) fn check(parts: &Parts, local: Local, allowed: &[String]) -> Result<()> {
    if matches!(local, Local::Path) {
        return Ok(());
    }
    if let Some(authority) = parts.uri.authority() {
        named(authority.as_str(), local, allowed)?;
    }
    let mut hosts = parts.headers.get_all(HOST).iter();
    match (hosts.next(), hosts.next()) {
        (Some(host), None) => {
            let host = host.to_str().map_err(|_| malformed("the Host header is not text"))?;
            named(host, local, allowed)
        }
        (None, _) => Err(malformed("the request has no Host header")),
        (Some(_), Some(_)) => Err(malformed("the request has several Host headers")),
    }
}

fn named(host: &str, local: Local, allowed: &[String]) -> Result<()> {
    let authority: Authority = host.parse().map_err(|_| refused(format!("{host:?} is not a host")))?;
    let name = authority.host().trim_end_matches('.');
    let bare = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    let known = match bare.parse::<IpAddr>() {
        // Whoever knows the address it came in on needed no name to find it.
        Ok(address) => address.to_canonical().is_loopback() || local.is(address),
        Err(_) => name.eq_ignore_ascii_case("localhost") || (name.len() > 10 && tail(name, 10).eq_ignore_ascii_case(".localhost")),
    };
    if known || allowed.iter().any(|other| other.eq_ignore_ascii_case(name)) {
        return Ok(());
    }
    Err(refused(format!("the request is for the host {name:?}, which is not this one")))
}

fn tail(name: &str, length: usize) -> &str {
    name.len().checked_sub(length).and_then(|start| name.get(start..)).unwrap_or_default()
}

/// What the protocol itself rules out, whatever host is meant.
fn malformed(message: &'static str) -> Error {
    Error::new(Code::InvalidValue, message).hint("send one Host header, such as localhost")
}

fn refused(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(Code::InvalidHost, message).hint("use localhost or 127.0.0.1, or start the server with --allow-host")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_names_the_own_address_and_allowed_hosts_pass() {
        let local = Local::Address("192.168.1.5".parse().unwrap());
        let allowed = ["box.lan".to_owned()];
        for host in [
            "localhost",
            "LocalHost:8420",
            "localhost.",
            "a.localhost",
            "127.0.0.1",
            "127.9.9.9:1",
            "[::1]:8420",
            "[::ffff:127.0.0.1]",
            "192.168.1.5:8420",
            "BOX.lan:80",
        ] {
            assert!(named(host, local, &allowed).is_ok(), "{host}");
        }
    }

    #[test]
    fn the_unspecified_address_passes_where_the_server_listens_on_it() {
        let local = "192.168.1.5".parse().unwrap();
        for host in ["0.0.0.0:8420", "[::]", "[::ffff:0.0.0.0]:1", "192.168.1.5"] {
            assert!(named(host, Local::Any(local), &[]).is_ok(), "{host}");
        }
        assert!(named("192.168.1.6", Local::Any(local), &[]).is_err());
        assert!(named("0.0.0.0", Local::Address(local), &[]).is_err());
    }

    #[test]
    fn other_names_do_not_pass() {
        let local = Local::Address("127.0.0.1".parse().unwrap());
        for host in [
            "example.com",
            "localhost.example.com",
            "evillocalhost",
            ".localhost",
            "192.168.1.5",
            "127.0.0.1.nip.io",
            "0.0.0.0",
            "[::]:8420",
            "",
            "a b",
            "[::1",
            "box.lan",
        ] {
            let error = named(host, local, &[]).unwrap_err();
            assert_eq!(error.code, Code::InvalidHost, "{host}");
        }
    }
}
