//! The channels of gpt-oss: `<|channel|>analysis<|message|>…<|end|>` is a thought, `commentary to=functions.NAME` a call, everything else words.
//!
//! Source: OpenAI's harmony response format.

use super::calls::{Emit, is_name, overlap};
use super::parsed::Kind;

/// Ends a header.
const MESSAGE: &str = "<|message|>";
/// What may end the content of a message.
const ENDS: [&str; 4] = ["<|end|>", "<|return|>", "<|call|>", "<|start|>"];
/// What a header may hold.
const CHANNEL: &str = "<|channel|>";
const CONSTRAIN: &str = "<|constrain|>";
/// How a header says to whom it is.
const TO: &str = "to=";
const FUNCTIONS: &str = "functions.";
/// A header that is longer than this is none.
const LONGEST: usize = 512;

#[derive(Debug, Default)]
enum At {
    /// In a header.
    #[default]
    Header,
    /// In a message: a thought, words, or a call.
    Message(Content),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Content {
    Thought,
    Words,
    Call,
}

/// A parser of channels.
#[derive(Debug, Default)]
pub(super) struct Harmony {
    at: At,
    begun: bool,
    arguments: String,
}

impl Harmony {
    pub(super) fn thinking(&self) -> bool {
        matches!(self.at, At::Message(Content::Thought))
    }

    /// Reads what is held as far as it goes.
    pub(super) fn read(&mut self, held: &mut String, emit: &mut Emit<'_>) {
        loop {
            let goes_on = match self.at {
                At::Header => self.header(held, emit),
                At::Message(content) => self.message(content, held, emit),
            };
            if !goes_on {
                return;
            }
        }
    }

    fn header(&mut self, held: &mut String, emit: &mut Emit<'_>) -> bool {
        if held.is_empty() {
            return false;
        }
        let start = held.len() - held.trim_start().len();
        let after = held.get(start..).unwrap_or_default();
        // A header begins with a mark, with the role after `<|start|>`, or with whom it is to.
        let begins = ["<|", "assistant", TO].iter().any(|sign| after.starts_with(sign) || sign.starts_with(after));
        let Some(end) = after.find(MESSAGE).filter(|end| begins && *end <= LONGEST) else {
            if begins && !emit.last && after.len() <= LONGEST + MESSAGE.len() {
                return false;
            }
            if held.trim().is_empty() || (emit.last && begins && after.starts_with("<|")) {
                emit.out.hidden(held.len());
                held.clear();
                return false;
            }
            // It is no header: a model that does not speak in channels after all.
            self.enter(Content::Words);
            return true;
        };
        let head = after.get(..end).unwrap_or_default();
        let to = head.split_once(TO).map(|(_, to)| to.split(|ch: char| ch.is_whitespace() || ch == '<').next().unwrap_or_default());
        let content = match to.map(|to| to.strip_prefix(FUNCTIONS).unwrap_or(to)) {
            Some(name) if !emit.tools.is_empty() && is_name(name) && emit.allows(name) => {
                emit.begin(name);
                Content::Call
            }
            _ if head.split_once(CHANNEL).is_some_and(|(_, channel)| channel.trim_start().starts_with("analysis")) => Content::Thought,
            _ => Content::Words,
        };
        self.enter(content);
        let read = start + end + MESSAGE.len();
        emit.out.hidden(read);
        held.drain(..read);
        true
    }

    fn enter(&mut self, content: Content) {
        self.at = At::Message(content);
        self.begun = false;
        self.arguments.clear();
    }

    fn message(&mut self, content: Content, held: &mut String, emit: &mut Emit<'_>) -> bool {
        let found = ENDS.iter().chain(&[CHANNEL, CONSTRAIN]).filter_map(|mark| Some((held.find(mark)?, *mark))).min();
        let safe = match found {
            Some((at, _)) => at,
            None if emit.last => held.len(),
            None => held.len() - ENDS.iter().chain(&[CHANNEL, CONSTRAIN]).map(|mark| overlap(held, mark)).max().unwrap_or(0),
        };
        self.tell(content, safe, found.is_some() || emit.last, held, emit);
        if found.is_none() && !emit.last {
            return false;
        }
        if content == Content::Call {
            let whole = serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(&self.arguments).is_ok();
            emit.end(whole);
        }
        self.at = At::Header;
        let Some((_, mark)) = found else { return false };
        if ENDS.contains(&mark) {
            emit.out.hidden(mark.len());
            held.drain(..mark.len());
        }
        true
    }

    /// Tells so many bytes; blanks around thoughts and words are neither.
    fn tell(&mut self, content: Content, bytes: usize, over: bool, held: &mut String, emit: &mut Emit<'_>) {
        let text = held.get(..bytes).unwrap_or_default();
        if content == Content::Call {
            self.arguments.push_str(text);
            emit.arguments(text);
            emit.out.hidden(bytes);
            held.drain(..bytes);
            return;
        }
        let blanks = if self.begun { 0 } else { text.len() - text.trim_start().len() };
        let end = text.trim_end().len();
        if end > blanks {
            let told = text.get(blanks..end).unwrap_or_default();
            self.begun = true;
            emit.out.hidden(blanks);
            if content == Content::Thought {
                emit.out.say(Kind::Reasoning, told);
                emit.out.hidden(told.len());
            } else {
                emit.out.say(Kind::Text, told);
                emit.out.shown(told.len());
            }
            held.drain(..end);
        }
        if over {
            let rest = bytes - if end > blanks { end } else { 0 };
            emit.out.hidden(rest);
            held.drain(..rest);
        }
    }
}
