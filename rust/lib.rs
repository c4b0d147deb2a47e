//! tmp
pub mod error;
pub mod prompt;
pub mod engine;
