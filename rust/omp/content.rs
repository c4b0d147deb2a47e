//! What lies in a folder that emberd makes for omp's MLX worker: emberd's own files, those that a killed process has not finished, and what is strange.
//!
//! Nothing is changed here; that is [`runtime`](super::runtime)'s part.

use std::fs;
use std::path::{Path, PathBuf};

use super::places::MLX_LM;
use super::plan::unfinished;
use crate::error::{Code, Error, Result};

/// The first lines of the script, by which it is known again.
pub(super) const HEADER: &str =
    "#!/bin/sh\n# Written by `emberd omp install`; `emberd omp uninstall` removes it. omp starts this as its MLX worker.\n";
/// The file that tells omp that the environment is ready, and of which mlx-lm.
pub(super) const MARKER: &str = ".omp-mlx-lm";
/// The script in such a folder.
pub(super) fn script(folder: &Path) -> PathBuf {
    folder.join("bin/python")
}

/// The command in a script of emberd's; nothing for any other file.
pub(super) fn command(script: &Path) -> Option<String> {
    // Bytes: what is no text is no script of ours.
    let text = String::from_utf8(fs::read(script).ok()?).ok()?;
    let command = text.strip_prefix(HEADER)?.trim();
    Some(command.trim_start_matches("exec ").trim_end_matches(" \"$@\"").to_owned())
}

/// What is in a folder that emberd makes, or has made.
#[derive(Default)]
pub(super) struct Content {
    /// Whether there is a folder.
    pub any: bool,
    /// Files that a killed process has not finished.
    pub unfinished: Vec<PathBuf>,
    /// Something that emberd has not put there.
    pub strange: Option<PathBuf>,
}

/// What is in a folder that emberd makes; nothing where there is no folder.
pub(super) fn content(folder: &Path) -> Result<Content> {
    let mut found = Content::default();
    look(folder, folder, &mut found).map_err(|error| Error::io(Code::ServerError, "look into", folder, &error))?;
    Ok(found)
}

fn look(root: &Path, folder: &Path, found: &mut Content) -> std::io::Result<()> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    found.any = true;
    for entry in entries {
        let entry = entry?;
        let (path, name, kind) = (entry.path(), entry.file_name(), entry.file_type()?);
        let file = if folder == root { MARKER } else { "python" };
        if folder == root && name == "bin" && kind.is_dir() {
            look(root, &path, found)?;
        } else if kind.is_file() && unfinished(&name, file) {
            found.unfinished.push(path);
        } else {
            let marks = || fs::read_to_string(&path).is_ok_and(|text| text.trim() == MLX_LM);
            let ours = kind.is_file() && name == file && if folder == root { marks() } else { command(&path).is_some() };
            if !ours {
                found.strange = Some(path);
            }
        }
    }
    Ok(())
}
