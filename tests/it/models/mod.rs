//! Models on disk: the GGUF reader and the import.

mod gguf;
mod import;
mod pieces;
pub mod writer;
