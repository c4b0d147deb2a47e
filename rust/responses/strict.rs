//! Whether the schemas of a request can be used: those of strict tools, of tools that have to be called, and of the form of the answer. One that cannot is named.

use std::sync::Arc;

use super::format::Format;
use super::request::Request;
use super::tools::Tools;
use crate::engine::Constraint;
use crate::error::{Code, Result};
use crate::grammar::{Compiler, Grammar};
use crate::models;

/// The constraint of an answer that has to call a tool.
///
/// # Errors
/// `unsupported_parameter` where the engine cannot hold an answer to anything, `invalid_value` at the parameters of the first
/// tool whose schema is wrong, or beyond what an answer can be held to.
pub(super) async fn forced(grammars: &Arc<Compiler>, tools: &Tools, grammar: Grammar) -> Result<Constraint> {
    match grammars.constraint(grammar).await {
        Ok(constraint) => Ok(constraint),
        Err(error) if error.code == Code::InvalidValue => {
            at_fault(grammars, tools).await?;
            Err(error.at("tools"))
        }
        Err(error) if error.code == Code::UnsupportedParameter => Err(error.at("tool_choice")),
        Err(error) => Err(error),
    }
}

/// Looks at the schemas one by one.
///
/// # Errors
/// `invalid_value` at the parameters of the first tool whose schema cannot be used.
pub(super) async fn at_fault(grammars: &Arc<Compiler>, tools: &Tools) -> Result<()> {
    for (path, schema) in tools.schemas() {
        grammars.constraint(schema).await.map_err(|error| error.at_fault(path))?;
    }
    Ok(())
}

/// Checks, before there is a model, what an answer is to be held to. What names special tokens of a model is left to that.
///
/// # Errors
/// `invalid_value` at the first schema or grammar that cannot be used; as [`Compiler::constraint`].
pub async fn check(request: &Request) -> Result<()> {
    let Request { tools, echo, .. } = request;
    if echo.format == Format::Text && tools.schemas().is_empty() {
        return Ok(());
    }
    let grammars = models::grammars()?;
    if let Some(grammar) = tools.grammar(echo.parallel_tool_calls) {
        forced(&grammars, tools, grammar).await?;
    }
    form_at_fault(&grammars, &echo.format).await?;
    at_fault(&grammars, tools).await
}

/// Looks at the form of the answer alone.
///
/// # Errors
/// As [`check`].
async fn form_at_fault(grammars: &Arc<Compiler>, format: &Format) -> Result<()> {
    match format.grammar() {
        Some(Grammar::Lark(text)) if text.contains('<') => Ok(()),
        Some(grammar) => grammars.constraint(grammar).await.map(drop).map_err(|error| format.at_fault(error)),
        None => Ok(()),
    }
}
