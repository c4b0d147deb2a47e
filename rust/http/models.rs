//! The list of models, in the form of the API with two fields more: the window and whether the model is loaded.

use schemars::JsonSchema;
use serde::Serialize;

use crate::models::{Entry, Models};

/// All models.
#[derive(JsonSchema, Serialize)]
#[schemars(rename = "ModelList")]
pub(crate) struct List {
    #[schemars(extend("const" = "list"))]
    object: &'static str,
    data: Vec<Model>,
}

/// One model.
#[derive(JsonSchema, Serialize)]
pub(crate) struct Model {
    /// The name to ask for it by.
    id: String,
    #[schemars(extend("const" = "model"))]
    object: &'static str,
    /// When its files were made, in seconds since 1970.
    created: u64,
    #[schemars(extend("const" = "emberd"))]
    owned_by: &'static str,
    /// Its window in tokens, prompt and answer together; null before it is loaded.
    context_length: Option<u32>,
    /// Whether it answers without loading first.
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
