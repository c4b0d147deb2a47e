//! Whether the schemas of tools can be used: those of strict tools, and of tools that have to be called. One that cannot is named.

use super::tools::Tools;
use crate::engine::Constraint;
use crate::error::{Code, Result};
use crate::grammar::Grammar;
use crate::models::Model;

/// The constraint of an answer that has to call a tool.
///
/// # Errors
/// `unsupported_parameter` where the engine cannot hold an answer to anything, `invalid_value` at the parameters of the first
/// tool whose schema is wrong, or beyond what an answer can be held to.
pub(super) async fn forced(model: &Model, tools: &Tools, grammar: Grammar) -> Result<Constraint> {
    match model.constraint(grammar).await {
        Ok(constraint) => Ok(constraint),
        Err(error) if error.code == Code::InvalidValue => {
            at_fault(model, tools).await?;
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
pub(super) async fn at_fault(model: &Model, tools: &Tools) -> Result<()> {
    for (path, schema) in tools.schemas() {
        model.constraint(schema).await.map_err(|error| error.at_fault(path))?;
    }
    Ok(())
}
