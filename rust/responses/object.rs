//! The response object: every field of the API, always there, null where there is nothing to say.
//!
//! When its fields change is decided in `stream`.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

use super::format::Format;
use super::item::Item;
use super::request::{Echo, Reasoning, Truncation};
use super::told::told;
use crate::engine::{Sampling, Timing};
use crate::error::{Code, Error};

/// How far a response is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// The answer is being made.
    InProgress,
    /// The model said what it had to say.
    Completed,
    /// The answer was cut at its limit.
    Incomplete,
    /// Something went wrong.
    Failed,
}

/// Why a response failed, in the words the API has for it.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Failure {
    /// Clients know no others.
    #[schemars(extend("enum" = ["server_error", "rate_limit_exceeded", "invalid_prompt"]))]
    pub code: &'static str,
    /// What happened.
    pub message: String,
    /// The error itself, for forms of an answer that have more words.
    #[serde(skip)]
    pub cause: Error,
}

impl From<&Error> for Failure {
    fn from(error: &Error) -> Self {
        let code = match error.code {
            Code::QueueFull => "rate_limit_exceeded",
            code if code.row().status < 500 => "invalid_prompt",
            _ => "server_error",
        };
        Self { code, message: told(error), cause: error.clone() }
    }
}

/// Why a response is incomplete.
#[derive(Debug, Clone, Copy, JsonSchema, Serialize)]
pub struct Incomplete {
    /// The limit that cut it.
    #[schemars(extend("const" = "max_output_tokens"))]
    pub reason: &'static str,
}

/// The form of the output.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct TextConfig {
    /// As asked for.
    pub format: Format,
    /// As asked for.
    #[schemars(extend("enum" = ["low", "medium", "high"]))]
    pub verbosity: &'static str,
}

/// How the answer is sampled: what takes effect, wherever it came from.
#[derive(Debug, Clone, PartialEq)]
pub struct Effective {
    /// 0 is greedy.
    pub temperature: f32,
    /// In [0, 1].
    pub top_p: f32,
    /// 0 is no limit.
    pub top_k: u32,
    /// In [0, 1].
    pub min_p: f32,
    /// 1 is none.
    pub repetition_penalty: f32,
    /// In [-2, 2].
    pub presence_penalty: f32,
    /// In [-2, 2].
    pub frequency_penalty: f32,
    /// What is added to the logits of these ids.
    pub logit_bias: BTreeMap<u32, f32>,
    /// How many of the most likely tokens are told with each.
    pub top_logprobs: u32,
    /// `None` where it is greedy.
    pub seed: Option<u64>,
}

impl Default for Effective {
    /// Greedy, with every control at the value at which it changes nothing.
    fn default() -> Self {
        Self::new(&Sampling::default(), None)
    }
}

impl Effective {
    /// What a response says of its sampling. `top_p`: the one asked for, which may be 0.
    #[must_use]
    pub fn new(sampling: &Sampling, top_p: Option<f32>) -> Self {
        Self {
            temperature: sampling.temperature,
            top_p: top_p.unwrap_or(sampling.top_p),
            top_k: sampling.top_k,
            min_p: sampling.min_p,
            repetition_penalty: sampling.repetition_penalty,
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            logit_bias: sampling.logit_bias.iter().copied().collect(),
            top_logprobs: sampling.top_logprobs.unwrap_or(0),
            seed: (sampling.temperature > 0.0).then_some(sampling.seed),
        }
    }
}

