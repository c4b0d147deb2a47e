//! What an answer may say, as token ids: at every place the set of ids that may come next, and the ids that are certain.
//!
//! Works on ids and sets of ids alone; how a schema or a grammar becomes a [`Rule`] is decided in `grammar`, and which of the allowed ids is chosen in the
//! engine.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use llguidance::Matcher;

use super::patience::within;

/// How long one look at a place may take; usual ones take some hundredths of a millisecond.
const LOOK: Duration = Duration::from_secs(2);

/// How many certain ids are followed to see whether a rule works.
const FOLLOWED: usize = 512;

/// What to do where a constraint gets stuck in the middle of an answer. An engine's failure with this hint is told to its client as one of its own.
pub const SIMPLIFY: &str = "simplify the schema or grammar";

/// Why an answer cannot go on under its constraint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConstraintError {
    /// An id that may not come at this place.
    #[error("token {0} is not allowed at this place of the answer")]
    Refused(u32),
    /// The grammar's limits were reached, or the grammar allows nothing at this place.
    #[error("the grammar cannot go on: {0}")]
    Stuck(String),
}

/// A compiled grammar, from which the constraints of any number of requests are made. They share what it has learnt of the vocabulary.
pub struct Rule {
    start: Mutex<Matcher>,
    eos: Box<[u32]>,
    vocab_size: usize,
    /// Whether a constraint of it got stuck. What they share may be the cause, so that it is better compiled anew.
    spent: AtomicBool,
}

impl Rule {
    /// A rule from a matcher at its start. `eos`: the ids that may end an answer, at least one; `vocab_size`: ids are below this; `most`: how long the first look may
    /// take.
    ///
    /// # Errors
    /// [`ConstraintError::Stuck`] where nothing may come, or the library gives up.
    pub(crate) fn new(start: Matcher, eos: &[u32], vocab_size: usize, most: Duration) -> Result<Self, ConstraintError> {
        let mut start = start.into_cancellable();
        // What is learnt here, the usual first tokens among it, is there for every constraint.
        timed(&mut start, most, |start| {
            let certain = start.compute_ff_tokens();
            start.compute_mask_or_eos()?;
            // That what is certain has no end shows with the first of it; what comes after it may be what is too much.
            let mut after = start.clone();
            certain.iter().take(FOLLOWED).try_for_each(|token| after.consume_token(*token))?;
            if certain.is_empty() || certain.len() > FOLLOWED || after.is_stopped() {
                return Ok(());
            }
            after.compute_mask_or_eos().map(drop)
        })
        .map_err(|error| ConstraintError::Stuck(error.to_string()))?;
        Ok(Self { start: Mutex::new(start), eos: eos.into(), vocab_size, spent: AtomicBool::new(false) })
    }

    /// Whether it should be compiled anew for the next request.
    #[must_use]
    pub fn spent(&self) -> bool {
        self.spent.load(Ordering::Relaxed)
    }

    /// The constraint of one request, at the start of its answer.
    #[must_use]
    pub fn constraint(self: &Arc<Self>) -> Constraint {
        let matcher = self.start.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Constraint { rule: Arc::clone(self), place: Box::new(Place { matcher, certain: VecDeque::new(), looked: false }) }
    }
}

impl fmt::Debug for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rule").field("vocab_size", &self.vocab_size).field("spent", &self.spent()).finish_non_exhaustive()
    }
}

/// What one answer may say, and how far it has come. Two are equal when they come from the same [`Rule`].
#[derive(Clone)]
pub struct Constraint {
    rule: Arc<Rule>,
    /// More than a kilobyte, which would make every order as large.
    place: Box<Place>,
}

/// A place in an answer.
#[derive(Clone)]
struct Place {
    matcher: Matcher,
    /// Ids that come next whatever is chosen.
    certain: VecDeque<u32>,
    /// Whether `certain` is known at this place.
    looked: bool,
}

impl Constraint {
    /// How many words of 32 ids a mask has.
    #[must_use]
    pub fn words(&self) -> usize {
        self.rule.vocab_size.div_ceil(32)
    }

