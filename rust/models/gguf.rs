//! Reads GGUF files (versions 2 and 3): metadata, tensor table, and the bytes of each tensor, over a memory map.
//!
//! Every length, count and offset in the file is checked before it is used, so a truncated or altered file gives an
//! error and never a panic or an allocation larger than the file. What the numbers inside a tensor mean is `blocks`'
//! business, what the tensors are for is `import`'s.
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>

pub mod blocks;

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
    #[error("not a gguf file: it starts with {found:02x?}\nhint: give a file that ends in .gguf; a git-lfs pointer or an html page is not one")]
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
    "F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32",
    "I64", "F64", "IQ1_M", "BF16",
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
        let (metadata, tensors) = parse(&map)?;
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

/// A place in the file.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

/// Array elements of arrays are refused, so nesting needs no limit of its own.
const TYPE_STRING: u32 = 8;
const TYPE_ARRAY: u32 = 9;

impl<'a> Cursor<'a> {
    fn take(&mut self, count: u64, what: &str) -> Result<&'a [u8], GgufError> {
        let end = usize::try_from(count).ok().and_then(|count| self.at.checked_add(count));
        match end.and_then(|end| Some((end, self.bytes.get(self.at..end)?))) {
            Some((end, taken)) => {
                self.at = end;
                Ok(taken)
            }
            None => Err(GgufError::Truncated {
                what: what.to_owned(),
                offset: self.at as u64,
                needed: count,
                size: self.bytes.len() as u64,
            }),
        }
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], GgufError> {
        let mut value = [0; N];
        value.copy_from_slice(self.take(N as u64, what)?);
        Ok(value)
    }

    fn u32(&mut self, what: &str) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    fn text(&mut self, what: &str) -> Result<String, GgufError> {
        let length = self.u64(what)?;
        let bytes = self.take(length, what)?;
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok(text.to_owned()),
            Err(_) => Err(GgufError::Damaged(format!("{what} is not utf-8"))),
        }
    }

    /// Checks that `count` things of at least `least` bytes each can still follow, before memory is set aside for them.
    fn expect_room(&self, count: u64, least: u64, what: &str) -> Result<usize, GgufError> {
        let left = (self.bytes.len() - self.at) as u64;
        match count.checked_mul(least) {
            Some(needed) if needed <= left => Ok(count as usize),
            needed => Err(GgufError::Truncated {
                what: format!("{count} entries of {what}"),
                offset: self.at as u64,
                needed: needed.unwrap_or(u64::MAX),
                size: self.bytes.len() as u64,
            }),
        }
    }

    fn scalar(&mut self, kind: u32, what: &str) -> Result<Value, GgufError> {
        Ok(match kind {
            0 => Value::Int(u8::from_le_bytes(self.array(what)?).into()),
            1 => Value::Int(i8::from_le_bytes(self.array(what)?).into()),
            2 => Value::Int(u16::from_le_bytes(self.array(what)?).into()),
            3 => Value::Int(i16::from_le_bytes(self.array(what)?).into()),
            4 => Value::Int(self.u32(what)?.into()),
            5 => Value::Int(i32::from_le_bytes(self.array(what)?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array(what)?).into()),
            7 => match self.array::<1>(what)? {
                [flag @ (0 | 1)] => Value::Int(flag.into()),
                [other] => return Err(GgufError::Damaged(format!("{what} is a boolean of value {other}"))),
            },
            TYPE_STRING => Value::Text(self.text(what)?),
            10 => Value::Int(self.u64(what)?.into()),
            11 => Value::Int(i64::from_le_bytes(self.array(what)?).into()),
            12 => Value::Float(f64::from_le_bytes(self.array(what)?)),
            other => return Err(GgufError::Damaged(format!("{what} has the unknown value type {other}"))),
        })
    }

    fn value(&mut self, what: &str) -> Result<Value, GgufError> {
        let kind = self.u32(what)?;
        if kind != TYPE_ARRAY {
            return self.scalar(kind, what);
        }
        let (kind, count) = (self.u32(what)?, self.u64(what)?);
        let least = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            TYPE_STRING | 10..=12 => 8,
            other => return Err(GgufError::Damaged(format!("{what} is an array of the unsupported type {other}"))),
        };
        let count = self.expect_room(count, least, what)?;
        let (mut ints, mut floats, mut texts) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..count {
            match self.scalar(kind, what)? {
                Value::Int(value) => ints.push(i64::try_from(value).unwrap_or(i64::MAX)),
                Value::Float(value) => floats.push(value),
                Value::Text(text) => texts.push(text),
                _ => return Err(GgufError::Damaged(format!("{what} nests arrays"))),
            }
        }
        Ok(match kind {
            TYPE_STRING => Value::Texts(texts),
            6 | 12 => Value::Floats(floats),
            _ => Value::Ints(ints),
        })
    }
}

