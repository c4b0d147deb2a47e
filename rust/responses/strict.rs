//! Whether the schemas of tools can be used: those of strict tools, and of tools that have to be called. One that cannot is named.
//!
//! Where calling is left to the model a strict schema is looked at and not enforced.

use super::tools::Tools;
use crate::engine::Constraint;
use crate::error::{Code, Result};
use crate::grammar::Grammar;
use crate::models::Model;

/// Looks at the schemas of strict tools where calling is left to the model.
///
/// # Errors
/// `invalid_value` at the parameters of the first tool whose schema is wrong, or beyond what an answer can be held to.
pub(super) async fn check(model: &Model, tools: &Tools) -> Result<()> {
    if tools.is_forced() {
        return Ok(());
    }
    // All as one grammar: it is kept from one request of a conversation to the next, however many tools there are.
    let Some(grammar) = tools.strict() else { return Ok(()) };
    match model.constraint(grammar).await {
        Ok(_) => Ok(()),
        // An engine that holds no answer to anything may still be asked.
        Err(error) if error.code == Code::UnsupportedParameter => Ok(()),
        // Together they may be too much, which they need not be.
        Err(error) if error.code == Code::InvalidValue => at_fault(model, tools).await,
        Err(error) => Err(error),
    }
}

/// The constraint of an answer that has to call a tool.
///
/// # Errors
/// `unsupported_parameter` where the engine cannot hold an answer to anything, `invalid_value` as [`check`].
pub(super) async fn forced(model: &Model, tools: &Tools, grammar: Grammar) -> Result<Constraint> {
    match model.constraint(grammar).await {
        Ok(constraint) => Ok(constraint),
        Err(error) if error.code == Code::InvalidValue => {
            at_fault(model, tools).await?;
            Err(error.at("tools"))
        }
        Err(error) if error.code == Code::UnsupportedParameter => Err(error.at("tool_choice")),
        Err(error) => Err(error.at("tools")),
    }
}

/// Looks at the schemas one by one.
async fn at_fault(model: &Model, tools: &Tools) -> Result<()> {
    for (path, schema) in tools.schemas() {
        model.constraint(schema).await.map_err(|error| error.at(path))?;
    }
    Ok(())
}
