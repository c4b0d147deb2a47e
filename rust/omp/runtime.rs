//! The place of omp's MLX worker: a Python environment below omp's cache, which omp takes as ready when a file in it names the version of mlx-lm.
//!
//! emberd stands there as `bin/python`, a script of one line. An environment that omp has made itself is never changed: it is in the way, or is moved
//! aside as a whole and comes back.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::Emberd;
use super::places::{MLX_LM, Places};
use super::plan::{Plan, Step, shell};
use crate::error::{Code, Error, Result};

/// The first lines of the script, by which it is known again.
const HEADER: &str =
    "#!/bin/sh\n# Written by `emberd omp install`; `emberd omp uninstall` removes it. omp starts this as its MLX worker.\n";
/// The file that tells omp that the environment is ready, and of which mlx-lm.
const MARKER: &str = ".omp-mlx-lm";
/// What the folder's name ends with while it is aside.
const ASIDE: &str = ".before-emberd";

/// What is in the place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Nothing.
    Absent,
    /// emberd, started by these words of a shell; or why it would not start.
    Emberd(String, Result<(), String>),
    /// Something that emberd has not put there: an environment of omp's, whole or half made.
    Foreign,
}

fn script(places: &Places) -> PathBuf {
    places.runtime.join("bin/python")
}

fn aside(places: &Places) -> PathBuf {
    let mut name = places.runtime.clone().into_os_string();
    name.push(ASIDE);
    name.into()
}

/// What is in the place.
///
/// # Errors
/// When it cannot be looked at.
pub fn state(places: &Places) -> Result<State> {
    let folder = &places.runtime;
    let io = |error: std::io::Error| Error::io(Code::ServerError, "look into", folder, &error);
    let mut entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(State::Absent),
        Err(error) if error.kind() == std::io::ErrorKind::NotADirectory => return Ok(State::Foreign),
        Err(error) => return Err(io(error)),
    };
    // Bytes: what is no text is no script of ours.
    let text = fs::read(script(places)).unwrap_or_default();
    if let Some(command) = std::str::from_utf8(&text).ok().and_then(|text| text.strip_prefix(HEADER)) {
        let command = command.trim().trim_start_matches("exec ").trim_end_matches(" \"$@\"");
        return Ok(State::Emberd(command.to_owned(), usable(places, command)));
    }
    Ok(if entries.next().is_some() { State::Foreign } else { State::Absent })
}

/// Whether omp would take the place as ready, and the script would find its program.
fn usable(places: &Places, command: &str) -> Result<(), String> {
    let marker = fs::read_to_string(places.runtime.join(MARKER)).unwrap_or_default();
    if marker.trim() != MLX_LM {
        return Err(format!("{MARKER} does not say {MLX_LM}"));
    }
    let executable = |path: &Path| fs::metadata(path).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0);
    if !executable(&script(places)) {
        return Err("bin/python cannot be run".to_owned());
    }
    let program = match command.strip_prefix('\'') {
        Some(quoted) => quoted.split("' ").next().unwrap_or_default().replace(r"'\''", "'"),
        None => command.split(' ').next().unwrap_or_default().to_owned(),
    };
    if !executable(Path::new(&program)) {
        return Err(format!("{program} is not there any more"));
    }
    Ok(())
}

/// The steps that put emberd in the place. `replace` moves what omp has there aside.
///
/// # Errors
/// When something else is in the place and is not to be replaced, or something is aside already.
pub fn install(places: &Places, emberd: &Emberd, replace: bool) -> Result<Plan> {
    let mut plan = Plan::default();
    if state(places)? == State::Foreign {
        let place = places.runtime.display();
        if !replace {
            return Err(Error::new(Code::InvalidValue, format!("omp has a Python environment of its own in {place}"))
                .hint("say --replace to have it moved aside until emberd is uninstalled"));
        }
        let aside = aside(places);
        if fs::symlink_metadata(&aside).is_ok() {
            return Err(Error::new(Code::InvalidValue, format!("{} is there already, and so is {place}", aside.display()))
                .hint("remove the one that is not needed"));
        }
        plan.then(Step::Move(places.runtime.clone(), aside));
    }
    plan.then(Step::Folder(places.runtime.join("bin"), 0o755));
    plan.then(Step::File(script(places), 0o755, format!("{HEADER}exec {} \"$@\"\n", shell(&emberd.command()))));
    // Last: from here on omp takes the place as ready.
    plan.then(Step::File(places.runtime.join(MARKER), 0o644, format!("{MLX_LM}\n")));
    plan.note(used());
    Ok(plan)
}

/// When omp starts what is in the place.
fn used() -> &'static str {
    if APPLE_SILICON {
        "omp starts emberd in place of its MLX worker when PI_TINY_DEVICE, or its setting providers.tinyModelDevice, is mlx"
    } else {
        "on this machine omp never starts it: it has MLX on Macs with Apple silicon only; see emberd omp install --keep"
    }
}

/// Where omp has MLX at all.
const APPLE_SILICON: bool = cfg!(all(target_os = "macos", target_arch = "aarch64"));

/// The steps that take emberd out of the place again, and put back what was there before.
///
/// # Errors
/// When the place cannot be looked at.
pub fn uninstall(places: &Places) -> Result<Plan> {
    let mut plan = Plan::default();
    if let State::Emberd(..) = state(places)? {
        // First: from here on omp takes the place as not ready.
        plan.then(Step::Remove(places.runtime.join(MARKER)));
        plan.then(Step::Remove(script(places)));
        plan.then(Step::RemoveFolder(places.runtime.join("bin")));
        plan.then(Step::RemoveFolder(places.runtime.clone()));
    }
    let aside = aside(places);
    if fs::symlink_metadata(&aside).is_ok() && state(places)? != State::Foreign {
        plan.then(Step::Move(aside, places.runtime.clone()));
    } else if let Some(parent) = places.runtime.parent()
        && !plan.is_empty()
    {
        plan.then(Step::RemoveFolder(parent.to_path_buf()));
    }
    Ok(plan)
}

