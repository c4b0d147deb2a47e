//! Reads GGUF files (versions 2 and 3): metadata, tensor table, and the bytes of each tensor, over a memory map.
//!
//! Every length, count and offset in the file is checked before it is used, so a truncated or altered file gives an
//! error and never a panic or an allocation larger than the file. What the numbers inside a tensor mean is `blocks`'
//! business, what the tensors are for is `import`'s.
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>

pub mod blocks;
mod parse;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use thiserror::Error;

/// What was wrong with a GGUF file.
#[derive(Debug, Error)]
pub enum GgufError {
    /// The file could not be opened or mapped.
    #[error("cannot read {}: {source}\nhint: check that the file exists and may be read", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file does not start with `GGUF`.
    #[error(
        "not a gguf file: it starts with {found:02x?}\nhint: give a file that ends in .gguf; a git-lfs pointer or an html page is not one"
    )]
    Magic {
        /// The first bytes, at most four.
        found: Vec<u8>,
    },
    /// A version other than 2 and 3, or a big-endian file.
    #[error("gguf version {version} is not supported\nhint: versions 2 and 3 (little-endian) are; convert the model anew")]
    Version {
        /// The version field.
        version: u32,
    },
    /// The file ends before something that its own tables announce.
    #[error("the gguf file is truncated: {what} needs {needed} bytes at offset {offset}, the file has {size}\nhint: download it again")]
    Truncated {
        /// What was being read.
        what: String,
        /// Where it starts, bytes from the file's start.
        offset: u64,
        /// How long it is, bytes.
        needed: u64,
        /// The file's size, bytes.
        size: u64,
    },
    /// Something that the format forbids.
    #[error("the gguf file is damaged: {0}\nhint: download it again and compare its sha256")]
    Damaged(String),
    /// A metadata key that is needed and is not there, or has another type.
    #[error("the gguf file has no usable metadata key {key}\nhint: it should be {expected}; convert the model anew")]
    Key {
        /// The key.
        key: String,
        /// What it should be.
        expected: &'static str,
    },
    /// A tensor that is needed and is not there.
    #[error("the gguf file has no tensor {0}\nhint: it may be one part of a split model; join the parts first")]
    Tensor(String),
}

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Any of the unsigned and signed integer types, or a boolean (0 or 1).
    Int(i128),
    /// `f32` or `f64`.
    Float(f64),
    /// A string.
    Text(String),
    /// An array of integers or booleans.
    Ints(Vec<i64>),
    /// An array of floats.
    Floats(Vec<f64>),
    /// An array of strings.
    Texts(Vec<String>),
}

/// How a tensor's elements are stored. Types that the importer does not read keep their number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// 32-bit floats.
    F32,
    /// 16-bit IEEE floats.
    F16,
    /// 16-bit brain floats.
    Bf16,
    /// Blocks of 32: an f16 scale and 32 four-bit codes, `w = d * (q - 8)`.
    Q4_0,
    /// Blocks of 32: an f16 scale, an f16 minimum and 32 four-bit codes, `w = d * q + m`.
    Q4_1,
    /// Blocks of 32: an f16 scale and 32 signed bytes, `w = d * q`.
    Q8_0,
    /// A type that is known by number only.
    Other(u32),
}

/// Names of ggml's tensor types by number; gaps are numbers that were retired.
const KIND_NAMES: [&str; 31] = [
    "F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K",
    "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16",
];

impl Kind {
    fn from_number(number: u32) -> Self {
        match number {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            8 => Self::Q8_0,
            30 => Self::Bf16,
            other => Self::Other(other),
        }
    }

    /// The type's name as ggml spells it, for messages.
    pub fn name(self) -> String {
        let number = match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q8_0 => 8,
            Self::Bf16 => 30,
            Self::Other(number) => number,
        };
        match KIND_NAMES.get(number as usize) {
            Some(name) => (*name).to_owned(),
            None => format!("type {number}"),
        }
    }

    /// Elements in a block and the block's size in bytes; `None` for a type that is not read.
    pub fn block(self) -> Option<(u64, u64)> {
        match self {
            Self::F32 => Some((1, 4)),
            Self::F16 | Self::Bf16 => Some((1, 2)),
            Self::Q4_0 => Some((32, 18)),
            Self::Q4_1 => Some((32, 20)),
            Self::Q8_0 => Some((32, 34)),
            Self::Other(_) => None,
        }
    }
}

/// One tensor of the table.
#[derive(Debug, Clone)]
pub struct TensorInfo {
    /// Its name, e.g. `blk.0.attn_q.weight`.
    pub name: String,
    /// Elements along a row (ggml's first dimension).
    pub columns: usize,
    /// Number of rows: the product of the other dimensions.
    pub rows: usize,
    /// How the elements are stored.
    pub kind: Kind,
    /// Where the data starts, bytes from the file's start.
    offset: usize,
    /// How long the data is, bytes; 0 for a type that is not read.
    bytes: usize,
}

impl TensorInfo {
    /// Size of the data in bytes (0 when the type is one that is not read).
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// An open GGUF file.
#[derive(Debug)]
pub struct Gguf {
    map: Mmap,
    metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, TensorInfo>,
}

impl Gguf {
    /// Opens and checks a file. The tensor data is mapped, not read.
    ///
    /// # Errors
    /// See [`GgufError`]: not readable, not GGUF, another version, truncated, damaged.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let io = |source| GgufError::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(io)?;
        if file.metadata().map_err(io)?.len() == 0 {
            return Err(GgufError::Magic { found: Vec::new() });
        }
        // SAFETY: the map is read-only. Another process that shortens the file meanwhile can end this one with SIGBUS;
        // model files are written once and renamed into place, and copying each into memory would cost its size.
        #[allow(unsafe_code)]
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        let (metadata, tensors) = parse::tables(&map)?;
        Ok(Self { map, metadata, tensors })
    }

    /// The whole file's bytes.
    pub fn file_bytes(&self) -> &[u8] {
        &self.map
    }

    /// A metadata value.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// A string, or `None` when the key is absent or of another type.
    pub fn text(&self, key: &str) -> Option<&str> {
        match self.value(key) {
            Some(Value::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// A non-negative integer (or boolean), or `None`.
    pub fn integer(&self, key: &str) -> Option<u64> {
        match self.value(key) {
            Some(Value::Int(value)) => u64::try_from(*value).ok(),
            _ => None,
        }
    }

    /// A float, or `None`.
    pub fn float(&self, key: &str) -> Option<f64> {
        match self.value(key) {
            Some(Value::Float(value)) => Some(*value),
            _ => None,
        }
    }

    /// An array of strings, or `None`.
    pub fn texts(&self, key: &str) -> Option<&[String]> {
        match self.value(key) {
            Some(Value::Texts(texts)) => Some(texts),
            _ => None,
        }
    }

    /// An array of integers, or `None`.
    pub fn integers(&self, key: &str) -> Option<&[i64]> {
        match self.value(key) {
            Some(Value::Ints(values)) => Some(values),
            _ => None,
        }
    }

    /// The tensors, by name.
    pub fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    /// A tensor's entry.
    ///
    /// # Errors
    /// [`GgufError::Tensor`] when there is none of that name.
    pub fn tensor(&self, name: &str) -> Result<&TensorInfo, GgufError> {
        self.tensors.get(name).ok_or_else(|| GgufError::Tensor(name.to_owned()))
    }

    /// A tensor's bytes as they are stored; empty for a type that is not read.
    pub fn data(&self, tensor: &TensorInfo) -> &[u8] {
        self.map.get(tensor.offset..tensor.offset + tensor.bytes).unwrap_or_default()
    }
}
