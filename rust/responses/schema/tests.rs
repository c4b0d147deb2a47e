//! Holds the description of requests to what reads them, in both directions: fields, words, bounds.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::*;
use crate::error::Error;
use crate::responses::Request;
use crate::responses::validate::looked;

/// Fields that are read as they are, without being looked at one by one.
const PASSED_OVER: [&str; 5] = ["extra_body", "generation_mode", "mtp_depth", "input[].action", "input[].operation"];
/// Words of the readers' own, which no request that is taken has in these places.
const OWN: [&str; 16] = [
    // What names and calls are made of, what is taken out of hosted calls, and where forms are at fault.
    "__",
    "_call",
    "result",
    "text.format",
    "text.format.definition",
    "text.format.schema",
    "text.format.type",
    // What is refused by its name.
    "compaction",
    "compaction_trigger",
    "computer_screenshot",
    "image_url",
    "input_audio",
    "input_image",
    "input_video",
    "item_reference",
    "mcp_approval_response",
];

/// The schema, with references in reach.
struct Described {
    root: Value,
    definitions: Value,
}

impl Described {
    fn new() -> Self {
        let root = schemars::schema_for!(CreateResponse).to_value();
        let definitions = root["$defs"].clone();
        Self { root, definitions }
    }

    /// What may stand where this schema does: itself, or each of its branches.
    fn branches<'a>(&'a self, schema: &'a Value) -> Vec<&'a Value> {
        if let Some(name) = schema["$ref"].as_str() {
            return self.branches(&self.definitions[name.rsplit('/').next().unwrap()]);
        }
        let inner = ["anyOf", "oneOf"].iter().filter_map(|key| schema[*key].as_array()).flatten();
        let inner: Vec<&Value> = inner.flat_map(|branch| self.branches(branch)).collect();
        if inner.is_empty() { vec![schema] } else { inner }
    }

    /// Every field, by its path.
    fn fields(&self, schema: &Value, path: &str, found: &mut BTreeSet<String>) {
        for branch in self.branches(schema) {
            for (key, field) in branch["properties"].as_object().into_iter().flatten() {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                found.insert(path.clone());
                self.fields(field, &path, found);
            }
            if branch["items"].is_object() {
                self.fields(&branch["items"], &format!("{path}[]"), found);
            }
        }
    }

    /// Values of which at least one takes each branch of the schema, with every field that there may be.
    fn samples(&self, schema: &Value) -> Vec<Value> {
        let mut samples = Vec::new();
        for branch in self.branches(schema) {
            if let Some(value) = branch.get("const") {
                samples.push(value.clone());
            } else if let Some(values) = branch["enum"].as_array() {
                samples.extend(values.iter().filter(|value| !value.is_null()).cloned());
            } else if let Some(fields) = branch["properties"].as_object() {
                let fields: Vec<(&String, Vec<Value>)> = fields.iter().map(|(key, field)| (key, self.samples(field))).collect();
                let most = fields.iter().map(|(_, samples)| samples.len()).max().unwrap_or(0);
                samples.extend((0..most).map(|at| {
                    let each = fields.iter().filter(|(_, samples)| !samples.is_empty());
                    each.map(|(key, samples)| ((*key).clone(), samples[at % samples.len()].clone())).collect::<Value>()
                }));
            } else {
                samples.extend(self.plain(branch));
            }
        }
        samples
    }

    /// Samples of what is no object of fields.
    fn plain(&self, schema: &Value) -> Vec<Value> {
        let kind = schema["type"].as_array().and_then(|kinds| kinds.iter().find(|kind| **kind != "null")).unwrap_or(&schema["type"]);
        match kind.as_str() {
            Some("string") if schema["examples"].is_array() => vec![schema["examples"][0].clone()],
            Some("string") => vec![json!("word")],
            Some("boolean") => vec![json!(true), json!(false)],
            Some("integer" | "number") => vec![schema.get("minimum").cloned().unwrap_or(json!(1))],
            Some("object") => vec![json!({})],
            Some("array") => self.samples(&schema["items"]).into_iter().map(|item| json!([item])).collect(),
            Some("null") => vec![],
            _ => vec![json!({"any": "thing"})],
        }
    }
}

