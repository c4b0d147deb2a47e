//! How a request's ids are chosen, as Python sees it. What each field does is said in `docs/port.md`.

use std::collections::BTreeMap;

use emberd::engine;
use pyo3::prelude::*;

/// How a request chooses its ids; `None` in its place is plain greedy decoding.
#[pyclass(frozen, eq, module = "emberd._core")]
#[derive(Clone, PartialEq)]
pub(crate) struct Sampling {
    sampling: engine::Sampling,
}

impl From<engine::Sampling> for Sampling {
    fn from(sampling: engine::Sampling) -> Self {
        Self { sampling }
    }
}

impl From<&Sampling> for engine::Sampling {
    fn from(it: &Sampling) -> Self {
        it.sampling.clone()
    }
}

#[pymethods]
impl Sampling {
    #[new]
    #[pyo3(signature = (temperature, top_p, top_k, seed, *, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logit_bias=None, top_logprobs=None))]
    #[allow(clippy::too_many_arguments)] // Named ones, in Python.
    fn new(
        temperature: f32,
        top_p: f32,
        top_k: u32,
        seed: u64,
        min_p: f32,
        repetition_penalty: f32,
        presence_penalty: f32,
        frequency_penalty: f32,
        logit_bias: Option<BTreeMap<u32, f32>>,
        top_logprobs: Option<u32>,
    ) -> Self {
        let logit_bias = logit_bias.unwrap_or_default().into_iter().collect();
        let sampling = engine::Sampling {
            temperature,
            top_p,
            top_k,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            logit_bias,
            top_logprobs,
            seed,
        };
        Self { sampling }
    }

    #[getter]
    fn temperature(&self) -> f32 {
        self.sampling.temperature
    }

    #[getter]
    fn top_p(&self) -> f32 {
        self.sampling.top_p
    }

    #[getter]
    fn top_k(&self) -> u32 {
        self.sampling.top_k
    }

    #[getter]
    fn seed(&self) -> u64 {
        self.sampling.seed
    }

    #[getter]
    fn min_p(&self) -> f32 {
        self.sampling.min_p
    }

    #[getter]
    fn repetition_penalty(&self) -> f32 {
        self.sampling.repetition_penalty
    }

    #[getter]
    fn presence_penalty(&self) -> f32 {
        self.sampling.presence_penalty
    }

    #[getter]
    fn frequency_penalty(&self) -> f32 {
        self.sampling.frequency_penalty
    }

    /// A new dict at every access.
    #[getter]
    fn logit_bias(&self) -> BTreeMap<u32, f32> {
        self.sampling.logit_bias.iter().copied().collect()
    }

    #[getter]
    fn top_logprobs(&self) -> Option<u32> {
        self.sampling.top_logprobs
    }

    fn __repr__(&self) -> String {
        let it = &self.sampling;
        let mut text = format!("Sampling(temperature={}, top_p={}, top_k={}, seed={}", it.temperature, it.top_p, it.top_k, it.seed);
        text.push_str(&format!(", min_p={}, repetition_penalty={}", it.min_p, it.repetition_penalty));
        text.push_str(&format!(", presence_penalty={}, frequency_penalty={}", it.presence_penalty, it.frequency_penalty));
        let top = it.top_logprobs.map_or_else(|| "None".to_owned(), |top| top.to_string());
        text.push_str(&format!(", logit_bias=<{} ids>, top_logprobs={top})", it.logit_bias.len()));
        text
    }
}
