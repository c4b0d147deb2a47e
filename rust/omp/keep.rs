//! Workers that the system keeps running for omp: services of the user, with the tag that one version of omp expects.
//!
//! omp never starts emberd as its ONNX worker, but takes whatever answers on the worker's socket with its tag. A worker with another tag it asks to end,
//! which is no failure: such a service stays ended, and is brought up again by installing it anew for the omp that is there now. How a service is
//! described to the system is said in [`service`](super::service).

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};

use super::places::Places;
use super::plan::{Plan, Step, shell};
use super::service::{MANAGER_HERE, Service, WRITTEN};
use super::{Emberd, Variables};
use crate::error::{Code, Error, Result};
use crate::worker::launch;

/// What the names of all definitions begin with.
const PREFIX: &str = "emberd-omp-";

/// What a worker reads from its environment that decides what it serves, where it finds it and how it runs, and that is not among its arguments. The
/// service manager's environment is another than the one in which the tag was made. Secrets (`HF_TOKEN`) are not written: the hub's own file of the
/// user's token, which `hf auth login` writes, is found without.
const ENVIRONMENT: [&str; 21] = [
    "PI_TINY_DEVICE",
    "PI_TINY_DTYPE",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "HF_ENDPOINT",
    "HF_TOKEN_PATH",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "XDG_CACHE_HOME",
    "XDG_STATE_HOME",
    "PI_CONFIG_DIR",
    "PI_CODING_AGENT_DIR",
    "OMP_PROFILE",
    "PI_PROFILE",
    "EMBERD_ENGINE",
    "EMBERD_THREADS",
    "EMBERD_LOG",
    "EMBERD_PYTHON",
    "EMBERD_HUB_RETRIES",
    "EMBERD_HUB_TIMEOUT",
];

/// Those of them that are paths, from wherever the user is. A relative one of the others means something else, or nothing.
const PATHS: [&str; 6] = ["HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN_PATH", "PI_CODING_AGENT_DIR", "EMBERD_PYTHON"];

/// A worker that is to be kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    key: String,
    tag: String,
    command: Vec<OsString>,
    options: Vec<OsString>,
    environment: Vec<(String, String)>,
}

impl Kept {
    /// A worker for one of omp's models. `model` stands in for omp's own, `home` is where models are; `variable` is the environment, where what is set
    /// to nothing is set.
    ///
    /// # Errors
    /// When omp has no such model, and when a variable that the worker needs is no text.
    pub fn new(key: &str, tag: &str, emberd: &Emberd, model: Option<&str>, home: &Path, variable: Variables<'_>) -> Result<Self> {
        if !launch::is_key(key) {
            return Err(Error::new(Code::InvalidValue, format!("Unknown tiny local model: {key}"))
                .hint("give a key that omp tiny-models list shows"));
        }
        let home = std::path::absolute(home).map_err(|error| Error::io(Code::InvalidValue, "use the folder", home, &error))?;
        let mut options = vec!["--home".into(), home.into_os_string()];
        // A variable that is set to nothing says nothing.
        if let Some(model) = model.filter(|model| !model.is_empty()) {
            options.extend(["--model".into(), anywhere(model)?]);
        }
        Ok(Self { key: key.to_owned(), tag: tag.to_owned(), command: emberd.command(), options, environment: environment(variable)? })
    }

    fn words(&self, places: &Places) -> Vec<OsString> {
        let socket = places.socket(&self.key).into_os_string();
        let own = ["worker".into(), "--socket".into(), socket, "--model-key".into(), self.key.clone().into()];
        let more = [OsString::from(format!("--tag={}", self.tag)), "--idle-ms".into(), "never".into()];
        self.command.iter().cloned().chain(own).chain(more).chain(self.options.iter().cloned()).collect()
    }

    fn name(&self, places: &Places) -> String {
        let profile = places.profile.as_ref().map(|profile| format!("{profile}-")).unwrap_or_default();
        format!("{PREFIX}{profile}{}", Places::base(&self.key, "onnx"))
    }

    fn service(&self, places: &Places) -> Service {
        Service {
            name: self.name(places),
            about: format!("emberd for omp: {}", self.key),
            folder: places.run.clone(),
            log: places.run.join(format!("{}.kept.log", Places::base(&self.key, "onnx"))),
            words: self.words(places),
            environment: self.environment.clone(),
        }
    }

    /// The command that does by hand what the service does.
    fn by_hand(&self, places: &Places) -> String {
        let set = self.environment.iter().map(|(name, value)| OsString::from(format!("{name}={value}")));
        let env = (!self.environment.is_empty()).then(|| OsString::from("env"));
        shell(&env.into_iter().chain(set).chain(self.words(places)).collect::<Vec<_>>())
    }
}

