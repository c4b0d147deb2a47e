//! The port's crossing into Python: the only place that lets go of the interpreter, and the only place where ids become integers.
//!
//! Every call runs guarded, so that a panic fails the engine and raises instead of unwinding into the interpreter. The contract is `docs/port.md`.

use std::sync::{Mutex, PoisonError};

use emberd::engine::{self, Finish, Id, Logprob, Order, SnapshotId, Step};
use pyo3::create_exception;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyList, PyTuple};

use crate::constraint::Constraint;
use crate::sampling::Sampling;

create_exception!(emberd._core, PortError, PyRuntimeError, "A call on the port that the contract does not allow.");

#[allow(clippy::needless_pass_by_value)] // The shape that map_err asks for.
fn refused(error: engine::PortError) -> PyErr {
    PortError::new_err(error.to_string())
}

/// A new request.
#[pyclass(frozen, module = "emberd._core")]
pub(crate) struct Admit {
    #[pyo3(get)]
    id: Id,
    prompt: Vec<u32>,
    #[pyo3(get)]
    max_tokens: u32,
    sampling: Option<Sampling>,
    constraint: Option<Constraint>,
    #[pyo3(get)]
    speculation: Option<u32>,
    reuse: engine::Reuse,
}

impl From<engine::Admit> for Admit {
    fn from(admit: engine::Admit) -> Self {
        let engine::Admit { id, prompt, max_tokens, sampling, constraint, speculation, reuse } = admit;
        let (sampling, constraint) = (sampling.map(Sampling::from), constraint.map(Constraint::from));
        Self { id, prompt, max_tokens, sampling, constraint, speculation, reuse }
    }
}

#[pymethods]
impl Admit {
    #[new]
    #[pyo3(signature = (id, prompt, max_tokens, sampling=None, *, constraint=None, speculation=None, salt="", start_from=None, save_as=None))]
    #[allow(clippy::too_many_arguments)] // Named ones, in Python.
    fn new(
        id: Id,
        prompt: Vec<u32>,
        max_tokens: u32,
        sampling: Option<&Bound<'_, Sampling>>,
        constraint: Option<&Bound<'_, Constraint>>,
        speculation: Option<u32>,
        salt: &str,
        start_from: Option<SnapshotId>,
        save_as: Option<SnapshotId>,
    ) -> Self {
        let reuse = engine::Reuse { salt: salt.into(), start_from, save_as };
        let sampling = sampling.map(|sampling| sampling.get().clone());
        let constraint = constraint.map(|constraint| constraint.get().clone());
        Self { id, prompt, max_tokens, sampling, constraint, speculation, reuse }
    }

    #[getter]
    fn salt(&self) -> &str {
        &self.reuse.salt
    }

    #[getter]
    fn start_from(&self) -> Option<SnapshotId> {
        self.reuse.start_from
    }

    #[getter]
    fn save_as(&self) -> Option<SnapshotId> {
        self.reuse.save_as
    }

    /// A new list at every access.
    #[getter]
    fn prompt(&self) -> Vec<u32> {
        self.prompt.clone()
    }

    #[getter]
    fn sampling(&self) -> Option<Sampling> {
        self.sampling.clone()
    }

    /// The same one at every access.
    #[getter]
    fn constraint(&self) -> Option<Constraint> {
        self.constraint.clone()
    }

    fn __repr__(&self) -> String {
        format!("Admit(id={}, prompt=<{} ids>, max_tokens={})", self.id, self.prompt.len(), self.max_tokens)
    }
}

/// Nobody reads this request any more.
#[pyclass(frozen, module = "emberd._core")]
pub(crate) struct Cancel {
    #[pyo3(get)]
    id: Id,
}

#[pymethods]
impl Cancel {
    #[new]
    fn new(id: Id) -> Self {
        Self { id }
    }

    fn __repr__(&self) -> String {
        format!("Cancel(id={})", self.id)
    }
}