    /// Writes which ids may come next: id `i` is bit `i % 32` of word `i / 32`. At least one bit is set; once the answer is complete these are the ids that end it.
    ///
    /// # Errors
    /// [`ConstraintError::Stuck`]; every later call then says the same.
    pub fn mask(&mut self, words: &mut [u32]) -> Result<(), ConstraintError> {
        words.fill(0);
        if let Some(token) = self.certain()?.front().copied() {
            if let Some(word) = words.get_mut(token as usize / 32) {
                *word = 1 << (token % 32);
            }
            return Ok(());
        }
        let allowed = timed(&mut self.place.matcher, LOOK, Matcher::compute_mask_or_eos);
        let allowed = allowed.map_err(|error| self.stuck(&error.to_string()))?;
        for (word, bits) in words.iter_mut().zip(allowed.as_slice()) {
            *word = *bits;
        }
        // The set of the library may have room beyond the vocabulary.
        if let Some(last) = words.last_mut().filter(|_| !self.rule.vocab_size.is_multiple_of(32)) {
            *last &= (1 << (self.rule.vocab_size % 32)) - 1;
        }
        Ok(())
    }

    /// The ids that are certain to come next, in order; empty where there is a choice, and when the answer is complete.
    ///
    /// # Errors
    /// [`ConstraintError::Stuck`].
    pub fn certain(&mut self) -> Result<&VecDeque<u32>, ConstraintError> {
        if !self.place.looked && self.place.certain.is_empty() {
            if !self.complete() {
                self.place.certain = timed(&mut self.place.matcher, LOOK, Matcher::compute_ff_tokens).into();
            }
            if let Some(error) = self.place.matcher.get_error() {
                return Err(self.stuck(&error));
            }
            self.place.looked = true;
        }
        Ok(&self.place.certain)
    }

    /// Goes on to the next place of the answer.
    ///
    /// # Errors
    /// [`ConstraintError::Refused`] for an id that may not come here, which changes nothing; [`ConstraintError::Stuck`].
    pub fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        let next = self.certain()?.front().copied();
        if self.complete() {
            return if self.rule.eos.contains(&token) { Ok(()) } else { Err(ConstraintError::Refused(token)) };
        }
        let ends = self.rule.eos.contains(&token);
        let fits = match next {
            Some(certain) => certain == token,
            None if ends => self.accepting()?,
            None => self.place.matcher.validate_tokens(&[token]).map_err(|error| self.stuck(&error.to_string()))? == 1,
        };
        if !fits {
            return Err(ConstraintError::Refused(token));
        }
        let gone_on = timed(&mut self.place.matcher, LOOK, |matcher| matcher.consume_token(token));
        gone_on.map_err(|error| self.stuck(&error.to_string()))?;
        self.place.certain.pop_front();
        self.place.looked = !self.place.certain.is_empty();
        Ok(())
    }

    /// Whether the answer may end here.
    ///
    /// # Errors
    /// [`ConstraintError::Stuck`].
    pub fn accepting(&mut self) -> Result<bool, ConstraintError> {
        if self.complete() {
            return Ok(true);
        }
        self.place.matcher.is_accepting().map_err(|error| self.stuck(&error.to_string()))
    }

    /// Whether nothing but the end may come.
    #[must_use]
    pub fn complete(&self) -> bool {
        self.place.matcher.is_stopped() && !self.place.matcher.is_error()
    }

    fn stuck(&mut self, error: &str) -> ConstraintError {
        self.rule.spent.store(true, Ordering::Relaxed);
        self.place.certain.clear();
        self.place.looked = false;
        // What follows the first line is the library's own state.
        ConstraintError::Stuck(error.lines().next().unwrap_or("no reason was given").to_owned())
    }
}

/// Works with a matcher that is cancelled when it takes longer than `most`.
fn timed<T>(matcher: &mut Matcher, most: Duration, work: impl FnOnce(&mut Matcher) -> T) -> T {
    match matcher.cancellation_handle() {
        Some(handle) => within(&handle, most, || work(matcher)),
        None => work(matcher),
    }
}

impl PartialEq for Constraint {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.rule, &other.rule)
    }
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraint").field("rule", &self.rule).field("certain", &self.place.certain).finish_non_exhaustive()
    }
}
