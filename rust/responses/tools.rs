//! The tools of a request: which the model is shown, under which names, and what its calls of them are called in the answer.
//!
//! Functions keep their names; those of a namespace become `namespace__name`, since templates know no namespaces. A custom tool, which takes a text, is
//! shown as a function with that text as its only argument. Tools that a provider would run itself are not shown.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::validate::{At, NAME};
use crate::error::{Code, Error, Result};
use crate::grammar::{Grammar, Tag, Tagged};
use crate::prompt::definition;
use crate::text::Signatures;

/// How a call that is held to a grammar begins and ends.
const CALL: &str = "<tool_call>";
const END: &str = "}\n</tool_call>";
/// The argument of a custom tool.
pub(crate) const INPUT: &str = "input";
/// What stands between a namespace and a name.
const BETWEEN: &str = "__";

/// The name of a tool as templates know it.
pub(super) fn flat(namespace: Option<&str>, name: &str) -> String {
    namespace.map_or_else(|| name.to_owned(), |namespace| format!("{namespace}{BETWEEN}{name}"))
}

#[derive(Debug, Clone)]
struct Tool {
    name: String,
    namespace: Option<String>,
    custom: bool,
    description: String,
    parameters: Value,
    /// Whether the client relies on its schema.
    strict: bool,
    /// Where it stands in the request.
    path: String,
}

/// The tools that the model is shown, by the names that the template knows them by.
#[derive(Debug, Clone, Default)]
pub struct Tools {
    shown: BTreeMap<String, Tool>,
    /// Their names in the order of the request.
    order: Vec<String>,
    /// Those of which one has to be called; empty where that is left to the model.
    forced: Vec<String>,
    /// Those that the choice leaves out: they are not shown, and a call of one is text.
    barred: Vec<String>,
    /// Whether it is one of them by name, which is called once.
    once: bool,
}

/// Of one request: what is shown, and what the response repeats.
pub(super) struct Read {
    pub(super) tools: Tools,
    pub(super) echo: Vec<Value>,
    pub(super) choice: Value,
}