/// Nobody will start from this snapshot any more.
#[pyclass(frozen, module = "emberd._core")]
pub(crate) struct Forget {
    #[pyo3(get)]
    snapshot: SnapshotId,
}

#[pymethods]
impl Forget {
    #[new]
    fn new(snapshot: SnapshotId) -> Self {
        Self { snapshot }
    }

    fn __repr__(&self) -> String {
        format!("Forget(snapshot={})", self.snapshot)
    }
}

/// What a loaded model can do.
#[pyclass(frozen, module = "emberd._core")]
pub(crate) struct Capabilities {
    capabilities: engine::Capabilities,
}

#[pymethods]
impl Capabilities {
    #[new]
    #[pyo3(signature = (context_length, max_batch, vocab_size, eos_ids, *, constraints=false))]
    fn new(context_length: u32, max_batch: u32, vocab_size: u32, eos_ids: Vec<u32>, constraints: bool) -> Self {
        Self { capabilities: engine::Capabilities { context_length, max_batch, vocab_size, eos_ids, constraints } }
    }

    #[getter]
    fn context_length(&self) -> u32 {
        self.capabilities.context_length
    }

    #[getter]
    fn max_batch(&self) -> u32 {
        self.capabilities.max_batch
    }

    #[getter]
    fn vocab_size(&self) -> u32 {
        self.capabilities.vocab_size
    }

    #[getter]
    fn eos_ids(&self) -> Vec<u32> {
        self.capabilities.eos_ids.clone()
    }

    #[getter]
    fn constraints(&self) -> bool {
        self.capabilities.constraints
    }

    fn __repr__(&self) -> String {
        let it = &self.capabilities;
        format!(
            "Capabilities(context_length={}, max_batch={}, vocab_size={}, eos_ids={:?}, constraints={})",
            it.context_length,
            it.max_batch,
            it.vocab_size,
            it.eos_ids,
            if it.constraints { "True" } else { "False" }
        )
    }
}

/// A choice by its name; `ValueError` for one that there is not.
pub(crate) fn named<E: engine::Choice>(what: &str, name: &str) -> PyResult<E> {
    engine::named(what, name).map_err(PyValueError::new_err)
}

/// What the user asked of the engine; `None` leaves the choice to it.
#[pyclass(frozen, module = "emberd._core")]
#[derive(Clone, Default)]
pub(crate) struct Settings {
    settings: engine::Settings,
}

#[pymethods]
impl Settings {
    #[new]
    #[pyo3(signature = (*, threads=None, max_batch=None, context_length=None, prefill_chunk=None, cache_bytes=None, kv_bytes=None, spin=None, activations=None, kernels=None))]
    #[allow(clippy::too_many_arguments)] // Named ones, in Python.
    fn new(
        threads: Option<u32>,
        max_batch: Option<u32>,
        context_length: Option<u32>,
        prefill_chunk: Option<u32>,
        cache_bytes: Option<u64>,
        kv_bytes: Option<u64>,
        spin: Option<bool>,
        activations: Option<&str>,
        kernels: Option<&str>,
    ) -> PyResult<Self> {
        let activations = activations.map(|name| named("activations", name)).transpose()?;
        let kernels = kernels.map(|name| named("kernels", name)).transpose()?;
        Ok(Self {
            settings: engine::Settings {
                threads,
                max_batch,
                context_length,
                prefill_chunk,
                cache_bytes,
                kv_bytes,
                spin,
                activations,
                kernels,
                ..engine::Settings::default()
            },
        })
    }

    #[getter]
    fn threads(&self) -> Option<u32> {
        self.settings.threads
    }

    #[getter]
    fn max_batch(&self) -> Option<u32> {
        self.settings.max_batch
    }

    #[getter]
    fn context_length(&self) -> Option<u32> {
        self.settings.context_length
    }

    #[getter]
    fn prefill_chunk(&self) -> Option<u32> {
        self.settings.prefill_chunk
    }

