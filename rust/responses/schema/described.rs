//! A description of requests, taken apart, and held to what reads them: every field, every word and every bound, in both directions.
//!
//! What is described and who reads it is said by the tests of each form.

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema;
use serde_json::{Value, json};

use crate::error::Error;
use crate::responses::validate::looked;

/// Reads a request, and says what is wrong with it.
pub(crate) type Read = fn(&Value) -> Result<(), Error>;

/// A description, with references in reach, beside what reads the requests that it describes.
pub(crate) struct Described {
    pub(crate) root: Value,
    definitions: Value,
    read: Read,
    /// The least that is taken: each field is tried in it.
    least: Value,
}

impl Described {
    pub(crate) fn new<T: JsonSchema>(read: Read, least: Value) -> Self {
        let root = schemars::schema_for!(T).to_value();
        let definitions = root["$defs"].clone();
        Self { root, definitions, read, least }
    }

    /// Its fields at the top.
    pub(crate) fn properties(&self) -> impl Iterator<Item = (&String, &Value)> {
        self.root["properties"].as_object().unwrap().iter()
    }

    /// A request that has this value in this field.
    pub(crate) fn with(&self, key: &str, value: Value) -> Value {
        let mut body = self.least.clone();
        body[key] = value;
        body
    }

    /// Every field, by its path.
    pub(crate) fn fields(&self) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        self.fields_of(&self.root, "", &mut found);
        found
    }
    /// What may stand where this schema does: itself, or each of its branches.
    pub(crate) fn branches<'a>(&'a self, schema: &'a Value) -> Vec<&'a Value> {
        if let Some(name) = schema["$ref"].as_str() {
            return self.branches(&self.definitions[name.rsplit('/').next().unwrap()]);
        }
        let inner = ["anyOf", "oneOf"].iter().filter_map(|key| schema[*key].as_array()).flatten();
        let inner: Vec<&Value> = inner.flat_map(|branch| self.branches(branch)).collect();
        if inner.is_empty() { vec![schema] } else { inner }
    }

    /// Those of a schema.
    fn fields_of(&self, schema: &Value, path: &str, found: &mut BTreeSet<String>) {
        for branch in self.branches(schema) {
            for (key, field) in branch["properties"].as_object().into_iter().flatten() {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                found.insert(path.clone());
                self.fields_of(field, &path, found);
            }
            if branch["items"].is_object() {
                self.fields_of(&branch["items"], &format!("{path}[]"), found);
            }
        }
    }

    /// Values of which at least one takes each branch of the schema, with every field that there may be.
    pub(crate) fn samples(&self, schema: &Value) -> Vec<Value> {
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

    /// Takes what there is in a request of a sample, whatever becomes of it, and says which fields have been looked at.
    fn looked(&self) -> BTreeSet<String> {
        looked::take();
        for (key, field) in self.properties() {
            for sample in self.samples(field) {
                // A request is read up to its first fault: each field is looked at beside nothing else.
                let _ = (self.read)(&self.with(key, sample));
            }
            let _ = (self.read)(&self.with(key, json!(7.5)));
        }
        looked::take().into_iter().filter(|path| !path.ends_with(".word")).collect()
    }

    /// Checks that all fields that are read are described, and the other way round. `passed_over` are read as they are, without being looked at one by
    /// one; `beneath` are those of a request that is made of this one.
    pub(crate) fn check_fields(&self, passed_over: &[&str], beneath: &BTreeSet<String>) {
        let (fields, looked) = (self.fields(), self.looked());
        let unknown: Vec<_> = looked.difference(&fields).filter(|path| !beneath.contains(*path)).collect();
        assert!(unknown.is_empty(), "read and not described: {unknown:#?}");
        let unread: Vec<_> = fields.difference(&looked).filter(|path| !passed_over.contains(&path.as_str())).collect();
        assert!(unread.is_empty(), "described and not read: {unread:#?}");
    }

    /// Checks that all words that the sources of the readers have are described, but for their own.
    pub(crate) fn check_words(&self, sources: &[&str], own: &[&str]) {
        let (mut known, mut unknown) = (BTreeSet::new(), BTreeSet::new());
        words_of(&self.root, &mut known);
        for source in sources {
            let source = source.split("#[cfg(test)]").next().unwrap();
            // Texts of one word, on lines that are code: names of fields, kinds and choices.
            let code = source.lines().map(str::trim_start).filter(|line| !line.starts_with("//") && !line.starts_with("#["));
            let quoted = code.flat_map(|line| line.split('"').skip(1).step_by(2));
            let word = |text: &&str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_lowercase() || b"_.".contains(&byte));
            unknown.extend(quoted.filter(word).filter(|word| !known.contains(*word)).map(str::to_owned));
        }
        let own: BTreeSet<String> = own.iter().map(|word| (*word).to_owned()).collect();
        assert_eq!(unknown, own, "read and not described, or no longer read");
    }

    /// Checks that what is at a bound is taken, and that what is beyond it is not, at the top and one level below; `but` are fields that need others beside them.
    pub(crate) fn check_bounds(&self, but: &[&str]) {
        for (key, field) in self.properties().filter(|(key, _)| !but.contains(&key.as_str())) {
            self.probe(key, field, &|value| self.with(key, value));
            for branch in self.branches(field) {
                for (inner, schema) in branch["properties"].as_object().into_iter().flatten() {
                    if branch["required"].is_array() {
                        continue; // Its other fields are needed too; those of tools and formats are tested where these are.
                    }
                    self.probe(&format!("{key}.{inner}"), schema, &|value| self.with(key, json!({ inner: value })));
                }
            }
        }
    }

    /// Checks that what a schema allows at its bounds is taken, and that what is beyond them is not. `body` puts a value where the schema belongs.
    pub(crate) fn probe(&self, path: &str, schema: &Value, body: &dyn Fn(Value) -> Value) {
        for branch in self.branches(schema) {
            let taken = |value: Value| self.take(&body(value));
            let refused = |value: Value| self.refuse(path, &body(value));
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
            if branch["minItems"].as_u64() == Some(1) {
                refused(json!([]));
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

    /// Checks that a request is taken.
    pub(crate) fn take(&self, body: &Value) {
        (self.read)(body).unwrap_or_else(|error| panic!("{body}: {error}"));
    }

    /// Checks that a request is refused for what is in this place.
    pub(crate) fn refuse(&self, path: &str, body: &Value) {
        let error = (self.read)(body).err().unwrap_or_else(|| panic!("{path}: {body} is taken"));
        assert!(error.param.as_deref().is_some_and(|param| param.starts_with(path)), "{path}: {body}: {error:?}");
    }

    /// Checks that a request with any of the samples of a field is taken, as it is and without a field that one need not have, and that it is refused without
    /// one that it has to have. `body` makes a request of a sample, `but` are places of fields that some need.
    pub(crate) fn take_samples(&self, key: &str, but: &[&str], body: &dyn Fn(Value) -> Value) {
        let field = &self.root["properties"][key];
        for sample in self.samples(field) {
            self.take(&body(sample.clone()));
            let mut places = BTreeMap::new();
            self.places(field, &sample, "", &mut places);
            for (place, needed) in places.into_iter().filter(|(place, _)| !but.contains(&place.as_str())) {
                let mut without = sample.clone();
                let (parent, name) = place.rsplit_once('/').unwrap();
                without.pointer_mut(parent).unwrap().as_object_mut().unwrap().remove(name);
                let taken = (self.read)(&body(without));
                assert_eq!(taken.is_err(), needed, "without {place}: {sample}: {taken:?}");
            }
        }
    }

    /// Where the fields of a sample are, each with whether it has to be there, by every branch that the sample is of.
    fn places(&self, schema: &Value, sample: &Value, place: &str, found: &mut BTreeMap<String, bool>) {
        for branch in self.branches(schema).into_iter().filter(|branch| is_of(branch, sample)) {
            let needed = |name: &String| branch["required"].as_array().is_some_and(|required| required.iter().any(|each| each == name));
            for (name, field) in branch["properties"].as_object().into_iter().flatten() {
                if let Some(inner) = sample.get(name) {
                    let place = format!("{place}/{name}");
                    self.places(field, inner, &place, found);
                    *found.entry(place).or_default() |= needed(name);
                }
            }
            for (at, inner) in sample.as_array().into_iter().flatten().enumerate() {
                self.places(&branch["items"], inner, &format!("{place}/{at}"), found);
            }
        }
    }
}

/// Whether a sample is of a branch, by its kind: by what the branch says of its `type` or `role`, else by what JSON it is.
fn is_of(branch: &Value, sample: &Value) -> bool {
    let says = |key: &str, word: &Value| {
        let field = &branch["properties"][key];
        let may = |words: &Value| words.as_array().is_some_and(|words| words.contains(word));
        let allowed = field["enum"].is_null() || may(&field["enum"]);
        field.get("const").map_or(allowed, |only| only == word) && !may(&field["not"]["enum"])
    };
    match sample {
        Value::Object(fields) => {
            branch["properties"].is_object() && ["type", "role"].iter().all(|key| says(key, fields.get(*key).unwrap_or(&Value::Null)))
        }
        Value::Array(_) => branch["items"].is_object(),
        _ => false,
    }
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
