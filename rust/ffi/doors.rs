//! The doors' side of a port, for tests of engines and loops without a door.

use std::sync::{Mutex, PoisonError};

use emberd::engine::{self, Id, SnapshotId};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::constraint::Constraint;
use crate::port::Port;
use crate::sampling::Sampling;

/// A port with both its sides, for tests of engines and loops without a door: `(doors, port)`.
#[pyfunction]
#[pyo3(signature = (queue=256))]
pub(crate) fn port(py: Python<'_>, queue: usize) -> PyResult<(Doors, Py<Port>)> {
    let (engine, port) = engine::port::port(queue);
    Ok((Doors { engine }, Py::new(py, Port::from(port))?))
}

/// The doors' side of a port, for tests of engines and loops without a door: submit prompts, read ids, leave.
#[pyclass(frozen, module = "emberd._core")]
pub(crate) struct Doors {
    engine: engine::Engine,
}

/// The reader's end of one request.
#[pyclass(frozen, module = "emberd._core")]
pub(crate) struct Reader {
    id: Id,
    generation: Mutex<Option<engine::Generation>>,
}

#[pymethods]
impl Doors {
    /// Queues a request. Its constraint is a copy of the one given, as that is now.
    #[pyo3(signature = (prompt, max_tokens, sampling=None, *, constraint=None, speculation=None, salt="", start_from=None, save_as=None))]
    #[allow(clippy::too_many_arguments)] // Named ones, in Python.
    fn submit(
        &self,
        prompt: Vec<u32>,
        max_tokens: u32,
        sampling: Option<&Bound<'_, Sampling>>,
        constraint: Option<&Bound<'_, Constraint>>,
        speculation: Option<u32>,
        salt: &str,
        start_from: Option<SnapshotId>,
        save_as: Option<SnapshotId>,
    ) -> PyResult<Reader> {
        let sampling = sampling.map(|sampling| sampling.get().into());
        let constraint = constraint.map(|constraint| constraint.get().copied());
        let reuse = engine::Reuse { salt: salt.into(), start_from, save_as };
        let generation = self
            .engine
            .submit(engine::Request { prompt, max_tokens, sampling, constraint, speculation, reuse })
            .map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        Ok(Reader { id: generation.id(), generation: Mutex::new(Some(generation)) })
    }

    /// Gives up a snapshot.
    fn forget(&self, snapshot: SnapshotId) {
        self.engine.forget(snapshot);
    }

    /// Requests that wait, and requests in the engine.
    fn load(&self) -> (usize, usize) {
        let load = self.engine.load();
        (load.waiting, load.running)
    }

    /// Closes the port.
    fn close(&self) {
        self.engine.close();
    }
}

#[pymethods]
impl Reader {
    #[getter]
    fn id(&self) -> Id {
        self.id
    }

    /// What has come since the last call: ids, and the finish if it is over. Sleeps, with the interpreter free, until there is something. Raises
    /// `RuntimeError` with the reason when the request failed; returns `None` after the end.
    fn read(&self, py: Python<'_>) -> PyResult<Option<(Vec<u32>, Option<&'static str>)>> {
        let mut held = self.generation.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(generation) = held.as_mut() else { return Ok(None) };
        let chunk = py.detach(|| generation.next_blocking());
        match chunk {
            None => Ok(None),
            Some(engine::Chunk { tokens, end: None }) => Ok(Some((tokens, None))),
            Some(engine::Chunk { tokens, end: Some(Ok(finish)) }) => Ok(Some((tokens, Some(finish.name())))),
            Some(engine::Chunk { end: Some(Err(error)), .. }) => Err(PyRuntimeError::new_err(error.to_string())),
        }
    }

    /// The log probabilities of the ids that `read` has given since the last call: one `(logprob, [(id, logprob), ...])` for each, or none at all.
    fn logprobs(&self) -> Vec<(f32, Vec<(u32, f32)>)> {
        let mut held = self.generation.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = held.as_mut().map(engine::Generation::take_logprobs).unwrap_or_default();
        taken.into_iter().map(|each| (each.logprob, each.top)).collect()
    }

    /// Leaves: the request is cancelled.
    fn leave(&self) {
        self.generation.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}
