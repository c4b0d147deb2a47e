//! What an answer may say, as Python sees it: masks as bytes, ids as integers. What each call means is said in `docs/port.md`.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use emberd::engine;
use emberd::grammar::{Grammar, compile};
use emberd::prompt::Tokenizer;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// The most ids that are told as certain at once: what is certain may be as long as a text.
const CERTAIN: usize = 512;

/// What one answer may say, and how far it has come.
#[pyclass(frozen, module = "emberd._core")]
#[derive(Clone)]
pub(crate) struct Constraint {
    constraint: Arc<Mutex<engine::Constraint>>,
}

impl From<engine::Constraint> for Constraint {
    fn from(constraint: engine::Constraint) -> Self {
        Self { constraint: Arc::new(Mutex::new(constraint)) }
    }
}

impl Constraint {
    fn lock(&self) -> MutexGuard<'_, engine::Constraint> {
        self.constraint.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As it is now, for a request of its own.
    pub(crate) fn copied(&self) -> engine::Constraint {
        self.lock().clone()
    }
}

#[allow(clippy::needless_pass_by_value)] // The shape that map_err asks for.
fn stuck(error: engine::ConstraintError) -> PyErr {
    PyValueError::new_err(match error {
        engine::ConstraintError::Stuck(_) => format!("{error}; hint: {}", engine::constraint::SIMPLIFY),
        engine::ConstraintError::Refused(_) => error.to_string(),
    })
}

#[pymethods]
impl Constraint {
    /// Which ids may come next, one bit for each: id `i` is bit `i % 8` of byte `i // 8`. Works with the interpreter free.
    fn mask<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let words = py.detach(|| {
            let mut constraint = self.lock();
            let mut words = vec![0; constraint.words()];
            constraint.mask(&mut words).map(|()| words)
        });
        let words = words.map_err(stuck)?;
        PyBytes::new_with(py, words.len() * 4, |bytes| {
            for (bytes, word) in bytes.chunks_exact_mut(4).zip(words) {
                bytes.copy_from_slice(&word.to_le_bytes());
            }
            Ok(())
        })
    }

    /// The ids that are certain to come next, in order, up to 512 of them. Works with the interpreter free.
    fn forced(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        py.detach(|| self.lock().certain().map(|ids| ids.iter().take(CERTAIN).copied().collect())).map_err(stuck)
    }

    /// Goes on to the next place of the answer.
    fn accept(&self, token: u32) -> PyResult<()> {
        self.lock().accept(token).map_err(stuck)
    }

    /// Whether the answer may end here.
    fn accepting(&self) -> PyResult<bool> {
        self.lock().accepting().map_err(stuck)
    }

    /// Whether nothing but the end may come.
    #[getter]
    fn complete(&self) -> bool {
        self.lock().complete()
    }

    fn __repr__(&self) -> String {
        format!("Constraint(complete={})", self.complete())
    }
}

/// A constraint for tests and benchmarks of engines without a door: what a door makes of a grammar. `folder` holds `tokenizer.json`; `syntax` is `json_schema`,
/// `json_object`, `regex` or `lark`.
#[pyfunction]
pub(crate) fn constraint(
    py: Python<'_>,
    folder: PathBuf,
    vocab_size: u32,
    eos_ids: Vec<u32>,
    syntax: &str,
    definition: &str,
) -> PyResult<Constraint> {
    let tokenizer = Tokenizer::load(&folder).map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
    let constraint =
        py.detach(|| Grammar::named(syntax, definition).and_then(|grammar| compile(Arc::new(tokenizer), vocab_size, &eos_ids, &grammar)));
    constraint.map(Constraint::from).map_err(|error| PyRuntimeError::new_err(error.to_string()))
}
