//! Takes the tables at the start of a GGUF file apart, and checks every number in them against the file's size.

use std::collections::BTreeMap;

use super::{GgufError, Kind, TensorInfo, Value};

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
            None => {
                Err(GgufError::Truncated { what: what.to_owned(), offset: self.at as u64, needed: count, size: self.bytes.len() as u64 })
            }
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
                [other] => {
                    return Err(GgufError::Damaged(format!("{what} is a boolean of value {other}")));
                }
            },
            TYPE_STRING => Value::Text(self.text(what)?),
            10 => Value::Int(self.u64(what)?.into()),
            11 => Value::Int(i64::from_le_bytes(self.array(what)?).into()),
            12 => Value::Float(f64::from_le_bytes(self.array(what)?)),
            other => {
                return Err(GgufError::Damaged(format!("{what} has the unknown value type {other}")));
            }
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
            other => {
                return Err(GgufError::Damaged(format!("{what} is an array of the unsupported type {other}")));
            }
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

/// Metadata by key, tensors by name.
pub(super) type Tables = (BTreeMap<String, Value>, BTreeMap<String, TensorInfo>);

/// Reads the tables at the file's start and checks that every tensor lies inside the file.
pub(super) fn tables(bytes: &[u8]) -> Result<Tables, GgufError> {
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
        let truncated =
            |offset| GgufError::Truncated { what: format!("tensor {}", tensor.name), offset, needed: bytes_long, size: bytes.len() as u64 };
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