fn read(body: &Value) -> Result<Request, Error> {
    Request::from_json(body.to_string().as_bytes())
}

#[test]
fn every_field_that_is_read_is_described_and_the_other_way_round() {
    let described = Described::new();
    let mut fields = BTreeSet::new();
    described.fields(&described.root, "", &mut fields);
    looked::take();
    for (key, field) in described.root["properties"].as_object().unwrap() {
        for sample in described.samples(field) {
            // A request is read up to its first fault: each field is looked at beside nothing else.
            let _ = read(&json!({ "input": "hi", key: sample }));
        }
        let _ = read(&json!({ "input": "hi", key: 7.5 }));
    }
    let looked: BTreeSet<String> = looked::take().into_iter().filter(|path| !path.ends_with(".word")).collect();
    let unknown: Vec<_> = looked.difference(&fields).collect();
    assert!(unknown.is_empty(), "read and not described: {unknown:#?}");
    let passed_over = |path: &&String| PASSED_OVER.iter().any(|known| path == known);
    let unread: Vec<_> = fields.difference(&looked).filter(|path| !passed_over(path)).collect();
    assert!(unread.is_empty(), "described and not read: {unread:#?}");
}

/// Every text in a schema that is no description.
fn words_of(value: &Value, found: &mut BTreeSet<String>) {
    match value {
        Value::String(text) => _ = found.insert(text.clone()),
        Value::Array(values) => values.iter().for_each(|value| words_of(value, found)),
        Value::Object(fields) => {
            for (key, value) in fields {
                found.insert(key.clone());
                if key != "description" || !value.is_string() {
                    words_of(value, found);
                }
            }
        }
        _ => {}
    }
}

#[test]
fn every_word_that_the_readers_know_is_described() {
    let (mut known, mut unknown) = (BTreeSet::new(), BTreeSet::new());
    words_of(&Described::new().root, &mut known);
    for source in [
        include_str!("../request.rs"),
        include_str!("../controls.rs"),
        include_str!("../format.rs"),
        include_str!("../tools.rs"),
        include_str!("../input.rs"),
    ] {
        // Texts of one word, on lines that are code: names of fields, kinds and choices.
        let code = source.lines().map(str::trim_start).filter(|line| !line.starts_with("//") && !line.starts_with("#["));
        let quoted = code.flat_map(|line| line.split('"').skip(1).step_by(2));
        let word = |text: &&str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_lowercase() || b"_.".contains(&byte));
        unknown.extend(quoted.filter(word).filter(|word| !known.contains(*word)).map(str::to_owned));
    }
    let own = OWN.map(str::to_owned).into_iter().collect();
    assert_eq!(unknown, own, "read and not described, or no longer read");
}