type Tables = (BTreeMap<String, Value>, BTreeMap<String, TensorInfo>);

/// Reads the tables at the file's start and checks that every tensor lies inside the file.
fn parse(bytes: &[u8]) -> Result<Tables, GgufError> {
    let mut cursor = Cursor { bytes, at: 0 };
    if !bytes.starts_with(b"GGUF") {
        return Err(GgufError::Magic { found: bytes.iter().take(4).copied().collect() });
    }
    cursor.at = 4;
    let version = cursor.u32("the version")?;
    if !(2..=3).contains(&version) {
        return Err(GgufError::Version { version });
    }
    let tensor_count = cursor.u64("the tensor count")?;
    let key_count = cursor.u64("the metadata count")?;

    cursor.expect_room(key_count, 8 + 4 + 1, "metadata")?;
    let mut metadata = BTreeMap::new();
    for _ in 0..key_count {
        let key = cursor.text("a metadata key")?;
        let value = cursor.value(&format!("the value of {key}"))?;
        if metadata.insert(key.clone(), value).is_some() {
            return Err(GgufError::Damaged(format!("metadata key {key} is there twice")));
        }
    }

    cursor.expect_room(tensor_count, 8 + 4 + 8 + 4 + 8, "the tensor table")?;
    let mut tensors = Vec::new();
    for _ in 0..tensor_count {
        tensors.push(tensor_entry(&mut cursor)?);
    }

    let alignment = match metadata.get("general.alignment") {
        None => 32,
        Some(Value::Int(value)) => u64::try_from(*value).unwrap_or(0),
        Some(_) => 0,
    };
    if !alignment.is_power_of_two() || alignment > 1 << 20 {
        return Err(GgufError::Damaged(format!("general.alignment is {alignment}, not a small power of two")));
    }
    let start = (cursor.at as u64).next_multiple_of(alignment);
    let mut table = BTreeMap::new();
    for (mut tensor, offset, bytes_long) in tensors {
        if offset % alignment != 0 {
            return Err(GgufError::Damaged(format!("tensor {} starts at {offset}, not a multiple of {alignment}", tensor.name)));
        }
        let truncated = |offset| GgufError::Truncated {
            what: format!("tensor {}", tensor.name),
            offset,
            needed: bytes_long,
            size: bytes.len() as u64,
        };
        let offset = start.checked_add(offset).ok_or_else(|| truncated(u64::MAX))?;
        if offset.checked_add(bytes_long).is_none_or(|end| end > bytes.len() as u64) {
            return Err(truncated(offset));
        }
        (tensor.offset, tensor.bytes) = (offset as usize, bytes_long as usize);
        if let Some(twice) = table.insert(tensor.name.clone(), tensor) {
            return Err(GgufError::Damaged(format!("tensor {} is there twice", twice.name)));
        }
    }
    Ok((metadata, table))
}

/// One entry of the tensor table, with its offset from the data section's start and its size in bytes.
fn tensor_entry(cursor: &mut Cursor<'_>) -> Result<(TensorInfo, u64, u64), GgufError> {
    let name = cursor.text("a tensor name")?;
    let damaged = |what: &str| GgufError::Damaged(format!("tensor {name} {what}"));
    let dimensions = cursor.u32("a tensor's dimensions")?;
    if !(1..=4).contains(&dimensions) {
        return Err(damaged(&format!("has {dimensions} dimensions")));
    }
    let columns = cursor.u64("a tensor's dimensions")?;
    let mut rows: u64 = 1;
    for _ in 1..dimensions {
        let size = cursor.u64("a tensor's dimensions")?;
        rows = rows.checked_mul(size).ok_or_else(|| damaged("is larger than any memory"))?;
    }
    let kind = Kind::from_number(cursor.u32("a tensor's type")?);
    let offset = cursor.u64("a tensor's offset")?;
    if columns == 0 || rows == 0 {
        return Err(damaged("is empty"));
    }
    let bytes = match kind.block() {
        Some((elements, _)) if columns % elements != 0 => {
            return Err(damaged(&format!("has rows of {columns}, not whole blocks of {elements}")));
        }
        Some((elements, size)) => (columns / elements).checked_mul(size).and_then(|row| row.checked_mul(rows)),
        None => Some(0),
    };
    let too_large = || damaged("is larger than any memory");
    let bytes = bytes.ok_or_else(too_large)?;
    columns.checked_mul(rows).and_then(|count| usize::try_from(count).ok()).ok_or_else(too_large)?;
    let tensor = TensorInfo { name: name.clone(), columns: columns as usize, rows: rows as usize, kind, offset: 0, bytes: 0 };
    Ok((tensor, offset, bytes))
}
