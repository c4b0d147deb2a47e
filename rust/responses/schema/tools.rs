//! Tools, and the choice among them. `tools` reads them.

use schemars::JsonSchema;
use serde_json::{Map, Value};

/// Something that the model may call.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub(super) enum Tool {
    Function(FunctionTool),
    Custom(CustomTool),
    Namespace(NamespaceTool),
    Other(OtherTool),
}

/// A function with arguments.
#[derive(JsonSchema)]
pub(super) struct FunctionTool {
    #[schemars(extend("const" = "function"))]
    r#type: String,
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
pub(super) struct CustomTool {
    #[schemars(extend("const" = "custom"))]
    r#type: String,
    #[schemars(regex(pattern = r"^[a-zA-Z0-9_-]{1,64}$"))]
    name: String,
    description: Option<String>,
    /// The form of the text.
    format: Option<CustomFormat>,
}

/// The form of a text: the model is told its grammar.
#[derive(JsonSchema)]
pub(crate) struct CustomFormat {
    definition: Option<String>,
    /// The same in the form of Chat Completions.
    grammar: Option<CustomGrammar>,
}

/// A grammar within a form.
#[derive(JsonSchema)]
pub(crate) struct CustomGrammar {
    definition: Option<String>,
}

/// Tools of one name space: the model calls them by both names.
#[derive(JsonSchema)]
pub(super) struct NamespaceTool {
    #[schemars(extend("const" = "namespace"))]
    r#type: String,
    #[schemars(regex(pattern = r"^[a-zA-Z0-9_-]{1,64}$"))]
    name: String,
    tools: Vec<InnerTool>,
}

/// A tool in a name space.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub(super) enum InnerTool {
    Function(FunctionTool),
    Custom(CustomTool),
    Other(OtherInnerTool),
}

/// A tool of a kind that is left out of the prompt, such as `web_search`, whatever else it holds.
#[derive(JsonSchema)]
pub(super) struct OtherTool {
    #[schemars(extend("not" = { "enum": ["function", "custom", "namespace"] }))]
    r#type: String,
}

/// A tool of a kind that is left out of the prompt, whatever else it holds.
#[derive(JsonSchema)]
pub(crate) struct OtherInnerTool {
    #[schemars(extend("not" = { "enum": ["function", "custom"] }))]
    r#type: String,
}

/// Whether and what the model has to call.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub(super) enum ToolChoice {
    Mode(#[schemars(extend("enum" = ["none", "auto", "required"]))] String),
    Named(NamedChoice),
    Allowed(AllowedChoice),
}

/// This one, once.
#[derive(JsonSchema)]
pub(super) struct NamedChoice {
    #[schemars(extend("enum" = ["function", "custom"]))]
    r#type: String,
    name: String,
    namespace: Option<String>,
}

/// None but these.
#[derive(JsonSchema)]
pub(super) struct AllowedChoice {
    #[schemars(extend("const" = "allowed_tools"))]
    r#type: String,
    #[schemars(extend("enum" = ["auto", "required", null]))]
    mode: Option<String>,
    tools: Vec<AllowedTool>,
}

/// A tool that may be called.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub(super) enum AllowedTool {
    Named(NamedChoice),
    Other(OtherInnerTool),
}
