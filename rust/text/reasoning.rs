//! How models mark their thoughts: a table of pairs of tags, recognised from the chat template.
//!
//! Where the tags are looked for is decided in `parse`; models that speak in channels have their own way, in `harmony`.

/// A pair of tags.
#[derive(Debug, PartialEq, Eq)]
pub struct Tags {
    /// Begins a thought, at the start of what is said.
    pub open: &'static str,
    /// Ends it.
    pub close: &'static str,
}

/// The pairs that are known, each with what stands in the templates of models that use it. The first that fits is taken.
const TABLE: [(&str, Tags); 5] = [
    ("<seed:think>", Tags { open: "<seed:think>", close: "</seed:think>" }),
    ("[THINK]", Tags { open: "[THINK]", close: "[/THINK]" }),
    ("<|START_THINKING|>", Tags { open: "<|START_THINKING|>", close: "<|END_THINKING|>" }),
    ("<|channel>thought", Tags { open: "<|channel>thought", close: "<channel|>" }),
    ("</think>", Tags { open: "<think>", close: "</think>" }),
];

impl Tags {
    /// The tags of the model with this chat template; `None` where it shows none.
    #[must_use]
    pub fn of(template: &str) -> Option<&'static Self> {
        // `seed` writes its tags with variables, so only one of them is there in one piece.
        TABLE.iter().find(|(sign, _)| template.contains(sign)).map(|(_, tags)| tags)
    }

    /// Whether a prompt ends within a thought, which the answer then goes on with.
    #[must_use]
    pub fn inside(&self, prompt: &str) -> bool {
        prompt.trim_end().ends_with(self.open)
    }
}
