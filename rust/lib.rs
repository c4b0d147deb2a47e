//! emberd.

pub mod prompt;
pub mod text;