impl Tools {
    /// Name, namespace, and whether it takes a text, of the tool that the model calls so. A name that nobody gave is repeated.
    #[must_use]
    pub fn named<'a>(&'a self, flat: &'a str) -> (&'a str, Option<&'a str>, bool) {
        self.shown.get(flat).map_or((flat, None, false), |tool| (tool.name.as_str(), tool.namespace.as_deref(), tool.custom))
    }

    /// The tools as templates know them.
    #[must_use]
    pub fn definitions(&self) -> Arc<[Value]> {
        let tools = self.order.iter().filter_map(|name| Some((name, self.shown.get(name)?)));
        tools.map(|(name, tool)| definition(name, &tool.description, tool.parameters.clone())).collect()
    }

    /// Their names, each with the schema of its arguments; those that are left out with the schema `false`.
    #[must_use]
    pub fn signatures(&self) -> Arc<Signatures> {
        let shown = self.shown.iter().map(|(name, tool)| (name.clone(), tool.parameters.clone()));
        // Without tools nothing is a call.
        let barred = self.barred.iter().filter(|_| !self.is_empty()).map(|name| (name.clone(), Value::Bool(false)));
        Arc::new(shown.chain(barred).collect())
    }

    /// What an answer is held to that has to call one of them, however the model writes calls else; `None` where calling is left to the model.
    #[must_use]
    pub fn grammar(&self, parallel: bool) -> Option<Grammar> {
        self.calls(&self.forced, (self.once || !parallel).then_some(1))
    }

    /// What an answer is that consists of calls of these; `None` where there are none.
    fn calls(&self, names: &[String], most: Option<u32>) -> Option<Grammar> {
        let tag = |name: &String| {
            let begin = format!("{CALL}\n{{\"name\": {}, \"arguments\": ", Value::from(name.as_str()));
            let schema = self.shown.get(name)?.parameters.to_string();
            Some(Tag { begin: begin.into(), schema: schema.into(), end: END.into() })
        };
        let tags: Vec<Tag> = names.iter().filter_map(tag).collect();
        (!tags.is_empty()).then(|| Grammar::Tagged(Tagged { trigger: CALL.into(), tags, text: false, least: 1, most }))
    }

    /// Whether an answer in which calling is left to the model is held to a grammar for the sake of its tools: some are strict, or some are left out.
    pub(super) fn ask_for_a_grammar(&self) -> bool {
        !self.barred.is_empty() || self.held().any(|(name, _)| self.shown.get(name).is_some_and(|tool| tool.strict))
    }

    /// Where it stands in the request that a tool is strict: the first one.
    pub(super) fn strict(&self) -> Option<String> {
        let strict = self.order.iter().filter_map(|name| self.shown.get(name)).find(|tool| tool.strict);
        strict.map(|tool| format!("{}.strict", tool.path))
    }

    /// Their names in the order of the request, each with the schema that its arguments are held to where the model may call it; `None` for any object.
    pub(super) fn held(&self) -> impl Iterator<Item = (&str, Option<&Value>)> {
        let shown = self.order.iter().filter_map(|name| Some((name.as_str(), self.shown.get(name)?)));
        shown.map(|(name, tool)| (name, (tool.strict || tool.custom).then_some(&tool.parameters)))
    }

    /// The schemas of the tools of which one has to be called, else of those that are strict, each with where it stands in the request.
    pub(super) fn schemas(&self) -> Vec<(String, Grammar)> {
        let meant = |name: &String, tool: &Tool| if self.forced.is_empty() { tool.strict } else { self.forced.contains(name) };
        let tools = self.order.iter().filter_map(|name| self.shown.get(name).filter(|tool| meant(name, tool)));
        tools.map(|tool| (format!("{}.parameters", tool.path), Grammar::JsonSchema(tool.parameters.to_string().into()))).collect()
    }

    /// How many bytes they may add to a prompt, roughly.
    #[must_use]
    pub fn weight(&self) -> usize {
        self.shown.iter().map(|(name, tool)| name.len() + tool.description.len() + tool.parameters.to_string().len()).sum()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Adds the tool that is described here: a function, or a custom one.
    pub(crate) fn add(&mut self, at: &At<'_, '_>, namespace: Option<&str>, custom: bool) -> Result<()> {
        self.add_of(NAME, at, namespace, custom)
    }

    /// As [`Tools::add`], where names have at most this many characters.
    fn add_of(&mut self, most: usize, at: &At<'_, '_>, namespace: Option<&str>, custom: bool) -> Result<()> {
        let name = at.need("name")?;
        let name = name.name_of(most)?;
        let described = at.get("description").map(|at| at.string()).transpose()?.unwrap_or_default();
        let (description, parameters, strict) = if custom {
            let schema = json!({"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]});
            (format(at, described)?, schema, false)
        } else {
            let parameters = at.get("parameters").map(|at| at.object().cloned()).transpose()?.unwrap_or_default();
            let strict = at.get("strict").map(|at| at.boolean()).transpose()?.unwrap_or(false);
            (described.to_owned(), schema(parameters), strict)
        };
        let flat = flat(namespace, name);
        let namespace = namespace.map(str::to_owned);
        let tool = Tool { name: name.to_owned(), namespace, custom, description, parameters, strict, path: at.path() };
        if self.shown.insert(flat.clone(), tool).is_some() {
            return Err(Error::new(Code::InvalidValue, format!("`{}` has a name that another tool has: {flat:?}", at.path()))
                .hint("give every tool a name of its own")
                .at(at.path()));
        }
        self.order.push(flat);
        Ok(())
    }

    /// This one has to be called, once.
    pub(crate) fn force(&mut self, name: String) {
        self.forced = vec![name];
        self.once = true;
    }

    /// Leaves these alone.
    pub(crate) fn allow(&mut self, allowed: &[String]) {
        (self.order, self.barred) = std::mem::take(&mut self.order).into_iter().partition(|name| allowed.contains(name));
        self.shown.retain(|name, _| allowed.contains(name));
    }

    /// One of them has to be called.
    pub(crate) fn require(&mut self, at: &At<'_, '_>) -> Result<()> {
        if self.order.is_empty() {
            let what = format!("`{}` asks for a call, and there are no tools that could be called", at.path());
            return Err(Error::new(Code::InvalidValue, what).hint("give tools, or leave the choice out").at(at.path()));
        }
        self.forced.clone_from(&self.order);
        Ok(())
    }

    /// The name, as templates know it, of the tool that a choice names.
    pub(crate) fn find(&self, namespace: Option<&str>, name: &At<'_, '_>) -> Result<String> {
        let flat = flat(namespace, name.string()?);
        if self.shown.contains_key(&flat) {
            return Ok(flat);
        }
        let names = self.order.join(", ");
        let what =
            if names.is_empty() { "the name of a tool, and there are none".to_owned() } else { format!("the name of a tool: {names}") };
        Err(name.wrong(what))
    }
}

/// Reads the tools and the choice among them. Functions have names of at most `longest` characters.
pub(super) fn read(root: &At<'_, '_>, longest: usize) -> Result<Read> {
    let mut tools = Tools::default();
    let mut echo = Vec::new();
    if let Some(list) = root.get("tools") {
        for at in list.each()? {
            let mut kept = at.object()?.clone();
            match at.need("type")?.string()? {
                "function" => {
                    tools.add_of(longest, &at, None, false)?;
                    for key in ["description", "parameters", "strict"] {
                        kept.entry(key).or_insert(Value::Null);
                    }
                }
                "custom" => tools.add(&at, None, true)?,
                "namespace" => {
                    let namespace = at.need("name")?;
                    let namespace = namespace.name()?;
                    for inner in at.need("tools")?.each()? {
                        match inner.need("type")?.string()? {
                            "function" => tools.add(&inner, Some(namespace), false)?,
                            "custom" => tools.add(&inner, Some(namespace), true)?,
                            kind => tracing::debug!(kind, namespace, "a tool of this kind is left out of the prompt"),
                        }
                    }
                }
                kind => tracing::debug!(kind, "a tool of this kind is left out of the prompt"),
            }
            echo.push(Value::Object(kept));
        }
    }
    let choice = choose(&mut tools, root)?;
    Ok(Read { tools, echo, choice })
}

/// Reads the choice, and leaves those tools that it allows.
fn choose(tools: &mut Tools, root: &At<'_, '_>) -> Result<Value> {
    let Some(at) = root.get("tool_choice") else { return Ok(Value::from("auto")) };
    match at.value {
        Value::String(_) => match at.one_of(&[("none", "none"), ("auto", "auto"), ("required", "required")])? {
            "required" => {
                tools.require(&at)?;
                Ok(Value::from("required"))
            }
            "none" => {
                *tools = Tools::default();
                Ok(Value::from("none"))
            }
            mode => Ok(Value::from(mode)),
        },
        Value::Object(object) => match at.need("type")?.string()? {
            "function" | "custom" => {
                let name = chosen(tools, &at)?;
                tools.force(name);
                Ok(Value::Object(object.clone()))
            }
            "allowed_tools" => {
                let mode = at.get("mode").map(|at| at.one_of(&[("auto", "auto"), ("required", "required")])).transpose()?.unwrap_or("auto");
                let mut allowed = Vec::new();
                for tool in at.need("tools")?.each()? {
                    tool.object()?;
                    match tool.need("type")?.string()? {
                        "function" | "custom" => allowed.push(chosen(tools, &tool)?),
                        kind => tracing::debug!(kind, "a tool of this kind is not shown, allowed or not"),
                    }
                }
                tools.allow(&allowed);
                if mode == "required" {
                    tools.require(&at)?;
                }
                let mut kept: Map<String, Value> = object.clone();
                kept.insert("mode".to_owned(), Value::from(mode));
                Ok(Value::Object(kept))
            }
            kind => {
                let error = at.unsupported(format_args!("asks for a tool of kind \"{kind}\", which this server does not run"));
                Err(error.hint("choose one of the functions, or \"auto\""))
            }
        },
        _ => Err(at.not("a string or an object")),
    }
}

/// The name, as templates know it, of the tool that a choice names.
fn chosen(tools: &Tools, at: &At<'_, '_>) -> Result<String> {
    let namespace = at.get("namespace").map(|at| at.string()).transpose()?;
    tools.find(namespace, &at.need("name")?)
}

/// A schema of arguments with what templates look for in one.
fn schema(mut schema: Map<String, Value>) -> Value {
    if !schema.contains_key("type") && !schema.contains_key("$ref") {
        schema.insert("type".to_owned(), Value::from("object"));
    }
    if schema.get("type").is_some_and(|kind| kind == "object") {
        let properties = schema.entry("properties").or_insert_with(|| json!({}));
        if properties.is_null() {
            *properties = json!({});
        }
    }
    Value::Object(schema)
}

/// The description of a custom tool, with the form that its text should have.
fn format(at: &At<'_, '_>, description: &str) -> Result<String> {
    let Some(format) = at.get("format") else { return Ok(description.to_owned()) };
    format.object()?;
    // Chat Completions has it one level deeper.
    let (inner, definition) = (format.get("grammar"), format.get("definition"));
    inner.as_ref().map(|at| at.object()).transpose()?;
    let definition = inner.as_ref().and_then(|grammar| grammar.get("definition")).or(definition);
    let grammar = definition.map(|at| at.string()).transpose()?;
    Ok(grammar.map_or_else(|| description.to_owned(), |grammar| format!("{description}\nThe input follows this grammar:\n{grammar}")))
}
