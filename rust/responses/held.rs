//! What an answer is held to, out of the form that is asked for, the tools and the choice among them, and how it is then read.
//!
//! A call that has to be made goes before a form for words: some clients send both, meaning the same. Where calling is left to the model, a grammar is asked for by
//! a `strict` tool, by a form beside tools, and by a choice that leaves tools out; else the answer is free, which costs nothing. The grammar itself is written in `grammar`.

use std::sync::Arc;

use serde_json::{Value, json};

use super::answer::{INLINE, length, options};
use super::format::Format;
use super::request::Echo;
use super::strict;
use super::tools::Tools;
use crate::engine::Constraint;
use crate::error::{Code, Error, Result};
use crate::grammar::{Calls, Grammar, Tag, Thoughts, Whole};
use crate::models::{Model, beside};
use crate::prompt::Turn;
use crate::text::{self, Written};

/// How an answer is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reading {
    /// As the model writes thoughts, words and calls.
    Written,
    /// The same, where words are of a form: what is in them is theirs.
    Leading,
    /// All of it is words. There is no room for thoughts.
    Words,
    /// All of it is calls in one form, whichever way the model writes them else. There is no room for thoughts.
    Calls,
}

impl Reading {
    /// Whether the model may think first.
    pub(super) fn thinks(self) -> bool {
        matches!(self, Self::Written | Self::Leading)
    }
}

/// What an answer is held to.
pub(super) struct Hold {
    /// `None`: to nothing.
    pub(super) constraint: Option<Constraint>,
    /// How it is read.
    pub(super) reading: Reading,
}

/// Finds out what the answer is held to. The turns may be lent to another thread meanwhile; after an error they can be gone.
///
/// # Errors
/// `invalid_value` for a schema or a grammar that cannot be used, with where it stands; `unsupported_parameter` where the model cannot be held to it;
/// `queue_full` as [`Model::constraint`]; `server_error` as [`beside`].
pub(super) async fn hold(model: &Arc<Model>, turns: &mut Vec<Turn>, tools: &Tools, echo: &Echo) -> Result<Hold> {
    if let Some(grammar) = tools.grammar(echo.parallel_tool_calls) {
        let constraint = strict::forced(model.grammars(), tools, grammar).await?;
        // It goes before the form, which has to be one all the same.
        at_fault(model, &echo.format).await?;
        return Ok(Hold { constraint: Some(constraint), reading: Reading::Calls });
    }
    let form = echo.format.grammar();
    let free = Hold { constraint: None, reading: Reading::Written };
    if !model.capabilities.constraints
        && let Some(path) = tools.strict()
    {
        let what = format!("`{path}` is true, and this engine cannot hold an answer to a schema");
        return Err(Error::new(Code::UnsupportedParameter, what)
            .hint("send strict: false, or serve the model with another engine")
            .at(path));
    }
    // Tools that are left out are called by no answer of an engine without grammars either: a call of one is read as text. A form is refused below.
    let calls = !tools.is_empty() && (form.is_some() || (tools.ask_for_a_grammar() && model.capabilities.constraints));
    let thinks = form.is_some() && echo.reasoning.thinking() == Some(true) && model.format(false).tags.is_some();
    if !calls && !thinks {
        let Some(form) = form else { return Ok(free) };
        let constraint = model.constraint(form).await.map_err(|error| echo.format.at_fault(error))?;
        return Ok(Hold { constraint: Some(constraint), reading: Reading::Words });
    }
    let reading = if form.is_some() { Reading::Leading } else { Reading::Written };
    let format = model.format(!tools.is_empty());
    // Where thinking is off an answer of a form has none; free words may begin like a thought all the same, and are then read as one.
    let thinks = form.is_none() || echo.reasoning.thinking() != Some(false);
    let whole = Whole {
        thoughts: if thinks { thoughts(model, format, turns, tools, echo).await? } else { None },
        form: form.map(Box::new),
        calls: calls.then(|| self::calls(tools, format, !echo.parallel_tool_calls)),
        channels: format.family.written().channel,
    };
    match model.constraint(Grammar::Whole(whole)).await {
        Ok(constraint) => Ok(Hold { constraint: Some(constraint), reading }),
        Err(error) if error.code == Code::InvalidValue => {
            // Whose fault it is shows alone; where it is nobody's, together they are too much.
            at_fault(model, &echo.format).await?;
            strict::at_fault(model.grammars(), tools).await?;
            Err(error.at("tools"))
        }
        Err(error) if echo.format != Format::Text => Err(echo.format.at_fault(error)),
        Err(error) => Err(error.at_fault("tools")),
    }
}

/// Looks at the form alone.
async fn at_fault(model: &Model, format: &Format) -> Result<()> {
    let Some(grammar) = format.grammar() else { return Ok(()) };
    model.constraint(grammar).await.map(drop).map_err(|error| format.at_fault(error))
}

/// How thoughts are marked, and whether the prompt begins one.
async fn thoughts(model: &Arc<Model>, format: text::Format, turns: &mut Vec<Turn>, tools: &Tools, echo: &Echo) -> Result<Option<Thoughts>> {
    let Some(tags) = format.tags else { return Ok(None) };
    let options = options(tools, echo.reasoning);
    // A conversation that the template refuses is refused when its prompt is made.
    let inside = move |model: &Model, turns: &[Turn]| model.text(turns, &options).is_ok_and(|text| tags.inside(&text));
    let inside = if length(turns, tools) <= INLINE {
        inside(model, turns)
    } else {
        let (model, lent) = (Arc::clone(model), std::mem::take(turns));
        let (inside, back) = beside(move || Ok((inside(&model, &lent), lent))).await?;
        *turns = back;
        inside
    };
    Ok(Some(Thoughts { open: tags.open.into(), close: tags.close.into(), inside }))
}

/// The calls that there may be, as the family writes them. A tool that is not strict is given any object.
fn calls(tools: &Tools, format: text::Format, once: bool) -> Calls {
    let family = format.family;
    let written = family.written();
    let any = json!({"type": "object"});
    let tags = |begin: &dyn Fn(&str) -> String, all: bool| -> Vec<Tag> {
        let meant = tools.held().filter(|(_, schema)| all || schema.is_some());
        let tag = |(name, schema): (&str, Option<&Value>)| Tag {
            begin: begin(name).into(),
            schema: schema.unwrap_or(&any).to_string().into(),
            end: written.close.into(),
        };
        meant.map(tag).collect()
    };
    let Written { trigger, open, between, bare, .. } = written;
    let bare = bare.map(|open| tags(&|name| format!("{open}{name}{between}"), false)).unwrap_or_default();
    let names = tools.held().filter(|(_, schema)| schema.is_some()).map(|(name, _)| format!("\"{name}\"").into());
    Calls {
        trigger: trigger.into(),
        tags: tags(&|name| format!("{trigger}{open}{name}{between}"), true),
        names: if bare.is_empty() { Vec::new() } else { names.collect() },
        bare,
        barred: family.other_openers().map(Into::into).collect(),
        passed: family.dropped.iter().map(|mark| (*mark).into()).collect(),
        once,
    }
}
