//! The messages of a conversation and their blocks. `conversation` and `blocks` read them.

use schemars::JsonSchema;
use serde_json::{Map, Value};

/// A message of a conversation.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub(super) enum AnthropicMessage {
    User(AnthropicUser),
    Assistant(AnthropicAssistant),
    System(AnthropicSystem),
}

/// What the user says, and what came of uses of tools.
#[derive(JsonSchema)]
pub(super) struct AnthropicUser {
    #[schemars(extend("const" = "user"))]
    role: String,
    content: AnthropicUserContent,
}

/// What the assistant said, thought and called for.
#[derive(JsonSchema)]
pub(super) struct AnthropicAssistant {
    #[schemars(extend("const" = "assistant"))]
    role: String,
    content: AnthropicAssistantContent,
}

/// What the system says in the middle of it.
#[derive(JsonSchema)]
pub(super) struct AnthropicSystem {
    #[schemars(extend("const" = "system"))]
    role: String,
    content: AnthropicText,
}

/// A text, or blocks.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub(super) enum AnthropicUserContent {
    Text(String),
    Blocks(Vec<AnthropicUserBlock>),
}

/// A text, or blocks.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub(super) enum AnthropicAssistantContent {
    Text(String),
    Blocks(Vec<AnthropicAssistantBlock>),
}

/// A text, or blocks of words.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub(super) enum AnthropicText {
    Text(String),
    Blocks(Vec<AnthropicWords>),
}

/// A text, or blocks of text.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub(super) enum AnthropicPlain {
    Text(String),
    Blocks(Vec<AnthropicTextBlock>),
}

/// Text.
#[derive(JsonSchema)]
pub(super) struct AnthropicTextBlock {
    #[schemars(extend("const" = "text"))]
    r#type: String,
    text: String,
}

/// Words of a message.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub(super) enum AnthropicWords {
    Text(AnthropicTextBlock),
    Document(AnthropicDocument),
    SearchResult(AnthropicSearchResult),
    ToolReference(AnthropicToolReference),
}

/// A document of plain text.
#[derive(JsonSchema)]
pub(super) struct AnthropicDocument {
    #[schemars(extend("const" = "document"))]
    r#type: String,
    title: Option<String>,
    /// What is said of it.
    context: Option<String>,
    source: AnthropicSource,
}

/// The text of a document.
#[derive(JsonSchema)]
#[schemars(tag = "type", rename_all = "snake_case")]
pub(super) enum AnthropicSource {
    /// As it is.
    Text { data: String },
    /// In blocks.
    Content { content: AnthropicPlain },
}

/// Something that was found.
#[derive(JsonSchema)]
pub(super) struct AnthropicSearchResult {
    #[schemars(extend("const" = "search_result"))]
    r#type: String,
    title: String,
    source: String,
    content: AnthropicPlain,
}

/// One of the tools, by its name.
#[derive(JsonSchema)]
pub(super) struct AnthropicToolReference {
    #[schemars(extend("const" = "tool_reference"))]
    r#type: String,
    tool_name: String,
}

/// A block of the user's.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub(super) enum AnthropicUserBlock {
    Words(AnthropicWords),
    ToolResult(AnthropicToolResult),
}

/// What came of a use of a tool.
#[derive(JsonSchema)]
pub(super) struct AnthropicToolResult {
    #[schemars(extend("const" = "tool_result"))]
    r#type: String,
    /// The id of the use.
    #[schemars(length(min = 1))]
    tool_use_id: String,
    content: Option<AnthropicText>,
    /// True: the model is told that it failed.
    is_error: Option<bool>,
}

/// A block of the assistant's.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub(super) enum AnthropicAssistantBlock {
    Words(AnthropicWords),
    ToolUse(AnthropicToolUse),
    Thinking(AnthropicThought),
    RedactedThinking(AnthropicSealedThought),
    Hosted(AnthropicHosted),
}

/// A use of a tool, which its result has to follow.
#[derive(JsonSchema)]
pub(super) struct AnthropicToolUse {
    #[schemars(extend("const" = "tool_use"))]
    r#type: String,
    #[schemars(length(min = 1))]
    id: String,
    name: String,
    input: Map<String, Value>,
}

/// What the model thought; its signature is not looked at.
#[derive(JsonSchema)]
pub(super) struct AnthropicThought {
    #[schemars(extend("const" = "thinking"))]
    r#type: String,
    thinking: String,
}

/// Thoughts that another server has sealed, which are left out.
#[derive(JsonSchema)]
pub(super) struct AnthropicSealedThought {
    #[schemars(extend("const" = "redacted_thinking"))]
    r#type: String,
}

/// What a provider ran and answered by itself: the model is told that it happened, with all other fields as they are.
#[derive(JsonSchema)]
pub(super) struct AnthropicHosted {
    #[schemars(regex(pattern = "^(server_tool_use|mcp_tool_use)$|_tool_result$"), extend("examples" = ["web_search_tool_result"]))]
    r#type: String,
}
