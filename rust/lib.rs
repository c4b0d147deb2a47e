//! emberd keeps a small language model warm for every program on the machine.
//!
//! The modules stand in the order a request meets them.

pub mod error;

pub mod engine;
