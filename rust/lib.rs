//! emberd.

pub mod models;
