//! What a model writes, told apart: thoughts, words, and calls of tools. Text comes in pieces cut anywhere, and what is found is the same however it
//! was cut; what may become a mark waits until it has or has not.
//!
//! Blanks before a call or a thought, and after one, are no words. A call that is malformed is shown as the text it is; one that was told of before
//! it went wrong ends as cut short, and its text is shown besides.

use std::sync::Arc;

use super::calls::{Body, Emit, Family, Signatures, Start, Step, overlap};
use super::harmony::Harmony;
use super::parsed::{Kind, Parsed};
use super::reasoning::Tags;

/// What a mark means where words stand.
#[derive(Debug, Clone, Copy)]
enum Mark {
    /// A thought begins. Only where nothing has been said since the last thought or call.
    Think,
    /// A call begins behind the mark, or, where the mark is part of it, at the mark. `first`: only at the start of the answer.
    Call { start: Start, within: bool, first: bool },
    /// It means nothing.
    Drop,
}

#[derive(Debug)]
enum State {
    Words,
    Thought,
    /// In a call: the region begins with the held text, of which so much is its opener with the blanks before it, so much is read, and so much of it
    /// is calls that are whole.
    Call {
        body: Box<Body>,
        opener: usize,
        at: usize,
        whole: usize,
    },
    /// Channels, which have a way of their own.
    Harmony(Box<Harmony>),
}

/// How a model marks what it thinks and what it calls for.
#[derive(Debug, Clone, Copy)]
pub struct Format {
    /// How it writes calls.
    pub family: &'static Family,
    /// How it marks thoughts, if it does.
    pub tags: Option<&'static Tags>,
}

impl Format {
    /// That of the model with this chat template.
    #[must_use]
    pub fn of(template: &str) -> Self {
        let family = Family::of(template);
        let found = Self { family, tags: None };
        Self { tags: if found.channels() { None } else { Tags::of(template) }, ..found }
    }

    /// Whether it speaks in channels.
    fn channels(self) -> bool {
        self.family.name == "harmony"
    }

    /// The marks whose text a parser has to see, also where they are special tokens.
    #[must_use]
    pub fn marks(self) -> Vec<&'static str> {
        let tags = self.tags.map(|tags| [tags.open, tags.close]);
        self.family.marks().chain(tags.into_iter().flatten()).collect()
    }
}

/// The parser of one answer.
#[derive(Debug)]
pub struct Parser {
    tags: Option<&'static Tags>,
    marks: Vec<(&'static str, Mark)>,
    tools: Arc<Signatures>,
    /// What has been read and is nothing yet.
    held: String,
    state: State,
    /// Whether words or thoughts have been told since the last mark.
    begun: bool,
    /// Whether anything has come before: then blanks at the start are no words.
    after: bool,
    /// Whether words have no marks in them.
    leading: bool,
    open: bool,
    ended: u32,
}

impl Parser {
    /// The parser for an answer of a model of this form, to a request with these tools. `None` where there is nothing to tell apart. `prompt`: what
    /// the answer goes on from.
    #[must_use]
    pub fn of(format: Format, tools: Arc<Signatures>, prompt: &str) -> Option<Self> {
        let Format { family, tags } = format;
        let channels = format.channels();
        if tools.is_empty() && tags.is_none() && !channels {
            return None;
        }
        let mut marks = Vec::new();
        if let Some(tags) = tags {
            marks.push((tags.open, Mark::Think));
        }
        if !tools.is_empty() {
            marks.extend(family.openers.iter().map(|(mark, start)| {
                let within = matches!(start, Start::Bare) || *mark == "<function=";
                (*mark, Mark::Call { start: *start, within, first: matches!(start, Start::Bare) })
            }));
            marks.extend(family.dropped.iter().map(|mark| (*mark, Mark::Drop)));
        }
        let inside = tags.is_some_and(|tags| tags.inside(prompt));
        let state = match () {
            () if channels => State::Harmony(Box::default()),
            () if inside => State::Thought,
            () => State::Words,
        };
        let held = String::new();
        Some(Self { tags, marks, tools, held, state, begun: false, after: inside, leading: false, open: false, ended: 0 })
    }

