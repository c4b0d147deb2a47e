//! Reads what frames the weights of an ONNX graph: its inputs, its tensors' names, and what it needs of the files beside it. Never the weights themselves.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

/// The longest text that is taken for a name.
const LONGEST_NAME: u64 = 4096;

/// The inputs beside caches that the engine fills; `py/emberd/layout.py` has the same list, and says what each is.
const FILLED: [&str; 7] =
    ["input_ids", "attention_mask", "position_ids", "cache_position", "use_cache_branch", "num_logits_to_keep", "logits_to_keep"];

/// What a refusal says of the inputs that a graph should have, in the engine's words.
pub const EXPECTED: &str = "input_ids, attention_mask, position_ids and past_key_values.N.key/value";

/// The first input of a graph that no engine here takes, if there is one: before its weights have come, which may be a thousand times its size. An engine
/// looks at more than names; a graph that cannot be read is left for it to judge.
#[must_use]
pub fn unknown_input(graph: &Path) -> Option<String> {
    let Framed { inputs, tensors, .. } = framed(graph).ok()?;
    // Old graphs list their weights among the inputs as well.
    let mut real = inputs.into_iter().filter(|name| !tensors.contains(name));
    // Keys, values and recurrent states: `past_key_values.0.key`, `past_conv.1`.
    real.find(|name| !FILLED.contains(&name.as_str()) && !name.starts_with("past"))
}

/// What a graph's bytes say about what is around it.
#[derive(Debug, Default)]
pub(crate) struct Framed {
    /// The files beside it that its tensors are in, and how many bytes of each they need.
    pub(crate) external: BTreeMap<String, u64>,
    /// The names of its inputs.
    inputs: Vec<String>,
    /// The names of its tensors.
    tensors: BTreeSet<String>,
}

/// What a graph says. Of onnx.proto are known: `ModelProto.graph` (7), `GraphProto.initializer` (5) and `input` (11), `ValueInfoProto.name` (1), `TensorProto.name` (8) and
/// `external_data` (13) with the keys `location`, `offset` and `length`. The rest is stepped over, and has to be there.
///
/// # Errors
/// A file that cannot be read, is cut short, or holds no graph.
pub(crate) fn framed(graph: &Path) -> io::Result<Framed> {
    let file = File::open(graph)?;
    let end = file.metadata()?.len();
    let mut wire = Wire { file: BufReader::new(file), at: 0 };
    let mut framed = Framed::default();
    let mut any = false;
    while let Some((field, graph_end)) = wire.field(end)? {
        if field != 7 {
            wire.step_to(graph_end)?;
            continue;
        }
        any = true;
        while let Some((field, stop)) = wire.field(graph_end)? {
            match field {
                5 => wire.tensor(stop, &mut framed)?,
                11 => wire.input(stop, &mut framed)?,
                _ => wire.step_to(stop)?,
            }
        }
    }
    if any { Ok(framed) } else { Err(io::Error::other("it holds no graph")) }
}

/// A file in the wire format of protocol buffers, read forward.
struct Wire {
    file: BufReader<File>,
    at: u64,
}

impl Wire {
    /// The next field that has a length, and where it ends; others are stepped over. `None` at the end of the message.
    fn field(&mut self, end: u64) -> io::Result<Option<(u64, u64)>> {
        while self.at < end {
            let tag = self.varint()?;
            let stop = match tag & 7 {
                0 => {
                    self.varint()?;
                    self.at
                }
                1 => self.at + 8,
                2 => self.varint()?.saturating_add(self.at),
                5 => self.at + 4,
                other => return Err(io::Error::other(format!("a field of wire type {other} at byte {}", self.at))),
            };
            if stop > end {
                return Err(io::Error::other(format!("it is cut short: byte {stop} is missing, and {end} is where it ends")));
            }
            if tag & 7 == 2 {
                return Ok(Some((tag >> 3, stop)));
            }
            self.step_to(stop)?;
        }
        Ok(None)
    }

