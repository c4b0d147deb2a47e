//! Whether a folder that somebody else filled holds a whole model: every file that is needed, and the large ones to their last byte.
//!
//! For folders without a list of sizes. Only what frames the weights is read, never the weights: an ONNX graph says in its own bytes how long it is and
//! how much of which file beside it it needs, a safetensors file how long it is. What the weights say is the engine's business.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::{Component, Path};

use serde::de::IgnoredAny;
use serde_json::Value;

use crate::models::onnx::frame::{Framed, framed};
use crate::models::table::{Dtype, Form};

/// The longest table of tensors that is taken for one.
const LONGEST_HEADER: u64 = 100_000_000;

/// Checks that the folder holds a model of this form, with a chat template.
///
/// # Errors
/// What is missing, cut short or not what its name says, in a few words.
pub fn check(folder: &Path, form: Form, dtype: Dtype) -> Result<(), String> {
    for name in ["config.json", "tokenizer.json"] {
        json::<IgnoredAny>(&folder.join(name))?.ok_or_else(|| missing(&folder.join(name)))?;
    }
    json::<IgnoredAny>(&folder.join("generation_config.json"))?;
    let config = json::<Value>(&folder.join("tokenizer_config.json"))?.unwrap_or_default();
    let beside = ["chat_template.jinja", "chat_template.json"].iter().any(|name| folder.join(name).is_file());
    if !beside && config.get("chat_template").is_none_or(Value::is_null) {
        return Err(format!("{} has no chat template", folder.display()));
    }
    match form {
        Form::Onnx => {
            let graph = dtype.graphs().into_iter().map(|name| folder.join(name)).find(|path| path.is_file());
            graph.ok_or_else(|| missing(&folder.join(&dtype.graphs()[0]))).and_then(|graph| onnx(&graph))
        }
        Form::Mlx => mlx(folder),
    }
}

fn missing(path: &Path) -> String {
    format!("{} is missing", path.display())
}

fn cut(path: &Path, bytes: u64, needed: u64) -> String {
    format!("{} has {bytes} bytes and needs {needed}", path.display())
}

/// What a JSON file holds; `None` where there is none.
fn json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Option<T>, String> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(format!("could not read {}: {error}", path.display())),
    };
    serde_json::from_slice(&bytes).map(Some).map_err(|error| format!("{} is damaged: {error}", path.display()))
}

/// A graph whose every byte is here, and whose weights in other files are as well.
fn onnx(graph: &Path) -> Result<(), String> {
    let Framed { external, .. } = framed(graph).map_err(|error| format!("{} is damaged: {error}", graph.display()))?;
    for (location, bytes) in external {
        if !Path::new(&location).components().all(|part| matches!(part, Component::Normal(_))) {
            return Err(format!("{} keeps weights in {location:?}, outside its folder", graph.display()));
        }
        let path = graph.with_file_name("").join(location);
        let found = fs::metadata(&path).map_err(|_| missing(&path))?.len();
        if found < bytes {
            return Err(cut(&path, found, bytes));
        }
    }
    Ok(())
}

/// Safetensors, each to its last byte, and all that the index names.
fn mlx(folder: &Path) -> Result<(), String> {
    let entries = fs::read_dir(folder).map_err(|error| format!("could not read {}: {error}", folder.display()))?;
    let mut shards: Vec<_> =
        entries.flatten().map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|kind| kind == "safetensors")).collect();
    if shards.is_empty() {
        return Err(format!("{} has no .safetensors file", folder.display()));
    }
    let index = json::<Value>(&folder.join("model.safetensors.index.json"))?.unwrap_or_default();
    let named = index.get("weight_map").and_then(Value::as_object).into_iter().flat_map(|map| map.values()).filter_map(Value::as_str);
    shards.extend(named.map(|name| folder.join(name)));
    shards.sort();
    shards.dedup();
    for shard in shards {
        let (found, needed) = match safetensors(&shard) {
            Ok(sizes) => sizes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(missing(&shard)),
            Err(error) => return Err(format!("{} is damaged: {error}", shard.display())),
        };
        if found != needed {
            return Err(cut(&shard, found, needed));
        }
    }
    Ok(())
}

