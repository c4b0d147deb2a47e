//! One request answered: from a checked request and a loaded model to a running answer, and from there to events.
//!
//! Knows neither sockets nor HTTP. Dropping a [`Running`] cancels the answer.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{SystemTime, UNIX_EPOCH};

use super::event::{Sink, Unheard};
use super::object::{Arrival, Begin, Effective, Response, Usage};
use super::request::{Request, Truncation};
use super::stream::Stream;
use crate::engine::Timing;
use crate::error::{Code, Error, Result};
use crate::models::{Answer, Ask, Model, Pieces, PromptOptions};
use crate::prompt::{Role, Turn};

/// A prompt of at most this many bytes is rendered where it is: that takes less time than handing it to another thread.
const INLINE: usize = 16 * 1024;
/// A reader for whom more pieces than this have gathered gets them as one: it is slow, and fewer events help it.
const BACKLOG: usize = 1024;

/// An answer under way.
pub struct Running {
    answer: Answer,
    pieces: Pieces,
    stream: Stream,
    arrival: Arrival,
}

impl Running {
    /// Renders the prompt and hands it to the engine. `created_at`: when the request arrived, in seconds since 1970.
    ///
    /// # Errors
    /// `context_length_exceeded` when the prompt leaves no room for an answer, `queue_full`, and what the template or the engine complains of.
    pub async fn start(model: Arc<Model>, request: Request, arrival: Arrival, created_at: u64) -> Result<Self> {
        let Request { turns, max_output_tokens, temperature, top_p, top_k, seed, stop, truncation, echo, .. } = request;
        let thinking = echo.reasoning.thinking();
        let prompt = if turns.iter().map(|turn| turn.text.len()).sum::<usize>() <= INLINE {
            prompt(&model, &turns, thinking, truncation, max_output_tokens)?
        } else {
            let model = Arc::clone(&model);
            tokio::task::spawn_blocking(move || prompt(&model, &turns, thinking, truncation, max_output_tokens))
                .await
                .map_err(|error| Error::new(Code::ServerError, "the prompt could not be made").detail(error.to_string()))??
        };
        // `max_output_tokens` is an upper bound: what the window has no room for is not an error, the answer is then incomplete.
        let room = model.room(prompt.len()).map_err(|error| error.at("input"))?;
        let max_tokens = max_output_tokens.map_or(room, |most| most.min(room));
        let seed = match seed {
            Some(seed) => seed,
            None => random_seed()?,
        };
        // A mass of 0 means the likeliest id alone, which an engine knows as the smallest mass.
        let mass = top_p.map(|mass| mass.max(f32::MIN_POSITIVE));
        let sampling = model.defaults.sampling(temperature, mass, top_k, seed);
        let effective = Effective {
            temperature: sampling.map_or(0.0, |sampling| sampling.temperature),
            top_p: top_p.or(sampling.map(|sampling| sampling.top_p)).unwrap_or(1.0),
            top_k: top_k.or(sampling.map(|sampling| sampling.top_k)).unwrap_or(0),
            seed: sampling.map(|sampling| sampling.seed),
        };
        let begin = Begin {
            id: id("resp_")?,
            created_at,
            model: model.id.clone(),
            max_output_tokens,
            effective,
            stop: stop.clone(),
            truncation,
            echo,
        };
        let message_id = id("msg_")?;
        let answer = model.answer(prompt, Ask { max_tokens, sampling, stop, include_stop: false })?;
        Ok(Self::new(answer, begin, message_id, arrival))
    }

    /// An answer that has been asked for already.
    #[must_use]
    pub fn new(answer: Answer, begin: Begin, message_id: String, arrival: Arrival) -> Self {
        Self { answer, pieces: Pieces::default(), stream: Stream::new(begin, message_id), arrival }
    }

    /// The first events, which wait for nothing.
    pub fn begin(&mut self, sink: &mut impl Sink) {
        self.stream.begin(sink);
    }

    /// Tells the sink what has come. Ready with `true` when the last event has gone out, with `false` when more will follow.
    pub fn poll(&mut self, cx: &mut Context<'_>, sink: &mut impl Sink) -> Poll<bool> {
        if self.stream.over() {
            return Poll::Ready(true);
        }
        self.pieces.clear();
        let Poll::Ready(end) = self.answer.poll(cx, &mut self.pieces) else { return Poll::Pending };
        if self.pieces.len() > BACKLOG {
            self.stream.text(self.pieces.text(), sink);
        } else {
            for piece in self.pieces.iter() {
                self.stream.text(piece, sink);
            }
        }
        match end {
            None => {}
            Some(Ok(ending)) => {
                let usage = self.usage();
                self.stream.end(ending, usage, now(), sink);
            }
            Some(Err(error)) => self.fail(&error, sink),
        }
        Poll::Ready(self.stream.over())
    }

