//! The list of models, in the form of the API with two fields more: the window and whether the model is loaded.

use serde::Serialize;

use crate::models::{Entry, Models};

/// All models.
#[derive(Serialize)]
pub(crate) struct List {
    object: &'static str,
    data: Vec<Model>,
}

/// One model.
#[derive(Serialize)]
pub(crate) struct Model {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    context_length: Option<u32>,
    loaded: bool,
}

impl From<Entry> for Model {
    fn from(entry: Entry) -> Self {
        let Entry { id, created, context_length, loaded } = entry;
        Self { id, object: "model", created, owned_by: "emberd", context_length, loaded }
    }
}

/// All models that are served.
pub(crate) fn list(models: &Models) -> List {
    List { object: "list", data: models.list().into_iter().map(Model::from).collect() }
}

/// The one with this name.
pub(crate) fn one(models: &Models, id: &str) -> Option<Model> {
    models.list().into_iter().find(|entry| entry.id == id).map(Model::from)
}
