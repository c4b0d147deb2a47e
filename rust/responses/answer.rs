//! One request answered: from a checked request and a loaded model to a running answer, and from there to events.
//!
//! Knows neither sockets nor HTTP. Dropping a [`Running`] cancels the answer.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{SystemTime, UNIX_EPOCH};

use super::event::{Sink, Unheard};
use super::held::{self, Hold, Reading};
use super::ids::Ids;
use super::object::{Arrival, Begin, Effective, Response, Usage};
use super::request::{Reasoning, Request, Truncation};
use super::stream::{ReasoningEvents, Stream};
use super::told::log;
use super::tools::Tools;
use super::truncate::prompt;
use crate::engine::{Client, Constraint, Place, Sampling, Timing};
use crate::error::{Code, Error, Result};
use crate::metrics::{Door, Flight, Outcome};
use crate::models::{Answer, Ask, Ending, Model, Pieces, PromptOptions, beside};
use crate::prompt::{Role, Turn};

/// A prompt of at most this many bytes is rendered where it is: that takes less time than handing it to another thread.
pub(super) const INLINE: usize = 4 * 1024;
/// A reader for whom more pieces than this have gathered gets them as one: it is slow, and fewer events help it.
const BACKLOG: usize = 1024;

/// Whether a prompt fits is known without making it when the window is this many times what its text could come to at most: an id stands
/// for a byte at least, and what is left provides for tokenizers that write their text anew before they cut it.
const MARGIN: usize = 2;
/// Bytes that a template may add to a conversation, and to each turn.
const TEMPLATE: (usize, usize) = (1024, 64);

/// An answer under way.
pub struct Running {
    stage: Stage,
    pieces: Pieces,
    stream: Stream,
    arrival: Arrival,
    /// Counted until the answer is over.
    flight: Option<Flight>,
}

/// How far it is.
enum Stage {
    /// Its place in the queue is held; its prompt is made when it is first polled.
    Held(Box<Held>),
    /// The engine has it.
    Answering(Box<Answer>),
    /// It ended before the engine had it.
    Over,
}

/// A request whose prompt is still to be made.
struct Held {
    model: Arc<Model>,
    place: Place,
    turns: Vec<Turn>,
    prefill: Option<String>,
    tools: Arc<Tools>,
    reasoning: Reasoning,
    parallel: bool,
    truncation: Truncation,
    max_output_tokens: Option<u32>,
    most_tokens: Option<u32>,
    sampling: Option<Sampling>,
    speculation: Option<u32>,
    constraint: Option<Constraint>,
    reading: Reading,
    stop: Vec<String>,
    salt: Arc<str>,
}

impl Held {
    /// How long the prompt's text is before a template writes it, in bytes.
    fn length(&self) -> usize {
        let prefill = self.prefill.as_ref().map_or(0, String::len);
        length(&self.turns, &self.tools) + prefill
    }

    /// Whether the prompt is so short that it fits the window whatever it becomes.
    fn surely_fits(&self) -> bool {
        let (whole, each) = TEMPLATE;
        let bytes = whole + self.length() + self.turns.len() * each;
        bytes.saturating_mul(MARGIN) <= self.model.capabilities.context_length as usize && bytes <= INLINE
    }

    /// Whether the conversation is of a form that no template refuses.
    fn surely_taken(&self) -> bool {
        self.tools.is_empty() && self.turns.iter().all(Turn::is_plain) && in_turn(&self.turns)
    }

    /// Makes the prompt and hands it to the engine.
    fn answer(self) -> Result<Answer> {
        let Self {
            model,
            place,
            turns,
            prefill,
            tools,
            reasoning,
            parallel,
            truncation,
            max_output_tokens,
            most_tokens,
            sampling,
            constraint,
            speculation,
            reading,
            stop,
            salt,
        } = self;
        let mut options = options(&tools, reasoning);
        if !reading.thinks() {
            options.enable_thinking = Some(false);
        }
        options.prefill = prefill;
        let mut prompt = prompt(&model, &turns, &options, truncation, max_output_tokens).map_err(|error| error.at("input"))?;
        // `max_output_tokens` is an upper bound: what the window has no room for is not an error, the answer is then incomplete.
        let room = model.room(prompt.ids.len()).map_err(|error| error.at("input"))?;
        let max_tokens = [max_output_tokens, most_tokens].into_iter().flatten().fold(room, u32::min);
        let most_calls = (!parallel).then_some(1);
        match reading {
            Reading::Written => {}
            Reading::Leading => prompt.take_as_leading(),
            Reading::Words => prompt.take_as_words(),
            Reading::Calls => prompt.take_as_calls(&model, &tools.signatures()),
        }
        model.converse(place, prompt, Ask { max_tokens, sampling, constraint, speculation, stop, include_stop: false, salt }, most_calls)
    }
}