/// What of this environment a worker needs.
fn environment(variable: Variables<'_>) -> Result<Vec<(String, String)>> {
    let mut found = Vec::new();
    for name in ENVIRONMENT {
        // An empty OMP_PROFILE is the default profile, whatever PI_PROFILE says; of the others, empty is as good as unset.
        let Some(value) = variable(name).filter(|value| !value.is_empty() || name == "OMP_PROFILE") else { continue };
        let value = value.into_string().map_err(|value| {
            Error::new(Code::InvalidValue, format!("{name} is {}, which is not UTF-8: no service can be given it", value.display()))
                .hint("give it another name, or unset it")
        })?;
        let relative = PATHS.contains(&name) && value.contains('/') && !value.starts_with(['/', '~']);
        let value = match std::path::absolute(&value).map(PathBuf::into_os_string).map(OsString::into_string) {
            Ok(Ok(path)) if relative => path,
            _ => value,
        };
        found.push((name.to_owned(), value));
    }
    Ok(found)
}

/// A model's name or path that means the same in every folder: a service does not start where the user is. What has no separator is a name before it
/// is a path; what has one and is not there may be a repository, unless it begins as only a path does.
fn anywhere(model: &str) -> Result<OsString> {
    let found = Path::new(model).canonicalize();
    match found {
        Ok(path) if model.contains('/') => Ok(path.into_os_string()),
        Err(error) if model.starts_with(['.', '/']) => Err(Error::io(Code::ModelNotFound, "open", Path::new(model), &error)),
        _ => Ok(model.into()),
    }
}

/// The tag that an omp of this version gives to its ONNX worker: version, kind, device and weight format. Newer versions put the last two in order, and
/// leave out what does not exist.
#[must_use]
pub fn tag(version: &str, variable: Variables<'_>) -> String {
    let mut numbers = version.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    let in_order = (numbers.next(), numbers.next()) >= (Some(18), Some(3));
    let part = |name: &str| {
        let given = variable(name).map(|value| value.to_string_lossy().into_owned()).unwrap_or_default();
        if in_order { launch::setting(name, &given).ok().flatten().unwrap_or_default() } else { given }
    };
    format!("{version}|onnx|{}|{}", part("PI_TINY_DEVICE"), part("PI_TINY_DTYPE"))
}

/// The steps that have the system keep these workers running, and see that they answer.
///
/// # Errors
/// When nothing here keeps programs running for a user, with the commands that do it by hand; and when a definition of this name is not emberd's.
pub async fn install(places: &Places, kept: &[Kept], variable: Variables<'_>) -> Result<Plan> {
    if let Err(why) = MANAGER_HERE.answers().await {
        let by_hand: Vec<String> = kept.iter().map(|kept| kept.by_hand(places)).collect();
        return Err(Error::new(Code::InvalidValue, format!("{why}, so nothing here can keep a worker running")).hint(format!(
            "make the folder {} and keep this running by other means: {}",
            places.run.display(),
            by_hand.join("; ")
        )));
    }
    let mut plan = Plan::default();
    // As omp makes it, for its sockets.
    plan.then(Step::Folder(places.run.clone(), 0o700));
    plan.then(Step::Folder(places.services.clone(), 0o755));
    for kept in kept {
        let service = kept.service(places);
        let path = places.services.join(format!("{}{}", service.name, MANAGER_HERE.ending()));
        if fs::read_to_string(&path).is_ok_and(|text| !text.contains(WRITTEN)) {
            return Err(Error::new(Code::InvalidValue, format!("{} is there, and emberd has not written it", path.display()))
                .hint("give it another name, or remove it"));
        }
        plan.then(Step::File(path.clone(), 0o644, MANAGER_HERE.definition(&service)));
        // A worker of omp's own would keep the place until it is idle.
        plan.then(Step::Shutdown(places.socket(&kept.key)));
        for step in MANAGER_HERE.start(&service.name, &path) {
            plan.then(step);
        }
    }
    // All are started before the first is waited for.
    for kept in kept {
        let service = kept.service(places);
        let otherwise = format!("{}, then install again; or emberd omp uninstall", MANAGER_HERE.told(&service));
        plan.then(Step::Await { socket: places.socket(&kept.key), tag: kept.tag.clone(), otherwise });
    }
    let tag = kept.first().map(|kept| kept.tag.as_str()).unwrap_or_default();
    plan.note(format!("the tag is {tag}: after an update of omp, or of its settings for the device, install again"));
    if ["PI_TINY_DEVICE", "PI_TINY_DTYPE"].iter().all(|name| variable(name).is_none()) {
        plan.note("omp's settings providers.tinyModelDevice and providers.tinyModelDtype are part of it, and were not looked at; --tag gives another");
    }
    if variable("HF_TOKEN").is_some() {
        plan.note("HF_TOKEN is a secret, and is not written anywhere; hf auth login keeps one where the worker finds it");
    }
    Ok(plan)
}

