//! How a call is written that is held to its schema: as the family writes calls where that is JSON, else as JSON between the family's own marks, which
//! its bodies read as well.
//!
//! What stands between these texts (the name, the arguments) and around them is the grammar's business.

use super::table::Family;

/// The form of one call: `trigger`, `open`, the name, `between`, the arguments, `close`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// What sets a call off: one of the family's openers.
    pub trigger: &'static str,
    /// What stands between that and the name.
    pub open: &'static str,
    /// What stands between the name and its arguments, a JSON object.
    pub between: &'static str,
    /// What ends the call.
    pub close: &'static str,
    /// The same without a trigger, where a whole answer may be a call: what stands before the name.
    pub bare: Option<&'static str>,
    /// Whether a call is a message of its own in a channel.
    pub channel: bool,
}

impl Written {
    /// A JSON object between `trigger` and `close`.
    const fn object(trigger: &'static str, close: &'static str) -> Self {
        Self { trigger, open: "\n{\"name\": \"", between: "\", \"arguments\": ", close, bare: None, channel: false }
    }

    /// A list with a JSON object between `trigger` and `close`.
    const fn list(trigger: &'static str, close: &'static str) -> Self {
        Self { open: "[{\"name\": \"", ..Self::object(trigger, close) }
    }
}

/// Hermes and Qwen, and Qwen-coder, GLM and Gemma, whose opener it is too.
const TAGGED: Written = Written::object("<tool_call>", "}\n</tool_call>");

impl Family {
    /// How this family writes a call that is held to its schema.
    #[must_use]
    pub fn written(&self) -> Written {
        match self.name {
            "harmony" => Written {
                trigger: "<|channel|>",
                open: "commentary to=functions.",
                between: " <|constrain|>json<|message|>",
                close: "",
                bare: None,
                channel: true,
            },
            "seed" => Written::object("<seed:tool_call>", "}\n</seed:tool_call>"),
            "minimax" => Written::object("<minimax:tool_call>", "}\n</minimax:tool_call>"),
            "dsml" => Written::object("<｜DSML｜function_calls>", "}\n</｜DSML｜function_calls>"),
            "mistral" => Written { trigger: "[TOOL_CALLS]", open: "", between: "[ARGS]", close: "", ..TAGGED },
            "deepseek" => {
                Written {
                    trigger: "<｜tool▁call▁begin｜>", open: "", between: "<｜tool▁sep｜>", close: "<｜tool▁call▁end｜>", ..TAGGED
                }
            }
            "kimi" => Written {
                trigger: "<|tool_call_begin|>",
                open: "functions.",
                between: ":0<|tool_call_argument_begin|>",
                close: "<|tool_call_end|>",
                ..TAGGED
            },
            "lfm2" => Written::list("<|tool_call_start|>", "}]<|tool_call_end|>"),
            "gemma-4" => Written::object("<|tool_call>", "}\n<tool_call|>"),
            "function-gemma" => Written::object("<start_function_call>", "}\n<end_function_call>"),
            "command-r" => Written {
                open: "[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"",
                between: "\", \"parameters\": ",
                ..Written::object("<|START_ACTION|>", "}\n]<|END_ACTION|>")
            },
            "nemotron" => Written::list("<TOOLCALL>", "}]</TOOLCALL>"),
            "granite" => Written::list("<|tool_call|>", "}]"),
            "llama-3" => Written {
                open: "{\"name\": \"",
                between: "\", \"parameters\": ",
                bare: Some("{\"name\": \""),
                ..Written::object("<|python_tag|>", "}")
            },
            _ => TAGGED,
        }
    }

    /// The other openers of the family: what may begin a call in another way than [`written`](Self::written) has it.
    pub fn other_openers(&self) -> impl Iterator<Item = &'static str> {
        let trigger = self.written().trigger;
        let bare = |start: &super::Start| matches!(start, super::Start::Bare);
        self.openers.iter().filter(move |(opener, start)| *opener != trigger && !bare(start)).map(|(opener, _)| *opener)
    }
}
