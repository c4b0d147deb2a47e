//! One load or chat: what it says while it runs, and the one answer in which it ends.

use std::sync::Arc;
use std::time::Instant;

use serde_json::value::RawValue;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;

use crate::engine::Client;
use crate::error::{Code, Error, Result};
use crate::memory;
use crate::metrics::{Door, Outcome};
use crate::models::{Ask, Ending, Hosted, Loading, Model, PromptOptions, beside};
use crate::worker::connection::Options;
use crate::worker::idle::Busy;
use crate::worker::message::{Chat, Event, Reply};

/// Where conversations longer than this, in bytes, are tokenised beside the loop that answers pings.
const LONG_TEXT: usize = 4 * 1024;

/// Conversations that take more than this, in bytes, leave so much free memory behind that it is given back; and what a turn takes besides its text.
const LARGE: usize = 1024 * 1024;
const A_TURN: usize = 64;

/// An id that outlives its line.
pub(super) type OwnedId = Option<Box<RawValue>>;

/// How a load or chat ends: a task returns it, so that there is one for each request.
#[derive(Debug)]
pub(super) enum Answer {
    Line(Vec<u8>),
    /// The trouble is passing: the client should come again, and must not be told that the request itself is at fault.
    HangUp,
}

/// Whether the trouble passes by itself. Clients take an `error` for a chat as the model's own and never ask it again, and a closed connection as a
/// reason to come back. Whoever asked for the load itself wants to hear why it failed, and may ask again after an error too.
fn passes(error: &Error, asked_to_load: bool) -> bool {
    match error.code {
        Code::ShuttingDown => true,
        Code::DownloadFailed => !asked_to_load,
        _ => false,
    }
}

/// One load or chat.
pub(super) struct Task {
    pub(super) client: Client,
    pub(super) id: OwnedId,
    pub(super) model: Arc<Hosted>,
    pub(super) options: Arc<Options>,
    pub(super) sender: mpsc::Sender<Vec<u8>>,
    /// Holds the idle timer.
    pub(super) busy: Busy,
}

impl Task {
    /// Does it to its end.
    pub(super) async fn run(self, chat: Option<Chat>) -> Answer {
        let asked = chat.is_none();
        let large = chat.as_ref().is_some_and(|chat| chat.turns.iter().map(|turn| turn.text.len() + A_TURN).sum::<usize>() > LARGE);
        let outcome = match chat {
            None => self.load(true).await.map(|_| None),
            Some(chat) => {
                // Dropped with the connection, which is how a client leaves.
                let mut flight = self.model.flight(Door::Worker);
                let answered = self.chat(chat).await;
                flight.settle(match &answered {
                    Ok((_, Ending::Length)) => Outcome::Incomplete,
                    Ok((_, Ending::Stop | Ending::StopString)) => Outcome::Completed,
                    Err(error) => Outcome::of(error),
                });
                answered.map(|(text, _)| Some(text))
            }
        };
        if large {
            memory::give_back();
        }
        let id = self.id.as_deref();
        Answer::Line(match outcome {
            Ok(None) => Reply::Loaded { id }.line(),
            Ok(Some(text)) => Reply::Text { id, text: &text }.line(),
            Err(error) if passes(&error, asked) => {
                tracing::warn!(%error, detail = error.detail.as_deref(), "hanging up: the client is to come again");
                return Answer::HangUp;
            }
            Err(error) => {
                tracing::warn!(%error, detail = error.detail.as_deref(), "a request failed");
                Reply::Error { id, error: &error.one_line() }.line()
            }
        })
    }

    async fn tell(&self, event: Event<'_>) {
        let news = Reply::Progress { id: self.id.as_deref(), event }.line();
        let _ = self.sender.send(news).await; // A client that has gone is told nothing.
    }

    /// The model, loaded first if need be; whoever starts the load hears how it goes, and `asked` for it, that it is ready.
    async fn load(&self, asked: bool) -> Result<Arc<Model>> {
        let loading = match self.model.loaded() {
            Some(model) if !asked => return Ok(model),
            _ => self.model.load(),
        };
        let started = loading.started;
        if started {
            // The load goes on when whoever asked for it leaves, and until then the worker is not idle.
            let (busy, model) = (self.busy.unasked(), loading.model());
            tokio::spawn(async move {
                _ = model.await; // Told to those who ask.
                drop(busy);
            });
        }
        let model = if started { self.watch(loading).await? } else { loading.model().await? };
        if started || asked {
            let event = Event::ready(&self.options.model_key, self.model.id());
            self.tell(event).await;
        }
        Ok(model)
    }

    async fn watch(&self, mut loading: Loading) -> Result<Arc<Model>> {
        let model = loading.model();
        tokio::pin!(model);
        loop {
            let news = tokio::select! {
                biased;
                news = loading.news.recv() => news,
                model = &mut model => return model,
            };
            match news {
                Ok(news) => {
                    for event in Event::of(&self.options.model_key, &news).into_iter().flatten() {
                        self.tell(event).await;
                    }
                }
                Err(RecvError::Lagged(_)) => {} // Newer news follows.
                Err(RecvError::Closed) => return model.await,
            }
        }
    }

    async fn chat(&self, chat: Chat) -> Result<(String, Ending)> {
        let asked = Instant::now();
        let model = self.load(false).await?;
        let options = PromptOptions { enable_thinking: Some(false), prefill: chat.prefill, ..PromptOptions::default() };
        let length = chat.turns.iter().map(|turn| turn.text.len()).sum::<usize>() + options.prefill.as_ref().map_or(0, String::len);
        let prompt = if length > LONG_TEXT {
            let model = Arc::clone(&model);
            beside(move || model.prompt(&chat.turns, &options)).await?
        } else {
            model.prompt(&chat.turns, &options)?
        };
        let prompt = prompt.ids;
        let max_tokens = chat.max_new_tokens.min(model.room(prompt.len())?);
        let stop = chat.stop.into_iter().collect();
        let sampling = model.defaults.greedy();
        let ask = Ask { max_tokens, sampling, constraint: None, speculation: None, stop, include_stop: true, salt: Arc::default() };
        let mut answer = model.answer_at(model.engine.place(self.client)?.since(asked), prompt, ask)?;
        let (text, ending) = answer.rest().await?;
        tracing::debug!(prompt = answer.prompt_tokens(), tokens = answer.tokens(), ?ending, "answered");
        Ok((text, ending))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_hung_up_on_only_when_the_trouble_passes() {
        let said = |code, asked| passes(&Error::new(code, "x"), asked);
        assert!(said(Code::ShuttingDown, true) && said(Code::ShuttingDown, false));
        assert!(said(Code::DownloadFailed, false) && !said(Code::DownloadFailed, true), "a load hears why");
        for lasting in [Code::ModelLoadFailed, Code::ModelNotFound, Code::EngineFailed, Code::QueueFull, Code::ContextLengthExceeded] {
            assert!(!said(lasting, false), "{lasting:?}");
        }
    }
}
