//! What keeps a user's programs running, systemd or launchd: how a program is described to it, and how a description is read again.
//!
//! Nothing here knows omp; which programs are kept, and why, is [`keep`](super::keep)'s part.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::plan::Step;
use super::status;

/// What every definition says of itself, by which it is known again.
pub const WRITTEN: &str = "Written by `emberd omp install`; `emberd omp uninstall` removes it.";
/// How long the service manager may take to say that it is there.
const MANAGER: Duration = Duration::from_secs(10);

/// A program that is to run whenever the user is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// What the manager calls it.
    pub name: String,
    /// What a person is told of it, in one line.
    pub about: String,
    /// A folder that must be there, with mode 0700.
    pub folder: PathBuf,
    /// Where its standard error goes, where the manager has no journal.
    pub log: PathBuf,
    /// The program and its arguments.
    pub words: Vec<OsString>,
    /// Names and values of what is set in its environment, besides what the manager sets.
    pub environment: Vec<(String, String)>,
}

/// What keeps the user's programs running.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manager {
    /// The systemd instance of the user; definitions are units.
    Systemd,
    /// The launchd domain of the user's graphical session; definitions are agents.
    Launchd,
}

/// The one that this system has.
pub const MANAGER_HERE: Manager = if cfg!(target_os = "macos") { Manager::Launchd } else { Manager::Systemd };

impl Manager {
    /// What the names of its definitions end with.
    #[must_use]
    pub fn ending(self) -> &'static str {
        match self {
            Self::Systemd => ".service",
            Self::Launchd => ".plist",
        }
    }

    /// Whether it is there.
    ///
    /// # Errors
    /// What is wrong, when it does not answer.
    pub async fn answers(self) -> Result<(), &'static str> {
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

    /// The text of a definition.
    #[must_use]
    pub fn definition(self, service: &Service) -> String {
        match self {
            Self::Systemd => unit(service),
            Self::Launchd => agent(service),
        }
    }

    /// The program and the arguments that a definition of this manager has; empty where it has none.
    #[must_use]
    pub fn words(self, definition: &str) -> Vec<String> {
        match self {
            Self::Systemd => definition.lines().find_map(|line| line.strip_prefix("ExecStart=")).map(unquoted).unwrap_or_default(),
            Self::Launchd => {
                let array = definition.split("<key>ProgramArguments</key>").nth(1).and_then(|rest| rest.split("</array>").next());
                let strings = array.unwrap_or_default().split("<string>").skip(1).filter_map(|rest| rest.split("</string>").next());
                strings.map(|text| text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")).collect()
            }
        }
    }

    /// What brings a new definition into force, and its program up.
    #[must_use]
    pub fn start(self, name: &str, path: &Path) -> Vec<Step> {
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

    /// What ends a program and takes its definition out of force, but for the file itself.
    #[must_use]
    pub fn stop(self, name: &str) -> Step {
        match self {
            Self::Systemd => Step::Try(words(["systemctl", "--user", "disable", "--now", &format!("{name}.service")])),
            Self::Launchd => Step::Try(words(["launchctl", "bootout", &format!("{}/{name}", domain())])),
        }
    }

    /// What makes the manager forget definitions whose files are gone.
    #[must_use]
    pub fn forget(self) -> Option<Step> {
        (self == Self::Systemd).then(|| Step::Try(words(["systemctl", "--user", "daemon-reload"])))
    }

    /// Where a person reads why a program does not come up.
    #[must_use]
    pub fn told(self, service: &Service) -> String {
        match self {
            Self::Systemd => format!("see journalctl --user --unit {}.service for the reason", service.name),
            Self::Launchd => format!("see {} for the reason", service.log.display()),
        }
    }
}

fn domain() -> String {
    format!("gui/{}", rustix::process::getuid().as_raw())
}

fn words<'a>(words: impl IntoIterator<Item = &'a str>) -> Vec<OsString> {
    words.into_iter().map(OsString::from).collect()
}

/// A word between quotes, as systemd reads it everywhere (systemd.syntax(7), and the specifiers of systemd.unit(5)).
fn quoted(word: &str) -> String {
    let word = word.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n").replace('%', "%%");
    format!("\"{word}\"")
}

/// The words of a command line that [`argument`] has quoted.
fn unquoted(line: &str) -> Vec<String> {
    let (mut found, mut open) = (Vec::new(), None::<String>);
    let mut letters = line.chars().peekable();
    while let Some(letter) = letters.next() {
        match (&mut open, letter) {
            (None, '"') => open = Some(String::new()),
            (None, _) => {}
            (Some(_), '"') => found.extend(open.take()),
            (Some(word), '\\') => word.extend(letters.next().map(|letter| if letter == 'n' { '\n' } else { letter })),
            (Some(word), '%' | '$') => {
                let _ = letters.next_if_eq(&letter);
                word.push(letter);
            }
            (Some(word), letter) => word.push(letter),
        }
    }
    found
}

/// A word of a command line, where variables are put in for what follows a dollar sign. In `Environment=` it means nothing.
fn argument(word: &OsString) -> String {
    quoted(&word.to_string_lossy()).replace('$', "$$")
}

