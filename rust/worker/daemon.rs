//! A process whose launcher goes its own way: it leaves the launcher's session, says what it is, and says nothing more on its standard output.
//!
//! The working directory is the launcher's: anchored elsewhere, it would turn up in terminals that open new tabs where their newest process is.

/// Leaves the session of the launcher, and with it its terminal; names the process `omp tiny` and the key, which systems cut short.
#[cfg(unix)]
pub fn detach(model_key: &str) {
    if let Err(error) = rustix::process::setsid() {
        // The leader of a session, as omp starts it, or of a group, as a shell does, stays where it is.
        tracing::debug!(%error, "no session of its own was made");
    }
    name(&format!("omp tiny {model_key}"));
}

/// The first thread's name is the process's, and is told by ps and top. Must be called on it.
#[cfg(target_os = "linux")]
fn name(name: &str) {
    if let Ok(name) = std::ffi::CString::new(name)
        && let Err(error) = rustix::thread::set_name(&name)
    {
        tracing::debug!(%error, "the process keeps its name");
    }
}

#[cfg(all(unix, not(target_os = "linux")))]
fn name(_name: &str) {}

/// From here on, whatever a library prints to standard output goes to the log, and whoever reads standard output to its end has come to it.
#[cfg(unix)]
pub fn end_stdout() {
    if let Err(error) = rustix::stdio::dup2_stdout(rustix::stdio::stderr()) {
        tracing::debug!(%error, "standard output stays open");
    }
}

/// Elsewhere a program that is started without a window has none.
#[cfg(not(unix))]
pub fn detach(_model_key: &str) {}

/// Elsewhere standard output stays open.
#[cfg(not(unix))]
pub fn end_stdout() {}
