//! Tools, and the choice among them. `completions::tools` reads them.

use schemars::JsonSchema;
use serde_json::{Map, Value};

use crate::responses::schema::tools::{CustomFormat, OtherInnerTool};

/// Something that the model may call.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub(super) enum ChatTool {
    Function(ChatFunctionTool),
    Custom(ChatCustomTool),
    Other(OtherInnerTool),
}

/// A function with arguments.
#[derive(JsonSchema)]
pub(super) struct ChatFunctionTool {
    #[schemars(extend("const" = "function"))]
    r#type: String,
    function: ChatFunction,
}

/// What a function is.
#[derive(JsonSchema)]
pub(super) struct ChatFunction {
    #[schemars(regex(pattern = r"^[a-zA-Z0-9_-]{1,64}$"))]
    name: String,
    description: Option<String>,
    /// A JSON schema of its arguments.
    parameters: Option<Map<String, Value>>,
    /// Whether arguments have to be of that schema.
    strict: Option<bool>,
}

/// A tool that takes a text.
#[derive(JsonSchema)]
pub(super) struct ChatCustomTool {
    #[schemars(extend("const" = "custom"))]
    r#type: String,
    custom: ChatCustom,
}

/// What such a tool is.
#[derive(JsonSchema)]
pub(super) struct ChatCustom {
    #[schemars(regex(pattern = r"^[a-zA-Z0-9_-]{1,64}$"))]
    name: String,
    description: Option<String>,
    /// The form of the text.
    format: Option<CustomFormat>,
}

/// Whether and what the model has to call.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub(super) enum ChatToolChoice {
    Mode(#[schemars(extend("enum" = ["none", "auto", "required"]))] String),
    Function(ChatNamedFunction),
    Custom(ChatNamedCustom),
    Allowed(ChatAllowedChoice),
}

/// This function.
#[derive(JsonSchema)]
pub(super) struct ChatNamedFunction {
    #[schemars(extend("const" = "function"))]
    r#type: String,
    function: ChatName,
}

/// This tool that takes a text.
#[derive(JsonSchema)]
pub(super) struct ChatNamedCustom {
    #[schemars(extend("const" = "custom"))]
    r#type: String,
    custom: ChatName,
}

/// The name of one of the tools.
#[derive(JsonSchema)]
pub(super) struct ChatName {
    name: String,
}

/// None but these.
#[derive(JsonSchema)]
pub(super) struct ChatAllowedChoice {
    #[schemars(extend("const" = "allowed_tools"))]
    r#type: String,
    allowed_tools: ChatAllowed,
}

/// Which these are.
#[derive(JsonSchema)]
pub(super) struct ChatAllowed {
    #[schemars(extend("enum" = ["auto", "required", null]))]
    mode: Option<String>,
    tools: Vec<ChatAllowedTool>,
}

/// A tool that may be called.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub(super) enum ChatAllowedTool {
    Function(ChatNamedFunction),
    Custom(ChatNamedCustom),
    Other(OtherInnerTool),
}