/// Checks that what a schema allows at its bounds is taken, and that what is beyond them is not. `body` puts a value where the schema belongs.
fn probe(described: &Described, path: &str, schema: &Value, body: &dyn Fn(Value) -> Value) {
    for branch in described.branches(schema) {
        let taken = |value: Value| read(&body(value.clone())).unwrap_or_else(|error| panic!("{path}: {value} is refused: {error}"));
        let refused = |value: Value| {
            let error = read(&body(value.clone())).err().unwrap_or_else(|| panic!("{path}: {value} is taken"));
            assert!(error.param.as_deref().is_some_and(|param| param.starts_with(path)), "{path}: {value}: {error:?}");
        };
        for value in branch["enum"].as_array().into_iter().flatten() {
            taken(value.clone());
        }
        if branch["enum"].is_array() {
            refused(json!("no_such_word"));
        }
        for (bound, step) in [("minimum", -1), ("maximum", 1)] {
            let Some(bound) = branch.get(bound) else { continue };
            taken(bound.clone());
            match (bound.as_i64(), bound.as_f64()) {
                // One that 64 bits hold has no neighbour that they hold as well.
                (Some(i64::MIN), _) => {}
                (Some(number), _) => refused(json!(number + step)),
                (None, Some(number)) if number < 1e18 => refused(json!(number + 0.005 * step as f64)),
                _ => {}
            }
        }
        if let Some(most) = branch["maxLength"].as_u64() {
            taken(json!("x".repeat(most as usize)));
            refused(json!("x".repeat(most as usize + 1)));
        }
        if branch["minLength"].as_u64() == Some(1) {
            refused(json!(""));
        }
        if let Some(most) = branch["maxItems"].as_u64() {
            taken(json!(vec!["x"; most as usize]));
            refused(json!(vec!["x"; most as usize + 1]));
        }
        if branch["type"] == json!("null") && branch["description"].is_string() {
            refused(json!("anything"));
        }
    }
}

#[test]
fn what_is_at_a_bound_is_taken_and_what_is_beyond_it_is_not() {
    let described = Described::new();
    let properties = described.root["properties"].as_object().unwrap();
    for (key, field) in properties.iter().filter(|(key, _)| *key != "input" && *key != "tool_choice") {
        probe(&described, key, field, &|value| json!({ "input": "hi", key: value }));
        for branch in described.branches(field) {
            for (inner, schema) in branch["properties"].as_object().into_iter().flatten() {
                if branch["required"].is_array() {
                    continue; // Its other fields are needed too; those of tools and formats are tested where these are.
                }
                probe(&described, &format!("{key}.{inner}"), schema, &|value| json!({ "input": "hi", key: { inner: value } }));
            }
        }
    }
    let biases = &properties["logit_bias"]["additionalProperties"];
    probe(&described, "logit_bias.7", biases, &|value| json!({ "input": "hi", "logit_bias": { "7": value } }));
    let include = &described.branches(&properties["include"])[0]["items"];
    for word in described.samples(include) {
        read(&json!({ "input": "hi", "include": [word] })).unwrap();
    }
    assert!(read(&json!({ "input": "hi", "include": ["no_such_word"] })).is_err());
}

#[test]
fn items_parts_tools_and_choices_that_are_described_are_read() {
    let described = Described::new();
    let properties = described.root["properties"].as_object().unwrap();
    for sample in described.samples(&properties["input"]) {
        let Value::Array(items) = &sample else { continue };
        let kind = items[0]["type"].as_str().unwrap_or("message");
        let call = json!({ "type": "function_call", "call_id": "word", "name": "f", "arguments": "{}" });
        let output = json!({ "type": "function_call_output", "call_id": "word", "output": "x" });
        let body = match kind {
            kind if kind.ends_with("_output") => json!({ "input": [call, items[0]] }),
            "function_call" | "custom_tool_call" | "local_shell_call" | "shell_call" | "apply_patch_call" | "computer_call" => {
                json!({ "input": [items[0], output] })
            }
            _ => json!({ "input": sample }),
        };
        read(&body).unwrap_or_else(|error| panic!("{body}: {error}"));
    }
    for sample in described.samples(&properties["tools"]) {
        read(&json!({ "input": "hi", "tools": sample })).unwrap_or_else(|error| panic!("{sample}: {error}"));
    }
    let named = json!([{ "type": "function", "name": "word" }, { "type": "namespace", "name": "word", "tools": [{ "type": "function", "name": "word" }] }]);
    for sample in described.samples(&properties["tool_choice"]) {
        read(&json!({ "input": "hi", "tools": named, "tool_choice": sample })).unwrap_or_else(|error| panic!("{sample}: {error}"));
    }
    for sample in described.samples(&properties["text"]) {
        let taken = read(&json!({ "input": "hi", "text": sample }));
        taken.unwrap_or_else(|error| panic!("{sample}: {error}"));
    }
}
