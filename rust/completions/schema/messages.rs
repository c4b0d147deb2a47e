//! The messages of a conversation and their parts. `completions::messages` reads them.

use schemars::JsonSchema;

/// A message of a conversation.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub(super) enum ChatMessage {
    Words(ChatWords),
    Assistant(ChatAssistant),
    Tool(ChatToolResult),
}

/// Words of the system's or the user's. `developer` is as good as `system`.
#[derive(JsonSchema)]
pub(super) struct ChatWords {
    #[schemars(extend("enum" = ["system", "developer", "user"]))]
    role: String,
    content: ChatContent,
    /// Has no effect.
    name: Option<String>,
}

/// What the assistant said, thought and called for.
#[derive(JsonSchema)]
pub(super) struct ChatAssistant {
    #[schemars(extend("const" = "assistant"))]
    role: String,
    content: Option<ChatContent>,
    /// What it said in the place of an answer.
    refusal: Option<String>,
    /// What it thought.
    reasoning_content: Option<String>,
    /// Each is answered by a message of the role `tool` that follows.
    tool_calls: Option<Vec<ChatCall>>,
    /// Has no effect.
    name: Option<String>,
    /// Not supported: it has given way to `tool_calls`.
    function_call: Option<()>,
    /// Not supported: the server takes text only.
    audio: Option<()>,
}

/// What came of a call.
#[derive(JsonSchema)]
pub(super) struct ChatToolResult {
    #[schemars(extend("const" = "tool"))]
    role: String,
    /// The id of the call.
    #[schemars(length(min = 1))]
    tool_call_id: String,
    content: ChatContent,
    /// Has no effect.
    name: Option<String>,
}

/// A text, or parts of one.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub(super) enum ChatContent {
    Text(String),
    Parts(Vec<ChatPart>),
}

/// A part of a text.
#[derive(JsonSchema)]
#[schemars(tag = "type", rename_all = "snake_case")]
pub(super) enum ChatPart {
    /// Text.
    Text { text: String },
    /// What an assistant said in the place of an answer.
    Refusal { refusal: String },
}

/// A call of a tool.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub(super) enum ChatCall {
    Function(ChatFunctionCall),
    Custom(ChatCustomCall),
}

/// A call of a function.
#[derive(JsonSchema)]
pub(super) struct ChatFunctionCall {
    #[schemars(length(min = 1))]
    id: String,
    #[schemars(extend("enum" = ["function", null]))]
    r#type: Option<String>,
    function: ChatArguments,
}

/// Which function was called, and with what.
#[derive(JsonSchema)]
pub(super) struct ChatArguments {
    name: String,
    /// JSON.
    arguments: String,
}

/// A call of a tool that takes a text.
#[derive(JsonSchema)]
pub(super) struct ChatCustomCall {
    #[schemars(length(min = 1))]
    id: String,
    #[schemars(extend("const" = "custom"))]
    r#type: String,
    custom: ChatInput,
}

/// Which tool was called, and with what.
#[derive(JsonSchema)]
pub(super) struct ChatInput {
    name: String,
    input: String,
}
