//! Workers that the system keeps running for omp: services of the user, with the tag that one version of omp expects.
//!
//! omp never starts emberd as its ONNX worker, but takes whatever answers on the worker's socket with its tag. A worker with another tag it asks to end,
//! which is no failure: such a service stays ended, and is brought up again by installing it anew for the omp that is there now.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::places::Places;
use super::plan::{Plan, Step, shell};
use super::{Emberd, Variables, status};
use crate::error::{Code, Error, Result};
use crate::worker::launch;

/// What every definition says of itself, by which it is known again.
const WRITTEN: &str = "Written by `emberd omp install`; `emberd omp uninstall` removes it.";
/// What the names of all definitions begin with.
const PREFIX: &str = "emberd-omp-";
/// How long the service manager may take to say that it is there.
const MANAGER: Duration = Duration::from_secs(10);

/// A worker that is to be kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    key: String,
    tag: String,
    command: Vec<OsString>,
    options: Vec<OsString>,
}

impl Kept {
    /// A worker for one of omp's models. `model` stands in for omp's own, `home` is where models are, if not in the usual place.
    ///
    /// # Errors
    /// When omp has no such model.
    pub fn new(key: &str, tag: &str, emberd: &Emberd, model: Option<&str>, home: Option<&Path>) -> Result<Self> {
        if !launch::is_key(key) {
            return Err(Error::new(Code::InvalidValue, format!("Unknown tiny local model: {key}"))
                .hint("give a key that omp tiny-models list shows"));
        }
        let mut options = Vec::new();
        if let Some(home) = home {
            let home = std::path::absolute(home).map_err(|error| Error::io(Code::InvalidValue, "use the folder", home, &error))?;
            options.extend(["--home".into(), home.into_os_string()]);
        }
        if let Some(model) = model {
            options.extend(["--model".into(), anywhere(model)?]);
        }
        Ok(Self { key: key.to_owned(), tag: tag.to_owned(), command: emberd.command(), options })
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

/// What keeps the user's programs running.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manager {
    Systemd,
    Launchd,
}

const MANAGER_HERE: Manager = if cfg!(target_os = "macos") { Manager::Launchd } else { Manager::Systemd };

impl Manager {
    fn ending(self) -> &'static str {
        match self {
            Self::Systemd => ".service",
            Self::Launchd => ".plist",
        }
    }

    /// Fails unless it answers.
    async fn answers(self) -> Result<(), &'static str> {
        let (ask, otherwise) = match self {
            Self::Systemd => (&["systemctl", "--user", "show-environment"][..], "no systemd instance of the user answers"),
            Self::Launchd => (&["launchctl", "version"][..], "launchd does not answer"),
        };
        let ask: Vec<OsString> = ask.iter().map(OsString::from).collect();
        match status::output(&ask, MANAGER).await {
            Ok(output) if output.status.success() => Ok(()),
            _ => Err(otherwise),
        }
    }

    fn definition(self, kept: &Kept, places: &Places) -> String {
        match self {
            Self::Systemd => unit(kept, places),
            Self::Launchd => agent(kept, places),
        }
    }

    /// What brings a new definition into force, and its worker up.
    fn start(self, name: &str, path: &Path) -> Vec<Step> {
        let unit = format!("{name}.service");
        match self {
            Self::Systemd => vec![
                Step::Run(words(["systemctl", "--user", "daemon-reload"])),
                Step::Run(words(["systemctl", "--user", "enable", &unit])),
                Step::Run(words(["systemctl", "--user", "restart", &unit])),
            ],
            Self::Launchd => {
                let domain = domain();
                vec![
                    Step::Try(words(["launchctl", "bootout", &format!("{domain}/{name}")])),
                    Step::Run([words(["launchctl", "bootstrap", &domain]), vec![path.into()]].concat()),
                ]
            }
        }
    }

    /// What ends a worker and takes its definition out of force, but for the file itself.
    fn stop(self, name: &str) -> Step {
        match self {
            Self::Systemd => Step::Try(words(["systemctl", "--user", "disable", "--now", &format!("{name}.service")])),
            Self::Launchd => Step::Try(words(["launchctl", "bootout", &format!("{}/{name}", domain())])),
        }
    }
}

fn domain() -> String {
    format!("gui/{}", rustix::process::getuid().as_raw())
}

fn words<'a>(words: impl IntoIterator<Item = &'a str>) -> Vec<OsString> {
    words.into_iter().map(OsString::from).collect()
}

/// A unit of systemd. Exit codes are a worker's own decision, to be asked to end (0) or to find another in its place (1), and are left at that.
fn unit(kept: &Kept, places: &Places) -> String {
    let quoted = |word: &OsString| {
        let word = word.to_string_lossy().replace('\\', r"\\").replace('"', "\\\"").replace('%', "%%").replace('$', "$$");
        format!("\"{word}\"")
    };
    let line = |words: &[OsString]| words.iter().map(quoted).collect::<Vec<_>>().join(" ");
    let folder = ["/bin/mkdir", "-p", "-m", "0700"].map(OsString::from);
    let folder = [&folder[..], &[places.run.clone().into()]].concat();
    format!(
        "# {WRITTEN}\n\
         [Unit]\n\
         Description=emberd for omp: {}\n\
         \n\
         [Service]\n\
         ExecStartPre={}\n\
         ExecStart={}\n\
         Restart=on-failure\n\
         RestartSec=1\n\
         RestartPreventExitStatus=1\n\
         SuccessExitStatus=129 130 143\n\
         \n\
         [Install]\n\
         WantedBy=default.target\n",
        kept.key,
        line(&folder),
        line(&kept.words(places)),
    )
}

