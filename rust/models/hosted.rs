//! A model that this process serves: absent, loading, ready or failed.
//!
//! The first request loads it; requests that come meanwhile wait for the same load, and the load goes on when they leave. After a failure the
//! next request tries anew.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::{Semaphore, broadcast, watch};
use tokio::task::{AbortHandle, JoinError};

use crate::engine::port::{Capabilities, Engine, Phase};
use crate::engine::{Client, Constraint, Launcher, Place, Request, Reuse, Sampling, Settings, host};
use crate::error::{Code, Error, Result};
use crate::grammar::{Compiler, Grammar};
use crate::metrics::{Door, Flight, Meters};
use crate::models::answer::Answer;
use crate::models::builtin;
use crate::models::catalog::Source;
use crate::models::fetch::Shelf;
use crate::models::progress::Progress;
use crate::models::prompt::{Prompt, PromptOptions};
use crate::models::sampling::Defaults;
use crate::prompt::{Prompter, Tokenizer, Turn, Writing};
use crate::text::decode::Visible;
use crate::text::{Format, Parser};

/// News that a slow watcher may fall behind by before it misses some.
const NEWS: usize = 256;

/// What every model of a process shares.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) shelf: Shelf,
    pub(crate) launcher: Launcher,
    pub(crate) engine: String,
    pub(crate) settings: Settings,
}

/// What brings a model up: its files, for one engine.
#[derive(Clone)]
pub(crate) struct Plan {
    pub(crate) source: Source,
    pub(crate) shelf: Shelf,
    pub(crate) engine: String,
}

/// Where a model is in its life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Nobody has asked for it.
    Absent,
    /// Being fetched or loaded.
    Loading,
    /// Answers.
    Ready,
    /// The last load, or the engine, failed; the next request loads it again.
    Failed(Error),
}

impl State {
    /// Its name where it is told.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Loading => "loading",
            Self::Ready => "ready",
            Self::Failed(_) => "failed",
        }
    }
}

type Settled = Option<Result<Arc<Model>>>;

enum Held {
    Absent,
    Loading(watch::Receiver<Settled>, AbortHandle),
    Ready(Arc<Model>),
    Failed(Error),
}

/// A model that this process serves.
pub struct Hosted {
    id: String,
    source: Source,
    created: u64,
    shared: Shared,
    fallback: OnceLock<Plan>,
    fell_back: AtomicBool,
    held: Mutex<Held>,
    news: broadcast::Sender<Progress>,
    meters: Arc<Meters>,
}

/// A load in progress, or one that is over already.
pub struct Loading {
    /// Whether this call started it: the caller then is the one to be told of its progress.
    pub started: bool,
    /// News of it. What comes after the model has settled belongs to another load.
    pub news: broadcast::Receiver<Progress>,
    settled: watch::Receiver<Settled>,
}

impl Loading {
    /// The model, once it is ready.
    ///
    /// # Errors
    /// Why it could not be loaded.
    pub fn model(&self) -> impl Future<Output = Result<Arc<Model>>> + Send + use<> {
        let mut settled = self.settled.clone();
        async move {
            match settled.wait_for(Option::is_some).await.as_deref() {
                Ok(Some(model)) => model.clone(),
                _ => Err(gone()),
            }
        }
    }
}

impl Hosted {
    pub(crate) fn new(id: String, source: Source, shared: Shared) -> Self {
        let created = created(&source, &shared.shelf);
        let (fallback, fell_back) = (OnceLock::new(), AtomicBool::new(false));
        let (held, news, meters) = (Mutex::new(Held::Absent), broadcast::channel(NEWS).0, Arc::default());
        Self { id, source, created, shared, fallback, fell_back, held, news, meters }
    }

    /// Lets this plan bring the model up where its own cannot. Has an effect once.
    pub(crate) fn or(&self, plan: Plan) {
        let _ = self.fallback.set(plan);
    }

    /// The name it is served under.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// When its files were made, in seconds since 1970; stable for as long as they are the same.
    #[must_use]
    pub fn created(&self) -> u64 {
        self.created
    }

    /// What is counted of it.
    #[must_use]
    pub fn meters(&self) -> &Arc<Meters> {
        &self.meters
    }

