//! What all requests have in common, in whichever form they come: how an answer is sampled, where it stops, and what is told with it.

use schemars::JsonSchema;
use serde_json::{Map, Value};

use crate::models::sampling::LEAST_PENALTY;
use crate::responses::controls::{BIAS, BIASES, PENALTY};
use crate::responses::request::{METADATA, RETENTION, SALT, STOPS};

/// The number as it is written, and not as 32 bits have it.
fn decimal(number: f32) -> f64 {
    number.to_string().parse().unwrap_or(f64::from(number))
}

/// How an answer is sampled. How hot is said where it is asked, since the forms differ in how hot it may be.
#[derive(JsonSchema)]
pub(crate) struct Sampling {
    /// Only the likeliest tokens that make up this share together.
    #[schemars(range(min = 0, max = 1))]
    top_p: Option<f64>,
    /// Only this many of the likeliest tokens; 0: all.
    #[schemars(range(min = 0, max = i32::MAX))]
    top_k: Option<i64>,
    /// Only tokens that are at least this share as likely as the likeliest.
    #[schemars(range(min = 0, max = 1))]
    min_p: Option<f64>,
    /// Makes what the prompt and the answer have said less likely; 1: no effect.
    #[schemars(range(min = decimal(LEAST_PENALTY), max = 2))]
    repetition_penalty: Option<f64>,
    /// Taken from the logit of what the answer has said.
    #[schemars(range(min = *PENALTY.start(), max = *PENALTY.end()))]
    presence_penalty: Option<f64>,
    /// Taken from the logit of what the answer has said, as often as it has.
    #[schemars(range(min = *PENALTY.start(), max = *PENALTY.end()))]
    frequency_penalty: Option<f64>,
    /// Added to the logits of these token ids.
    #[schemars(extend(
        "maxProperties" = BIASES,
        "propertyNames" = { "pattern": "^(0|[1-9][0-9]{0,8})$" },
        "additionalProperties" = { "type": ["number", "null"], "minimum": *BIAS.start(), "maximum": *BIAS.end() }
    ))]
    logit_bias: Option<Map<String, Value>>,
    /// The same seed and prompt give the same answer.
    #[schemars(range(min = i64::MIN, max = u64::MAX))]
    seed: Option<i128>,
    /// Requests of different salts share nothing that was kept of prompts. At most 256 bytes in UTF-8.
    #[schemars(length(min = 1, max = SALT))]
    cache_salt: Option<String>,
    /// `ar` reads ahead nothing, `mtp` as much as `mtp_depth` says; anything else has no effect. It changes the pace alone.
    #[schemars(extend("examples" = ["ar", "mtp"]))]
    generation_mode: Option<Value>,
    /// How many tokens may be guessed ahead, from 1 to 64; anything else has no effect.
    mtp_depth: Option<Value>,
}

/// One text, or several.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub(crate) enum Stop {
    /// One.
    One(#[schemars(length(min = 1))] String),
    /// Several.
    Several(#[schemars(length(max = STOPS), inner(length(min = 1)))] Vec<String>),
}

/// Pairs of the client's.
pub(crate) struct Metadata;

impl JsonSchema for Metadata {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Metadata".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        let (pairs, key, value) = METADATA;
        schemars::json_schema!({
            "type": "object",
            // One more than pairs, for the field that is none of them.
            "maxProperties": pairs + 1,
            "propertyNames": { "maxLength": key },
            "properties": { "retention_seconds": { "type": ["integer", "null"], "minimum": RETENTION.start(), "maximum": RETENTION.end() } },
            "additionalProperties": { "type": ["string", "null"], "maxLength": value },
        })
    }
}
