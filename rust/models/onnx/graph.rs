//! A graph under construction: nodes, inputs and outputs in memory, weights streamed to the external data file.
//!
//! It knows the file format and ONNX Runtime's operator domains; it knows nothing of language models.

use std::io::Write;

use prost::Message;

use super::proto::{
    AttributeProto, Dimension, DimensionProto, GraphProto, LOCATION_EXTERNAL, ModelProto, NodeProto, OperatorSetIdProto,
    StringStringEntryProto, TensorProto, TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto, attribute_type, data_type,
};
use crate::models::output::{FileEntry, Output};

/// ONNX operator set; 21 is what `SimplifiedLayerNormalization`'s neighbours here need at most.
const OPSET: i64 = 21;
/// ONNX file format version that goes with the operator set.
const IR_VERSION: i64 = 10;
/// Operators that live in ONNX Runtime's own domain.
const MICROSOFT: [&str; 6] =
    ["FusedMatMul", "GatherBlockQuantized", "GroupQueryAttention", "MatMulNBits", "QuickGelu", "SkipSimplifiedLayerNormalization"];

/// A node's attribute.
#[derive(Debug, Clone, Copy)]
pub enum Attribute {
    /// An integer.
    Int(i64),
    /// A float.
    Float(f32),
}

/// A dimension of an input or output.
#[derive(Debug, Clone, Copy)]
pub enum Size<'a> {
    /// Known when the graph is made.
    Fixed(usize),
    /// Known when it runs; equal names are equal sizes.
    Named(&'a str),
}

/// Element types.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    /// 32-bit floats.
    Float,
    /// Unsigned bytes.
    Byte,
    /// 64-bit integers.
    Int64,
}

impl Element {
    fn number(self) -> i32 {
        match self {
            Self::Float => data_type::FLOAT,
            Self::Byte => data_type::UINT8,
            Self::Int64 => data_type::INT64,
        }
    }

    fn bytes(self) -> usize {
        match self {
            Self::Float => 4,
            Self::Byte => 1,
            Self::Int64 => 8,
        }
    }
}

/// `Cast`'s target for 32-bit integers.
pub const CAST_INT32: Attribute = Attribute::Int(data_type::INT32 as i64);

/// A graph under construction.
#[derive(Debug)]
pub struct Graph {
    graph: GraphProto,
    metadata: Vec<StringStringEntryProto>,
    data: Output,
    location: String,
}

impl Graph {
    /// An empty graph whose weights go to `data`, a file named `location` beside the model.
    pub fn new(name: &str, data: Output, location: &str) -> Self {
        let graph = GraphProto { name: Some(name.to_owned()), ..GraphProto::default() };
        Self { graph, metadata: Vec::new(), data, location: location.to_owned() }
    }

