//! How an answer is sampled: what a request asks for, over what the model's makers recommend.
//!
//! What the fields do is said in `docs/port.md`; nothing is drawn here.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;

use crate::engine::Sampling;
use crate::error::{Code, Error, Result};

/// The least repetition penalty: logits are divided by it, and must stay numbers.
pub const LEAST_PENALTY: f32 = 0.01;

/// Sampling that the model's makers recommend (`generation_config.json`), as far as it is given.
#[derive(Debug, Clone, Copy, PartialEq, Default, Deserialize)]
#[serde(default)]
pub struct Defaults {
    /// Whether to sample at all when a request says nothing.
    pub do_sample: Option<bool>,
    /// Temperature.
    pub temperature: Option<f32>,
    /// Nucleus.
    pub top_p: Option<f32>,
    /// Most likely ids.
    pub top_k: Option<u32>,
    /// Least share of the likeliest id's probability.
    pub min_p: Option<f32>,
    /// Penalty on ids that have come: in force whether the answer is sampled or greedy, as transformers and transformers.js have it.
    pub repetition_penalty: Option<f32>,
}

/// What a request says of its sampling; `None` leaves it to the model.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Controls {
    /// 0 is greedy.
    pub temperature: Option<f32>,
    /// In [0, 1].
    pub top_p: Option<f32>,
    /// 0 is no limit.
    pub top_k: Option<u32>,
    /// In [0, 1].
    pub min_p: Option<f32>,
    /// In (0, 2]; 1 is none.
    pub repetition_penalty: Option<f32>,
    /// In [-2, 2].
    pub presence_penalty: Option<f32>,
    /// In [-2, 2].
    pub frequency_penalty: Option<f32>,
    /// Each id once, with what is added to its logit: in [-100, 100].
    pub logit_bias: Arc<[(u32, f32)]>,
    /// How many of the most likely ids are told with each; `None` asks for no log probabilities.
    pub top_logprobs: Option<u32>,
    /// The same seed gives the same answer.
    pub seed: Option<u64>,
}

impl Defaults {
    /// Reads `generation_config.json`; a folder without one has no defaults.
    ///
    /// # Errors
    /// A file that is there and cannot be read, or that has a penalty that cannot be.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("generation_config.json");
        let defaults: Self = match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map_err(|error| Error::new(Code::ModelLoadFailed, format!("could not read {}: {error}", path.display())))?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Self::default(),
            Err(error) => return Err(Error::io(Code::ModelLoadFailed, "read", &path, &error)),
        };
        match defaults.repetition_penalty {
            Some(penalty) if !(penalty >= LEAST_PENALTY && penalty.is_finite()) => {
                let what = format!("{} has the repetition_penalty {penalty}, which must be at least {LEAST_PENALTY}", path.display());
                Err(Error::new(Code::ModelLoadFailed, what).hint("correct the file, or take the line out"))
            }
            _ => Ok(defaults),
        }
    }

    /// The sampling for a request that asks for this. What it leaves open is the model's own if the model samples by default, else greedy
    /// (temperature 0); a repetition penalty of the model's own holds in both cases. `seed` is for a request that gives none.
    #[must_use]
    pub fn sampling(&self, asked: &Controls, seed: u64) -> Sampling {
        let own = if self.do_sample == Some(true) { *self } else { Self::default() };
        let temperature = if own.do_sample.is_some() { self.temperature.unwrap_or(1.0) } else { 0.0 };
        Sampling {
            temperature: asked.temperature.unwrap_or(temperature).max(0.0),
            // A mass of 0 means the likeliest id alone, which an engine knows as the smallest mass.
            top_p: asked.top_p.or(own.top_p).unwrap_or(1.0).clamp(f32::MIN_POSITIVE, 1.0),
            top_k: asked.top_k.or(own.top_k).unwrap_or(0),
            min_p: asked.min_p.or(own.min_p).unwrap_or(0.0).clamp(0.0, 1.0),
            repetition_penalty: asked.repetition_penalty.or(self.repetition_penalty).unwrap_or(1.0),
            presence_penalty: asked.presence_penalty.unwrap_or(0.0),
            frequency_penalty: asked.frequency_penalty.unwrap_or(0.0),
            logit_bias: Arc::clone(&asked.logit_bias),
            top_logprobs: asked.top_logprobs,
            seed: asked.seed.unwrap_or(seed),
        }
    }

    /// Greedy decoding, with the model's own repetition penalty where it has one.
    #[must_use]
    pub fn greedy(&self) -> Option<Sampling> {
        self.sampling(&Controls { temperature: Some(0.0), ..Controls::default() }, 0).unless_plain()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(temperature: f32) -> Controls {
        Controls { temperature: Some(temperature), ..Controls::default() }
    }

    #[test]
    fn greedy_is_the_default_unless_the_model_samples() {
        let none = Defaults::default();
        assert_eq!(none.sampling(&Controls { top_p: Some(0.5), ..Controls::default() }, 1).unless_plain(), None);
        let own = Defaults { do_sample: Some(true), temperature: Some(0.3), top_p: Some(0.9), ..Defaults::default() };
        let sampled = Sampling { temperature: 0.3, top_p: 0.9, seed: 1, ..Sampling::default() };
        assert_eq!(own.sampling(&Controls::default(), 1), sampled);
        assert_eq!(own.sampling(&asked(0.0), 1).unless_plain(), None);
        assert_eq!(own.sampling(&asked(0.7), 1), Sampling { temperature: 0.7, ..sampled });
        let idle = Defaults { do_sample: Some(false), ..own };
        assert_eq!(idle.sampling(&asked(0.7), 1), Sampling { temperature: 0.7, seed: 1, ..Sampling::default() });
    }

    #[test]
    fn the_makers_repetition_penalty_holds_for_greedy_answers_too_unless_the_request_has_its_own() {
        let own = Defaults { repetition_penalty: Some(1.1), ..Defaults::default() };
        let penalised = Sampling { repetition_penalty: 1.1, ..Sampling::default() };
        assert_eq!(own.greedy(), Some(penalised));
        assert_eq!(Defaults { repetition_penalty: Some(1.0), ..own }.greedy(), None);
        let none = Controls { repetition_penalty: Some(1.0), ..Controls::default() };
        assert_eq!(own.sampling(&none, 0).unless_plain(), None);
    }

    #[test]
    fn a_repetition_penalty_that_cannot_be_is_told_when_the_model_is_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let write = |text: &str| fs::write(folder.path().join("generation_config.json"), text).unwrap();
        for bad in ["0", "-1.5", "0.0"] {
            write(&format!("{{\"repetition_penalty\": {bad}}}"));
            let error = Defaults::read(folder.path()).unwrap_err();
            assert!(error.code == Code::ModelLoadFailed && error.message.contains("repetition_penalty"), "{error}");
        }
        write("{\"repetition_penalty\": 1.2, \"do_sample\": true}");
        assert_eq!(Defaults::read(folder.path()).unwrap().repetition_penalty, Some(1.2));
    }
}