/// How many bytes a safetensors file has, and how many it should have: a length of eight bytes, a table of that length, and the tensors to the end of the
/// last one.
fn safetensors(path: &Path) -> io::Result<(u64, u64)> {
    let mut file = File::open(path)?;
    let found = file.metadata()?.len();
    let mut length = [0; 8];
    file.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    if length > LONGEST_HEADER || length > found - 8 {
        return Err(io::Error::other(format!("its table has {length} bytes, and the file {found}")));
    }
    file.seek(SeekFrom::Start(8))?;
    let table: BTreeMap<String, Value> = serde_json::from_reader(BufReader::new(file.take(length)))?;
    let ends = table.values().filter_map(|tensor| tensor.get("data_offsets")?.get(1)?.as_u64());
    Ok((found, 8 + length + ends.max().unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::onnx::frame::tests::graph;

    fn folder(form: Form) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, content: &[u8]| fs::write(folder.path().join(name), content).unwrap();
        write("config.json", b"{}");
        write("tokenizer.json", b"{\"model\":{}}");
        write("tokenizer_config.json", b"{\"chat_template\":\"x\"}");
        match form {
            Form::Onnx => {
                fs::create_dir(folder.path().join("onnx")).unwrap();
                write("onnx/model_q4.onnx", &graph("model_q4.onnx_data", "28"));
                write("onnx/model_q4.onnx_data", &[0; 128]);
            }
            Form::Mlx => {
                let table = br#"{"__metadata__":{"format":"mlx"},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
                write("model.safetensors", &[&(table.len() as u64).to_le_bytes(), &table[..], &[1, 2, 3, 4]].concat());
            }
        }
        folder
    }

    fn fault(folder: &tempfile::TempDir, form: Form) -> String {
        check(folder.path(), form, Dtype::default()).unwrap_err()
    }

    fn shorten(folder: &tempfile::TempDir, name: &str) {
        let path = folder.path().join(name);
        let length = fs::metadata(&path).unwrap().len();
        File::options().write(true).open(path).unwrap().set_len(length - 1).unwrap();
    }

    #[test]
    fn whole_folders_are_whole() {
        for form in [Form::Onnx, Form::Mlx] {
            assert_eq!(check(folder(form).path(), form, Dtype::default()), Ok(()));
        }
    }

    #[test]
    fn each_file_that_is_missing_or_a_byte_short_is_named() {
        let names = |form| match form {
            Form::Onnx => vec!["onnx/model_q4.onnx", "onnx/model_q4.onnx_data"],
            Form::Mlx => vec!["model.safetensors"],
        };
        for form in [Form::Onnx, Form::Mlx] {
            for name in names(form).into_iter().chain(["config.json", "tokenizer.json"]) {
                let damaged = folder(form);
                shorten(&damaged, name);
                let said = fault(&damaged, form);
                assert!(said.contains(name) && (said.contains(" is damaged: ") || said.contains("bytes and needs")), "{said}");
                fs::remove_file(damaged.path().join(name)).unwrap();
                let said = fault(&damaged, form);
                assert!(said.contains(name) && said.ends_with(" is missing") || said.ends_with("no .safetensors file"), "{said}");
            }
        }
    }

    #[test]
    fn weights_outside_the_folder_are_not_looked_at() {
        let folder = folder(Form::Onnx);
        for location in ["../model_q4.onnx_data", "/etc/passwd"] {
            fs::write(folder.path().join("onnx/model_q4.onnx"), graph(location, "0")).unwrap();
            assert!(fault(&folder, Form::Onnx).contains("outside its folder"));
        }
        fs::write(folder.path().join("onnx/model_q4.onnx"), graph("model_q4.onnx_data", "soon")).unwrap();
        assert!(fault(&folder, Form::Onnx).contains("a tensor's offset is \"soon\""));
    }

    #[test]
    fn a_shard_that_the_index_names_must_be_there() {
        let folder = folder(Form::Mlx);
        let index = br#"{"weight_map":{"a":"model.safetensors","b":"model-2.safetensors"}}"#;
        fs::write(folder.path().join("model.safetensors.index.json"), index).unwrap();
        assert!(fault(&folder, Form::Mlx).ends_with("model-2.safetensors is missing"));
    }

    #[test]
    fn a_model_without_a_template_is_not_whole() {
        let folder = folder(Form::Onnx);
        fs::write(folder.path().join("tokenizer_config.json"), b"{}").unwrap();
        assert!(fault(&folder, Form::Onnx).ends_with("has no chat template"));
        fs::write(folder.path().join("chat_template.jinja"), b"x").unwrap();
        assert_eq!(check(folder.path(), Form::Onnx, Dtype::default()), Ok(()));
    }
}
