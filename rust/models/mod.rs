//! Models on disk: reading the formats they are published in, and importing them into the folder an engine loads.
//!
//! Nothing here runs a model, and nothing here talks to the network.

pub mod gguf;
pub mod import;
pub mod llama;
pub mod onnx;
pub mod output;
pub mod tokenizer;
