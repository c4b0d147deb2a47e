//! `GET /openapi.json`: what this door takes and gives, as an OpenAPI 3.1 document. It is made from the types that answers are written from, from those
//! that describe requests (`responses::schema` and its namesakes) and from the table of errors; what the routes are for is written here.
//!
//! A route of [`super::routes`] has an entry in [`paths`]: a test holds the two together.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use bytes::Bytes;
use schemars::generate::{Contract, SchemaSettings};
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};

use super::health::Health;
use super::models::{List, Model};
use super::outbound::Envelope;
use super::routes::Counted;
use super::{messages, metrics, sse};
use crate::anthropic;
use crate::anthropic::schema::{CountMessageTokens, CreateMessage};
use crate::completions::schema::CreateChatCompletion;
use crate::completions::{Chunk, Completion};
use crate::error::Code;
use crate::responses::schema::CreateResponse;
use crate::responses::{Event, Response};

/// What only the routes of a body complain of.
const OF_BODIES: [u16; 4] = [408, 413, 415, 429];

/// The document, which is made once.
pub(crate) fn document() -> Bytes {
    static DOCUMENT: OnceLock<Bytes> = OnceLock::new();
    // Strings and numbers alone cannot fail to be written.
    DOCUMENT.get_or_init(|| serde_json::to_vec(&build()).unwrap_or_default().into()).clone()
}

fn build() -> Value {
    let mut schemas = Schemas::default();
    let paths = paths(&mut schemas);
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "emberd",
            "version": env!("CARGO_PKG_VERSION"),
            "description": env!("CARGO_PKG_DESCRIPTION"),
            "license": { "name": env!("CARGO_PKG_LICENSE"), "identifier": env!("CARGO_PKG_LICENSE") },
        },
        "servers": [{ "url": "/" }],
        "paths": paths,
        // Where the server has keys, one is needed.
        "security": [{}, { "bearer": [] }, { "apiKey": [] }],
        "components": {
            "securitySchemes": {
                "bearer": { "type": "http", "scheme": "bearer" },
                "apiKey": { "type": "apiKey", "in": "header", "name": "x-api-key" },
            },
            "schemas": schemas.all(),
        },
    })
}

