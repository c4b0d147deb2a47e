//! The items of a conversation and their parts. `input` reads them.

use schemars::JsonSchema;
use serde_json::Value;

/// A conversation.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub(super) enum Input {
    /// What the user says.
    Text(String),
    /// Everything in order.
    Items(Vec<InputItem>),
}

/// An item of a conversation. `id` and `status` are as the client has them.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub(super) enum InputItem {
    Message(InputMessage),
    Assistant(AssistantMessage),
    Reasoning(InputReasoning),
    FunctionCall(InputFunctionCall),
    CustomToolCall(InputCustomToolCall),
    LocalCall(InputLocalCall),
    CallOutput(InputCallOutput),
    LocalCallOutput(InputLocalCallOutput),
    LocalShellOutput(InputLocalShellOutput),
    HostedCall(InputHostedCall),
}

/// Words of the user's or the system's.
#[derive(JsonSchema)]
pub(super) struct InputMessage {
    id: Option<String>,
    status: Option<String>,
    #[schemars(extend("enum" = ["message", null]))]
    r#type: Option<String>,
    /// `developer` is as good as `system`.
    #[schemars(extend("enum" = ["user", "system", "developer"]))]
    role: String,
    content: Content,
}

/// Words of the assistant's.
#[derive(JsonSchema)]
pub(super) struct AssistantMessage {
    id: Option<String>,
    status: Option<String>,
    #[schemars(extend("enum" = ["message", null]))]
    r#type: Option<String>,
    #[schemars(extend("const" = "assistant"))]
    role: String,
    /// None where it only called tools.
    content: Option<Content>,
}

/// A text, or parts of one.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub(super) enum Content {
    Text(String),
    Parts(Vec<ContentPart>),
}

/// A part of a text.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub(super) enum ContentPart {
    Text(TextPart),
    Refusal(RefusalPart),
    File(FilePart),
}

/// Text.
#[derive(JsonSchema)]
pub(super) struct TextPart {
    #[schemars(extend("enum" = ["input_text", "output_text", "text", "summary_text", "reasoning_text"]))]
    r#type: String,
    text: String,
}

/// What an assistant said in the place of an answer.
#[derive(JsonSchema)]
pub(super) struct RefusalPart {
    #[schemars(extend("const" = "refusal"))]
    r#type: String,
    refusal: String,
}

/// A text file, which is read as text.
#[derive(JsonSchema)]
pub(super) struct FilePart {
    #[schemars(extend("const" = "input_file"))]
    r#type: String,
    filename: Option<String>,
    /// A data URL of a text.
    #[schemars(extend("examples" = ["data:text/plain,word"]))]
    file_data: String,
    /// Only null: files are not kept here.
    file_id: Option<()>,
    /// Only null: nothing is fetched.
    file_url: Option<()>,
}

/// What the model thought.
#[derive(JsonSchema)]
pub(super) struct InputReasoning {
    id: Option<String>,
    status: Option<String>,
    #[schemars(extend("const" = "reasoning"))]
    r#type: String,
    /// The thoughts as they were.
    content: Option<Content>,
    /// In their place where there are none.
    summary: Option<Content>,
    /// As this server sealed it: what another one did is refused (`invalid_encrypted_content`).
    #[schemars(extend("examples" = [""]))]
    encrypted_content: Option<String>,
}

/// A call of a function, which its output has to follow.
#[derive(JsonSchema)]
pub(super) struct InputFunctionCall {
    id: Option<String>,
    status: Option<String>,
    #[schemars(extend("const" = "function_call"))]
    r#type: String,
    #[schemars(length(min = 1))]
    call_id: String,
    name: String,
    namespace: Option<String>,
    /// JSON.
    arguments: String,
}

/// A call of a tool that takes a text, which its output has to follow.
#[derive(JsonSchema)]
pub(super) struct InputCustomToolCall {
    id: Option<String>,
    status: Option<String>,
    #[schemars(extend("const" = "custom_tool_call"))]
    r#type: String,
    #[schemars(length(min = 1))]
    call_id: String,
    name: String,
    namespace: Option<String>,
    input: String,
}

/// A call of something that the client has run by itself.
#[derive(JsonSchema)]
pub(super) struct InputLocalCall {
    id: Option<String>,
    status: Option<String>,
    #[schemars(extend("enum" = ["local_shell_call", "shell_call", "apply_patch_call", "computer_call"]))]
    r#type: String,
    #[schemars(length(min = 1))]
    call_id: String,
    /// What was done.
    action: Option<Value>,
    /// The other name of `action`.
    operation: Option<Value>,
}

/// What came of a call.
#[derive(JsonSchema)]
pub(super) struct InputCallOutput {
    id: Option<String>,
    status: Option<String>,
    #[schemars(extend("enum" = ["function_call_output", "custom_tool_call_output"]))]
    r#type: String,
    #[schemars(length(min = 1))]
    call_id: String,
    output: Content,
}

/// What came of a call of something that the client has run by itself.
#[derive(JsonSchema)]
pub(super) struct InputLocalCallOutput {
    id: Option<String>,
    status: Option<String>,
    #[schemars(extend("enum" = ["shell_call_output", "apply_patch_call_output", "computer_call_output"]))]
    r#type: String,
    #[schemars(length(min = 1))]
    call_id: String,
    #[schemars(extend("not" = { "type": "null" }))]
    output: Value,
}

/// What came of a call of a local shell.
#[derive(JsonSchema)]
pub(super) struct InputLocalShellOutput {
    /// That of the call, where there is no `call_id`.
    id: Option<String>,
    status: Option<String>,
    #[schemars(extend("const" = "local_shell_call_output"))]
    r#type: String,
    #[schemars(length(min = 1))]
    call_id: Option<String>,
    #[schemars(extend("not" = { "type": "null" }))]
    output: Value,
}

/// What a provider ran and answered by itself: the model is told that it happened, with all other fields as they are.
#[derive(JsonSchema)]
pub(super) struct InputHostedCall {
    id: Option<String>,
    status: Option<String>,
    #[schemars(extend("enum" = [
        "web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call", "mcp_list_tools", "mcp_approval_request", "mcp_call"
    ]))]
    r#type: String,
}
