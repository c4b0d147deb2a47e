//! What was fetched from hubs, written down: the commit, the folder, and every file with its size.
//!
//! A record is what lets a load use a model without asking anybody. It vouches for sizes; checksums were compared when the files came.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Code, Error, Result};
use crate::models::hub::Repo;
use crate::models::table::{Dtype, Form};

/// A file that belongs to a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    /// Its path within the repository.
    pub name: String,
    /// Its size.
    pub bytes: u64,
}

/// What was fetched, and where it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The repository.
    pub repo: String,
    /// The commit.
    pub commit: String,
    /// The model's folder: a snapshot of the hub cache.
    pub folder: PathBuf,
    /// Every file that the model needs.
    pub files: Vec<Listed>,
}

impl Record {
    /// Whether every file is there and has its size.
    ///
    /// # Errors
    /// The first that is missing or has another size.
    pub fn check(&self) -> std::result::Result<(), String> {
        for Listed { name, bytes } in &self.files {
            let path = self.folder.join(name);
            let found = fs::metadata(&path).map_err(|_| format!("{} is missing", path.display()))?.len();
            if found != *bytes {
                return Err(format!("{} has {found} bytes instead of {bytes}", path.display()));
            }
        }
        Ok(())
    }

    /// What the files have together.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }
}

/// What is written down about the models of hubs, in one folder.
#[derive(Debug, Clone)]
pub struct Records(PathBuf);

impl Records {
    /// Those in the folder of this emberd home.
    #[must_use]
    pub fn new(home: &Path) -> Self {
        Self(home.join("hub"))
    }

    fn path(&self, repo: &Repo, dtype: Dtype) -> PathBuf {
        let variant = match repo.form {
            Form::Onnx => dtype.name(),
            Form::Mlx => "mlx",
        };
        self.0.join(format!("{}.{variant}.json", repo.name.replace('/', "--")))
    }

    /// The one of a model. One that cannot be read is none.
    #[must_use]
    pub fn find(&self, repo: &Repo, dtype: Dtype) -> Option<Record> {
        serde_json::from_slice(&fs::read(self.path(repo, dtype)).ok()?).ok()
    }

    /// All of them, by repository, each with the form of its weights: the name of a [`Dtype`], or `mlx`.
    #[must_use]
    pub fn all(&self) -> Vec<(String, Record)> {
        let entries = fs::read_dir(&self.0).into_iter().flatten().flatten().map(|entry| entry.path());
        let files = entries.filter(|path| path.extension().is_some_and(|kind| kind == "json"));
        let read = |path: PathBuf| {
            let variant = Path::new(path.file_stem()?).extension()?.to_str()?.to_owned();
            Some((variant, serde_json::from_slice(&fs::read(path).ok()?).ok()?))
        };
        let mut records: Vec<(String, Record)> = files.filter_map(read).collect();
        records.sort_by(|(a, one), (b, other)| (&one.repo, a).cmp(&(&other.repo, b)));
        records
    }

    /// Forgets what is written down about a repository; whether there was anything.
    ///
    /// # Errors
    /// A record that cannot be removed.
    pub fn forget(&self, repo: &str) -> Result<bool> {
        let start = format!("{}.", repo.replace('/', "--"));
        let mut found = false;
        for entry in fs::read_dir(&self.0).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let variant = name.strip_prefix(&start).and_then(|rest| rest.strip_suffix(".json"));
            if variant.is_some_and(|variant| !variant.contains('.')) {
                fs::remove_file(entry.path()).map_err(|error| Error::io(Code::ServerError, "remove", &entry.path(), &error))?;
                found = true;
            }
        }
        Ok(found)
    }

    /// Writes one, in one step. A record that cannot be written costs a question to the hub at the next load, and no more.
    pub(crate) fn write(&self, repo: &Repo, dtype: Dtype, record: &Record) {
        let path = self.path(repo, dtype);
        let fresh = path.with_extension(format!("part-{}", std::process::id()));
        let written = fs::create_dir_all(&self.0).and_then(|()| {
            let mut file = fs::File::create(&fresh)?;
            serde_json::to_writer(&file, record)?;
            file.flush()?;
            fs::rename(&fresh, &path)
        });
        if let Err(error) = written {
            tracing::warn!(%error, path = %path.display(), "what was fetched could not be written down");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repo() -> Repo {
        Repo { name: "org/name".into(), form: Form::Onnx, dir: None }
    }

    #[test]
    fn a_record_vouches_for_sizes() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a"), "four").unwrap();
        let files = vec![Listed { name: "a".into(), bytes: 4 }];
        let mut record = Record { repo: "org/name".into(), commit: "c".into(), folder: folder.path().into(), files };
        assert_eq!((record.check(), record.bytes()), (Ok(()), 4));
        record.files[0].bytes = 5;
        assert!(record.check().unwrap_err().ends_with("a has 4 bytes instead of 5"));
        record.files.push(Listed { name: "b".into(), bytes: 1 });
        record.files.remove(0);
        assert!(record.check().unwrap_err().ends_with("b is missing"));
    }

    #[test]
    fn records_are_kept_for_each_form_and_forgotten_together() {
        let home = tempfile::tempdir().unwrap();
        let records = Records::new(home.path());
        assert_eq!(records.find(&repo(), Dtype::default()), None);
        let record = |name: &str| Record { repo: name.into(), commit: "c".into(), folder: "f".into(), files: vec![] };
        let other = Repo { name: "org/name.q4".into(), ..repo() };
        records.write(&repo(), Dtype::default(), &record("org/name"));
        records.write(&Repo { form: Form::Mlx, ..repo() }, Dtype::default(), &record("org/name"));
        records.write(&other, Dtype::default(), &record("org/name.q4"));
        assert_eq!(records.find(&repo(), Dtype::default()), Some(record("org/name")));
        assert_eq!(records.find(&repo(), Dtype::named("fp16").unwrap()), None);
        let entry = |variant: &str, name| (variant.to_owned(), record(name));
        assert_eq!(records.all(), [entry("mlx", "org/name"), entry("q4", "org/name"), entry("q4", "org/name.q4")]);
        assert_eq!(records.forget("org/name"), Ok(true));
        assert_eq!(records.forget("org/name"), Ok(false));
        assert_eq!(records.all(), [entry("q4", "org/name.q4")]);
        fs::write(records.path(&repo(), Dtype::default()), "{").unwrap();
        assert_eq!(records.find(&repo(), Dtype::default()), None);
    }
}