/// The response object. Fields of type `()` are null: this server has nothing to put there.
#[derive(Debug, Clone, JsonSchema, Serialize)]
#[allow(missing_docs)] // The names and meanings are those of the API.
pub struct Response {
    pub id: String,
    #[schemars(extend("const" = "response"))]
    pub object: &'static str,
    pub created_at: u64,
    pub status: Status,
    pub background: bool,
    pub completed_at: Option<u64>,
    pub error: Option<Failure>,
    pub incomplete_details: Option<Incomplete>,
    pub instructions: Option<String>,
    pub max_output_tokens: Option<u32>,
    pub max_tool_calls: Option<i64>,
    pub model: String,
    pub output: Vec<Item>,
    pub parallel_tool_calls: bool,
    pub previous_response_id: (),
    pub prompt_cache_key: Option<String>,
    pub prompt_cache_retention: (),
    pub reasoning: Reasoning,
    pub safety_identifier: Option<String>,
    #[schemars(extend("const" = "default"))]
    pub service_tier: &'static str,
    pub store: bool,
    pub temperature: f32,
    pub text: TextConfig,
    pub tool_choice: Value,
    pub tools: Vec<Value>,
    pub top_logprobs: u32,
    pub top_p: f32,
    pub truncation: Truncation,
    pub usage: Option<Usage>,
    pub user: Option<String>,
    pub metadata: Map<String, Value>,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    pub access_programs: (),
    pub conversation: (),
    pub image: (),
    pub input_transformations: (),
    pub moderation: (),
    pub prompt: (),
    pub prompt_cache_diagnostics: (),
    pub prompt_cache_options: (),
    pub tool_usage: (),
    pub top_k: u32,
    pub min_p: f32,
    pub repetition_penalty: f32,
    pub logit_bias: BTreeMap<u32, f32>,
    pub seed: Option<u64>,
    pub stop: Vec<String>,
    /// The stop string that ended it, for forms of an answer that tell it.
    #[serde(skip)]
    pub stopped_by: Option<String>,
}

/// What a response is made from before its first token.
#[derive(Debug)]
pub struct Begin {
    /// `resp_…`.
    pub id: String,
    /// When the request arrived, in seconds since 1970.
    pub created_at: u64,
    /// The model that answers.
    pub model: String,
    /// The longest answer asked for.
    pub max_output_tokens: Option<u32>,
    /// How it is sampled.
    pub effective: Effective,
    /// What ends it.
    pub stop: Vec<String>,
    /// What happens to a prompt that does not fit.
    pub truncation: Truncation,
    /// The fields that are repeated.
    pub echo: Echo,
}

impl From<Begin> for Response {
    fn from(begin: Begin) -> Self {
        let Begin { id, created_at, model, max_output_tokens, effective, stop, truncation, echo } = begin;
        Self {
            id,
            object: "response",
            created_at,
            status: Status::InProgress,
            background: false,
            completed_at: None,
            error: None,
            incomplete_details: None,
            instructions: echo.instructions,
            max_output_tokens,
            max_tool_calls: echo.max_tool_calls,
            model,
            output: Vec::new(),
            parallel_tool_calls: echo.parallel_tool_calls,
            previous_response_id: (),
            prompt_cache_key: echo.prompt_cache_key,
            prompt_cache_retention: (),
            reasoning: echo.reasoning,
            safety_identifier: echo.safety_identifier,
            service_tier: "default",
            // What takes effect: nothing is kept, whatever was asked for.
            store: false,
            temperature: effective.temperature,
            text: TextConfig { format: echo.format, verbosity: echo.verbosity },
            tool_choice: echo.tool_choice,
            tools: echo.tools,
            top_logprobs: effective.top_logprobs,
            top_p: effective.top_p,
            truncation,
            usage: None,
            user: echo.user,
            metadata: echo.metadata,
            presence_penalty: effective.presence_penalty,
            frequency_penalty: effective.frequency_penalty,
            access_programs: (),
            conversation: (),
            image: (),
            input_transformations: (),
            moderation: (),
            prompt: (),
            prompt_cache_diagnostics: (),
            prompt_cache_options: (),
            tool_usage: (),
            top_k: effective.top_k,
            min_p: effective.min_p,
            repetition_penalty: effective.repetition_penalty,
            logit_bias: effective.logit_bias,
            seed: effective.seed,
            stop,
            stopped_by: None,
        }
    }
}

