//! The tools of a request, and the choice among them: what the Responses API says flat is here one level deeper.
//!
//! What becomes of them is said in [`crate::responses::tools`].

use serde_json::Value;

use crate::error::Result;
use crate::responses::Tools;
use crate::responses::validate::At;

pub(super) fn read(root: &At<'_, '_>) -> Result<Tools> {
    let mut tools = Tools::default();
    if let Some(list) = root.get("tools") {
        for at in list.each()? {
            at.object()?;
            match at.need("type")?.string()? {
                kind @ ("function" | "custom") => {
                    let tool = at.need(kind)?;
                    tool.object()?;
                    tools.add(&tool, None, kind == "custom")?;
                }
                kind => tracing::debug!(kind, "a tool of this kind is left out of the prompt"),
            }
        }
    }
    choose(&mut tools, root)?;
    Ok(tools)
}

/// Reads the choice, and leaves those tools that it allows.
fn choose(tools: &mut Tools, root: &At<'_, '_>) -> Result<()> {
    let Some(at) = root.get("tool_choice") else { return Ok(()) };
    match at.value {
        Value::String(_) => match at.one_of(&[("none", "none"), ("auto", "auto"), ("required", "required")])? {
            "required" => tools.require(&at)?,
            "none" => *tools = Tools::default(),
            _ => {}
        },
        Value::Object(_) => match at.need("type")?.string()? {
            kind @ ("function" | "custom") => {
                let name = named(tools, &at, kind)?;
                tools.force(name);
            }
            "allowed_tools" => {
                let inner = at.need("allowed_tools")?;
                inner.object()?;
                let required = inner.get("mode").map(|at| at.one_of(&[("auto", false), ("required", true)])).transpose()?;
                let mut allowed = Vec::new();
                for tool in inner.need("tools")?.each()? {
                    tool.object()?;
                    match tool.need("type")?.string()? {
                        kind @ ("function" | "custom") => allowed.push(named(tools, &tool, kind)?),
                        kind => tracing::debug!(kind, "a tool of this kind is not shown, allowed or not"),
                    }
                }
                tools.allow(&allowed);
                if required == Some(true) {
                    tools.require(&at)?;
                }
            }
            kind => {
                let error = at.unsupported(format_args!("asks for a tool of kind {kind:?}, which this server does not run"));
                return Err(error.hint("choose one of the functions, or \"auto\""));
            }
        },
        _ => return Err(at.not("a string or an object")),
    }
    Ok(())
}

/// The tool that a choice names, in an object of the name of its kind.
fn named(tools: &Tools, at: &At<'_, '_>, kind: &str) -> Result<String> {
    let inner = at.need(kind)?;
    inner.object()?;
    tools.find(None, &inner.need("name")?)
}
