//! The process as Python sees it: start it, load the engines it asks for, and end with its exit code.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Mutex;

use pyo3::prelude::*;

use crate::port::Launch;

/// A running `emberd`: its doors live on threads of Rust.
#[pyclass(frozen, module = "emberd._core")]
pub(crate) struct App {
    app: Mutex<emberd::app::App>,
}

/// Parses the arguments (without the program's name) and starts what they say. `python` is the interpreter that can run pip; `mlx` says whether MLX is
/// the best engine on this machine.
#[pyfunction]
#[pyo3(signature = (args, python=None, mlx=false))]
pub(crate) fn start(py: Python<'_>, args: Vec<OsString>, python: Option<PathBuf>, mlx: bool) -> App {
    App { app: Mutex::new(py.detach(|| emberd::app::App::start(args, python, mlx))) }
}

/// Where the graph of a model may be within its folder, the best place first, for weights in this form (`PI_TINY_DTYPE`; a name that is none is the default).
#[pyfunction]
pub(crate) fn graphs(dtype: &str) -> Vec<String> {
    emberd::models::table::Dtype::named(dtype).unwrap_or_default().graphs()
}

#[pymethods]
impl App {
    /// The next engine to load; sleeps, with the interpreter free, until there is one. `None` when the process ends.
    fn next_launch(&self, py: Python<'_>) -> PyResult<Option<Launch>> {
        let launch = py.detach(|| self.app.lock().unwrap_or_else(std::sync::PoisonError::into_inner).next_launch());
        launch.map(|launch| Launch::from(py, launch)).transpose()
    }

    /// Waits until everything in Rust has ended; returns the exit code.
    fn finish(&self, py: Python<'_>) -> u8 {
        py.detach(|| self.app.lock().unwrap_or_else(std::sync::PoisonError::into_inner).finish())
    }
}
