//! The place of omp's MLX worker: a Python environment below omp's cache, which omp takes as ready when a file in it names the version of mlx-lm.
//!
//! emberd stands there as `bin/python`, a script of one line. An environment that omp has made itself is never changed: it is in the way, or is moved
//! aside as a whole and comes back. The commands may be killed between any two of their steps, and within one: each of them, run again, goes on from
//! what it finds, and takes what emberd has left half made for emberd's.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::Emberd;
use super::content::{Content, HEADER, MARKER, command, content, script};
use super::places::{MLX_LM, Places};
use super::plan::{Plan, Step, shell};
use crate::error::{Code, Error, Result};

/// What the folder's name ends with while it is aside.
pub(super) const ASIDE: &str = ".before-emberd";
/// What the name of the folder ends with in which emberd's is made, until it is whole.
pub(super) const FRESH: &str = ".by-emberd";

/// What is in the place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Nothing.
    Absent,
    /// emberd, started by these words of a shell; or why it would not start.
    Emberd(String, Result<(), String>),
    /// A part of what emberd puts there, and nothing else, or an empty folder: a command did not come to its end.
    HalfMade,
    /// Something that emberd has not put there: an environment of omp's, whole or half made.
    Foreign,
}

/// The place, with an ending to its name.
pub(super) fn named(places: &Places, ending: &str) -> PathBuf {
    let mut name = places.runtime.clone().into_os_string();
    name.push(ending);
    name.into()
}

/// Where the environment of omp's is that was in the place before emberd, if there is one.
#[must_use]
pub fn moved_aside(places: &Places) -> Option<PathBuf> {
    Some(named(places, ASIDE)).filter(|aside| fs::symlink_metadata(aside).is_ok())
}

/// The places of omps that pin another version of mlx-lm, as far as they have made one, in the order of their names.
#[must_use]
pub fn beside(places: &Places) -> Vec<PathBuf> {
    let other = |path: &PathBuf| {
        let version = path.file_name().and_then(OsStr::to_str).and_then(|name| name.strip_prefix("mlx-lm-"));
        version.is_some_and(|version| fs::read_to_string(path.join(MARKER)).is_ok_and(|text| text.trim() == version && version != MLX_LM))
    };
    let entries = places.runtime.parent().and_then(|folder| fs::read_dir(folder).ok());
    let mut found: Vec<PathBuf> = entries.into_iter().flatten().flatten().map(|entry| entry.path()).filter(other).collect();
    found.sort();
    found
}

/// What is in the place.
///
/// # Errors
/// When it cannot be looked at.
pub fn state(places: &Places) -> Result<State> {
    let folder = &places.runtime;
    if fs::metadata(folder).is_ok_and(|found| !found.is_dir()) {
        return Ok(State::Foreign);
    }
    if let Some(command) = command(&script(folder)) {
        let usable = usable(places, &command);
        return Ok(State::Emberd(command, usable));
    }
    Ok(match content(folder)? {
        Content { strange: Some(_), .. } => State::Foreign,
        Content { any: true, .. } => State::HalfMade,
        Content { .. } => State::Absent,
    })
}

/// Whether omp would take the place as ready, and the script would find its program.
fn usable(places: &Places, command: &str) -> Result<(), String> {
    let marker = fs::read_to_string(places.runtime.join(MARKER)).unwrap_or_default();
    if marker.trim() != MLX_LM {
        return Err(format!("{MARKER} does not say {MLX_LM}"));
    }
    let executable = |path: &Path| fs::metadata(path).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0);
    if !executable(&script(&places.runtime)) {
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
    let (place, fresh) = (&places.runtime, named(places, FRESH));
    let content_of_fresh = content(&fresh)?;
    if let Some(strange) = content_of_fresh.strange {
        return Err(Error::new(Code::InvalidValue, format!("{} is in the way, and emberd has not put it there", strange.display()))
            .hint(format!("move {} away", fresh.display())));
    }
    let state = state(places)?;
    if matches!(state, State::Emberd(..) | State::HalfMade) {
        take_away(&mut plan, &fresh)?;
        make(&mut plan, place, emberd)?;
    } else {
        let aside = named(places, ASIDE);
        if state == State::Foreign && !replace {
            return Err(Error::new(Code::InvalidValue, format!("omp has a Python environment of its own in {}", place.display()))
                .hint("say --replace to have it moved aside until emberd is uninstalled"));
        }
        if state == State::Foreign && moved_aside(places).is_some() {
            return Err(two(places, &aside));
        }
        // Whole before it is in its place: the place is empty for no longer than it takes to give two names.
        make(&mut plan, &fresh, emberd)?;
        if state == State::Foreign {
            plan.then(Step::Move(place.clone(), aside));
        }
        plan.then(Step::Move(fresh, place.clone()));
    }
    plan.note(used());
    Ok(plan)
}

