//! What is to be done, step by step, so that it can be shown instead of done, and is the same either way.

use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::fs::{self, DirBuilder, File};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::status;
use crate::error::{Code, Error, Result};

/// How long a program of the system may take.
const SYSTEM: Duration = Duration::from_secs(30);

/// One thing to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Make a folder, and those above it, where there are none, with this mode.
    Folder(PathBuf, u32),
    /// Write a file with this mode, in one piece: whoever looks sees the old one or the new one.
    File(PathBuf, u32, String),
    /// Give something another name.
    Move(PathBuf, PathBuf),
    /// Remove a file, if it is there.
    Remove(PathBuf),
    /// Remove a folder, if it is there and empty.
    RemoveFolder(PathBuf),
    /// Ask the worker on a socket to end, if one answers.
    Shutdown(PathBuf),
    /// Wait until a worker answers on a socket with this tag.
    Await {
        /// The socket.
        socket: PathBuf,
        /// The tag.
        tag: String,
        /// What to do when none does.
        otherwise: String,
    },
    /// Run a program; it must succeed.
    Run(Vec<OsString>),
    /// Run a program; if it fails, there was nothing to do.
    Try(Vec<OsString>),
}

/// Steps in their order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    steps: Vec<Step>,
    notes: Vec<String>,
}

impl Plan {
    /// Adds a step.
    pub fn then(&mut self, step: Step) {
        self.steps.push(step);
    }

    /// Adds what the user should know, told at the end.
    pub fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// Adds all of another plan.
    pub fn extend(&mut self, other: Self) {
        self.steps.extend(other.steps);
        self.notes.extend(other.notes);
    }

    /// What the user should know.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Whether there is nothing to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Whether anything at this path, or below it, is changed.
    #[must_use]
    pub fn touches(&self, path: &Path) -> bool {
        self.steps.iter().any(|step| match step {
            Step::Folder(at, _) | Step::File(at, ..) | Step::Remove(at) | Step::RemoveFolder(at) => at.starts_with(path),
            Step::Move(from, to) => from.starts_with(path) || to.starts_with(path),
            Step::Shutdown(_) | Step::Await { .. } | Step::Run(_) | Step::Try(_) => false,
        })
    }

    /// What would be done, with all that would be written.
    #[must_use]
    pub fn show(&self) -> String {
        let mut text = String::from("nothing is changed; without --dry-run this would be done:\n");
        for step in &self.steps {
            let _ = writeln!(text, "{}", step.describe());
            if let Step::File(_, _, content) = step {
                for line in content.lines() {
                    let _ = writeln!(text, "    | {line}");
                }
            }
        }
        for note in &self.notes {
            let _ = writeln!(text, "{note}");
        }
        text
    }

    /// Does the first steps and is killed in the next one, in the midst of it where it has one; whether there was a next one.
    #[cfg(test)]
    pub(super) async fn killed(&self, at: usize) -> bool {
        for step in self.steps.iter().take(at) {
            step.apply().await.unwrap();
        }
        if let Some(Step::File(path, _, content)) = self.steps.get(at) {
            let name = format!(".{}.1", path.file_name().unwrap().to_str().unwrap());
            fs::write(path.with_file_name(name), &content[..content.len() / 2]).unwrap();
        }
        at < self.steps.len()
    }

    /// Does it, and tells what has been done.
    ///
    /// # Errors
    /// When a step fails; those after it are not done.
    pub async fn apply(&self, tell: &mut dyn FnMut(&str) -> Result<()>) -> Result<()> {
        for step in &self.steps {
            step.apply().await?;
            tell(&step.describe())?;
        }
        for note in &self.notes {
            tell(note)?;
        }
        Ok(())
    }
}

impl Step {
    fn describe(&self) -> String {
        match self {
            Self::Folder(path, mode) => format!("make the folder {} (mode {mode:04o})", path.display()),
            Self::File(path, mode, _) => format!("write {} (mode {mode:04o})", path.display()),
            Self::Move(from, to) => format!("move {} to {}", from.display(), to.display()),
            Self::Remove(path) => format!("remove {}", path.display()),
            Self::RemoveFolder(path) => format!("remove the folder {} if it is empty", path.display()),
            Self::Shutdown(path) => format!("ask the worker on {} to end, if one answers", path.display()),
            Self::Await { socket, tag, .. } => format!("see that the worker on {} answers, with the tag {tag}", socket.display()),
            Self::Run(words) | Self::Try(words) => format!("run {}", shell(words)),
        }
    }

