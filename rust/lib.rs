//! emberd.

pub mod prompt;