    /// The same, for an answer that is calls or words of a form: marks count where nothing has been said yet, and what is within words is theirs. An answer that
    /// is one object is never a call.
    #[must_use]
    pub fn leading(mut self) -> Self {
        self.leading = true;
        self.marks.retain(|(_, mark)| !matches!(mark, Mark::Call { start: Start::Bare, .. }));
        self
    }

    /// Whether what has been read last belongs to a thought.
    #[must_use]
    pub fn thinking(&self) -> bool {
        match &self.state {
            State::Thought => true,
            State::Harmony(harmony) => harmony.thinking(),
            _ => false,
        }
    }

    /// How many calls have ended.
    #[must_use]
    pub fn calls(&self) -> u32 {
        self.ended
    }

    /// Takes the next piece of text, and adds what it shows to `out`.
    pub fn push(&mut self, text: &str, out: &mut Parsed) {
        self.held.push_str(text);
        self.run(false, out);
    }

    /// Says that no more text comes.
    pub fn finish(&mut self, out: &mut Parsed) {
        self.run(true, out);
    }

    fn run(&mut self, last: bool, out: &mut Parsed) {
        if let State::Harmony(harmony) = &mut self.state {
            let mut emit = Emit { out, open: &mut self.open, ended: &mut self.ended, tools: &self.tools, last };
            harmony.read(&mut self.held, &mut emit);
            return;
        }
        loop {
            let goes_on = match self.state {
                State::Words => self.words(last, out),
                State::Thought => self.thought(last, out),
                State::Call { .. } => self.call(last, out),
                State::Harmony(_) => false,
            };
            if !goes_on {
                return;
            }
        }
    }