    async fn apply(&self) -> Result<()> {
        let io = |doing: &str, path: &Path, error: &std::io::Error| Error::io(Code::ServerError, doing, path, error);
        let gone = |outcome: std::io::Result<()>, path: &Path| match outcome {
            Err(error) if ![ErrorKind::NotFound, ErrorKind::DirectoryNotEmpty].contains(&error.kind()) => Err(io("remove", path, &error)),
            _ => Ok(()),
        };
        match self {
            Self::Folder(path, mode) => {
                DirBuilder::new().recursive(true).mode(*mode).create(path).map_err(|error| io("make the folder", path, &error))
            }
            Self::File(path, mode, content) => write(path, *mode, content).map_err(|error| io("write", path, &error)),
            Self::Move(from, to) => fs::rename(from, to).map_err(|error| io("move", from, &error)),
            Self::Remove(path) => gone(fs::remove_file(path), path),
            Self::RemoveFolder(path) => gone(fs::remove_dir(path), path),
            Self::Shutdown(path) => status::shut_down(path).await,
            Self::Await { socket, tag, otherwise } => status::answers(socket, tag).await.map_err(|error| error.hint(otherwise.clone())),
            Self::Run(words) => run(words).await,
            Self::Try(words) => {
                if let Err(error) = run(words).await {
                    tracing::debug!(%error, "passed over");
                }
                Ok(())
            }
        }
    }
}

/// Whether a file of this name is what a process that was killed has left of a file that it wrote.
pub(super) fn unfinished(name: &OsStr, of: &str) -> bool {
    let process = name.to_str().and_then(|name| name.strip_prefix('.')?.strip_prefix(of)?.strip_prefix('.'));
    process.is_some_and(|process| !process.is_empty() && process.bytes().all(|digit| digit.is_ascii_digit()))
}

fn write(path: &Path, mode: u32, content: &str) -> std::io::Result<()> {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}", std::process::id()));
    let fresh = path.with_file_name(name);
    let _ = fs::remove_file(&fresh); // Of an earlier process that had this number and did not come to its end.
    let written = || -> std::io::Result<()> {
        let mut file = File::options().write(true).create_new(true).mode(mode).open(&fresh)?;
        file.write_all(content.as_bytes())?;
        file.sync_all()?;
        fs::rename(&fresh, path)
    };
    written().inspect_err(|_| {
        let _ = fs::remove_file(&fresh);
    })
}

async fn run(words: &[OsString]) -> Result<()> {
    let output = status::output(words, SYSTEM).await?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Error::new(Code::ServerError, format!("{} failed ({}): {}", shell(words), output.status, said.trim())))
}

/// Words as a shell would take them again.
pub(super) fn shell(words: &[impl AsRef<OsStr>]) -> String {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "-_./=:,+@%".contains(letter);
    let quoted = words.iter().map(|word| {
        let word = word.as_ref().to_string_lossy();
        if !word.is_empty() && word.chars().all(plain) { word.into_owned() } else { format!("'{}'", word.replace('\'', r"'\''")) }
    });
    quoted.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_where_a_shell_would_cut_or_change_them() {
        let words = ["/usr/bin/python", "-P", "a b", "it's", "18.2.3|onnx||", "$HOME", ""];
        assert_eq!(shell(&words), r"/usr/bin/python -P 'a b' 'it'\''s' '18.2.3|onnx||' '$HOME' ''");
    }

    #[tokio::test]
    async fn what_is_shown_is_what_is_done() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("old"), "old").unwrap();
        let mut plan = Plan::default();
        plan.then(Step::Move(path("old"), path("aside")));
        plan.then(Step::Folder(path("a/b"), 0o700));
        plan.then(Step::File(path("a/b/f"), 0o755, "one\ntwo\n".into()));
        plan.then(Step::RemoveFolder(path("a")));
        plan.then(Step::Remove(path("not there")));
        plan.note("and that is all");
        let shown = plan.show();
        assert!(path("old").exists() && !path("a").exists(), "showing changes nothing");
        let mut told = Vec::new();
        plan.apply(&mut |line| {
            told.push(line.to_owned());
            Ok(())
        })
        .await
        .unwrap();
        let left: Vec<&str> = shown.lines().skip(1).filter(|line| !line.starts_with("    | ")).collect();
        assert_eq!(left, told);
        assert!(shown.contains("    | one\n    | two\n"));
        assert_eq!(fs::read_to_string(path("a/b/f")).unwrap(), "one\ntwo\n");
        assert_eq!(fs::read_to_string(path("aside")).unwrap(), "old");
        assert_eq!(fs::read_dir(path("a/b")).unwrap().count(), 1, "nothing unfinished is left");
        assert!(plan.touches(&path("a")) && !plan.touches(&path("b")));
    }

    #[tokio::test]
    async fn a_step_that_fails_ends_the_plan_and_says_what_failed() {
        let folder = tempfile::tempdir().unwrap();
        let mut plan = Plan::default();
        plan.then(Step::Try(vec!["false".into()]));
        plan.then(Step::Run(["sh", "-c", "echo no luck >&2; exit 3"].map(OsString::from).to_vec()));
        plan.then(Step::Folder(folder.path().join("later"), 0o700));
        let error = plan.apply(&mut |_| Ok(())).await.unwrap_err();
        assert!(error.message.contains("no luck"), "{error}");
        assert!(!folder.path().join("later").exists());
    }
}