/// How long the text of a conversation and its tools is before a template writes it, in bytes.
pub(super) fn length(turns: &[Turn], tools: &Tools) -> usize {
    turns.iter().map(Turn::len).sum::<usize>() + tools.weight()
}

/// Whether the roles are in the order that every chat template takes: system at most first, then user and assistant in turn, a user last. Any
/// other may be refused, which has to be known before a stream begins.
fn in_turn(turns: &[Turn]) -> bool {
    let spoken = match turns.split_first() {
        Some((first, rest)) if first.role == Role::System => rest,
        _ => turns,
    };
    let expected = [Role::User, Role::Assistant].into_iter().cycle();
    spoken.len() % 2 == 1 && spoken.iter().zip(expected).all(|(turn, role)| turn.role == role)
}

impl Running {
    /// Takes a place in the model's queue and, unless that can wait, makes the prompt and hands it to the engine. It can wait when the answer
    /// is streamed and its prompt surely fits and is of a form that templates do not refuse: then the first events need not wait for the prompt. `created_at`: when the request arrived, in
    /// seconds since 1970.
    ///
    /// # Errors
    /// `context_length_exceeded` when the prompt leaves no room for an answer, `invalid_value` for a bias of a token that the model has not and for a
    /// grammar that cannot be used, `queue_full`, and what the template or the engine complains of.
    pub async fn start(model: Arc<Model>, request: Request, arrival: Arrival, created_at: u64, thoughts: ReasoningEvents) -> Result<Self> {
        let mut flight = Flight::begin(model.engine.meters(), Door::Http);
        match Self::taken(model, request, arrival, created_at, thoughts).await {
            Ok((stage, stream)) => Ok(Self { stage, pieces: Pieces::default(), stream, arrival, flight: Some(flight) }),
            Err(error) => {
                flight.fail(&error);
                Err(error)
            }
        }
    }

    /// The request in its place, and the response that it gets.
    async fn taken(
        model: Arc<Model>,
        request: Request,
        arrival: Arrival,
        created_at: u64,
        thoughts: ReasoningEvents,
    ) -> Result<(Stage, Stream)> {
        let Request {
            mut turns,
            prefill,
            tools,
            stream,
            max_output_tokens,
            most_tokens,
            controls,
            speculation,
            stop,
            salt,
            truncation,
            seal,
            echo,
            ..
        } = request;
        // A grammar that cannot be used is refused before anything is taken for the request.
        let Hold { constraint, reading } = held::hold(&model, &mut turns, &tools, &echo).await?;
        let place = model.engine.place(Client::new())?.since(arrival.arrived);
        let (mut ids, seed) = Ids::random()?;
        let sampling = model.defaults.sampling(&controls, seed);
        // Only now is it known which ids the model has, and an error must come before the first event.
        sampling.check(model.capabilities.vocab_size)?;
        let effective = Effective::new(&sampling, controls.top_p);
        let sampling = sampling.unless_plain();
        let (reasoning, parallel) = (echo.reasoning, echo.parallel_tool_calls);
        let begin = Begin {
            id: ids.next("resp_"),
            created_at,
            model: model.id.clone(),
            max_output_tokens,
            effective,
            stop: stop.clone(),
            truncation,
            echo,
        };
        let shown = Arc::clone(&tools);
        let held = Held {
            model,
            place,
            turns,
            prefill,
            tools,
            reasoning,
            parallel,
            truncation,
            max_output_tokens,
            most_tokens,
            sampling,
            constraint,
            speculation,
            reading,
            stop,
            salt,
        };
        let stage = if stream && held.surely_fits() && held.surely_taken() {
            Stage::Held(Box::new(held))
        } else if held.length() <= INLINE {
            Stage::Answering(Box::new(held.answer()?))
        } else {
            Stage::Answering(Box::new(beside(move || held.answer()).await?))
        };
        Ok((stage, Stream::new(begin, ids, thoughts, shown).sealing(seal)))
    }

    /// The response as it is now.
    #[must_use]
    pub fn response(&self) -> &Response {
        self.stream.response()
    }

    /// The first events, which wait for nothing.
    pub fn begin(&mut self, sink: &mut impl Sink) {
        self.stream.begin(sink);
    }

    /// Tells the sink what has come. Ready with `true` when the last event has gone out, with `false` when more will follow.
    pub fn poll(&mut self, cx: &mut Context<'_>, sink: &mut impl Sink) -> Poll<bool> {
        if !self.stream.over() {
            match ready!(self.step(cx, sink)) {
                None => {}
                Some(Ok(ending)) => self.end(ending, sink),
                Some(Err(error)) => self.fail(&error, sink),
            }
        }
        Poll::Ready(self.stream.over())
    }

