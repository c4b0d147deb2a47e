//! omp's folders, found as omp finds them: the variables, the profile, and the XDG folders where omp has moved into them.
//!
//! Settings in omp's own `.env` files are not read: whoever has the folders there gives the variables to emberd as well.

use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

use crate::error::{Code, Error, Result};

/// What the environment says.
pub type Variables<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// The folders of omp for one profile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Omp {
    /// What omp keeps between its runs; sockets are in `run/tiny` of it.
    pub state: PathBuf,
    /// What it can fetch again, its models among that.
    pub cache: PathBuf,
    /// The profile, where it is not the default one.
    pub profile: Option<String>,
}

impl Omp {
    /// The folders that these variables mean. Nothing is made.
    ///
    /// # Errors
    /// When there is no home folder, or the profile has a name that omp would not take.
    pub fn find(variable: Variables<'_>) -> Result<Self> {
        let given = |name: &str| variable(name).filter(|value| !value.is_empty());
        let home = home(variable)?;
        let profile = match variable("OMP_PROFILE") {
            Some(profile) => self::profile(&profile)?,
            None => variable("PI_PROFILE").map_or(Ok(None), |profile| self::profile(&profile))?,
        };
        let root = joined(&home, Path::new(&given("PI_CONFIG_DIR").unwrap_or_else(|| ".omp".into())));
        let of_profile = |profile: &Option<String>| profile.as_ref().map_or_else(|| root.clone(), |name| root.join("profiles").join(name));
        let config = of_profile(&profile);
        let default_agent = config.join("agent");
        let agent = match given("PI_CODING_AGENT_DIR").map(PathBuf::from) {
            Some(agent) if profile.is_none() && !left_by_a_profile(&agent, variable, of_profile) => {
                std::path::absolute(&agent).map_err(|error| Error::io(Code::InvalidValue, "use the folder", &agent, &error))?
            }
            _ => default_agent.clone(),
        };
        let moved = |name: &str| {
            let base = given(name).map(PathBuf::from).filter(|_| agent == default_agent)?;
            let folder = profile.as_ref().map_or_else(|| base.join("omp"), |name| base.join("omp/profiles").join(name));
            folder.exists().then_some(folder)
        };
        let cache = moved("XDG_CACHE_HOME").unwrap_or_else(|| agent.clone()).join("cache");
        let state = moved("XDG_STATE_HOME").unwrap_or(config);
        Ok(Self { state, cache, profile })
    }
}

/// The user's home folder: `HOME`, and on Windows `USERPROFILE`.
///
/// # Errors
/// When that is not an absolute path.
pub fn home(variable: Variables<'_>) -> Result<PathBuf> {
    let named = variable("HOME").or_else(|| variable("USERPROFILE").filter(|_| cfg!(windows)));
    let home = named.map(PathBuf::from).filter(|home| home.is_absolute());
    home.ok_or_else(|| Error::new(Code::InvalidValue, "no home folder: HOME is not an absolute path"))
}

/// A path appended to a folder as omp does it: a slash at its beginning does not count, and a step up takes the folder before it away.
pub fn joined(folder: &Path, path: &Path) -> PathBuf {
    let mut all = folder.to_path_buf();
    for part in path.components() {
        match part {
            Component::Normal(name) => all.push(name),
            Component::ParentDir => {
                all.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    all
}

/// Whether an agent folder is what another omp, with a profile, has left in the environment of one that has been told to have none.
fn left_by_a_profile(agent: &Path, variable: Variables<'_>, of_profile: impl Fn(&Option<String>) -> PathBuf) -> bool {
    let left = variable("PI_PROFILE").and_then(|profile| self::profile(&profile).ok()).flatten();
    left.is_some() && agent == of_profile(&left).join("agent")
}

/// A profile's name; `None` is the default profile.
fn profile(given: &OsString) -> Result<Option<String>> {
    let name = given.to_string_lossy();
    let name = name.trim();
    if name.is_empty() || name == "default" {
        return Ok(None);
    }
    let plain = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit();
    let rest = |letter: char| plain(letter) || ['.', '_', '-'].contains(&letter);
    if name.len() > 64 || !name.starts_with(plain) || !name.chars().all(rest) || name.ends_with('.') {
        return Err(
            Error::new(Code::InvalidValue, format!("{name:?} is no name of a profile of omp's")).hint("check OMP_PROFILE and PI_PROFILE")
        );
    }
    Ok(Some(name.to_owned()))
}
