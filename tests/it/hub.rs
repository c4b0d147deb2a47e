//! Models of a hub, with a script in the place of the process that fetches: what it says is believed, and what it does not say is said for it.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use emberd::error::{Code, Error};
use emberd::models::hub::{Fetcher, Repo};
use emberd::models::progress::Progress;
use emberd::models::records::Records;
use emberd::models::table::{Dtype, Form};

use crate::http_support::PATIENCE;

/// A home, a program that is run as Python, and an environment.
struct Rig {
    folder: tempfile::TempDir,
    env: Vec<(&'static str, String)>,
    cancelled: AtomicBool,
}

impl Rig {
    /// `script` finds the test's folder in `$here`, and notes each run of it.
    fn new(script: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let here = folder.path().display();
        let text = format!("#!/bin/sh\nhere='{here}'\necho \"$@\" >> \"$here/calls\"\n{script}\n");
        fs::write(folder.path().join("python"), text).unwrap();
        fs::set_permissions(folder.path().join("python"), fs::Permissions::from_mode(0o755)).unwrap();
        let env = vec![("HOME", folder.path().join("user").display().to_string())];
        Self { folder, env, cancelled: AtomicBool::new(false) }
    }

    /// One whose process brings a model of two files.
    fn bringing() -> Self {
        Self::new(
            r#"mkdir -p "$here/snapshot" && printf '{}' > "$here/snapshot/config.json" && printf 12345 > "$here/snapshot/weights"
               echo '{"event":"plan","commit":"c","folder":"'"$here/snapshot"'","files":[{"name":"config.json","bytes":2,"done":2},{"name":"weights","bytes":5,"done":0}]}'
               echo 'something else'
               echo '{"event":"file","name":"weights"}'; echo '{"event":"bytes","name":"weights","done":5}'
               echo '{"event":"done","name":"weights"}'; echo '{"event":"ready"}'"#,
        )
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn ensure(&self, repo: &Repo, sink: &(dyn Fn(Progress) + Sync)) -> Result<PathBuf, Error> {
        let env = |name: &str| self.env.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value));
        let python = self.path("python");
        let records = Records::new(&self.path("home"));
        let fetcher = Fetcher { records, python: Some(&python), dtype: Dtype::default(), cancelled: &self.cancelled, env: &env };
        fetcher.ensure(repo, sink)
    }

    fn error(&self) -> Error {
        self.ensure(&repo(Form::Onnx), &|_| {}).unwrap_err()
    }

    fn calls(&self) -> Vec<String> {
        fs::read_to_string(self.path("calls")).unwrap_or_default().lines().map(str::to_owned).collect()
    }
}

fn repo(form: Form) -> Repo {
    Repo { name: "org/name".into(), form, dir: None }
}

/// A safetensors model of four bytes.
fn mlx(folder: &Path) {
    fs::create_dir_all(folder).unwrap();
    let table = br#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
    fs::write(folder.join("model.safetensors"), [&(table.len() as u64).to_le_bytes(), &table[..], &[1, 2, 3, 4]].concat()).unwrap();
    fs::write(folder.join("config.json"), "{}").unwrap();
    fs::write(folder.join("tokenizer.json"), "{}").unwrap();
    fs::write(folder.join("chat_template.jinja"), "x").unwrap();
}