/// A definition that emberd has written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installed {
    /// Its file.
    pub path: PathBuf,
    /// The socket of its worker; empty where the definition does not say.
    pub socket: PathBuf,
    /// The tag that it gives to its worker; empty where the definition does not say.
    pub tag: String,
}

impl Installed {
    /// Whether its worker's socket is among those of the omp that is meant here: of this profile, and in these folders.
    #[must_use]
    pub fn is_of(&self, places: &Places) -> bool {
        self.socket.parent() == Some(&places.run)
    }
}

/// The definitions that emberd has written, for omps of all profiles, in the order of their names.
///
/// # Errors
/// When the folder cannot be read.
pub fn installed(places: &Places) -> Result<Vec<Installed>> {
    let entries = match fs::read_dir(&places.services) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::io(Code::ServerError, "look into", &places.services, &error)),
    };
    let ours = |path: PathBuf| {
        let name = path.file_name().and_then(OsStr::to_str)?;
        let named = name.starts_with(PREFIX) && name.ends_with(MANAGER_HERE.ending());
        let text = named.then(|| fs::read_to_string(&path).ok()).flatten().filter(|text| text.contains(WRITTEN))?;
        let words = MANAGER_HERE.words(&text);
        let socket = words.iter().skip_while(|word| *word != "--socket").nth(1).map(PathBuf::from).unwrap_or_default();
        let tag = words.iter().find_map(|word| word.strip_prefix("--tag=")).unwrap_or_default().to_owned();
        Some(Installed { path, socket, tag })
    };
    let mut found: Vec<Installed> = entries.flatten().filter_map(|entry| ours(entry.path())).collect();
    found.sort_by(|one, other| one.path.cmp(&other.path));
    Ok(found)
}