/// Every route with its methods.
fn paths(schemas: &mut Schemas) -> Value {
    let id = json!([{
        "name": "id", "in": "path", "required": true, "description": "the name of a model; some have slashes in them",
        "schema": { "type": "string", "minLength": 1 },
    }]);
    let live = json!([{
        "name": "live", "in": "query", "required": false, "description": "asks for the process alone", "allowEmptyValue": true,
        "schema": { "type": "string" },
    }]);
    let envelope = schemas.json::<Envelope<'_>>();
    let responses = {
        let content = streamed(schemas.told::<Response>(), schemas.told::<Event<'_>>(), true);
        let body = schemas.asked::<CreateResponse>();
        post("createResponse", "Answers a conversation", body, content, &envelope)
    };
    let input_tokens = {
        let body = schemas.asked::<CreateResponse>();
        let content = schemas.json::<Counted>();
        post("countInputTokens", "Counts the tokens of a request's input, without an answer", body, content, &envelope)
    };
    let completions = {
        let chunk = json!({ "anyOf": [schemas.told::<Chunk<'_>>(), schemas.told::<Envelope<'_>>()] });
        // An answer that fails ends with an error.
        let content = streamed(schemas.told::<Completion<'_>>(), chunk, true);
        let body = schemas.asked::<CreateChatCompletion>();
        post("createChatCompletion", "Answers a conversation, in the form of Chat Completions", body, content, &envelope)
    };
    let of_messages = schemas.json::<anthropic::Envelope<'_>>();
    let messages = {
        let (message, event) = (schemas.told::<anthropic::Message<'_>>(), schemas.told::<anthropic::Event<'_>>());
        let content = streamed(message, event, false);
        let body = schemas.asked::<CreateMessage>();
        post("createMessage", "Answers a conversation, in the form of Anthropic's Messages", body, content, &of_messages)
    };
    let count = {
        let body = schemas.asked::<CountMessageTokens>();
        let content = schemas.json::<messages::Counted>();
        post("countMessageTokens", "Counts the tokens of such a request, without an answer", body, content, &of_messages)
    };
    let models = schemas.json::<List>();
    let model = schemas.json::<Model>();
    let health = schemas.json::<Health>();
    let mut of_health = get("getHealth", "Whether the server can serve", &live, health.clone(), &envelope);
    of_health["responses"]["503"] = json!({ "description": "it cannot", "content": health });
    of_health["security"] = json!([]);
    if let Some(answers) = of_health["responses"].as_object_mut() {
        answers.shift_remove("401");
    }
    let page = json!({ (metrics::TYPE): { "schema": { "type": "string" } } });
    let any = json!({ "application/json": { "schema": { "type": "object" } } });
    let none = json!([]);
    json!({
        "/v1/responses": { "post": responses },
        "/v1/responses/input_tokens": { "post": input_tokens },
        "/v1/chat/completions": { "post": completions },
        "/v1/messages": { "post": messages },
        "/v1/messages/count_tokens": { "post": count },
        "/v1/models": { "get": get("listModels", "The models that are served", &none, models, &envelope) },
        "/v1/models/{id}": { "get": get("getModel", "One of them", &id, model, &envelope) },
        "/health": { "get": of_health },
        "/metrics": { "get": get("getMetrics", "Counts and times for Prometheus", &none, page, &envelope) },
        "/openapi.json": { "get": get("getOpenApi", "This document", &none, any, &envelope) },
    })
}

/// An answer as an object, or as events of which this one's `data` is JSON. `done`: whether the last one is no JSON.
fn streamed(whole: Value, event: Value, done: bool) -> Value {
    let json = json!({ "type": "string", "contentMediaType": "application/json", "contentSchema": event });
    let data = if done { json!({ "anyOf": [json, { "const": "[DONE]" }] }) } else { json };
    let each = json!({
        "type": "object",
        "description": "a server-sent event",
        "required": ["data"],
        "properties": { "event": { "type": "string" }, "data": data },
    });
    json!({ "application/json": { "schema": whole }, (sse::TYPE): { "schema": each } })
}

/// A route that is asked for something; `content` is what it gives.
fn get(id: &str, summary: &str, parameters: &Value, content: Value, envelope: &Value) -> Value {
    let mut answers = errors(envelope, |status| !OF_BODIES.contains(&status) && status < 500);
    answers.insert("200".to_owned(), json!({ "description": "what was asked for", "content": content }));
    json!({ "operationId": id, "summary": summary, "parameters": parameters, "responses": answers })
}

/// A route that takes a body.
fn post(id: &str, summary: &str, body: Value, content: Value, envelope: &Value) -> Value {
    let mut answers = errors(envelope, |_| true);
    answers.insert("200".to_owned(), json!({ "description": "the answer", "content": content }));
    let body = json!({ "required": true, "content": { "application/json": { "schema": body } } });
    json!({ "operationId": id, "summary": summary, "requestBody": body, "responses": answers })
}

/// The errors of the table whose status a route may answer with, and any other, in this envelope.
fn errors(envelope: &Value, may: impl Fn(u16) -> bool) -> Map<String, Value> {
    let mut meanings: BTreeMap<u16, Vec<String>> = BTreeMap::new();
    for row in Code::ALL.iter().map(|code| code.row()).filter(|row| may(row.status)) {
        meanings.entry(row.status).or_default().push(format!("`{}`: {}", row.name, row.meaning));
    }
    let mut answers = Map::new();
    for (status, meanings) in meanings {
        answers.insert(status.to_string(), json!({ "description": meanings.join("; "), "content": envelope }));
    }
    answers.insert("default".to_owned(), json!({ "description": "an error", "content": envelope }));
    answers
}

/// Schemas of types, as requests are read and as answers are written.
struct Schemas {
    asked: SchemaGenerator,
    told: SchemaGenerator,
}

impl Default for Schemas {
    fn default() -> Self {
        let generator = |contract: Contract| {
            let settings = SchemaSettings::draft2020_12().with(|settings| {
                settings.definitions_path = "/components/schemas".into();
                settings.contract = contract;
            });
            settings.into_generator()
        };
        Self { asked: generator(Contract::Deserialize), told: generator(Contract::Serialize) }
    }
}

impl Schemas {
    fn asked<T: JsonSchema>(&mut self) -> Value {
        self.asked.subschema_for::<T>().to_value()
    }

    fn told<T: JsonSchema>(&mut self) -> Value {
        self.told.subschema_for::<T>().to_value()
    }

    /// A body of JSON.
    fn json<T: JsonSchema>(&mut self) -> Value {
        json!({ "application/json": { "schema": self.told::<T>() } })
    }

    /// All that have been referred to, by name.
    fn all(self) -> Map<String, Value> {
        let Self { mut asked, mut told } = self;
        let mut all = asked.take_definitions(true);
        all.extend(told.take_definitions(true));
        all.sort_keys();
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every reference in a value.
    fn references<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
        match value {
            Value::Object(object) => {
                found.extend(object.get("$ref").and_then(Value::as_str));
                object.values().for_each(|value| references(value, found));
            }
            Value::Array(array) => array.iter().for_each(|value| references(value, found)),
            _ => {}
        }
    }

    #[test]
    fn every_reference_leads_somewhere_and_no_name_stands_for_two_types() {
        let document: Value = serde_json::from_slice(&document()).unwrap();
        let mut found = Vec::new();
        references(&document, &mut found);
        assert!(found.len() > 30);
        for reference in found {
            assert!(document.pointer(reference.strip_prefix('#').unwrap()).is_some_and(Value::is_object), "{reference}");
        }
        let mut schemas = Schemas::default();
        paths(&mut schemas);
        let Schemas { mut asked, mut told } = schemas;
        let told = told.take_definitions(true);
        for (name, schema) in asked.take_definitions(true) {
            assert!(told.get(&name).is_none_or(|other| *other == schema), "{name}");
            assert!(!name.ends_with(|end: char| end.is_ascii_digit()), "{name}: two types have one name");
        }
        assert!(told.keys().all(|name| !name.ends_with(|end: char| end.is_ascii_digit())), "{:?}", told.keys());
    }
}
