//! A file being written: counted, hashed as it goes by, and on the disk (not only in the cache) once it is finished.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// A finished file, as the manifest lists it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Name inside the model folder.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
    /// SHA-256 of the content, lower-case hexadecimal.
    pub sha256: String,
}

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A file being written.
pub struct Output {
    name: String,
    path: PathBuf,
    file: BufWriter<File>,
    hash: Sha256,
    bytes: u64,
}

impl std::fmt::Debug for Output {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Output").field("path", &self.path).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Output {
    /// Creates (or empties) `folder/name`.
    ///
    /// # Errors
    /// What the system says.
    pub fn create(folder: &Path, name: &str) -> std::io::Result<Self> {
        let path = folder.join(name);
        let file = BufWriter::with_capacity(1 << 20, File::create(&path)?);
        Ok(Self { name: name.to_owned(), path, file, hash: Sha256::new(), bytes: 0 })
    }

    /// Bytes written so far.
    pub fn position(&self) -> u64 {
        self.bytes
    }

    /// Writes zeros up to the next multiple of `alignment` and returns that position.
    ///
    /// # Errors
    /// What the system says.
    pub fn align(&mut self, alignment: u64) -> std::io::Result<u64> {
        let padding = self.bytes.next_multiple_of(alignment) - self.bytes;
        self.write_all(&vec![0; padding as usize])?;
        Ok(self.bytes)
    }

    /// Flushes the file to the disk and returns its entry.
    ///
    /// # Errors
    /// What the system says.
    pub fn finish(mut self) -> std::io::Result<FileEntry> {
        self.file.flush()?;
        self.file.get_ref().sync_all()?;
        Ok(FileEntry { name: self.name, bytes: self.bytes, sha256: hex(&self.hash.finalize()) })
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.hash.update(bytes.get(..written).unwrap_or_default());
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}

/// Makes the names in a folder durable, where the system can.
///
/// # Errors
/// What the system says.
pub fn sync_folder(folder: &Path) -> std::io::Result<()> {
    if cfg!(unix) {
        File::open(folder)?.sync_all()?;
    }
    Ok(())
}