    #[getter]
    fn cache_bytes(&self) -> Option<u64> {
        self.settings.cache_bytes
    }

    #[getter]
    fn kv_bytes(&self) -> Option<u64> {
        self.settings.kv_bytes
    }

    #[getter]
    fn spin(&self) -> Option<bool> {
        self.settings.spin
    }

    #[getter]
    fn activations(&self) -> Option<&'static str> {
        self.settings.activations.map(engine::Activations::name)
    }

    #[getter]
    fn kernels(&self) -> Option<&'static str> {
        self.settings.kernels.map(engine::Kernels::name)
    }
}

/// An engine to load, and the port it answers on.
#[pyclass(frozen, module = "emberd._core")]
pub(crate) struct Launch {
    #[pyo3(get)]
    engine: String,
    folder: std::path::PathBuf,
    settings: Settings,
    port: Py<Port>,
}

impl Launch {
    /// Wraps a launch of the core.
    pub(crate) fn from(py: Python<'_>, launch: engine::Launch) -> PyResult<Self> {
        let port = Py::new(py, Port::from(launch.port))?;
        Ok(Self { engine: launch.engine, folder: launch.folder, settings: Settings { settings: launch.settings }, port })
    }
}

#[pymethods]
impl Launch {
    #[getter]
    fn folder(&self) -> String {
        self.folder.to_string_lossy().into_owned()
    }

    #[getter]
    fn settings(&self) -> Settings {
        self.settings.clone()
    }

    #[getter]
    fn port(&self, py: Python<'_>) -> Py<Port> {
        self.port.clone_ref(py)
    }
}

/// An engine's side of the port.
///
/// Closing it (`close`, or its last reference going) before the other side closed it fails the engine: a thread that dies silently must not leave
/// requests without an end.
#[pyclass(frozen, module = "emberd._core")]
pub(crate) struct Port {
    port: Mutex<Option<std::sync::Arc<engine::Port>>>,
}

impl Port {
    pub(crate) fn from(port: engine::Port) -> Self {
        Self { port: Mutex::new(Some(std::sync::Arc::new(port))) }
    }

    fn call<T: Send>(&self, call: impl FnOnce(&engine::Port) -> Result<T, engine::PortError>) -> PyResult<T> {
        let port = self.port.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match port {
            Some(port) => port.guarded(call).map_err(refused),
            None => Err(PortError::new_err("the port was closed by its own side")),
        }
    }
}

#[pymethods]
impl Port {
    /// Says, once, that the model is loaded and what it can do.
    fn ready(&self, capabilities: &Bound<'_, Capabilities>) -> PyResult<()> {
        self.call(|port| port.ready(capabilities.get().capabilities.clone()))
    }

    /// The orders since the last call; sleeps, with the interpreter free, until there is one. `None` once the port is closed.
    fn wait<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyList>>> {
        let orders = py.detach(|| self.call(engine::Port::wait))?;
        orders.map(|orders| list(py, orders)).transpose()
    }

    /// The orders since the last call, perhaps none. `None` once the port is closed.
    fn poll<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyList>>> {
        let orders = self.call(engine::Port::poll)?;
        orders.map(|orders| list(py, orders)).transpose()
    }

    /// Hands over what one step made, a list of `(id, token_ids, finish)` and `(id, cached)`; returns the ids whose reader has left.
    fn push(&self, steps: &Bound<'_, PyList>) -> PyResult<Vec<Id>> {
        let mut good = Vec::with_capacity(steps.len());
        let mut bad = Vec::new();
        let mut cached: Vec<(Id, u32)> = Vec::new();
        for entry in steps.iter() {
            if let Ok(entry) = entry.cast::<PyTuple>()
                && entry.len() == 2
            {
                match told(entry)? {
                    Ok(told) => cached.push(told),
                    Err(refusal) => bad.push(refusal),
                }
                continue;
            }
            match step(&entry)? {
                Ok(step) => good.push(step),
                Err(refusal) => bad.push(refusal),
            }
        }
        self.call(|port| {
            for (id, tokens) in cached {
                port.cached(id, tokens)?;
            }
            let mut gone = port.push(good)?;
            for (id, why) in bad {
                port.fail_request(id, &why)?;
                gone.push(id);
            }
            Ok(gone)
        })
    }