/// Tokens and times of one response. Times are milliseconds, rates tokens per second; absent where unknown.
#[derive(Debug, Clone, JsonSchema, Serialize)]
#[allow(missing_docs)] // The names are those of the API; `Usage::new` says how each is made.
pub struct Usage {
    pub input_tokens: usize,
    pub input_tokens_details: InputDetails,
    pub output_tokens: u32,
    pub output_tokens_details: OutputDetails,
    pub total_tokens: usize,
    pub prefill_input_tokens: usize,
    pub cached_prefix_tokens: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time_to_first_token_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_tokens_per_second: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_tokens_per_second: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server_inference_elapsed_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server_time_to_first_token_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server_total_time_to_first_token_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server_prefill_tokens_per_second: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server_decode_tokens_per_second: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server_model_resolve_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server_load_wait_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server_load_owner: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server_queue_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server_pre_inference_ms: Option<f64>,
}

/// Where the input's tokens came from.
#[derive(Debug, Clone, Copy, JsonSchema, Serialize)]
#[allow(missing_docs)]
pub struct InputDetails {
    pub cached_tokens: usize,
    pub cache_write_tokens: usize,
}

/// What the output's tokens were for.
#[derive(Debug, Clone, Copy, JsonSchema, Serialize)]
#[allow(missing_docs)]
pub struct OutputDetails {
    pub reasoning_tokens: u32,
}

/// When the stages before the engine were reached.
#[derive(Debug, Clone, Copy)]
pub struct Arrival {
    /// When the request was complete.
    pub arrived: Instant,
    /// How long it took to find the model.
    pub resolve: Option<Duration>,
    /// How long it took until the model was loaded.
    pub load_wait: Option<Duration>,
    /// Whether this request started the load; `None` where nothing had to be loaded.
    pub load_owner: Option<bool>,
}

impl Usage {
    /// Counts and times, from when the request arrived and from what the engine's stream saw; `reasoning_tokens` of the output are thoughts.
    #[must_use]
    pub fn new(input_tokens: usize, reasoning_tokens: u32, timing: &Timing, arrival: &Arrival) -> Self {
        let between = |from: Option<Instant>, to: Option<Instant>| Some(to?.saturating_duration_since(from?));
        let arrived = Some(arrival.arrived);
        let cached = (timing.cached as usize).min(input_tokens);
        let read = input_tokens - cached;
        let to_first = between(timing.taken, timing.first);
        let total_to_first = between(arrived, timing.first).map(milliseconds);
        let prefill = to_first.and_then(|time| rate(read, time));
        let decode = between(timing.first, timing.last).and_then(|time| rate((timing.tokens as usize).saturating_sub(1), time));
        Self {
            input_tokens,
            input_tokens_details: InputDetails { cached_tokens: cached, cache_write_tokens: 0 },
            output_tokens: timing.tokens,
            output_tokens_details: OutputDetails { reasoning_tokens },
            total_tokens: input_tokens + timing.tokens as usize,
            prefill_input_tokens: read,
            cached_prefix_tokens: cached,
            time_to_first_token_ms: total_to_first,
            prefill_tokens_per_second: prefill,
            decode_tokens_per_second: decode,
            server_inference_elapsed_ms: between(timing.taken, timing.last).map(milliseconds),
            server_time_to_first_token_ms: to_first.map(milliseconds),
            server_total_time_to_first_token_ms: total_to_first,
            server_prefill_tokens_per_second: prefill,
            server_decode_tokens_per_second: decode,
            server_model_resolve_ms: arrival.resolve.map(milliseconds),
            server_load_wait_ms: arrival.load_wait.map(milliseconds),
            server_load_owner: arrival.load_owner,
            server_queue_ms: between(Some(timing.submitted), timing.taken).map(milliseconds),
            server_pre_inference_ms: between(arrived, timing.taken).map(milliseconds),
        }
    }
}

/// To the microsecond: the clock tells no more that matters.
fn milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

/// Tokens per second; `None` where nothing was made, or in no time.
#[allow(clippy::cast_precision_loss)] // A count of tokens is far below 2^52.
fn rate(tokens: usize, time: Duration) -> Option<f64> {
    (tokens > 0 && !time.is_zero()).then(|| (tokens as f64 / time.as_secs_f64() * 1e3).round() / 1e3)
}