fn two(places: &Places, aside: &Path) -> Error {
    let said = format!("{} is there already, and so is {}", aside.display(), places.runtime.display());
    Error::new(Code::InvalidValue, said).hint("remove the one that is not needed")
}

/// The steps that make emberd's folder, or what is missing of it.
fn make(plan: &mut Plan, folder: &Path, emberd: &Emberd) -> Result<()> {
    for path in content(folder)?.unfinished {
        plan.then(Step::Remove(path));
    }
    plan.then(Step::Folder(folder.join("bin"), 0o755));
    plan.then(Step::File(script(folder), 0o755, format!("{HEADER}exec {} \"$@\"\n", shell(&emberd.command()))));
    // Last: from here on omp takes the place as ready.
    plan.then(Step::File(folder.join(MARKER), 0o644, format!("{MLX_LM}\n")));
    Ok(())
}

/// The steps that take emberd's folder away, or what is there of it; nothing where nothing is there.
fn take_away(plan: &mut Plan, folder: &Path) -> Result<()> {
    if fs::symlink_metadata(folder).is_err() {
        return Ok(());
    }
    // First: from here on omp takes the place as not ready.
    plan.then(Step::Remove(folder.join(MARKER)));
    for path in content(folder)?.unfinished {
        plan.then(Step::Remove(path));
    }
    plan.then(Step::Remove(script(folder)));
    plan.then(Step::RemoveFolder(folder.join("bin")));
    plan.then(Step::RemoveFolder(folder.to_path_buf()));
    Ok(())
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

/// The steps that take emberd out of the place again, and put back what was there before. Where omp has made a new environment meanwhile, both stay,
/// and that is said.
///
/// # Errors
/// When the place cannot be looked at, and when something lies in it that keeps what was there before from coming back.
pub fn uninstall(places: &Places) -> Result<Plan> {
    let mut plan = Plan::default();
    let (state, fresh) = (state(places)?, named(places, FRESH));
    if content(&fresh)?.strange.is_none() {
        take_away(&mut plan, &fresh)?;
    }
    if matches!(state, State::Emberd(..) | State::HalfMade) {
        take_away(&mut plan, &places.runtime)?;
    }
    match (moved_aside(places), state) {
        (Some(aside), State::Foreign) => {
            let Error { message, hint, .. } = two(places, &aside);
            plan.note(format!("{message}; {}", hint.unwrap_or_default()));
        }
        (Some(aside), _) => {
            if let Some(strange) = content(&places.runtime)?.strange {
                return Err(Error::new(Code::InvalidValue, format!("{} is in the way of {}", strange.display(), aside.display()))
                    .hint("emberd has not put it there: move it away, and uninstall again"));
            }
            plan.then(Step::Move(aside, places.runtime.clone()));
        }
        (None, _) => {
            if let Some(parent) = places.runtime.parent().filter(|_| !plan.is_empty()) {
                plan.then(Step::RemoveFolder(parent.to_path_buf()));
            }
        }
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
        (State::HalfMade, _) => "no: it is half made; run emberd omp install again, or uninstall".to_owned(),
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
    use super::super::killed::{everything, omps_own};
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
        let script = fs::read_to_string(script(&places.runtime)).unwrap();
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
        let python = script(&places.runtime);
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
        for folder in [places.runtime.join("lib"), named(&places, ASIDE)] {
            fs::create_dir_all(folder).unwrap();
        }
        assert!(install(&places, &emberd(), true).unwrap_err().message.contains("already"));
        let plan = uninstall(&places).unwrap();
        assert!(plan.is_empty() && plan.notes()[0].contains("remove the one that is not needed"), "{plan:?}");
    }

    #[tokio::test]
    async fn what_somebody_has_put_beside_emberd_is_not_lost_and_not_mixed_with_what_was_there() {
        let home = tempfile::tempdir().unwrap();
        let places = places(home.path());
        omps_own(&places);
        apply(install(&places, &emberd(), true).unwrap()).await;
        fs::write(places.runtime.join("notes"), "mine").unwrap();
        let before = everything(home.path());
        assert!(uninstall(&places).unwrap_err().message.contains("notes is in the way of"));
        assert_eq!(everything(home.path()), before);
        fs::create_dir(named(&places, FRESH)).unwrap();
        fs::write(named(&places, FRESH).join("mine"), "").unwrap();
        assert!(install(&places, &emberd(), true).unwrap_err().message.contains("mine is in the way"));
    }

    #[test]
    fn the_place_of_another_omp_is_one_that_it_has_made() {
        let home = tempfile::tempdir().unwrap();
        let places = places(home.path());
        assert_eq!(beside(&places), [] as [PathBuf; 0]);
        omps_own(&places);
        let other = places.runtime.with_file_name("mlx-lm-0.40.0");
        fs::create_dir_all(&other).unwrap();
        assert_eq!(beside(&places), [] as [PathBuf; 0]);
        fs::write(other.join(MARKER), "0.40.0\n").unwrap();
        assert_eq!(beside(&places), [other]);
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
