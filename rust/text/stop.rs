//! Stop strings: text comes in pieces cut anywhere, and leaves without any character that could still belong to a stop.
//!
//! The first stop to be complete ends the text; of several that are complete at the same character, the longest does. What comes out is therefore
//! the same however the text was cut into pieces, and nothing waits longer than it must. Matching is Knuth-Morris-Pratt over bytes, one state for
//! each stop: constant work for a byte and a stop, and no second look at old text.

use std::sync::Arc;

/// One stop string with its failure table: `fallback[n]` is the length of the longest proper prefix that the first `n + 1` bytes also end with.
#[derive(Debug)]
struct Pattern {
    text: String,
    fallback: Vec<usize>,
}

impl Pattern {
    fn new(text: String) -> Self {
        let bytes = text.as_bytes();
        let mut fallback = vec![0; bytes.len()];
        let mut state = 0;
        for at in 1..bytes.len() {
            while state > 0 && bytes[at] != bytes[state] {
                state = fallback[state - 1];
            }
            if bytes[at] == bytes[state] {
                state += 1;
            }
            fallback[at] = state;
        }
        Self { text, fallback }
    }

    /// The state after one more byte: how many bytes of the stop the text ends with. A state of `text.len()` is a match, and is not gone on from.
    fn advance(&self, mut state: usize, byte: u8) -> usize {
        let bytes = self.text.as_bytes();
        while state > 0 && bytes[state] != byte {
            state = self.fallback[state - 1];
        }
        if bytes[state] == byte { state + 1 } else { 0 }
    }
}

/// Watches one text for stop strings. Cloning a matcher that was not fed yet is cheap and gives one for another text.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    patterns: Arc<[Pattern]>,
    states: Vec<usize>,
    held: String,
    stopped: Option<usize>,
    keep: bool,
}

impl StopMatcher {
    /// A matcher for `stops`, which cuts before the stop. An empty string among them never stops anything; indices count it all the same.
    #[must_use]
    pub fn new(stops: Vec<String>) -> Self {
        let patterns: Arc<[Pattern]> = stops.into_iter().map(Pattern::new).collect();
        let states = vec![0; patterns.len()];
        Self { patterns, states, held: String::new(), stopped: None, keep: false }
    }

    /// Whether the stop itself is part of the text (`true`), or the text ends before it (`false`, as made by [`new`](Self::new)).
    #[must_use]
    pub fn keep_stop(mut self, keep: bool) -> Self {
        self.keep = keep;
        self
    }

    /// Takes the next piece and appends to `out` what is now safe to show. Returns the index of the stop once one is complete; from then on pieces
    /// are ignored.
    pub fn push(&mut self, piece: &str, out: &mut String) -> Option<usize> {
        if self.stopped.is_some() {
            return self.stopped;
        }
        let before = self.held.len();
        for (at, &byte) in piece.as_bytes().iter().enumerate() {
            let mut hit: Option<usize> = None;
            for (index, pattern) in self.patterns.iter().enumerate().filter(|(_, pattern)| !pattern.text.is_empty()) {
                let state = pattern.advance(self.states[index], byte);
                self.states[index] = state;
                let longer = |other: usize| self.patterns[other].text.len() < state;
                if state == pattern.text.len() && hit.is_none_or(longer) {
                    hit = Some(index);
                }
            }
            if let Some(index) = hit {
                self.held.push_str(&piece[..=at]);
                let kept = if self.keep { 0 } else { self.patterns[index].text.len() };
                out.push_str(&self.held[..before + at + 1 - kept]);
                self.held.clear();
                self.stopped = Some(index);
                return self.stopped;
            }
        }
        let hold = self.states.iter().copied().max().unwrap_or(0);
        if hold == 0 {
            out.push_str(&self.held);
            out.push_str(piece);
            self.held.clear();
        } else {
            self.held.push_str(piece);
            let safe = self.held.len() - hold;
            out.push_str(&self.held[..safe]);
            self.held.drain(..safe);
        }
        None
    }

    /// Says that no more text comes: appends to `out` what was held back, if no stop was found.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
        self.states.fill(0);
    }

    /// The index of the stop that was found.
    #[must_use]
    pub fn stopped(&self) -> Option<usize> {
        self.stopped
    }

    /// The stop string with this index, as given to [`new`](Self::new).
    #[must_use]
    pub fn stop(&self, index: usize) -> Option<&str> {
        self.patterns.get(index).map(|pattern| pattern.text.as_str())
    }

    /// How many bytes are held back at the moment: always fewer than the longest stop has.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held.len()
    }
}