    /// Counts a request of this door, until it is dropped.
    #[must_use]
    pub fn flight(&self, door: Door) -> Flight {
        Flight::begin(&self.meters, door)
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The model, if it is loaded and its engine lives.
    #[must_use]
    pub fn loaded(&self) -> Option<Arc<Model>> {
        match &*self.lock() {
            Held::Ready(model) if model.alive() => Some(Arc::clone(model)),
            _ => None,
        }
    }

    /// Where it is in its life.
    #[must_use]
    pub fn state(&self) -> State {
        match &*self.lock() {
            Held::Absent => State::Absent,
            Held::Loading(..) => State::Loading,
            Held::Failed(error) => State::Failed(error.clone()),
            Held::Ready(model) => match &*model.engine.phase().borrow() {
                Phase::Failed(error) => State::Failed(error.clone()),
                Phase::Closed => State::Absent,
                _ => State::Ready,
            },
        }
    }

    /// How long the engine has had work and made no step; `None` when it has no work or there is no engine.
    #[must_use]
    pub fn stalled(&self) -> Option<Duration> {
        self.loaded().and_then(|model| model.engine.stalled())
    }

    /// The model, loaded first if it is not.
    ///
    /// # Errors
    /// Why it could not be fetched or loaded.
    pub async fn ready(self: &Arc<Self>) -> Result<Arc<Model>> {
        match self.loaded() {
            Some(model) => Ok(model),
            None => self.load().model().await,
        }
    }

    /// Starts loading it, joins the load in progress, or finds it loaded. Must be called within a runtime. The load goes on when the
    /// result is dropped.
    pub fn load(self: &Arc<Self>) -> Loading {
        let news = self.news.subscribe();
        let mut held = self.lock();
        match &*held {
            Held::Loading(settled, _) => Loading { started: false, news, settled: settled.clone() },
            Held::Ready(model) if model.alive() => {
                let settled = watch::channel(Some(Ok(Arc::clone(model)))).1;
                Loading { started: false, news, settled }
            }
            _ => {
                let (sender, settled) = watch::channel(None);
                let hosted = Arc::clone(self);
                let work = tokio::spawn(async move { hosted.bring_up().await });
                *held = Held::Loading(settled.clone(), work.abort_handle());
                drop(held);
                let hosted = Arc::clone(self);
                tokio::spawn(async move {
                    let outcome = ended(work.await);
                    if let Err(error) = &outcome {
                        tracing::error!(model = hosted.id, %error, detail = error.detail.as_deref(), "the model could not be loaded");
                    }
                    *hosted.lock() = match &outcome {
                        Ok(model) => Held::Ready(Arc::clone(model)),
                        Err(error) => Held::Failed(error.clone()),
                    };
                    sender.send_replace(Some(outcome));
                });
                Loading { started: true, news, settled }
            }
        }
    }

    /// Brings the model up by its own plan, or by the other one where there is one and its own has failed, now or before.
    async fn bring_up(self: &Arc<Self>) -> Result<Arc<Model>> {
        let Shared { shelf, engine, .. } = self.shared.clone();
        let own = Plan { source: self.source.clone(), shelf, engine };
        let Some(other) = self.fallback.get() else { return self.bring_up_by(own).await };
        if !self.fell_back.load(Ordering::Relaxed) {
            let error = match self.bring_up_by(own).await {
                Err(error) if error.code != Code::ShuttingDown => error,
                outcome => return outcome,
            };
            let (failed, engine) = (&self.shared.engine, &other.engine);
            let detail = error.detail.as_deref();
            tracing::warn!(model = self.id, %error, detail, "the {failed} engine cannot run this model: {engine} does from now on");
            self.fell_back.store(true, Ordering::Relaxed);
        }
        self.bring_up_by(other.clone()).await
    }

    async fn bring_up_by(self: &Arc<Self>, plan: Plan) -> Result<Arc<Model>> {
        let started = std::time::Instant::now();
        let Plan { source, shelf, engine } = plan;
        let hosted = Arc::clone(self);
        let builtin = source == Source::Builtin;
        let folder = match source {
            // An engine without a model has no folder.
            Source::Builtin => PathBuf::new(),
            _ => {
                let news = move |progress| _ = hosted.news.send(progress); // Nobody may be watching.
                let id = self.id.clone();
                blocking(move || shelf.ensure(&source, &id, &news)).await?
            }
        };
        // The engine loads its weights while the tokenizer is read here.
        let engine = self.shared.launcher.launch(&engine, &folder, self.shared.settings.clone(), Arc::clone(&self.meters))?;
        let mut guard = Unfinished { engine: engine.clone(), ready: false };
        let (prompter, defaults) =
            if builtin { (builtin::prompter()?, Defaults::default()) } else { blocking(move || read(&folder)).await? };
        let capabilities = host::ready(engine.phase()).await.map_err(load_failed)?;
        guard.ready = true;
        tracing::info!(model = self.id, milliseconds = started.elapsed().as_millis() as u64, "ready");
        Ok(Arc::new(Model::new(self.id.clone(), prompter, engine, capabilities, defaults)))
    }

    /// Ends the engine, or its loading; what is in flight ends with `shutting_down`.
    pub fn close(&self) {
        match &*self.lock() {
            Held::Ready(model) => model.engine.close(),
            Held::Loading(_, work) => work.abort(),
            Held::Absent | Held::Failed(_) => {}
        }
    }
}

/// An engine that is being loaded: closed when the load ends before it is ready, since nobody else knows of it.
struct Unfinished {
    engine: Engine,
    ready: bool,
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.ready {
            self.engine.close();
        }
    }
}