    /// The response when the answer is over.
    ///
    /// # Errors
    /// The engine's failure, or the template's.
    pub async fn whole(&mut self) -> Result<&Response> {
        while !self.stream.over() {
            if let Some(ending) = poll_fn(|cx| self.step(cx, &mut Unheard)).await {
                let ending = ending.inspect_err(|error| self.count(Outcome::of(error)))?;
                self.end(ending, &mut Unheard);
            }
        }
        Ok(self.stream.response())
    }

    /// Ends the response with an error, the engine's or that the server is going away, and the request with it.
    pub fn fail(&mut self, error: &Error, sink: &mut impl Sink) {
        log(error);
        self.count(Outcome::of(error));
        let usage = self.usage();
        self.stage = Stage::Over;
        self.stream.fail(error, usage, sink);
    }

    /// The answer is over, and so is its count.
    fn count(&mut self, outcome: Outcome) {
        if let Some(mut flight) = self.flight.take() {
            flight.settle(outcome);
        }
    }

    fn end(&mut self, ending: Ending, sink: &mut impl Sink) {
        if let Stage::Answering(answer) = &self.stage {
            self.stream.stopped_by(answer.stopped_by());
        }
        self.count(if ending == Ending::Length { Outcome::Incomplete } else { Outcome::Completed });
        self.stream.end(ending, self.usage(), now(), sink);
    }

    /// Takes the text that has come. Ready with `Some` once, at the end of the answer.
    fn step(&mut self, cx: &mut Context<'_>, sink: &mut impl Sink) -> Poll<Option<Result<Ending>>> {
        if matches!(self.stage, Stage::Held(_))
            && let Stage::Held(held) = std::mem::replace(&mut self.stage, Stage::Over)
        {
            match held.answer() {
                Ok(answer) => self.stage = Stage::Answering(Box::new(answer)),
                Err(error) => return Poll::Ready(Some(Err(error))),
            }
        }
        let Stage::Answering(answer) = &mut self.stage else {
            return Poll::Ready(Some(Err(Error::new(Code::ServerError, "the answer is over already"))));
        };
        self.pieces.clear();
        let end = ready!(answer.poll(cx, &mut self.pieces));
        if self.pieces.len() > BACKLOG {
            self.pieces.merged().for_each(|piece| self.stream.piece(piece, sink));
        } else {
            self.pieces.told().for_each(|piece| self.stream.piece(piece, sink));
        }
        Poll::Ready(end)
    }

    /// What is known of tokens and times; nothing before the engine has the request.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        let Stage::Answering(answer) = &self.stage else { return None };
        let timing = Timing { tokens: answer.tokens(), ..answer.timing() };
        Some(Usage::new(answer.prompt_tokens(), answer.reasoning_tokens(), &timing, &self.arrival))
    }
}

/// How many tokens the prompt of a request has.
///
/// # Errors
/// As [`Running::start`], but for what belongs to an answer.
pub async fn count(model: Arc<Model>, request: Request) -> Result<usize> {
    let Request { mut turns, prefill, tools, truncation, max_output_tokens, echo, .. } = request;
    let mut options = options(&tools, echo.reasoning);
    let reading = held::hold(&model, &mut turns, &tools, &echo).await?.reading;
    if !reading.thinks() {
        // As it is when the answer is made.
        options.enable_thinking = Some(false);
    }
    options.prefill = prefill;
    let make = move || prompt(&model, &turns, &options, truncation, max_output_tokens);
    Ok(beside(make).await.map_err(|error| error.at("input"))?.ids.len())
}

/// How the prompt of a request with these tools is written.
pub(super) fn options(tools: &Tools, reasoning: Reasoning) -> PromptOptions {
    PromptOptions {
        enable_thinking: reasoning.thinking(),
        effort: reasoning.effort.filter(|effort| *effort != "none"),
        tools: tools.definitions(),
        signatures: tools.signatures(),
        ..PromptOptions::default()
    }
}

/// Seconds since 1970.
#[must_use]
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_conversation_in_turn_is_surely_taken() {
        let of = |roles: &str| {
            let turn = |role| {
                let role = match role {
                    's' => Role::System,
                    'u' => Role::User,
                    _ => Role::Assistant,
                };
                Turn::new(role, "")
            };
            in_turn(&roles.chars().map(turn).collect::<Vec<_>>())
        };
        for roles in ["u", "su", "uau", "suauau"] {
            assert!(of(roles), "{roles}");
        }
        for roles in ["", "s", "a", "ua", "sua", "uu", "au", "sau", "usu", "ssu", "uaau", "us"] {
            assert!(!of(roles), "{roles}");
        }
    }
}
