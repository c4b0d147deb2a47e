//! Tests: the commands for the MLX worker's place, killed between any two of their steps and in the midst of one, and what each of them makes of it.

use std::fs;
use std::path::{Path, PathBuf};

use super::Emberd;
use super::content::{MARKER, script};
use super::places::Places;
use super::plan::Plan;
use super::runtime::{ASIDE, State, install, named, state, uninstall};
use crate::error::Result;

fn places(folder: &Path) -> Places {
    Places::find(&|name| (name == "HOME").then(|| folder.into())).unwrap()
}

fn emberd() -> Emberd {
    Emberd::new(Some("/bin/sh".into())).unwrap()
}

async fn apply(plan: Plan) {
    plan.apply(&mut |_| Ok(())).await.unwrap();
}

/// An environment as omp has one, in its place.
pub(super) fn omps_own(places: &Places) {
    fs::create_dir_all(places.runtime.join("bin")).unwrap();
    fs::write(script(&places.runtime), b"\x7fELF\xff").unwrap();
    fs::write(places.runtime.join(MARKER), "0.31.3\n").unwrap();
}

pub(super) fn everything(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let path = entry.unwrap().path();
        all.push((path.clone(), fs::read(&path).unwrap_or_default()));
        all.extend(everything(&path));
    }
    all.sort();
    all
}

type Command = fn(&Places) -> Result<Plan>;
const COMMANDS: [Command; 3] =
    [|places| install(places, &emberd(), false), |places| install(places, &emberd(), true), |places| uninstall(places)];

/// Runs a command that may have been killed before, and sees that it has made its mind up; then, that nothing is lost.
async fn goes_on(places: &Places, own: bool, then: usize, how: &str) {
    match COMMANDS[then](places) {
        Ok(plan) => apply(plan).await,
        Err(error) => {
            let in_the_way = own && then == 0 && state(places) == Ok(State::Foreign);
            assert!(in_the_way && error.message.contains("of its own"), "{how}: {error}");
        }
    }
    let here = state(places).unwrap();
    let wanted = match (then, own) {
        (0, true) => matches!(here, State::Foreign | State::Emberd(_, Ok(()))),
        (0 | 1, _) => matches!(here, State::Emberd(_, Ok(()))),
        (_, own) => here == if own { State::Foreign } else { State::Absent },
    };
    assert!(wanted, "{how}: {here:?}");
    apply(uninstall(places).unwrap()).await;
    let left: Vec<PathBuf> = everything(places.runtime.parent().unwrap()).into_iter().map(|(path, _)| path).collect();
    let place = &places.runtime;
    let before = [place.clone(), place.join(MARKER), place.join("bin"), script(place)];
    assert_eq!(left, if own { &before[..] } else { &[] }, "{how}");
    assert!(!own || fs::read(script(place)).unwrap() == b"\x7fELF\xff", "{how}");
}

#[tokio::test]
async fn a_command_that_was_killed_anywhere_is_gone_on_from_by_each_of_them() {
    let mut cuts = 0;
    for (own, installed, cut, then) in (0..36).map(|case| (case % 2 == 1, case / 2 % 2 == 1, case / 4 % 3, case / 12)) {
        for at in 0.. {
            let home = tempfile::tempdir().unwrap();
            let places = places(home.path());
            if own {
                omps_own(&places);
            }
            if installed {
                apply(install(&places, &emberd(), true).unwrap()).await;
            }
            let Ok(plan) = COMMANDS[cut](&places) else { break };
            let killed = plan.killed(at).await;
            goes_on(&places, own, then, &format!("own {own}, installed {installed}, then {then}, killed at {at} of {plan:?}")).await;
            cuts += usize::from(killed);
            if !killed {
                break;
            }
        }
    }
    assert!(cuts > 100, "{cuts}");
}

#[tokio::test]
async fn an_empty_folder_in_the_place_of_what_is_aside_is_nobodys_environment() {
    for (then, half) in [(0, "bin"), (1, "bin"), (2, "bin"), (0, "bin/.python.7"), (2, "..omp-mlx-lm.7")] {
        let home = tempfile::tempdir().unwrap();
        let places = places(home.path());
        omps_own(&places);
        fs::rename(&places.runtime, named(&places, ASIDE)).unwrap();
        fs::create_dir_all(places.runtime.join("bin")).unwrap();
        if half != "bin" {
            fs::write(places.runtime.join(half), "#!/bin").unwrap();
        }
        assert_eq!(state(&places), Ok(State::HalfMade), "{half}");
        goes_on(&places, true, then, half).await;
    }
}
