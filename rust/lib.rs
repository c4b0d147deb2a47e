//! emberd keeps a small language model warm for every program on the machine.
//!
//! The modules stand in the order a request meets them: the process and its settings, the two doors, the models behind them, the way from
//! turns to token ids, the engine, and the way back to text. Arrows point down the list only. Nothing here knows Python: an engine written in it meets
//! this crate at [`engine::port`], through the extension module in `rust/ffi`.

pub mod app;
pub mod config;
#[cfg(unix)]
mod election;
pub mod error;
pub mod folders;
mod json;
mod linger;
pub mod listen;
mod memory;
pub mod shutdown;

pub mod chat;
#[cfg(unix)]
pub mod omp;
pub mod serve;
pub mod shelf;
#[cfg(unix)]
pub mod status;

pub mod worker;

pub mod http;

mod anthropic;
pub mod completions;
pub mod responses;

pub mod models;

pub mod grammar;

pub mod prompt;

pub mod engine;

pub mod text;

pub mod metrics;