/// A unit of systemd. To be asked to end is exit code 0, and is left at that. Every refusal is exit code 1, as omp's workers have it: that a worker
/// listens already, which lasts, cannot be told from a disk that is full for a moment. So each is tried again, ten times within a minute, and then it
/// stays down; a start that finds a worker in its place leaves that one alone.
fn unit(service: &Service) -> String {
    let line = |words: &[OsString]| words.iter().map(argument).collect::<Vec<_>>().join(" ");
    let folder = ["/bin/mkdir", "-p", "-m", "0700"].map(OsString::from);
    let folder = [&folder[..], &[service.folder.clone().into()]].concat();
    let set = |(name, value): &(String, String)| format!("Environment={}\n", quoted(&format!("{name}={value}")));
    format!(
        "# {WRITTEN}\n\
         [Unit]\n\
         Description={}\n\
         StartLimitIntervalSec=60\n\
         StartLimitBurst=10\n\
         \n\
         [Service]\n\
         {}\
         ExecStartPre={}\n\
         ExecStart={}\n\
         Restart=on-failure\n\
         RestartSec=1\n\
         SuccessExitStatus=129 130 143\n\
         \n\
         [Install]\n\
         WantedBy=default.target\n",
        service.about,
        service.environment.iter().map(set).collect::<String>(),
        line(&folder),
        line(&service.words),
    )
}

/// An agent of launchd, started again after a crash only: launchd has no number of tries after which it lets be, and would start one every ten
/// seconds for as long as another worker listens.
fn agent(service: &Service) -> String {
    let text = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let string = |word: &OsStr| format!("<string>{}</string>", text(&word.to_string_lossy()));
    let arguments: String = service.words.iter().map(|word| format!("    {}\n", string(word))).collect();
    let set = |(name, value): &(String, String)| format!("    <key>{}</key>\n    {}\n", text(name), string(value.as_ref()));
    let environment = match service.environment.iter().map(set).collect::<String>() {
        none if none.is_empty() => none,
        all => format!("  <key>EnvironmentVariables</key>\n  <dict>\n{all}  </dict>\n"),
    };
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
         {environment}\
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
        string(service.name.as_ref()),
        string(service.log.as_os_str()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(words: &[&str], environment: &[(&str, &str)]) -> Service {
        Service {
            name: "emberd-omp-x-onnx".into(),
            about: "emberd for omp: x".into(),
            folder: "/home/ada/.omp/run/tiny".into(),
            log: "/home/ada/.omp/run/tiny/x.log".into(),
            words: words.iter().map(OsString::from).collect(),
            environment: environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
        }
    }

    #[test]
    fn a_unit_says_what_runs_and_in_which_environment() {
        let unit = unit(&service(&["/opt/em berd", "100%", "$HOME"], &[("HF_HOME", "/a b/100%"), ("PI_TINY_DTYPE", "\"q8\" $x \\")]));
        assert!(unit.starts_with(&format!("# {WRITTEN}\n")), "{unit}");
        assert!(unit.contains("ExecStartPre=\"/bin/mkdir\" \"-p\" \"-m\" \"0700\" \"/home/ada/.omp/run/tiny\"\n"), "{unit}");
        assert!(unit.contains("ExecStart=\"/opt/em berd\" \"100%%\" \"$$HOME\"\n"), "{unit}");
        assert!(unit.contains("Environment=\"HF_HOME=/a b/100%%\"\n"), "{unit}");
        assert!(unit.contains(r#"Environment="PI_TINY_DTYPE=\"q8\" $x \\""#), "{unit}");
        assert!(!unit.contains("RestartPreventExitStatus"), "trouble that passes is tried again");
    }

    #[test]
    fn an_agent_says_the_same_to_launchd() {
        let agent = agent(&service(&["/bin/x", "--tag=a&b<c>"], &[("HF_HOME", "/a&b")]));
        assert!(agent.contains("<key>Label</key>\n  <string>emberd-omp-x-onnx</string>"), "{agent}");
        assert!(agent.contains("    <string>--tag=a&amp;b&lt;c&gt;</string>\n"), "{agent}");
        let environment = "  <key>EnvironmentVariables</key>\n  <dict>\n    <key>HF_HOME</key>\n    <string>/a&amp;b</string>\n  </dict>\n";
        assert!(agent.contains(environment), "{agent}");
        assert!(!super::agent(&service(&["/bin/x"], &[])).contains("EnvironmentVariables"));
    }

    #[test]
    fn words_come_out_of_a_definition_as_they_went_in() {
        let hard = ["/bin/x", "--tag=100% \"mine\" $HOME \\ \\n", "a&amp;b&lt;<c>", "", "two\nlines", "$$ %%"];
        for manager in [Manager::Systemd, Manager::Launchd] {
            assert_eq!(manager.words(&manager.definition(&service(&hard, &[("A", "b")]))), hard, "{manager:?}");
            assert_eq!(manager.words("of somebody else"), [] as [&str; 0]);
        }
    }
}
