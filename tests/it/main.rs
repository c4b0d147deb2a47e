//! The one binary of integration tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, clippy::print_stderr)]

mod decode;
mod messages;
mod stop;
mod templates;
mod tokenizer;
mod vocab;