/// The steps that end the kept workers of the omp that is meant here and remove their definitions; those for other profiles are named.
///
/// # Errors
/// As [`installed`] has them.
pub fn uninstall(places: &Places) -> Result<Plan> {
    let mut plan = Plan::default();
    let (own, others): (Vec<_>, Vec<_>) = installed(places)?.into_iter().partition(|one| one.is_of(places));
    for Installed { path, .. } in own {
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        plan.then(MANAGER_HERE.stop(&name));
        plan.then(Step::Remove(path));
    }
    if let Some(step) = MANAGER_HERE.forget().filter(|_| !plan.is_empty()) {
        plan.then(step);
    }
    for Installed { path, socket, .. } in others {
        plan.note(format!("{} is left alone: it is of another profile, whose socket is {}", path.display(), socket.display()));
    }
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment<'a>(variables: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<OsString> + 'a {
        |name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())
    }

    fn places(variables: &[(&str, &str)]) -> Places {
        Places::find(&environment(variables)).unwrap()
    }

    fn kept(key: &str, tag: &str, variables: &[(&str, &str)]) -> Kept {
        let emberd = Emberd::new(Some("/opt/em berd/bin/python".into())).unwrap();
        Kept::new(key, tag, &emberd, Some("smollm2-135m"), Path::new("/models/100%"), &environment(variables)).unwrap()
    }

    #[test]
    fn a_service_starts_the_worker_that_omp_looks_for() {
        let service = kept("llama3.2:3b", "18.2.3|onnx||", &[]).service(&places(&[("HOME", "/home/ada")]));
        let words = [
            ["/opt/em berd/bin/python", "-P", "-m", "emberd", "worker", "--socket", "/home/ada/.omp/run/tiny/llama3.2_3b-onnx.sock"]
                .as_slice(),
            &[
                "--model-key",
                "llama3.2:3b",
                "--tag=18.2.3|onnx||",
                "--idle-ms",
                "never",
                "--home",
                "/models/100%",
                "--model",
                "smollm2-135m",
            ],
        ];
        assert_eq!(service.words, words.concat());
        assert_eq!(service.name, "emberd-omp-llama3.2_3b-onnx");
        assert_eq!(service.environment, []);
        let of_work = kept("lfm2.5-230m", "t", &[]).name(&places(&[("HOME", "/home/ada"), ("OMP_PROFILE", "wren")]));
        assert_eq!(of_work, "emberd-omp-wren-lfm2.5-230m-onnx");
    }

    #[test]
    fn a_kept_worker_has_the_environment_that_its_tag_was_made_in() {
        let given = [
            ("PI_TINY_DTYPE", "q8"),
            ("HF_HOME", "a/b"),
            ("HF_HUB_CACHE", "~/hub"),
            ("HF_TOKEN", "secret"),
            ("HF_ENDPOINT", ""),
            ("OMP_PROFILE", ""),
            ("PI_PROFILE", "wren"),
            ("PI_CONFIG_DIR", "./.omp"),
            ("EMBERD_PYTHON", "python3"),
            ("UNRELATED", "x"),
        ];
        let here = std::env::current_dir().unwrap().join("a/b").into_os_string().into_string().unwrap();
        let expected = [
            ("PI_TINY_DTYPE", "q8"),
            ("HF_HOME", &here),
            ("HF_HUB_CACHE", "~/hub"),
            ("PI_CONFIG_DIR", "./.omp"),
            ("OMP_PROFILE", ""),
            ("PI_PROFILE", "wren"),
            ("EMBERD_PYTHON", "python3"),
        ];
        let found = kept("lfm2.5-230m", "t", &given).environment;
        assert_eq!(found.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_tag_is_what_this_version_of_omp_expects() {
        let with =
            |version: &str, device: &str, dtype: &str| tag(version, &environment(&[("PI_TINY_DEVICE", device), ("PI_TINY_DTYPE", dtype)]));
        assert_eq!(tag("18.3.4", &|_| None), "18.3.4|onnx||");
        assert_eq!(with("18.2.3", " GPU ", "bogus"), "18.2.3|onnx| GPU |bogus");
        assert_eq!(with("18.3.0", " GPU ", "bogus"), "18.3.0|onnx|gpu|");
        assert_eq!(with("19.0.0", "default", "q8"), "19.0.0|onnx||q8");
    }

    #[test]
    fn only_omps_models_are_kept_and_paths_hold_in_every_folder() {
        let emberd = Emberd::new(Some("/bin/sh".into())).unwrap();
        let new = |key: &str, model: &str| Kept::new(key, "t", &emberd, Some(model), Path::new("/m"), &|_| None);
        assert!(new("gpt-7", "x").unwrap_err().message.contains("Unknown tiny local model: gpt-7"));
        let model = |name: &str| new("lfm2.5-230m", name).map(|kept| kept.options[3].clone());
        assert_eq!(model("org/name"), Ok("org/name".into()));
        // Tests run in the folder of Cargo.toml.
        assert_eq!(model("./rust"), Ok(Path::new("rust").canonicalize().unwrap().into_os_string()));
        assert_eq!(model("rust"), Ok("rust".into()));
        assert!(model("./not there").unwrap_err().message.contains("./not there"));
        assert_eq!(new("lfm2.5-230m", "").unwrap().options, ["--home", "/m"]);
        assert!(Emberd::new(Some("python".into())).is_err() && Emberd::new(None).is_err());
    }

    #[test]
    fn definitions_are_known_by_what_they_say_and_each_profile_removes_its_own() {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().to_str().unwrap();
        let (plain, work) = (places(&[("HOME", folder)]), places(&[("HOME", folder), ("OMP_PROFILE", "wren")]));
        assert_eq!(installed(&plain), Ok(Vec::new()));
        fs::create_dir_all(&plain.services).unwrap();
        let tag = "18.2.3|onnx|100% \"mine\" \\ & $x|";
        let write = |places: &Places| {
            let kept = kept("lfm2.5-230m", tag, &[]);
            let path = places.services.join(format!("{}{}", kept.name(places), MANAGER_HERE.ending()));
            fs::write(&path, MANAGER_HERE.definition(&kept.service(places))).unwrap();
            Installed { path, socket: places.socket("lfm2.5-230m"), tag: tag.to_owned() }
        };
        let (of_plain, of_work) = (write(&plain), write(&work));
        fs::write(plain.services.join(format!("emberd-omp-y{}", MANAGER_HERE.ending())), "of somebody else").unwrap();
        for (places, own, other) in [(&plain, &of_plain, &of_work), (&work, &of_work, &of_plain)] {
            assert_eq!(installed(places), Ok(vec![of_plain.clone(), of_work.clone()]));
            let shown = uninstall(places).unwrap().show();
            assert!(shown.contains(&format!("remove {}\n", own.path.display())), "{shown}");
            assert!(!shown.contains(&format!("remove {}\n", other.path.display())), "{shown}");
            assert!(shown.contains(&format!("{} is left alone", other.path.display())), "{shown}");
        }
    }
}
