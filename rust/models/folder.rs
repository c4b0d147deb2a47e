//! What a model folder holds, and whether it is whole.
//!
//! A folder that an import made has a manifest (`emberd.json`) with the size and checksum of every file. Any other folder is the user's own: it is
//! asked only for the files without which nothing works.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::error::{Code, Error, Result};
use crate::models::import::{IMPORTER_VERSION, MANIFEST};
use crate::models::output::{FileEntry, hex};

/// The part of a manifest that says which files belong to the folder.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Files {
    /// Every file but the manifest itself.
    pub files: Vec<FileEntry>,
}

/// The part of a manifest that says who wrote it.
#[derive(Deserialize)]
struct Importer {
    importer: u32,
}

/// Whether an older importer made the folder: a new one would make it otherwise.
#[must_use]
pub fn outdated(folder: &Path) -> bool {
    let manifest = fs::read(folder.join(MANIFEST)).ok();
    let importer = manifest.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    importer.is_some_and(|Importer { importer }| importer < IMPORTER_VERSION)
}

/// The checksum of a file, lower-case hexadecimal.
///
/// # Errors
/// A file that cannot be read.
pub fn sha256(path: &Path) -> Result<String> {
    let mut file = File::open(path).map_err(|error| Error::io(Code::ModelLoadFailed, "open", path, &error))?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let read = file.read(&mut buffer).map_err(|error| Error::io(Code::ModelLoadFailed, "read", path, &error))?;
        if read == 0 {
            return Ok(hex(&hash.finalize()));
        }
        hash.update(&buffer[..read]);
    }
}

/// Whether the folder is whole.
///
/// With a manifest: every file is there, has its size, and, if it was written after the manifest, its checksum. Without: the files that every
/// model needs are there.
///
/// # Errors
/// `model_load_failed`, naming the first file that is missing, truncated or altered.
pub fn check(folder: &Path) -> Result<()> {
    let manifest = folder.join(MANIFEST);
    let written = match fs::metadata(&manifest) {
        Ok(metadata) => metadata.modified().ok(),
        Err(_) => return check_own(folder),
    };
    let again = "remove the model with emberd models rm and pull it again";
    let bytes = fs::read(&manifest).map_err(|error| Error::io(Code::ModelLoadFailed, "read", &manifest, &error))?;
    let Files { files } = serde_json::from_slice(&bytes)
        .map_err(|error| Error::new(Code::ModelLoadFailed, format!("{} is damaged: {error}", manifest.display())).hint(again))?;
    for FileEntry { name, bytes: size, sha256: expected } in files {
        let path = folder.join(&name);
        let found = fs::metadata(&path)
            .map_err(|error| Error::new(Code::ModelLoadFailed, format!("{} is missing: {error}", path.display())).hint(again))?;
        if found.len() != size {
            return Err(
                Error::new(Code::ModelLoadFailed, format!("{} has {} bytes instead of {size}", path.display(), found.len())).hint(again)
            );
        }
        // Hashing 160 MB at every start would cost more than the start; a file that was not touched since the import is the one that was hashed then.
        let touched = match (found.modified().ok(), written) {
            (Some(modified), Some(written)) => modified > written,
            _ => true,
        };
        if touched && sha256(&path)? != expected {
            return Err(Error::new(
                Code::ModelLoadFailed,
                format!("{} was altered: its checksum is not the one it was imported with", path.display()),
            )
            .hint(again));
        }
    }
    Ok(())
}

fn check_own(folder: &Path) -> Result<()> {
    for name in ["config.json", "tokenizer.json"] {
        if !folder.join(name).is_file() {
            return Err(Error::new(Code::ModelLoadFailed, format!("{} has no {name}", folder.display()))
                .hint("give a folder with config.json, tokenizer.json and a model, or a .gguf file"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, SystemTime};

    fn folder_with(content: &[u8]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("weights");
        fs::write(&file, content).unwrap();
        let entry = FileEntry { name: "weights".into(), bytes: content.len() as u64, sha256: sha256(&file).unwrap() };
        let manifest = serde_json::json!({ "files": [entry] });
        fs::write(folder.path().join(MANIFEST), manifest.to_string()).unwrap();
        folder
    }

    #[test]
    fn a_whole_folder_is_accepted() {
        check(folder_with(b"weights").path()).unwrap();
    }

    #[test]
    fn a_truncated_file_is_refused_with_both_sizes() {
        let folder = folder_with(b"weights");
        fs::write(folder.path().join("weights"), b"wei").unwrap();
        let error = check(folder.path()).unwrap_err();
        assert!(error.message.ends_with("has 3 bytes instead of 7"), "{error}");
    }

    #[test]
    fn a_file_altered_in_place_is_refused() {
        let folder = folder_with(b"weights");
        let file = folder.path().join("weights");
        fs::write(&file, b"WEIGHTS").unwrap();
        let later = SystemTime::now() + Duration::from_secs(5);
        File::options().write(true).open(&file).unwrap().set_modified(later).unwrap();
        assert!(check(folder.path()).unwrap_err().message.contains("was altered"));
    }

    #[test]
    fn a_file_copied_anew_but_the_same_is_accepted() {
        let folder = folder_with(b"weights");
        let later = SystemTime::now() + Duration::from_secs(5);
        File::options().write(true).open(folder.path().join("weights")).unwrap().set_modified(later).unwrap();
        check(folder.path()).unwrap();
    }

    #[test]
    fn a_missing_file_is_named() {
        let folder = folder_with(b"weights");
        fs::remove_file(folder.path().join("weights")).unwrap();
        assert!(check(folder.path()).unwrap_err().message.contains("weights is missing"));
    }

    #[test]
    fn a_folder_of_ones_own_needs_a_config_and_a_tokenizer() {
        let folder = tempfile::tempdir().unwrap();
        assert!(check(folder.path()).unwrap_err().message.contains("config.json"));
    }
}