/// Whether omp would start what is in the place, in words; `device` is `PI_TINY_DEVICE`.
#[must_use]
pub fn started(state: &State, device: Option<&OsStr>) -> String {
    told(state, device, APPLE_SILICON)
}

fn told(state: &State, device: Option<&OsStr>, apple_silicon: bool) -> String {
    let device = device.map(|device| device.to_string_lossy().trim().to_lowercase()).filter(|device| !device.is_empty());
    match (state, device.as_deref()) {
        (State::Absent, _) => "no: emberd is not installed there".to_owned(),
        (State::Foreign, _) => "no: omp has an environment of its own there".to_owned(),
        (State::Emberd(_, Err(why)), _) => format!("no: {why}; run emberd omp install again"),
        _ if !apple_silicon => "no: omp has MLX on Macs with Apple silicon only".to_owned(),
        (_, Some("mlx" | "metal")) => "yes".to_owned(),
        (_, Some(device)) => format!("no: PI_TINY_DEVICE is {device}, not mlx"),
        (_, None) => "if its setting providers.tinyModelDevice is mlx".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(folder: &Path) -> Places {
        Places::find(&|name| (name == "HOME").then(|| folder.into())).unwrap()
    }

    fn emberd() -> Emberd {
        Emberd::new(Some("/bin/sh".into())).unwrap()
    }

    async fn apply(plan: Plan) {
        plan.apply(&mut |_| Ok(())).await.unwrap();
    }

    #[tokio::test]
    async fn what_is_installed_is_found_again_and_goes_without_a_trace() {
        let home = tempfile::tempdir().unwrap();
        let places = places(home.path());
        assert_eq!(state(&places), Ok(State::Absent));
        for _ in 0..2 {
            apply(install(&places, &emberd(), false).unwrap()).await;
            assert_eq!(state(&places), Ok(State::Emberd("/bin/sh -P -m emberd".into(), Ok(()))));
        }
        let script = fs::read_to_string(script(&places)).unwrap();
        assert!(script.starts_with("#!/bin/sh\n") && script.ends_with("exec /bin/sh -P -m emberd \"$@\"\n"), "{script}");
        assert_eq!(fs::read_to_string(places.runtime.join(MARKER)).unwrap(), "0.31.3\n");
        apply(uninstall(&places).unwrap()).await;
        assert!(!places.runtime.parent().unwrap().exists());
        assert!(uninstall(&places).unwrap().is_empty());
    }

    #[tokio::test]
    async fn an_environment_of_omps_is_left_alone_unless_it_is_to_be_replaced_and_comes_back() {
        let home = tempfile::tempdir().unwrap();
        let places = places(home.path());
        let python = script(&places);
        fs::create_dir_all(python.parent().unwrap()).unwrap();
        fs::write(&python, b"\x7fELF\xff").unwrap();
        assert_eq!(state(&places), Ok(State::Foreign));
        let refusal = install(&places, &emberd(), false).unwrap_err();
        assert!(refusal.message.contains("of its own") && refusal.hint.unwrap().contains("--replace"));
        assert!(uninstall(&places).unwrap().is_empty(), "nothing there is emberd's");
        apply(install(&places, &emberd(), true).unwrap()).await;
        assert!(matches!(state(&places), Ok(State::Emberd(_, Ok(())))));
        apply(uninstall(&places).unwrap()).await;
        assert_eq!(fs::read(&python).unwrap(), b"\x7fELF\xff");
        assert_eq!(fs::read_dir(places.runtime.parent().unwrap()).unwrap().count(), 1);
    }

    #[tokio::test]
    async fn two_environments_are_never_made_one() {
        let home = tempfile::tempdir().unwrap();
        let places = places(home.path());
        for folder in [places.runtime.join("lib"), aside(&places)] {
            fs::create_dir_all(folder).unwrap();
        }
        assert!(install(&places, &emberd(), true).unwrap_err().message.contains("already"));
        assert!(uninstall(&places).unwrap().is_empty());
    }

    #[tokio::test]
    async fn what_omp_would_not_start_is_told() {
        let home = tempfile::tempdir().unwrap();
        let places = places(home.path());
        let why = |device: Option<&str>, apple: bool| told(&state(&places).unwrap(), device.map(OsStr::new), apple);
        assert!(why(None, true).contains("not installed"));
        apply(install(&places, &Emberd::new(Some("/no/such python".into())).unwrap(), false).unwrap()).await;
        assert!(why(Some("mlx"), true).contains("/no/such python is not there"));
        apply(install(&places, &emberd(), false).unwrap()).await;
        assert_eq!(why(Some(" Metal "), true), "yes");
        assert!(why(Some("mlx"), false).contains("Apple silicon only"));
        assert!(why(Some("cpu"), true).contains("PI_TINY_DEVICE is cpu"));
        assert!(why(Some(""), true).contains("providers.tinyModelDevice"));
        fs::write(places.runtime.join(MARKER), "0.30").unwrap();
        assert!(why(Some("mlx"), true).starts_with("no: .omp-mlx-lm"));
    }

    #[test]
    fn only_one_at_a_time_changes_the_place() {
        let home = tempfile::tempdir().unwrap();
        let places = places(home.path());
        let held = places.lock_runtime().unwrap();
        assert!(places.lock_runtime().unwrap_err().message.contains("is making its environment"));
        drop(held);
        assert!(places.lock_runtime().is_ok());
    }
}
