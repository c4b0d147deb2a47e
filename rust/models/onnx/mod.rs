//! Reads of ONNX models what frames their weights (`frame`), and writes ONNX models: the file format (`proto`), a graph under construction with its weights (`graph`), matrix products
//! over the weight formats of GGUF (`linear`), and the decoder that is made of them (`decoder`).
//!
//! The graphs are made for ONNX Runtime: next to the standard operators they use its `com.microsoft` ones.

pub mod decoder;
pub mod frame;
pub mod graph;
mod head;
mod linear;
pub mod proto;
