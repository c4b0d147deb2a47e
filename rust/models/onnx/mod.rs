//! Reads of ONNX models what frames their weights (`frame`), and writes ONNX models: the file format (`proto`), a graph under construction with its weights (`graph`), matrix products
//! over the weight formats of GGUF (`linear`, `packed`), and the decoder that is made of them (`decoder`, `attention`, `head`).
//!
//! The graphs are made for ONNX Runtime: next to the standard operators they use its `com.microsoft` ones.

mod attention;
pub mod decoder;
pub mod frame;
pub mod fuse;
pub mod graph;
mod head;
mod linear;
mod packed;
pub mod proto;
