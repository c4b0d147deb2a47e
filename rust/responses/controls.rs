//! What a request says of its sampling: names, ranges, and what is told of a value outside them.
//!
//! What the fields do is said in `docs/port.md`, what the model adds in `models::sampling`.

use std::ops::RangeInclusive;
use std::sync::Arc;

use serde_json::Value;

use super::request::whole;
use super::validate::At;
use crate::error::Result;
use crate::models::Controls;
use crate::models::sampling::LEAST_PENALTY;

/// What presence and frequency penalties may be.
pub(super) const PENALTY: RangeInclusive<f64> = -2.0..=2.0;
/// What a bias may be.
pub(super) const BIAS: RangeInclusive<f64> = -100.0..=100.0;
/// The most biases of one request.
pub(super) const BIASES: usize = 1024;
/// The most of the likeliest tokens that are told beside each one.
pub(crate) const TOP_LOGPROBS: i64 = 20;
/// The most ids that may be guessed ahead.
const DEEPEST: u64 = 64;
/// The additional output that asks for log probabilities.
pub(super) const LOGPROBS: &str = "message.output_text.logprobs";

pub(super) fn read(root: &At<'_, '_>) -> Result<Controls> {
    Ok(Controls { top_logprobs: top_logprobs(root)?, ..sampling(root)? })
}

/// All of it but the log probabilities.
pub(crate) fn sampling(root: &At<'_, '_>) -> Result<Controls> {
    Ok(Controls {
        temperature: number(root, "temperature", 0.0..=2.0)?,
        top_p: number(root, "top_p", 0.0..=1.0)?,
        top_k: whole(root, "top_k", 0)?,
        min_p: number(root, "min_p", 0.0..=1.0)?,
        repetition_penalty: repetition_penalty(root)?,
        presence_penalty: number(root, "presence_penalty", PENALTY)?,
        frequency_penalty: number(root, "frequency_penalty", PENALTY)?,
        logit_bias: logit_bias(root)?,
        top_logprobs: None,
        seed: seed(root)?,
    })
}

/// How far ahead the engine may guess. `generation_mode` and `mtp_depth` come from clients of other servers, in the top level or in an `extra_body` that
/// was sent as it is; whatever else they are is passed over, since they change the pace alone.
pub(crate) fn speculation(root: &At<'_, '_>) -> Option<u32> {
    let places = [root.value.get("extra_body"), Some(root.value)];
    let fields = |key: &'static str| places.into_iter().rev().flatten().filter_map(move |object| object.get(key));
    let depth = fields("mtp_depth").filter_map(Value::as_u64).find(|depth| (1..=DEEPEST).contains(depth));
    let depth = depth.and_then(|depth| u32::try_from(depth).ok());
    match fields("generation_mode").filter_map(Value::as_str).find(|mode| ["ar", "mtp"].contains(mode)) {
        Some("ar") => Some(0),
        Some(_) => depth.or(u32::try_from(DEEPEST).ok()),
        None => depth,
    }
}

#[allow(clippy::cast_possible_truncation)] // Engines sample in f32, and a response repeats what they were given.
fn number(root: &At<'_, '_>, key: &str, range: RangeInclusive<f64>) -> Result<Option<f32>> {
    root.get(key).map(|at| at.number(range).map(|number| number as f32)).transpose()
}

fn repetition_penalty(root: &At<'_, '_>) -> Result<Option<f32>> {
    const KEY: &str = "repetition_penalty";
    let penalty = number(root, KEY, 0.0..=2.0)?;
    match (penalty, root.get(KEY)) {
        // Logits are divided by it.
        (Some(penalty), Some(at)) if penalty < LEAST_PENALTY => Err(at.wrong(format_args!("at least {LEAST_PENALTY}"))),
        _ => Ok(penalty),
    }
}

/// A map from token ids, which are texts in JSON, to biases. That the model has these ids is checked once it is loaded.
#[allow(clippy::cast_possible_truncation)]
fn logit_bias(root: &At<'_, '_>) -> Result<Arc<[(u32, f32)]>> {
    let Some(at) = root.get("logit_bias") else { return Ok(Arc::default()) };
    let map = at.object()?;
    if map.len() > BIASES {
        return Err(at.wrong(format_args!("at most {BIASES} token ids, and there are {}", map.len())));
    }
    let mut biases = Vec::with_capacity(map.len());
    for key in map.keys() {
        let Some(field) = at.get(key) else { continue };
        let bias = field.number(BIAS)? as f32;
        // Only the plain form: "7" and "07" would be two biases for one id.
        match key.parse::<u32>() {
            Ok(id) if id.to_string() == *key => biases.push((id, bias)),
            _ => return Err(field.wrong("under a token id, such as \"42\"")),
        }
    }
    Ok(biases.into())
}

/// Either of two fields asks for log probabilities; `top_logprobs: 0` alone, which clients send as the default, does not.
fn top_logprobs(root: &At<'_, '_>) -> Result<Option<u32>> {
    let top = most_likely(root)?;
    let included = match root.get("include") {
        Some(include) => include.each()?.any(|at| at.value.as_str() == Some(LOGPROBS)),
        None => false,
    };
    Ok((included || top > 0).then_some(top))
}

/// How many of the likeliest tokens are to be told beside each one; 0 where that is not said.
pub(crate) fn most_likely(root: &At<'_, '_>) -> Result<u32> {
    let top = root.get("top_logprobs").map(|at| at.integer(0..=TOP_LOGPROBS)).transpose()?;
    Ok(top.and_then(|top| u32::try_from(top).ok()).unwrap_or(0))
}

fn seed(root: &At<'_, '_>) -> Result<Option<u64>> {
    let Some(at) = root.get("seed") else { return Ok(None) };
    match at.value.as_u64() {
        Some(seed) => Ok(Some(seed)),
        // Negative seeds are as good as any: their bits are used.
        None => match at.value.as_i64() {
            Some(seed) => Ok(Some(seed.cast_unsigned())),
            None if at.is_whole() => Err(at.wrong(format_args!("an integer from {} to {}", i64::MIN, u64::MAX))),
            None => Err(at.not("an integer")),
        },
    }
}
