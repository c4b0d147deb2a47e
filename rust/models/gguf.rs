//! Reads GGUF files (versions 2 and 3): metadata, tensor table, and the bytes of each tensor, over a memory map.
//!
//! Every length, count and offset in the file is checked before it is used, so a truncated or altered file gives an
//! error and never a panic or an allocation larger than the file. What the numbers inside a tensor mean is `blocks`'
//! business, what the tensors are for is `import`'s.
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>

pub mod blocks;
mod kind;
mod parse;
mod superblocks;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use thiserror::Error;

pub use kind::{Coding, Kind};

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

    /// Says that a part of [`Gguf::file_bytes`] is not needed for now, so that its pages do not count as this process's memory.
    /// Reading it again is right, and reads the disk or its cache.
    pub fn release(&self, part: &[u8]) {
        let offset = (part.as_ptr() as usize).wrapping_sub(self.map.as_ptr() as usize);
        if offset.checked_add(part.len()).is_none_or(|end| end > self.map.len()) {
            return;
        }
        // SAFETY: the map is of a file, shared and never written, so pages that are dropped come back with the same content.
        #[cfg(unix)]
        #[allow(unsafe_code)]
        // Advice: where the system does not take it, memory is all that is lost.
        let _ = unsafe { self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, offset, part.len()) };
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