fn mark(folder: &Path) {
    fs::write(folder.join(".omp-complete.json"), r#"{"repo":"org/name","files":["config.json","model.safetensors"]}"#).unwrap();
}

#[test]
fn a_model_is_fetched_once_and_then_found_by_what_was_written_down() {
    let rig = Rig::bringing();
    let news = Mutex::new(0);
    let sink = |_| *news.lock().unwrap() += 1;
    for _ in 0..2 {
        assert_eq!(rig.ensure(&repo(Form::Onnx), &sink).unwrap(), rig.path("snapshot"));
    }
    let graphs = "--graph onnx/model_q4.onnx --graph model_q4.onnx --graph model.onnx";
    assert_eq!(rig.calls(), [format!("-P -m emberd.hub org/name --form onnx {graphs}")]);
    assert_eq!(*news.lock().unwrap(), 4, "initiate, how far, how far in all, done");
    // Another form of the same repository is another model.
    rig.ensure(&repo(Form::Mlx), &sink).unwrap();
    assert_eq!(rig.calls()[1], "-P -m emberd.hub org/name --form mlx");
    // A file that has changed its size is asked for again.
    fs::write(rig.path("snapshot/weights"), "1").unwrap();
    rig.ensure(&repo(Form::Onnx), &sink).unwrap();
    assert_eq!(rig.calls().len(), 3);
}

#[test]
fn what_the_process_says_went_wrong_is_the_error_and_its_log_the_detail() {
    let rig = Rig::new(r#"echo 'a traceback' >&2; echo '{"event":"error","message":"no luck","hint":"try again"}'; exit 1"#);
    let error = rig.error();
    assert_eq!((error.code, &*error.message, error.hint.as_deref()), (Code::DownloadFailed, "no luck", Some("try again")));
    assert_eq!(error.detail.as_deref(), Some("a traceback"));
    let rig = Rig::new(r#"echo '{"event":"error","message":"no such thing","hint":"check the name","lasting":true}'; exit 1"#);
    assert_eq!(rig.error().code, Code::ModelLoadFailed);
}

#[test]
fn a_process_that_ends_without_a_word_or_a_model_is_told_of() {
    for (script, reason) in [
        ("exit 0", "it gave no reason"),
        ("echo 'No module named emberd' >&2; exit 1", "No module named emberd"),
        (r#"echo '{"event":"ready"}'"#, "it gave no reason"),
        (r#"echo '{"event":"plan","commit":"c","folder":"/f","files":[]}'"#, "it gave no reason"),
        (r#"echo '{"event":"plan","commit":"c","folder":"/f","files":[]}'; echo '{"event":"ready"}'; exit 1"#, "it gave no reason"),
    ] {
        let rig = Rig::new(script);
        let error = rig.error();
        assert!(error.message.starts_with("could not fetch org/name: ") && error.message.ends_with(reason), "{error}");
        assert!(error.hint.unwrap().contains("EMBERD_PYTHON"));
        assert!(!rig.path("home/hub").exists(), "{script}");
    }
    let rig = Rig::new("");
    fs::remove_file(rig.path("python")).unwrap();
    assert!(rig.error().message.starts_with("could not run "));
}

#[test]
fn a_fetch_that_is_cancelled_ends_its_process() {
    let rig = Rig::new("mkfifo \"$here/fifo\"; echo $$ > \"$here/pid\"; read _ < \"$here/fifo\"");
    let pid = std::thread::scope(|scope| {
        let work = scope.spawn(|| rig.error());
        let end = Instant::now() + PATIENCE;
        let pid = loop {
            match fs::read_to_string(rig.path("pid")).ok().and_then(|text| text.trim().parse::<i32>().ok()) {
                Some(pid) => break pid,
                None => assert!(Instant::now() < end, "the process does not start"),
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        rig.cancelled.store(true, Ordering::Relaxed);
        assert_eq!(work.join().unwrap().code, Code::ShuttingDown);
        pid
    });
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    assert!(rustix::process::test_kill_process(pid).is_err(), "the process has gone, and was waited for");
}

#[test]
fn a_user_who_is_offline_gets_what_is_whole_and_nothing_is_run() {
    let mut rig = Rig::new("exit 1");
    rig.env.push(("HF_HUB_OFFLINE", "1".into()));
    rig.env.push(("HF_HUB_CACHE", rig.path("cache").display().to_string()));
    let error = rig.ensure(&repo(Form::Mlx), &|_| {}).unwrap_err();
    assert!(error.message.contains("HF_HUB_OFFLINE is set: ") && error.message.ends_with("has none of it"), "{error}");
    let store = rig.path("cache/models--org--name");
    let snapshot = store.join("snapshots/abc");
    mlx(&snapshot);
    fs::create_dir_all(store.join("refs")).unwrap();
    fs::write(store.join("refs/main"), "abc").unwrap();
    assert_eq!(rig.ensure(&repo(Form::Mlx), &|_| {}).unwrap(), snapshot);
    fs::remove_file(snapshot.join("tokenizer.json")).unwrap();
    assert!(rig.ensure(&repo(Form::Mlx), &|_| {}).unwrap_err().message.ends_with("tokenizer.json is missing"));
    assert_eq!(rig.calls(), [""; 0]);
    // The same where the hub fails, and it is asked first.
    rig.env.retain(|(name, _)| *name != "HF_HUB_OFFLINE");
    mlx(&snapshot);
    assert_eq!(rig.ensure(&repo(Form::Mlx), &|_| {}).unwrap(), snapshot);
    assert_eq!(rig.calls(), ["-P -m emberd.hub org/name --form mlx --whole"]);
}

#[test]
fn folders_of_omps_are_used_when_they_are_marked_and_whole() {
    let rig = Rig::new("exit 1");
    let omp = rig.path("user/.omp/agent/cache/tiny-models/mlx/org--name");
    mlx(&omp);
    assert_eq!(rig.ensure(&repo(Form::Mlx), &|_| {}).unwrap_err().code, Code::ModelLoadFailed, "it is not marked");
    mark(&omp);
    assert_eq!(rig.ensure(&repo(Form::Mlx), &|_| {}).unwrap(), omp);
    // A folder that is named comes first.
    let dir = rig.path("elsewhere");
    mlx(&dir);
    mark(&dir);
    let named = Repo { dir: Some(dir.clone()), ..repo(Form::Mlx) };
    assert_eq!(rig.ensure(&named, &|_| {}).unwrap(), dir);
    // Marked, and cut short all the same.
    let weights = dir.join("model.safetensors");
    let length = fs::metadata(&weights).unwrap().len();
    fs::File::options().write(true).open(&weights).unwrap().set_len(length - 1).unwrap();
    assert_eq!(rig.ensure(&named, &|_| {}).unwrap(), omp);
    assert_eq!(rig.calls().len(), 1);
}
