//! What a parser found, in order: spans of one text, each with what it is. The room is used again from call to call.

/// What a span of an answer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Words for the reader.
    Text,
    /// A thought of the model's.
    Reasoning,
    /// A call begins; the span is the name of the tool.
    Call,
    /// More of the call's arguments: JSON.
    Arguments,
    /// The call ends: whole, or cut short. The span is empty.
    End {
        /// Whether its arguments are one whole JSON object.
        whole: bool,
    },
}

/// The spans.
#[derive(Debug, Default)]
pub struct Parsed {
    text: String,
    /// Each with where it ends.
    spans: Vec<(Kind, usize)>,
    /// How much of what was read became words, and how much did not, in bytes and in order.
    pub(super) passed: Vec<Passed>,
}

/// So many bytes of what the model wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Passed {
    /// They are words for the reader.
    Shown(usize),
    /// They are anything else.
    Hidden(usize),
}

impl Parsed {
    /// The spans, in order; only that of an end is empty.
    pub fn spans(&self) -> impl Iterator<Item = (Kind, &str)> {
        let starts = std::iter::once(0).chain(self.spans.iter().map(|(_, end)| *end));
        starts.zip(&self.spans).filter_map(|(start, (kind, end))| Some((*kind, self.text.get(start..*end)?)))
    }

    /// What became of the bytes that were read, in order.
    #[must_use]
    pub fn passed(&self) -> &[Passed] {
        &self.passed
    }

    /// Whether there is nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty() && self.passed.is_empty()
    }

    /// Forgets everything, keeps the room.
    pub fn clear(&mut self) {
        self.text.clear();
        self.spans.clear();
        self.passed.clear();
    }

    /// Adds to the last span if it is of this kind and may go on, or begins one.
    pub(super) fn say(&mut self, kind: Kind, text: &str) {
        let goes_on = matches!(kind, Kind::Text | Kind::Reasoning | Kind::Arguments);
        if goes_on && text.is_empty() {
            return;
        }
        self.text.push_str(text);
        match self.spans.last_mut() {
            Some((last, end)) if goes_on && *last == kind => *end = self.text.len(),
            _ => self.spans.push((kind, self.text.len())),
        }
    }

    /// So many bytes have been read and are words.
    pub(super) fn shown(&mut self, bytes: usize) {
        match self.passed.last_mut() {
            Some(Passed::Shown(last)) => *last += bytes,
            _ if bytes == 0 => {}
            _ => self.passed.push(Passed::Shown(bytes)),
        }
    }

    /// So many bytes have been read and are no words.
    pub(super) fn hidden(&mut self, bytes: usize) {
        match self.passed.last_mut() {
            Some(Passed::Hidden(last)) => *last += bytes,
            _ if bytes == 0 => {}
            _ => self.passed.push(Passed::Hidden(bytes)),
        }
    }
}