    /// Ends the response with an error: the engine's, or that the server is going away.
    pub fn fail(&mut self, error: &Error, sink: &mut impl Sink) {
        let usage = self.usage();
        self.stream.fail(error, Some(usage), sink);
    }

    /// The response when the answer is over.
    ///
    /// # Errors
    /// The engine's failure.
    pub async fn whole(&mut self) -> Result<&Response> {
        loop {
            self.pieces.clear();
            let end = poll_fn(|cx| self.answer.poll(cx, &mut self.pieces)).await;
            self.stream.text(self.pieces.text(), &mut Unheard);
            if let Some(end) = end {
                let usage = self.usage();
                self.stream.end(end?, usage, now(), &mut Unheard);
                return Ok(self.stream.response());
            }
        }
    }

    fn usage(&self) -> Usage {
        let timing = Timing { tokens: self.answer.tokens(), ..self.answer.timing() };
        Usage::new(self.answer.prompt_tokens(), &timing, &self.arrival)
    }
}

/// The prompt's ids. With `truncation: auto` the oldest turns are left out until there is room for it and for the answer that was asked for (at
/// most half the window); never a system turn, and never the last turn.
fn prompt(
    model: &Model,
    turns: &[Turn],
    enable_thinking: Option<bool>,
    truncation: Truncation,
    max_output_tokens: Option<u32>,
) -> Result<Vec<u32>> {
    let options = PromptOptions { enable_thinking, ..PromptOptions::default() };
    let window = model.capabilities.context_length as usize;
    let asked = max_output_tokens.map_or(1, |most| most as usize).min(window / 2).max(1);
    let whole = model.prompt(turns, &options)?;
    if truncation == Truncation::Disabled || whole.len() + asked <= window {
        return Ok(whole);
    }
    let old: Vec<usize> = turns.iter().enumerate().filter(|(_, turn)| turn.role != Role::System).map(|(index, _)| index).collect();
    // What is kept begins with a user's turn, where it is more than the last one: templates may insist on it.
    let last = old.last().copied();
    let starts: Vec<usize> = old
        .into_iter()
        .skip(1)
        .filter(|start| Some(*start) == last || turns.get(*start).is_some_and(|turn| turn.role == Role::User))
        .collect();
    // The later it starts, the shorter the prompt: halving finds the earliest start that fits.
    let (mut low, mut high) = (0, starts.len());
    let mut best = None;
    while low < high {
        let middle = usize::midpoint(low, high);
        let Some(start) = starts.get(middle).copied() else { break };
        let kept = turns.iter().enumerate().filter(|(index, turn)| *index >= start || turn.role == Role::System);
        let kept: Vec<Turn> = kept.map(|(_, turn)| turn.clone()).collect();
        let ids = model.prompt(&kept, &options)?;
        if ids.len() + asked <= window {
            best = Some((turns.len() - kept.len(), ids));
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    // Where nothing helps, the caller is told how long the whole prompt is.
    let Some((left_out, ids)) = best else { return Ok(whole) };
    tracing::debug!(left_out, tokens = ids.len(), window, "the oldest turns are left out of the prompt");
    Ok(ids)
}

/// Seconds since 1970.
#[must_use]
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// A name nobody has had: the prefix and 128 random bits.
///
/// # Errors
/// `server_error` when the operating system has no random bytes.
pub fn id(prefix: &str) -> Result<String> {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    let bytes: [u8; 16] = random()?;
    let mut id = String::with_capacity(prefix.len() + 2 * bytes.len());
    id.push_str(prefix);
    for byte in bytes {
        for digit in [byte >> 4, byte & 15] {
            id.push(char::from(HEX[usize::from(digit)]));
        }
    }
    Ok(id)
}

/// A seed below 2^53, which every JSON reader gives back as it came.
fn random_seed() -> Result<u64> {
    Ok(u64::from_le_bytes(random()?) >> 11)
}

fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)
        .map_err(|error| Error::new(Code::ServerError, "the system has no random bytes").detail(error.to_string()))?;
    Ok(bytes)
}