    /// Reads words up to the next mark; false when there is no more to do.
    fn words(&mut self, last: bool, out: &mut Parsed) -> bool {
        if self.held.is_empty() {
            return false;
        }
        // Only blanks so far: then marks count that do not count among words.
        let fresh = if self.begun { None } else { Some(blank(&self.held)) };
        let mut found: Option<(usize, &'static str, Mark)> = None;
        let mut safe = self.held.len();
        for (text, mark) in &self.marks {
            let anywhere = match mark {
                _ if self.leading => false,
                Mark::Think => false,
                Mark::Call { first, .. } => !first,
                Mark::Drop => true,
            };
            let at = if anywhere {
                self.held.find(text)
            } else {
                let start = match mark {
                    Mark::Call { first: true, .. } if self.after => None,
                    _ => fresh,
                };
                let Some(start) = start else { continue };
                let rest = self.held.get(start..).unwrap_or_default();
                if !last && rest.len() < text.len() && text.starts_with(rest) {
                    safe = safe.min(start);
                }
                rest.starts_with(text).then_some(start)
            };
            match at {
                Some(at) if found.is_none_or(|(first, other, _)| (at, other.len()) < (first, text.len())) => {
                    found = Some((at, text, *mark));
                }
                None if anywhere && !last => safe = safe.min(self.held.len() - overlap(&self.held, text)),
                _ => {}
            }
        }
        match found {
            // What may be a longer mark that begins earlier has to wait.
            Some((at, text, mark)) if at <= safe || last => {
                let spoken = self.held.get(..at).map_or(0, |text| text.trim_end().len());
                self.say(Kind::Text, spoken, out);
                let gone = at - spoken;
                match mark {
                    Mark::Drop => self.skip(gone + text.len(), out),
                    Mark::Think => {
                        self.skip(gone + text.len(), out);
                        self.state = State::Thought;
                    }
                    // The blanks before it are kept with it: they are words if it is no call.
                    Mark::Call { start, within, .. } => {
                        let opener = gone + text.len();
                        let at = if within { gone } else { opener };
                        self.state = State::Call { body: Box::new(Body::new(start)), opener, at, whole: 0 };
                    }
                }
                if !matches!(mark, Mark::Call { .. }) {
                    (self.begun, self.after) = (false, true);
                }
                true
            }
            _ => {
                let whole = self.held.get(..safe).unwrap_or_default();
                let spoken = whole.trim_end().len();
                self.say(Kind::Text, spoken, out);
                if last {
                    // Blanks at the end belong to words before them, or to an answer that has nothing else.
                    if self.begun || !self.after {
                        self.say(Kind::Text, self.held.len(), out);
                    }
                    self.skip(self.held.len(), out);
                }
                false
            }
        }
    }

    fn thought(&mut self, last: bool, out: &mut Parsed) -> bool {
        let Some(tags) = self.tags else { return false };
        if self.held.is_empty() {
            return false;
        }
        let found = self.held.find(tags.close);
        let safe = match found {
            Some(at) => at,
            None if last => self.held.len(),
            None => self.held.len() - overlap(&self.held, tags.close),
        };
        self.after = true;
        let spoken = self.held.get(..safe).map_or(0, |text| text.trim_end().len());
        self.say(Kind::Reasoning, spoken, out);
        let rest = safe - spoken;
        if found.is_some() {
            self.skip(rest + tags.close.len(), out);
            self.state = State::Words;
            self.begun = false;
        } else if last {
            self.skip(rest, out);
        }
        found.is_some()
    }

    fn call(&mut self, last: bool, out: &mut Parsed) -> bool {
        let State::Call { body, opener, at, whole } = &mut self.state else { return false };
        loop {
            let rest = self.held.get(*at..).unwrap_or_default();
            let before = self.ended;
            let mut emit = Emit { out, open: &mut self.open, ended: &mut self.ended, tools: &self.tools, last };
            let step = body.step(rest, &mut emit);
            match step {
                Step::More => return false,
                Step::Took(read) | Step::Done(read) => *at += read,
                Step::Broken => {}
            }
            if self.ended > before {
                *whole = *at;
            }
            match step {
                Step::Done(_) => {
                    let read = *at;
                    self.state = State::Words;
                    self.skip(read, out);
                    (self.begun, self.after) = (false, true);
                    return true;
                }
                Step::Broken => {
                    let (opener, whole) = (*opener, *whole);
                    self.state = State::Words;
                    self.broken(opener, whole, last, out);
                    return true;
                }
                Step::Took(_) | Step::More => {}
            }
        }
    }

    /// A region is no call, or not to its end: what is not part of a whole call is text, and looked at anew.
    fn broken(&mut self, opener: usize, whole: usize, last: bool, out: &mut Parsed) {
        self.skip(whole, out);
        if whole > 0 || self.open {
            (self.begun, self.after) = (false, true);
        }
        if self.open {
            Emit { out, open: &mut self.open, ended: &mut self.ended, tools: &self.tools, last }.end(false);
            if last {
                // It was cut off. All of it has been told.
                self.skip(self.held.len(), out);
                return;
            }
        }
        // The opener of this region must not be taken for one again.
        if whole == 0 {
            self.say(Kind::Text, opener, out);
        }
    }

    /// Tells so many bytes as words or thoughts; blanks at the start of what comes after something else are passed over.
    fn say(&mut self, kind: Kind, bytes: usize, out: &mut Parsed) {
        let text = self.held.get(..bytes).unwrap_or_default();
        let blanks = if !self.begun && self.after { blank(text) } else { 0 };
        let told = text.get(blanks..).unwrap_or_default();
        if told.is_empty() {
            return;
        }
        out.say(kind, told);
        out.hidden(blanks);
        let shown = bytes - blanks;
        if kind == Kind::Text {
            out.shown(shown)
        } else {
            out.hidden(shown)
        }
        self.begun = true;
        self.held.drain(..bytes);
    }

    /// Passes over so many bytes.
    fn skip(&mut self, bytes: usize, out: &mut Parsed) {
        out.hidden(bytes);
        self.held.drain(..bytes);
    }
}

/// How much blank a text begins with.
fn blank(text: &str) -> usize {
    text.len() - text.trim_start().len()
}