fn gone() -> Error {
    Error::new(Code::ShuttingDown, "the server is shutting down")
}

/// What a task's end means to those who wait for its result.
fn ended<T>(outcome: Result<Result<T>, JoinError>) -> Result<T> {
    match outcome {
        Ok(outcome) => outcome,
        Err(error) if error.is_cancelled() => Err(gone()),
        Err(error) => Err(Error::new(Code::ServerError, "a fault in work beside the door").detail(error.to_string())),
    }
}

fn load_failed(mut error: Error) -> Error {
    if error.code == Code::EngineFailed {
        error.code = Code::ModelLoadFailed;
    }
    error
}

fn read(folder: &Path) -> Result<(Prompter, Defaults)> {
    let defaults = Defaults::read(folder)?;
    Ok((Prompter::new(Arc::new(Tokenizer::load(folder)?))?, defaults))
}

/// Pieces of work that run at once in [`beside`]: a long prompt takes a core, and memory that is many times its text.
const BESIDE: usize = 2;
static PLACES: Semaphore = Semaphore::const_new(BESIDE);

/// Does work that takes long, such as making a long prompt, beside the thread that serves the sockets. Where much of it comes together, it
/// waits for its turn; a caller that has gone before that costs nothing.
///
/// # Errors
/// What the work says, or `server_error` when it panicked.
pub async fn beside<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let _place = PLACES.acquire().await.map_err(|error| Error::new(Code::ServerError, "no place to work").detail(error.to_string()))?;
    blocking(work).await
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    ended(tokio::task::spawn_blocking(work).await)
}

fn created(source: &Source, shelf: &Shelf) -> u64 {
    let path = match source {
        Source::Gguf(path) => Some(path.clone()),
        source => shelf.place(source).ok().map(|folder| folder.join("config.json")),
    };
    let modified = |path| std::fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
    // A model without files, or whose files are still to come, is as old as the program: that is the same from one start to the next.
    let time = path.and_then(modified).or_else(|| std::env::current_exe().ok().and_then(modified)).unwrap_or_else(SystemTime::now);
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// A loaded model: turns in, text out.
pub struct Model {
    /// The name it is served under.
    pub id: String,
    /// What its engine can do.
    pub capabilities: Arc<Capabilities>,
    /// Sampling that its makers recommend.
    pub defaults: Defaults,
    /// Its engine.
    pub engine: Engine,
    prompter: Prompter,
    grammars: Arc<Compiler>,
    /// The special tokens that mark thoughts and calls, for requests without and with tools.
    visible: [Visible; 2],
}

/// What is asked of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Ask {
    /// How many tokens may be made, at least one.
    pub max_tokens: u32,
    /// `None`: plain greedy decoding.
    pub sampling: Option<Sampling>,
    /// How many ids ahead the engine may guess: 0 none, `None` as many as it thinks best.
    pub speculation: Option<u32>,
    /// What the answer may say; `None` anything.
    pub constraint: Option<Constraint>,
    /// The answer ends at the earliest of these.
    pub stop: Vec<String>,
    /// Whether the stop string itself is part of the answer.
    pub include_stop: bool,
    /// What is kept of prompts and answers is shared by requests of the same salt alone.
    pub salt: Arc<str>,
}

impl Model {
    fn new(id: String, prompter: Prompter, engine: Engine, capabilities: Arc<Capabilities>, defaults: Defaults) -> Self {
        let grammars = Arc::new(Compiler::new(Arc::clone(prompter.tokenizer()), Arc::clone(&capabilities)));
        let detokeniser = prompter.tokenizer().detokeniser();
        let visible = [false, true].map(|tools| detokeniser.specials(&prompter.format(tools).marks()));
        Self { id, capabilities, defaults, engine, prompter, grammars, visible }
    }

    fn alive(&self) -> bool {
        matches!(&*self.engine.phase().borrow(), Phase::Ready(_))
    }