    /// Ends one request (`id`) or the whole engine (`None`) with an error.
    #[pyo3(signature = (id, message))]
    fn fail(&self, id: Option<Id>, message: &str) -> PyResult<()> {
        self.call(|port| match id {
            Some(id) => port.fail_request(id, message),
            None => {
                port.fail(message);
                Ok(())
            }
        })
    }

    /// Lets go of the port. Without a `fail` before, and while the other side has it open, this fails the engine.
    fn close(&self) {
        self.port.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

fn list(py: Python<'_>, orders: Vec<Order>) -> PyResult<Bound<'_, PyList>> {
    let list = PyList::empty(py);
    for order in orders {
        match order {
            Order::Admit(admit) => list.append(Bound::new(py, Admit::from(admit))?)?,
            Order::Cancel(id) => list.append(Bound::new(py, Cancel { id })?)?,
            Order::Forget(snapshot) => list.append(Bound::new(py, Forget { snapshot })?)?,
        }
    }
    Ok(list)
}

/// An entry `(id, cached)`. A second item that is no integer raises; an impossible one fails its own request.
fn told(entry: &Bound<'_, PyTuple>) -> PyResult<Result<(Id, u32), (Id, String)>> {
    let id: Id = entry.get_borrowed_item(0)?.extract()?;
    let cached = entry.get_borrowed_item(1)?;
    let cached = cached.cast::<PyInt>().map_err(|_| PyValueError::new_err("a step of two items is (id, cached)"))?;
    let impossible = |_| (id, format!("the engine says that {} tokens of a prompt were cached", cached.as_any()));
    Ok(cached.extract().map(|cached| (id, cached)).map_err(impossible))
}

/// A log probability as Python writes it: the id's own, and the likeliest ids with theirs.
type LogprobEntry = (f32, Vec<(u32, f32)>);

/// One entry of a push. What is not an entry at all raises; an entry with impossible content fails its own request.
fn step(entry: &Bound<'_, PyAny>) -> PyResult<Result<Step, (Id, String)>> {
    const FORM: &str = "a step is a tuple (id, token_ids, finish) or (id, token_ids, finish, logprobs)";
    let entry = entry.cast::<PyTuple>().map_err(|_| PyValueError::new_err(FORM))?;
    if !matches!(entry.len(), 3 | 4) {
        return Err(PyValueError::new_err(format!("{FORM}, not one of {} items", entry.len())));
    }
    let id: Id = entry.get_borrowed_item(0)?.extract()?;
    let tokens: Vec<u32> = match entry.get_borrowed_item(1)?.extract() {
        Ok(tokens) => tokens,
        Err(error) => return Ok(Err((id, format!("the engine made something that is no list of token ids: {error}")))),
    };
    let finish = entry.get_borrowed_item(2)?;
    let finish = match finish.extract::<&str>().ok().and_then(Finish::named) {
        None if !finish.is_none() => {
            return Ok(Err((id, format!("the engine ended a request with {}, which is no finish", finish.to_owned()))));
        }
        named => named,
    };
    let logprobs: Option<Vec<LogprobEntry>> = match entry.get_item(3).ok().map(|given| given.extract()).transpose() {
        Ok(given) => given.flatten(),
        Err(error) => return Ok(Err((id, format!("the engine gave something that is no list of log probabilities: {error}")))),
    };
    let logprobs = logprobs.unwrap_or_default().into_iter().map(|(logprob, top)| Logprob { logprob, top }).collect();
    Ok(Ok(Step { id, tokens, finish, logprobs }))
}
