//! Where omp has what concerns its workers: their sockets, and the environment from which it starts those for MLX.

use std::fs::{File, TryLockError};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use super::Variables;
use crate::error::{Code, Error, Result};
use crate::folders::{self, Omp};

/// The version of mlx-lm that omp pins, which is part of the environment's path.
pub const MLX_LM: &str = "0.31.3";

/// Where omp has what concerns its workers, and where the user's services are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Places {
    /// The sockets of omp's workers.
    pub run: PathBuf,
    /// The Python environment from which omp runs its MLX worker.
    pub runtime: PathBuf,
    /// Definitions of the user's services: units of systemd, or agents of launchd.
    pub services: PathBuf,
    /// The profile, where it is not the default one.
    pub profile: Option<String>,
}

impl Places {
    /// The folders that these variables mean. Nothing is made.
    ///
    /// # Errors
    /// As [`Omp::find`].
    pub fn find(variable: Variables<'_>) -> Result<Self> {
        let home = folders::home(variable)?;
        let Omp { state, cache, profile } = Omp::find(variable)?;
        let services = if cfg!(target_os = "macos") {
            home.join("Library/LaunchAgents")
        } else {
            let config = variable("XDG_CONFIG_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
            config.unwrap_or_else(|| home.join(".config")).join("systemd/user")
        };
        Ok(Self {
            run: state.join("run/tiny"),
            runtime: cache.join("tiny-mlx-runtime").join(format!("mlx-lm-{MLX_LM}")),
            services,
            profile,
        })
    }

    /// The name of the files of a worker, without their ending.
    #[must_use]
    pub fn base(key: &str, backend: &str) -> String {
        let plain = |letter: char| letter.is_ascii_alphanumeric() || ['.', '_', '-'].contains(&letter);
        format!("{key}-{backend}").chars().map(|letter| if plain(letter) { letter } else { '_' }).collect()
    }

    /// The socket of the ONNX worker for a model.
    #[must_use]
    pub fn socket(&self, key: &str) -> PathBuf {
        self.run.join(format!("{}.sock", Self::base(key, "onnx")))
    }

    /// Keeps omp from making its MLX environment meanwhile, in the way omp keeps its processes apart where it has MLX; the lock goes with the file.
    ///
    /// # Errors
    /// When omp is at it.
    pub fn lock_runtime(&self) -> Result<File> {
        let mut path = self.runtime.clone().into_os_string();
        path.push(".install.lock");
        let path = PathBuf::from(path);
        let io = |error: &std::io::Error| Error::io(Code::ServerError, "lock", &path, error);
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(|error| io(&error))?;
        }
        let file = File::options().create(true).truncate(false).write(true).mode(0o600).open(&path).map_err(|error| io(&error))?;
        match file.try_lock() {
            Ok(()) => Ok(file),
            Err(TryLockError::WouldBlock) => {
                Err(Error::new(Code::ServerError, format!("omp is making its environment in {}", self.runtime.display()))
                    .hint("wait until it is done"))
            }
            Err(TryLockError::Error(error)) => Err(io(&error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn found(variables: &[(&str, &str)]) -> Places {
        Places::find(&|name| variables.iter().rev().find(|(known, _)| *known == name).map(|(_, value)| value.into())).unwrap()
    }

    fn of(variables: &[(&str, &str)]) -> (String, String) {
        let mut all = vec![("HOME", "/home/ada")];
        all.extend(variables);
        let places = found(&all);
        (places.run.display().to_string(), places.runtime.display().to_string())
    }

    fn both(root: &str, cache: &str) -> (String, String) {
        (format!("{root}/run/tiny"), format!("{cache}/cache/tiny-mlx-runtime/mlx-lm-0.31.3"))
    }

    #[test]
    fn each_variable_moves_what_it_moves_for_omp() {
        let (omp, agent) = ("/home/ada/.omp", "/home/ada/.omp/agent");
        let (work, of_work) = ("/home/ada/.omp/profiles/wren", "/home/ada/.omp/profiles/wren/agent");
        type Row<'a> = (&'a [(&'a str, &'a str)], (&'a str, &'a str));
        let table: &[Row<'_>] = &[
            (&[], (omp, agent)),
            (&[("PI_CONFIG_DIR", ""), ("PI_CODING_AGENT_DIR", "")], (omp, agent)),
            (&[("PI_CONFIG_DIR", "x")], ("/home/ada/x", "/home/ada/x/agent")),
            (&[("PI_CONFIG_DIR", "./../bob/.x")], ("/home/bob/.x", "/home/bob/.x/agent")),
            (&[("PI_CONFIG_DIR", "/x/y")], ("/home/ada/x/y", "/home/ada/x/y/agent")),
            (&[("OMP_PROFILE", "wren")], (work, of_work)),
            (&[("PI_PROFILE", " wren ")], (work, of_work)),
            (&[("OMP_PROFILE", "wren"), ("PI_PROFILE", "play")], (work, of_work)),
            (&[("OMP_PROFILE", ""), ("PI_PROFILE", "wren")], (omp, agent)),
            (&[("OMP_PROFILE", "default")], (omp, agent)),
            (&[("PI_CODING_AGENT_DIR", "/d")], (omp, "/d")),
            (&[("PI_CODING_AGENT_DIR", "/d"), ("OMP_PROFILE", "wren")], (work, of_work)),
            (&[("PI_CODING_AGENT_DIR", of_work), ("OMP_PROFILE", ""), ("PI_PROFILE", "wren")], (omp, agent)),
            (&[("XDG_STATE_HOME", "/nowhere"), ("XDG_CACHE_HOME", "/nowhere")], (omp, agent)),
        ];
        for (variables, (root, cache)) in table {
            assert_eq!(of(variables), both(root, cache), "{variables:?}");
        }
    }

    #[test]
    fn xdg_folders_count_where_omp_has_moved_into_them() {
        let folder = tempfile::tempdir().unwrap();
        let base = folder.path().to_str().unwrap();
        let xdg = [("XDG_STATE_HOME", base), ("XDG_CACHE_HOME", base)];
        std::fs::create_dir_all(folder.path().join("omp/profiles/wren")).unwrap();
        assert_eq!(of(&xdg), both(&format!("{base}/omp"), &format!("{base}/omp")));
        let with = |more: (&'static str, &'static str)| [xdg[0], xdg[1], more];
        let work = format!("{base}/omp/profiles/wren");
        assert_eq!(of(&with(("OMP_PROFILE", "wren"))), both(&work, &work));
        let play = "/home/ada/.omp/profiles/play";
        assert_eq!(of(&with(("OMP_PROFILE", "play"))), both(play, &format!("{play}/agent")), "this profile has not moved");
        assert_eq!(of(&with(("PI_CODING_AGENT_DIR", "/d"))), both("/home/ada/.omp", "/d"), "an agent folder that is given is not moved");
    }

    #[test]
    fn a_profile_that_omp_would_not_take_is_refused() {
        for name in ["Work", "../x", ".x", "x.", "a b", &"x".repeat(65)] {
            let error = Places::find(&|variable| match variable {
                "HOME" => Some("/home/ada".into()),
                "OMP_PROFILE" => Some(name.into()),
                _ => None,
            });
            assert!(error.unwrap_err().message.contains("no name of a profile"), "{name}");
        }
        assert!(Places::find(&|_| None).unwrap_err().message.contains("no home folder"));
    }

    #[test]
    fn a_worker_is_named_after_its_model_and_its_kind() {
        assert_eq!(Places::base("llama3.2:3b", "onnx"), "llama3.2_3b-onnx");
        assert_eq!(found(&[("HOME", "/h")]).socket("lfm2.5-230m"), Path::new("/h/.omp/run/tiny/lfm2.5-230m-onnx.sock"));
    }
}