    /// The token ids of a conversation, ready for an answer. Costs some 50 µs for a short one and grows with its length.
    ///
    /// # Errors
    /// `invalid_value` when the model's template refuses the conversation; `context_length_exceeded` when its text alone says that it cannot fit, so
    /// that a text of megabytes is not tokenised to be refused.
    pub fn prompt(&self, turns: &[Turn], options: &PromptOptions) -> Result<Prompt> {
        let text = self.text(turns, options)?;
        let PromptOptions { tools, signatures, .. } = options;
        let (least, window) = (self.prompter.tokenizer().at_least(&text), self.capabilities.context_length);
        if least > window as usize {
            return Err(self.too_long(&format!("at least {least}")));
        }
        let ids = self.prompter.tokenizer().encode(&text, false).map_err(|error| Error::new(Code::ServerError, error.to_string()))?;
        let with_tools = !tools.is_empty();
        let parser = Parser::of(self.prompter.format(with_tools), Arc::clone(signatures), &text);
        Ok(Prompt { ids, parser, visible: Arc::clone(&self.visible[usize::from(with_tools)]) })
    }

    /// The text of a conversation, up to where the model is to speak.
    ///
    /// # Errors
    /// `invalid_value` when the model's template refuses the conversation.
    pub fn text(&self, turns: &[Turn], options: &PromptOptions) -> Result<String> {
        let PromptOptions { enable_thinking, prefill, effort, tools, .. } = options;
        let prefill = prefill.as_deref().unwrap_or_default();
        self.prompter.text(turns, &Writing { tools, enable_thinking: *enable_thinking, effort: *effort, prefill })
    }

    /// How it marks thoughts and calls, in requests with or without tools.
    #[must_use]
    pub fn format(&self, with_tools: bool) -> Format {
        self.prompter.format(with_tools)
    }

    /// The special tokens among these marks.
    pub(super) fn special(&self, marks: &[&str]) -> Visible {
        self.prompter.tokenizer().detokeniser().specials(marks)
    }

    /// What an answer may say that keeps to this grammar. The first request under a grammar waits until it is compiled, beside the thread that serves the sockets.
    ///
    /// # Errors
    /// As [`Compiler::constraint`].
    pub async fn constraint(&self, grammar: Grammar) -> Result<Constraint> {
        self.grammars.constraint(grammar).await
    }

    /// What compiles its grammars.
    pub(crate) fn grammars(&self) -> &Arc<Compiler> {
        &self.grammars
    }

    /// How many tokens an answer to a prompt of this length can have.
    ///
    /// # Errors
    /// `context_length_exceeded` when not even one fits.
    pub fn room(&self, prompt_tokens: usize) -> Result<u32> {
        let window = self.capabilities.context_length;
        let left = u32::try_from(prompt_tokens).ok().and_then(|prompt| window.checked_sub(prompt)).unwrap_or(0);
        if left == 0 {
            return Err(self.too_long(&prompt_tokens.to_string()));
        }
        Ok(left)
    }

    fn too_long(&self, tokens: &str) -> Error {
        let window = self.capabilities.context_length;
        let what = format!("the prompt has {tokens} tokens, but the window is {window} for prompt and answer together");
        Error::new(Code::ContextLengthExceeded, what).hint("shorten the input")
    }

    /// Queues a prompt of this client and gives its answer as a stream of text. Dropping the stream cancels it.
    ///
    /// # Errors
    /// As [`Engine::submit`].
    pub fn answer(&self, client: Client, prompt: Vec<u32>, ask: Ask) -> Result<Answer> {
        self.answer_at(self.engine.place(client)?, prompt, ask)
    }

    /// As [`Model::answer`], in a place that has been held for it.
    ///
    /// # Errors
    /// As [`Place::submit`].
    pub fn answer_at(&self, place: Place, prompt: Vec<u32>, ask: Ask) -> Result<Answer> {
        let Ask { max_tokens, sampling, constraint, speculation, stop, include_stop, salt } = ask;
        let reuse = Reuse { salt, ..Reuse::default() };
        let generation = place.submit(Request { prompt, max_tokens, sampling, constraint, speculation, reuse })?;
        Ok(Answer::new(generation, self.prompter.tokenizer(), stop, include_stop))
    }

    /// As [`Model::answer_at`], with thoughts and calls told apart from words. The answer ends after `most_calls` calls.
    ///
    /// # Errors
    /// As [`Place::submit`].
    pub fn converse(&self, place: Place, prompt: Prompt, ask: Ask, most_calls: Option<u32>) -> Result<Answer> {
        let Prompt { ids, parser, visible } = prompt;
        let answer = self.answer_at(place, ids, ask)?;
        Ok(match parser {
            Some(parser) => answer.parsed(parser, visible, most_calls),
            None => answer,
        })
    }
}
