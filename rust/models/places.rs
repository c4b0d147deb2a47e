//! Where the files of a hub repository may lie on this machine already: the user's hub cache, and the caches of omp.
//!
//! Only paths are made here, from the environment; whether a folder is whole is told by [`whole`](super::whole) and, for omp's MLX folders, by their
//! marker as well.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::folders::Omp;
use crate::models::table::Form;

/// What the environment says.
pub type Env<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// The environment of this process.
#[must_use]
pub fn environment(name: &str) -> Option<OsString> {
    std::env::var_os(name)
}

fn path(env: Env<'_>, name: &str) -> Option<PathBuf> {
    let value = PathBuf::from(env(name).filter(|value| !value.is_empty())?);
    match value.strip_prefix("~") {
        Ok(rest) => Some(home(env)?.join(rest)),
        Err(_) => Some(value),
    }
}

fn home(env: Env<'_>) -> Option<PathBuf> {
    env("HOME").or_else(|| env("USERPROFILE")).map(PathBuf::from).filter(|path| path.is_absolute())
}

/// The user's hub cache, by the variables of `huggingface_hub`.
#[must_use]
pub fn hub_cache(env: Env<'_>) -> Option<PathBuf> {
    if let Some(cache) = path(env, "HF_HUB_CACHE").or_else(|| path(env, "HUGGINGFACE_HUB_CACHE")) {
        return Some(cache);
    }
    let home = path(env, "HF_HOME")
        .or_else(|| path(env, "XDG_CACHE_HOME").map(|cache| cache.join("huggingface")))
        .or_else(|| home(env).map(|home| home.join(".cache").join("huggingface")))?;
    Some(home.join("hub"))
}

/// The snapshot of a repository's main branch in a hub cache.
#[must_use]
pub fn snapshot(cache: &Path, repo: &str) -> Option<PathBuf> {
    let folder = cache.join(format!("models--{}", repo.replace('/', "--")));
    let commit = fs::read_to_string(folder.join("refs").join("main")).ok()?;
    let snapshot = folder.join("snapshots").join(commit.trim());
    snapshot.is_dir().then_some(snapshot)
}