    fn varint(&mut self) -> io::Result<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let mut byte = [0];
            self.file.read_exact(&mut byte)?;
            self.at += 1;
            value |= u64::from(byte[0] & 0x7f) << shift;
            if byte[0] < 0x80 {
                return Ok(value);
            }
        }
        Err(io::Error::other(format!("a number without an end at byte {}", self.at)))
    }

    fn step_to(&mut self, stop: u64) -> io::Result<()> {
        let step = i64::try_from(stop.saturating_sub(self.at)).map_err(io::Error::other)?;
        self.file.seek_relative(step)?;
        self.at = stop;
        Ok(())
    }

    fn text(&mut self, stop: u64) -> io::Result<String> {
        let length = stop - self.at;
        if length > LONGEST_NAME {
            return Err(io::Error::other(format!("a text of {length} bytes at byte {}", self.at)));
        }
        let mut text = String::new();
        (&mut self.file).take(length).read_to_string(&mut text)?;
        self.at = stop;
        Ok(text)
    }

    fn input(&mut self, end: u64, framed: &mut Framed) -> io::Result<()> {
        while let Some((field, stop)) = self.field(end)? {
            match field {
                1 => framed.inputs.push(self.text(stop)?),
                _ => self.step_to(stop)?,
            }
        }
        Ok(())
    }

    fn tensor(&mut self, end: u64, framed: &mut Framed) -> io::Result<()> {
        let (mut location, mut offset, mut length) = (None, 0_u64, 0_u64);
        while let Some((field, entry_end)) = self.field(end)? {
            if field == 8 {
                let name = self.text(entry_end)?;
                framed.tensors.insert(name);
                continue;
            }
            if field != 13 {
                self.step_to(entry_end)?;
                continue;
            }
            let (mut key, mut value) = (String::new(), String::new());
            while let Some((field, stop)) = self.field(entry_end)? {
                match field {
                    1 => key = self.text(stop)?,
                    2 => value = self.text(stop)?,
                    _ => self.step_to(stop)?,
                }
            }
            let number = || value.parse().map_err(|_| io::Error::other(format!("a tensor's {key} is {value:?}")));
            match key.as_str() {
                "offset" => offset = number()?,
                "length" => length = number()?,
                "location" => location = Some(value),
                _ => {}
            }
        }
        if let Some(location) = location {
            let bytes: &mut u64 = framed.external.entry(location).or_default();
            *bytes = (*bytes).max(offset.saturating_add(length));
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::fs;

    /// A field with a length.
    fn field(number: u8, content: &[u8]) -> Vec<u8> {
        let mut bytes = vec![number << 3 | 2];
        let mut length = content.len();
        while length >= 0x80 {
            bytes.push((length & 0x7f) as u8 | 0x80);
            length >>= 7;
        }
        bytes.push(length as u8);
        bytes.extend(content);
        bytes
    }

    fn entry(key: &str, value: &str) -> Vec<u8> {
        field(13, &[field(1, key.as_bytes()), field(2, value.as_bytes())].concat())
    }

    /// A graph of two tensors: one in itself, one in a file beside it.
    pub(crate) fn graph(location: &str, offset: &str) -> Vec<u8> {
        let inside = field(5, &field(9, &[7; 300]));
        let outside = field(5, &[vec![0x10, 1], entry("location", location), entry("offset", offset), entry("length", "100")].concat());
        // An integer and a name before the graph, a message after it.
        [vec![0x08, 10], field(2, b"test"), field(7, &[field(2, b"main"), inside, outside].concat()), field(8, b"opset")].concat()
    }

    #[test]
    fn a_graph_cut_anywhere_is_not_whole() {
        let whole = graph("data", "0");
        let file = tempfile::NamedTempFile::new().unwrap();
        // Fields that follow the graph may be left out, so a cut between two of them cannot be seen.
        let graph_ends = whole.len() - field(8, b"opset").len();
        for length in 0..whole.len() {
            fs::write(file.path(), &whole[..length]).unwrap();
            assert_eq!(framed(file.path()).is_ok(), length == graph_ends, "{length}");
        }
        fs::write(file.path(), &whole).unwrap();
        assert_eq!(framed(file.path()).unwrap().external, BTreeMap::from([("data".to_owned(), 100)]));
    }

    #[test]
    fn a_graph_says_which_input_nobody_takes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let unknown = |inputs: &[&str]| {
            let inputs = inputs.iter().flat_map(|name| field(11, &[field(1, name.as_bytes()), field(2, b"type")].concat()));
            let weight = field(5, &[field(8, b"weight"), field(9, &[7; 300])].concat());
            fs::write(file.path(), field(7, &[inputs.collect(), weight].concat())).unwrap();
            unknown_input(file.path())
        };
        assert_eq!(unknown(&["input_ids", "attention_mask", "past_key_values.0.key", "past_key_values.0.value", "weight"]), None);
        assert_eq!(unknown(&["input_ids", "position_ids", "past_conv.0", "past_key_values.1.key", "num_logits_to_keep"]), None);
        assert_eq!(unknown(&["input_ids", "inputs_embeds", "pixel_values"]).as_deref(), Some("inputs_embeds"));
        fs::write(file.path(), b"a graph").unwrap();
        assert_eq!(unknown_input(file.path()), None, "what cannot be read is the engine's to judge");
    }
}
