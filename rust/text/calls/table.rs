//! The table of families: how each is recognised, what begins its calls, and what of its marks means nothing by itself.

use super::named;
use super::xml;

/// How the text after an opener is read.
#[derive(Debug, Clone, Copy)]
pub enum Start {
    /// `<tool_call>`: told apart by what follows.
    Tagged,
    /// JSON objects, alone or in a list, up to `close`.
    Json {
        /// Ends the region; may be missing.
        close: &'static str,
    },
    /// A JSON object that is the whole answer, whose name says that it is a call.
    Bare,
    /// A name and a JSON object.
    Named(&'static named::Form),
    /// Tags.
    Xml(&'static xml::Form),
    /// Python.
    Python {
        /// Ends the region; may be missing.
        close: &'static str,
    },
    /// Gemma's own.
    Gemma {
        /// Quotes texts.
        quote: &'static str,
        /// Ends the region; may be missing.
        close: &'static str,
    },
}

/// A family of models that write their calls in one way.
#[derive(Debug)]
pub struct Family {
    /// Its name, for logs and tests.
    pub name: &'static str,
    /// A template that has one of these is one of the family's.
    signs: &'static [&'static str],
    /// What begins a call, and how to go on from there. An opener that is part of the call is not read over.
    pub openers: &'static [(&'static str, Start)],
    /// Marks that are dropped wherever they stand outside calls: they only bracket.
    pub dropped: &'static [&'static str],
    /// Further marks that may be special tokens, whose text has to be seen.
    pub marks: &'static [&'static str],
}

impl Family {
    /// The family of a chat template; the way of Hermes for one that shows no other, which is how tools are then described to it.
    #[must_use]
    pub fn of(template: &str) -> &'static Self {
        TABLE.iter().find(|family| family.signs.iter().any(|sign| template.contains(sign))).unwrap_or(&HERMES)
    }

    /// All of them.
    pub fn all() -> impl Iterator<Item = &'static Self> {
        TABLE.iter().chain([&HERMES])
    }

    /// Every mark whose text has to be seen.
    pub fn marks(&self) -> impl Iterator<Item = &'static str> {
        let openers = self.openers.iter().map(|(opener, _)| *opener);
        openers.chain(self.dropped.iter().copied()).chain(self.marks.iter().copied())
    }
}

const TAGGED: (&str, Start) = ("<tool_call>", Start::Tagged);

/// Hermes, Qwen, and every model that is told of this form by us.
static HERMES: Family = Family { name: "hermes", signs: &["<tool_call>"], openers: &[TAGGED], dropped: &[], marks: &["</tool_call>"] };

/// What models of one family have in their templates and those of another have not comes first.
static TABLE: [Family; 17] = [
    Family {
        name: "harmony",
        signs: &["<|channel|>analysis"],
        // Its calls are channels: read in `harmony`.
        openers: &[],
        dropped: &[],
        marks: &["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"],
    },
    Family {
        name: "seed",
        signs: &["<seed:tool_call>"],
        openers: &[("<seed:tool_call>", Start::Xml(&xml::SEED))],
        dropped: &[],
        marks: &["</seed:tool_call>"],
    },
    Family {
        name: "minimax",
        signs: &["<minimax:tool_call>"],
        openers: &[("<minimax:tool_call>", Start::Xml(&xml::INVOKE))],
        dropped: &[],
        marks: &["</minimax:tool_call>"],
    },
    Family {
        name: "dsml",
        signs: &["｜DSML｜"],
        openers: &[("<｜DSML｜function_calls>", Start::Xml(&xml::DSML)), ("<｜DSML｜tool_calls>", Start::Xml(&xml::DSML))],
        dropped: &["</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"],
        marks: &["｜DSML｜"],
    },
    Family {
        name: "glm",
        signs: &["<arg_key>"],
        openers: &[TAGGED],
        dropped: &[],
        marks: &["</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    },
    Family {
        name: "qwen-coder",
        signs: &["<function="],
        openers: &[TAGGED, ("<function=", Start::Xml(&xml::CODER))],
        dropped: &[],
        marks: &["</tool_call>"],
    },
    Family {
        name: "mistral",
        signs: &["[TOOL_CALLS]"],
        openers: &[("[TOOL_CALLS]", Start::Named(&MISTRAL))],
        dropped: &[],
        marks: &["[ARGS]", "[CALL_ID]"],
    },
    Family {
        name: "deepseek",
        signs: &["<｜tool▁call▁begin｜>"],
        openers: &[("<｜tool▁call▁begin｜>", Start::Named(&DEEPSEEK))],
        dropped: &["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"],
        marks: &["<｜tool▁sep｜>", "<｜tool▁call▁end｜>"],
    },
    Family {
        name: "kimi",
        signs: &["<|tool_call_begin|>"],
        openers: &[("<|tool_call_begin|>", Start::Named(&KIMI))],
        dropped: &["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"],
        marks: &["<|tool_call_argument_begin|>", "<|tool_call_end|>"],
    },
    Family {
        name: "lfm2",
        signs: &["<|tool_call_start|>", "<|tool_list_start|>", "List of tools: ["],
        openers: &[("<|tool_call_start|>", Start::Python { close: "<|tool_call_end|>" })],
        dropped: &[],
        marks: &["<|tool_call_end|>"],
    },
    Family {
        name: "gemma-4",
        signs: &["<|tool_call>"],
        openers: &[("<|tool_call>", Start::Gemma { quote: "<|\"|>", close: "<tool_call|>" })],
        dropped: &[],
        marks: &["<tool_call|>", "<|\"|>"],
    },
    Family {
        name: "function-gemma",
        signs: &["<start_function_call>"],
        openers: &[("<start_function_call>", Start::Gemma { quote: "<escape>", close: "<end_function_call>" })],
        dropped: &[],
        marks: &["<end_function_call>", "<escape>"],
    },
    Family {
        name: "gemma",
        signs: &["<start_of_turn>"],
        openers: &[("```tool_code\n", Start::Python { close: "```" }), TAGGED],
        dropped: &[],
        marks: &["</tool_call>"],
    },
    Family {
        name: "command-r",
        signs: &["<|START_ACTION|>"],
        openers: &[("<|START_ACTION|>", Start::Json { close: "<|END_ACTION|>" })],
        dropped: &["<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"],
        marks: &["<|END_ACTION|>"],
    },
    Family {
        name: "nemotron",
        signs: &["<TOOLCALL>"],
        openers: &[("<TOOLCALL>", Start::Json { close: "</TOOLCALL>" })],
        dropped: &[],
        marks: &["</TOOLCALL>"],
    },
    Family {
        name: "granite",
        signs: &["<|tool_call|>"],
        openers: &[("<|tool_call|>", Start::Json { close: "" }), TAGGED],
        dropped: &[],
        marks: &[],
    },
    Family {
        name: "llama-3",
        signs: &["<|python_tag|>", "Environment: ipython"],
        openers: &[("<|python_tag|>", Start::Json { close: "" }), ("{", Start::Bare)],
        dropped: &[],
        marks: &[],
    },
];

static MISTRAL: named::Form = named::Form { marks: &["[ARGS]", "[CALL_ID]"], kind: None, prefix: "", numbered: false, close: "" };

static DEEPSEEK: named::Form =
    named::Form { marks: &["<｜tool▁sep｜>"], kind: Some("function"), prefix: "", numbered: false, close: "<｜tool▁call▁end｜>" };

static KIMI: named::Form =
    named::Form { marks: &["<|tool_call_argument_begin|>"], kind: None, prefix: "functions.", numbered: true, close: "<|tool_call_end|>" };