/// Whether the user has told the programs of this machine to leave hubs alone (`HF_HUB_OFFLINE`).
#[must_use]
pub fn offline(env: Env<'_>) -> bool {
    let set = |name| env(name).filter(|value| !value.is_empty());
    let value = set("HF_HUB_OFFLINE").or_else(|| set("TRANSFORMERS_OFFLINE")).unwrap_or_default();
    matches!(value.to_string_lossy().to_ascii_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE")
}

/// Where omp would have put the files of a repository; nowhere without a home folder. Those of an MLX form are whole only with their marker.
#[must_use]
pub fn omp(env: Env<'_>, repo: &str, form: Form) -> Option<PathBuf> {
    let models = Omp::find(env).ok()?.cache.join("tiny-models");
    Some(match form {
        Form::Onnx => models.join(repo),
        Form::Mlx => models.join("mlx").join(repo.replace('/', "--")),
    })
}

/// What omp writes into an MLX folder once all of it has come: `{"repo": …, "files": …}`.
pub const MARKER: &str = ".omp-complete.json";

/// Whether an MLX folder of omp's has the marker of this repository, and every file that the marker lists, with its size where that is listed.
///
/// # Errors
/// What is missing or has another size.
pub fn marked(folder: &Path, repo: &str) -> Result<(), String> {
    let marker = folder.join(MARKER);
    let bytes = fs::read(&marker).map_err(|_| format!("{} is missing", marker.display()))?;
    let value: Value = serde_json::from_slice(&bytes).map_err(|error| format!("{} is damaged: {error}", marker.display()))?;
    if value.get("repo").and_then(Value::as_str) != Some(repo) {
        return Err(format!("{} is of another repository", marker.display()));
    }
    for (name, size) in listed(value.get("files").unwrap_or(&Value::Null)) {
        let path = folder.join(&name);
        let found = fs::metadata(&path).map_err(|_| format!("{} is missing", path.display()))?.len();
        if let Some(size) = size.filter(|size| *size != found) {
            return Err(format!("{} has {found} bytes instead of {size}", path.display()));
        }
    }
    Ok(())
}

/// Files and their sizes, in whichever way they are listed: names, objects with a name, or a map from names to sizes.
fn listed(files: &Value) -> BTreeMap<String, Option<u64>> {
    let size = |value: &Value| value.as_u64().or_else(|| value.get("size")?.as_u64());
    match files {
        Value::Array(files) => files
            .iter()
            .filter_map(|file| match file {
                Value::String(name) => Some((name.clone(), None)),
                file => ["path", "name", "file"].iter().find_map(|key| Some((file.get(key)?.as_str()?.to_owned(), size(file)))),
            })
            .collect(),
        Value::Object(files) => files.iter().map(|(name, about)| (name.clone(), size(about))).collect(),
        _ => BTreeMap::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env<'a>(pairs: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<OsString> + 'a {
        move |name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into())
    }

    #[cfg(unix)] // The paths are written as they are there.
    #[test]
    fn the_hub_cache_is_where_its_variables_say() {
        for (pairs, expected) in [
            (&[("HF_HUB_CACHE", "/c"), ("HF_HOME", "/h"), ("HOME", "/u")][..], "/c"),
            (&[("HUGGINGFACE_HUB_CACHE", "/old"), ("HF_HOME", "/h")], "/old"),
            (&[("HF_HUB_CACHE", ""), ("HF_HOME", "~/h"), ("HOME", "/u")], "/u/h/hub"),
            (&[("XDG_CACHE_HOME", "/x"), ("HOME", "/u")], "/x/huggingface/hub"),
            (&[("HOME", "/u")], "/u/.cache/huggingface/hub"),
        ] {
            assert_eq!(hub_cache(&env(pairs)), Some(PathBuf::from(expected)), "{pairs:?}");
        }
        assert_eq!(hub_cache(&env(&[])), None);
    }

    #[cfg(unix)] // The paths are written as they are there.
    #[test]
    fn omp_keeps_its_models_where_its_variables_say() {
        let (repo, onnx) = ("org/name", Form::Onnx);
        for (pairs, expected) in [
            (&[("HOME", "/u")][..], "/u/.omp/agent/cache/tiny-models/org/name"),
            (&[("HOME", "/u"), ("PI_CONFIG_DIR", "x")], "/u/x/agent/cache/tiny-models/org/name"),
            (&[("HOME", "/u"), ("OMP_PROFILE", "p")], "/u/.omp/profiles/p/agent/cache/tiny-models/org/name"),
            (&[("HOME", "/u"), ("PI_CODING_AGENT_DIR", "/d")], "/d/cache/tiny-models/org/name"),
        ] {
            assert_eq!(omp(&env(pairs), repo, onnx), Some(PathBuf::from(expected)), "{pairs:?}");
        }
        let folders = omp(&env(&[("HOME", "/u")]), repo, Form::Mlx);
        assert_eq!(folders, Some(PathBuf::from("/u/.omp/agent/cache/tiny-models/mlx/org--name")));
    }

    #[test]
    fn offline_is_said_in_several_ways() {
        for value in ["1", "on", "Yes", "TRUE"] {
            assert!(offline(&env(&[("HF_HUB_OFFLINE", value)])), "{value}");
        }
        for value in ["", "0", "no", "false"] {
            assert!(!offline(&env(&[("HF_HUB_OFFLINE", value)])), "{value}");
        }
        assert!(offline(&env(&[("TRANSFORMERS_OFFLINE", "1")])));
    }

    #[test]
    fn a_marker_vouches_for_the_files_it_lists_and_no_others() {
        let folder = tempfile::tempdir().unwrap();
        let mark = |text: &str| fs::write(folder.path().join(MARKER), text).unwrap();
        assert!(marked(folder.path(), "a/b").unwrap_err().ends_with("is missing"));
        fs::write(folder.path().join("config.json"), "{}").unwrap();
        for files in
            [r#"["config.json"]"#, r#"[{"path":"config.json","size":2}]"#, r#"{"config.json":2}"#, r#"{"config.json":{"size":2}}"#, "null"]
        {
            mark(&format!(r#"{{"repo":"a/b","files":{files}}}"#));
            assert_eq!(marked(folder.path(), "a/b"), Ok(()), "{files}");
        }
        for (files, said) in [(r#"["other"]"#, "other is missing"), (r#"{"config.json":3}"#, "config.json has 2 bytes instead of 3")] {
            mark(&format!(r#"{{"repo":"a/b","files":{files}}}"#));
            assert!(marked(folder.path(), "a/b").unwrap_err().ends_with(said));
        }
        assert!(marked(folder.path(), "a/c").unwrap_err().contains("another repository"));
        mark("{");
        assert!(marked(folder.path(), "a/b").unwrap_err().contains("is damaged"));
    }

    #[test]
    fn a_snapshot_is_the_one_that_main_points_to() {
        let cache = tempfile::tempdir().unwrap();
        let repo = cache.path().join("models--a--b");
        assert_eq!(snapshot(cache.path(), "a/b"), None);
        fs::create_dir_all(repo.join("refs")).unwrap();
        fs::write(repo.join("refs/main"), "abc\n").unwrap();
        assert_eq!(snapshot(cache.path(), "a/b"), None);
        fs::create_dir_all(repo.join("snapshots/abc")).unwrap();
        assert_eq!(snapshot(cache.path(), "a/b"), Some(repo.join("snapshots/abc")));
    }
}