    /// Adds a node. An empty name stands for an optional input or output that is not there.
    pub fn node(&mut self, operator: &str, inputs: &[&str], outputs: &[&str], attributes: &[(&str, Attribute)]) {
        let attribute = attributes.iter().map(|(name, value)| {
            let (f, i, kind) = match *value {
                Attribute::Float(value) => (Some(value), None, attribute_type::FLOAT),
                Attribute::Int(value) => (None, Some(value), attribute_type::INT),
            };
            AttributeProto { name: Some((*name).to_owned()), f, i, r#type: Some(kind) }
        });
        let domain = if MICROSOFT.contains(&operator) { "com.microsoft" } else { "" };
        self.graph.node.push(NodeProto {
            input: inputs.iter().map(|&name| name.to_owned()).collect(),
            output: outputs.iter().map(|&name| name.to_owned()).collect(),
            name: Some(format!("{operator}/{}", outputs.first().copied().unwrap_or_default())),
            op_type: Some(operator.to_owned()),
            attribute: attribute.collect(),
            domain: Some(domain.to_owned()),
        });
    }

    /// How many nodes there are.
    pub fn node_count(&self) -> usize {
        self.graph.node.len()
    }

    /// Adds a small constant of integers, kept in the model file itself. `None` as `dims` makes a scalar.
    pub fn integers(&mut self, name: &str, values: &[i64], scalar: bool) {
        self.graph.initializer.push(TensorProto {
            dims: if scalar { Vec::new() } else { vec![values.len() as i64] },
            data_type: Some(data_type::INT64),
            name: Some(name.to_owned()),
            raw_data: Some(values.iter().flat_map(|value| value.to_le_bytes()).collect()),
            ..TensorProto::default()
        });
    }

    /// Adds a constant whose bytes `write` streams into the data file.
    ///
    /// # Errors
    /// What `write` returns; a byte count that is not the shape's is `InvalidData`.
    pub fn tensor<E: From<std::io::Error>>(
        &mut self,
        name: &str,
        element: Element,
        dims: &[usize],
        write: impl FnOnce(&mut Output) -> Result<(), E>,
    ) -> Result<(), E> {
        let length = (dims.iter().product::<usize>() * element.bytes()) as u64;
        // Large tensors begin on a page, so that the runtime can map them; small ones on a cache line.
        let offset = self.data.align(if length >= 1 << 16 { 4096 } else { 64 })?;
        write(&mut self.data)?;
        if self.data.position() - offset != length {
            let text = format!("{name}: {} bytes written, {length} expected", self.data.position() - offset);
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, text).into());
        }
        let entry = |key: &str, value: String| StringStringEntryProto { key: Some(key.to_owned()), value: Some(value) };
        self.graph.initializer.push(TensorProto {
            dims: dims.iter().map(|&size| size as i64).collect(),
            data_type: Some(element.number()),
            name: Some(name.to_owned()),
            external_data: vec![
                entry("location", self.location.clone()),
                entry("offset", offset.to_string()),
                entry("length", length.to_string()),
            ],
            data_location: Some(LOCATION_EXTERNAL),
            ..TensorProto::default()
        });
        Ok(())
    }

    /// Adds a constant of floats that is at hand.
    ///
    /// # Errors
    /// What the system says.
    pub fn floats<E: From<std::io::Error>>(&mut self, name: &str, dims: &[usize], values: &[f32]) -> Result<(), E> {
        self.tensor(name, Element::Float, dims, |data| Ok(write_floats(data, values)?))
    }

    /// Adds a constant of bytes that is at hand.
    ///
    /// # Errors
    /// What the system says.
    pub fn bytes<E: From<std::io::Error>>(&mut self, name: &str, dims: &[usize], values: &[u8]) -> Result<(), E> {
        self.tensor(name, Element::Byte, dims, |data| Ok(data.write_all(values)?))
    }

    /// Says something of the model that its tensors do not tell, to whoever loads it.
    pub fn metadata(&mut self, key: &str, value: &str) {
        self.metadata.push(StringStringEntryProto { key: Some(key.to_owned()), value: Some(value.to_owned()) });
    }

    /// Declares an input of the graph.
    pub fn input(&mut self, name: &str, element: Element, dims: &[Size<'_>]) {
        self.graph.input.push(value_info(name, element, dims));
    }

    /// Declares an output of the graph.
    pub fn output(&mut self, name: &str, element: Element, dims: &[Size<'_>]) {
        self.graph.output.push(value_info(name, element, dims));
    }

    /// Ends the data file, writes the model into `file`, and returns the entries of both.
    ///
    /// # Errors
    /// What the system says.
    pub fn finish(self, mut file: Output) -> std::io::Result<[FileEntry; 2]> {
        let opset = |domain: &str, version| OperatorSetIdProto { domain: Some(domain.to_owned()), version: Some(version) };
        let model = ModelProto {
            ir_version: Some(IR_VERSION),
            opset_import: vec![opset("", OPSET), opset("com.microsoft", 1)],
            producer_name: Some(env!("CARGO_PKG_NAME").to_owned()),
            producer_version: Some(env!("CARGO_PKG_VERSION").to_owned()),
            graph: Some(self.graph),
            metadata_props: self.metadata,
        };
        file.write_all(&model.encode_to_vec())?;
        Ok([file.finish()?, self.data.finish()?])
    }
}

/// Writes floats as little-endian bytes.
pub(super) fn write_floats(into: &mut Output, values: &[f32]) -> std::io::Result<()> {
    let mut bytes = Vec::with_capacity(4 * values.len().min(1 << 16));
    for part in values.chunks(1 << 16) {
        bytes.clear();
        bytes.extend(part.iter().flat_map(|value| value.to_le_bytes()));
        into.write_all(&bytes)?;
    }
    Ok(())
}

fn value_info(name: &str, element: Element, dims: &[Size<'_>]) -> ValueInfoProto {
    let dim = dims.iter().map(|size| DimensionProto {
        value: Some(match *size {
            Size::Fixed(size) => Dimension::Size(size as i64),
            Size::Named(name) => Dimension::Symbol(name.to_owned()),
        }),
    });
    let shape = TensorShapeProto { dim: dim.collect() };
    let tensor_type = TensorTypeProto { elem_type: Some(element.number()), shape: Some(shape) };
    ValueInfoProto { name: Some(name.to_owned()), r#type: Some(TypeProto { tensor_type: Some(tensor_type) }) }
}
