//! One binary for all tests that go through the public surface of the core crate.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod models;
