//! `emberd omp …`: puts emberd where omp, the coding agent, starts or finds the workers for its local models; takes it away; tells how things are.
//!
//! omp has two kinds of worker. For MLX it runs a Python environment that it has made itself, in a place that is known: emberd can stand there
//! ([`runtime`]). For ONNX it runs itself, so that emberd is used only where its worker listens already, with the tag that this omp expects ([`keep`]).
//! [`places`] knows omp's folders, [`service`] the system's service manager, [`plan`] does what is to be done or shows it, [`status`] looks.

mod content;
pub mod keep;
#[cfg(test)]
mod killed;
pub mod places;
pub mod plan;
pub mod runtime;
pub mod service;
pub mod status;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::config::{Install, Omp};
use crate::error::{Code, Error, Result};
use crate::shelf::say;
use keep::Kept;
use places::Places;
use plan::Plan;

pub use crate::folders::Variables;

/// How to start this emberd from anywhere: a program and its first arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Emberd {
    python: PathBuf,
}

impl Emberd {
    /// The emberd of this Python.
    ///
    /// # Errors
    /// When it is not known, or would not be found from another folder.
    pub fn new(python: Option<PathBuf>) -> Result<Self> {
        match python {
            Some(python) if python.is_absolute() => Ok(Self { python }),
            Some(python) => Err(Error::new(Code::InvalidValue, format!("the Python of emberd is {}, a relative path", python.display()))
                .hint("start emberd by its full path")),
            None => Err(Error::new(Code::InvalidValue, "emberd does not know which Python it belongs to")
                .hint("start it by the emberd command, or by python -m emberd")),
        }
    }

    /// The program and the arguments before emberd's own. A worker starts in its client's folder: what is there must not be taken for a part of emberd.
    #[must_use]
    pub fn command(&self) -> Vec<OsString> {
        vec![self.python.clone().into(), "-P".into(), "-m".into(), "emberd".into()]
    }
}

/// Runs the command; the exit code. `home` is where models are; `python` the interpreter that this emberd runs in.
///
/// # Errors
/// When omp's settings name no folder, when something of somebody else's is in the way, when nothing here keeps programs running, and when the
/// operating system refuses.
pub async fn run(what: &Omp, home: &Path, python: Option<PathBuf>) -> Result<u8> {
    let variables: Variables<'_> = &|name| std::env::var_os(name).filter(|value| !value.is_empty());
    let places = Places::find(&|name| std::env::var_os(name))?;
    match what {
        Omp::Install(how) => {
            let emberd = Emberd::new(python)?;
            let plan = if how.keep.is_empty() {
                runtime::install(&places, &emberd, how.replace)?
            } else {
                keep::install(&places, &kept(how, home, &emberd, variables).await?, variables).await?
            };
            carry_out(&plan, &places, how.dry_run).await
        }
        Omp::Uninstall { dry_run } => {
            let mut plan = runtime::uninstall(&places)?;
            plan.extend(keep::uninstall(&places)?);
            if plan.is_empty() {
                let told = ["nothing of emberd's is installed".to_owned()].iter().chain(plan.notes()).cloned().collect::<Vec<_>>();
                return say(&told.join("\n"));
            }
            carry_out(&plan, &places, *dry_run).await
        }
        Omp::Status => say(status::report(&places, variables).await?.trim_end()),
    }
}

async fn carry_out(plan: &Plan, places: &Places, dry_run: bool) -> Result<u8> {
    if dry_run {
        return say(plan.show().trim_end());
    }
    // Elsewhere omp never makes that environment.
    let shared = cfg!(target_os = "macos") && plan.touches(&places.runtime);
    let lock = shared.then(|| places.lock_runtime()).transpose()?;
    plan.apply(&mut |done| say(done).map(drop)).await?;
    drop(lock);
    Ok(0)
}

async fn kept(how: &Install, home: &Path, emberd: &Emberd, variables: Variables<'_>) -> Result<Vec<Kept>> {
    let tag = match &how.tag {
        Some(tag) => tag.clone(),
        None => keep::tag(&status::version(variables).await?, variables),
    };
    how.keep.iter().map(|key| Kept::new(key, &tag, emberd, how.model.as_deref(), home, &|name| std::env::var_os(name))).collect()
}