/// An agent of launchd, started again after a crash only, for the same reason.
fn agent(kept: &Kept, places: &Places) -> String {
    let text = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let string = |word: &OsStr| format!("<string>{}</string>", text(&word.to_string_lossy()));
    let arguments: String = kept.words(places).iter().map(|word| format!("    {}\n", string(word))).collect();
    let log = places.run.join(format!("{}.kept.log", Places::base(&kept.key, "onnx")));
    format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n\
         <!DOCTYPE plist PUBLIC \"-//Apple//DTD PLIST 1.0//EN\" \"http://www.apple.com/DTDs/PropertyList-1.0.dtd\">\n\
         <!-- {WRITTEN} -->\n\
         <plist version=\"1.0\">\n\
         <dict>\n\
         \x20 <key>Label</key>\n\
         \x20 {}\n\
         \x20 <key>ProgramArguments</key>\n\
         \x20 <array>\n{arguments}\
         \x20 </array>\n\
         \x20 <key>RunAtLoad</key>\n\
         \x20 <true/>\n\
         \x20 <key>KeepAlive</key>\n\
         \x20 <dict>\n\
         \x20   <key>Crashed</key>\n\
         \x20   <true/>\n\
         \x20 </dict>\n\
         \x20 <key>StandardErrorPath</key>\n\
         \x20 {}\n\
         </dict>\n\
         </plist>\n",
        string(kept.name(places).as_ref()),
        string(log.as_os_str()),
    )
}

/// The steps that have the system keep these workers running.
///
/// # Errors
/// When nothing here keeps programs running for a user, with the commands that do it by hand; and when a definition of this name is not emberd's.
pub async fn install(places: &Places, kept: &[Kept], variable: Variables<'_>) -> Result<Plan> {
    let manager = MANAGER_HERE;
    if let Err(why) = manager.answers().await {
        let by_hand: Vec<String> = kept.iter().map(|kept| shell(&kept.words(places))).collect();
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
        let name = kept.name(places);
        let path = places.services.join(format!("{name}{}", manager.ending()));
        if fs::read_to_string(&path).is_ok_and(|text| !text.contains(WRITTEN)) {
            return Err(Error::new(Code::InvalidValue, format!("{} is there, and emberd has not written it", path.display()))
                .hint("give it another name, or remove it"));
        }
        plan.then(Step::File(path.clone(), 0o644, manager.definition(kept, places)));
        // A worker of omp's own would keep the place until it is idle.
        plan.then(Step::Shutdown(places.socket(&kept.key)));
        for step in manager.start(&name, &path) {
            plan.then(step);
        }
    }
    let tag = kept.first().map(|kept| kept.tag.as_str()).unwrap_or_default();
    plan.note(format!("the tag is {tag}: after an update of omp, or of its settings for the device, install again"));
    if ["PI_TINY_DEVICE", "PI_TINY_DTYPE"].iter().all(|name| variable(name).is_none()) {
        plan.note("omp's settings providers.tinyModelDevice and providers.tinyModelDtype are part of it, and were not looked at; --tag gives another");
    }
    Ok(plan)
}

/// The definitions that emberd has written here.
///
/// # Errors
/// When the folder cannot be read.
pub fn installed(places: &Places) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(&places.services) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::io(Code::ServerError, "look into", &places.services, &error)),
    };
    let ours = |path: &PathBuf| {
        let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
        let named = name.starts_with(PREFIX) && name.ends_with(MANAGER_HERE.ending());
        named && fs::read_to_string(path).is_ok_and(|text| text.contains(WRITTEN))
    };
    let mut found: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).filter(ours).collect();
    found.sort();
    Ok(found)
}

/// The tag that a definition gives to its worker.
#[must_use]
pub fn tag_of(definition: &Path) -> Option<String> {
    let text = fs::read_to_string(definition).ok()?;
    let tag = text.split("--tag=").nth(1)?.split(['"', '<']).next()?;
    Some(tag.replace("%%", "%").replace("$$", "$"))
}

/// The steps that end all kept workers and remove their definitions.
///
/// # Errors
/// As [`installed`] has them.
pub fn uninstall(places: &Places) -> Result<Plan> {
    let mut plan = Plan::default();
    for path in installed(places)? {
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        plan.then(MANAGER_HERE.stop(&name));
        plan.then(Step::Remove(path));
    }
    if !plan.is_empty() && MANAGER_HERE == Manager::Systemd {
        plan.then(Step::Try(words(["systemctl", "--user", "daemon-reload"])));
    }
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(variables: &[(&str, &str)]) -> Places {
        Places::find(&|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())).unwrap()
    }

    fn kept(key: &str, tag: &str) -> Kept {
        let emberd = Emberd::new(Some("/opt/em berd/bin/python".into())).unwrap();
        Kept::new(key, tag, &emberd, Some("smollm2-135m"), Some(Path::new("/models/100%"))).unwrap()
    }

    #[test]
    fn a_unit_starts_the_worker_that_omp_looks_for() {
        let places = places(&[("HOME", "/home/ada")]);
        let kept = kept("llama3.2:3b", "18.2.3|onnx||");
        let unit = unit(&kept, &places);
        let start = "ExecStart=\"/opt/em berd/bin/python\" \"-P\" \"-m\" \"emberd\" \"worker\" \
                     \"--socket\" \"/home/ada/.omp/run/tiny/llama3.2_3b-onnx.sock\" \"--model-key\" \"llama3.2:3b\" \"--tag=18.2.3|onnx||\" \
                     \"--idle-ms\" \"never\" \"--home\" \"/models/100%%\" \"--model\" \"smollm2-135m\"\n";
        assert!(unit.contains(start), "{unit}");
        assert!(unit.contains("ExecStartPre=\"/bin/mkdir\" \"-p\" \"-m\" \"0700\" \"/home/ada/.omp/run/tiny\"\n"), "{unit}");
        assert!(unit.starts_with(&format!("# {WRITTEN}\n")));
        assert_eq!(kept.name(&places), "emberd-omp-llama3.2_3b-onnx");
    }

    #[test]
    fn an_agent_says_the_same_to_launchd() {
        let places = places(&[("HOME", "/home/ada"), ("OMP_PROFILE", "work")]);
        let kept = kept("lfm2.5-230m", "a&b<c>");
        let agent = agent(&kept, &places);
        assert!(agent.contains("<key>Label</key>\n  <string>emberd-omp-work-lfm2.5-230m-onnx</string>"), "{agent}");
        assert!(agent.contains("    <string>--tag=a&amp;b&lt;c&gt;</string>\n"), "{agent}");
        let strings = agent.matches("<string>").count();
        assert_eq!(strings, kept.words(&places).len() + 2, "the name, the words and the log");
    }

    #[test]
    fn a_tag_is_what_this_version_of_omp_expects() {
        let with = |version: &str, device: &str, dtype: &str| {
            tag(version, &|name| match name {
                "PI_TINY_DEVICE" => Some(device.into()),
                "PI_TINY_DTYPE" => Some(dtype.into()),
                _ => None,
            })
        };
        assert_eq!(tag("18.3.4", &|_| None), "18.3.4|onnx||");
        assert_eq!(with("18.2.3", " GPU ", "bogus"), "18.2.3|onnx| GPU |bogus");
        assert_eq!(with("18.3.0", " GPU ", "bogus"), "18.3.0|onnx|gpu|");
        assert_eq!(with("19.0.0", "default", "q8"), "19.0.0|onnx||q8");
    }

    #[test]
    fn only_omps_models_are_kept_and_paths_hold_in_every_folder() {
        let emberd = Emberd::new(Some("/bin/sh".into())).unwrap();
        assert!(Kept::new("gpt-7", "t", &emberd, None, None).unwrap_err().message.contains("Unknown tiny local model: gpt-7"));
        let model = |name: &str| Kept::new("lfm2.5-230m", "t", &emberd, Some(name), None).map(|kept| kept.options[1].clone());
        assert_eq!(model("org/name"), Ok("org/name".into()));
        // Tests run in the folder of Cargo.toml.
        assert_eq!(model("./rust"), Ok(Path::new("rust").canonicalize().unwrap().into_os_string()));
        assert_eq!(model("rust"), Ok("rust".into()));
        assert!(model("./not there").unwrap_err().message.contains("./not there"));
        assert!(Emberd::new(Some("python".into())).is_err() && Emberd::new(None).is_err());
    }

    #[test]
    fn definitions_are_known_by_what_they_say_and_tell_their_tags() {
        let home = tempfile::tempdir().unwrap();
        let places = places(&[("HOME", home.path().to_str().unwrap())]);
        assert_eq!(installed(&places), Ok(Vec::new()));
        fs::create_dir_all(&places.services).unwrap();
        let mine = places.services.join(format!("emberd-omp-x{}", MANAGER_HERE.ending()));
        fs::write(&mine, MANAGER_HERE.definition(&kept("lfm2.5-230m", "18.2.3|onnx|100%|"), &places)).unwrap();
        fs::write(places.services.join(format!("emberd-omp-y{}", MANAGER_HERE.ending())), "of somebody else").unwrap();
        assert_eq!(installed(&places), Ok(vec![mine.clone()]));
        assert_eq!(tag_of(&mine).as_deref(), Some("18.2.3|onnx|100%|"));
        let plan = uninstall(&places).unwrap();
        assert!(plan.show().contains(&format!("remove {}\n", mine.display())));
    }
}
