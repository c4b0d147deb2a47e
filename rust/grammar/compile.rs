//! Compiles grammars for one model, away from the threads that serve sockets and from the engine, and keeps the latest.
//!
//! A grammar comes from anybody. Its text is bounded (`bound`), and so is everything that the library makes of it; it is compiled on a thread with room for
//! deep ones, one at a time, and a request waits for that only so long.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{InferenceCapabilities, TokEnv};
use llguidance::{Matcher, ParserFactory};

use super::place::{Places, fault, no_thread, worker};
use super::vocabulary::Vocabulary;
use super::{Grammar, bound, refused, schema, tagged, whole};
use crate::engine::constraint::Rule;
use crate::engine::{Capabilities, Constraint, ConstraintError};
use crate::error::{Code, Error, Result};
use crate::prompt::Tokenizer;

/// How many grammars are kept; most take less than a megabyte.
const KEPT: usize = 32;
/// How long a request waits for its turn, and then for its grammar. The usual ones take some milliseconds.
const WAIT: Duration = Duration::from_secs(10);
/// How long a grammar is compiled before the next one begins beside it.
const ALONE: Duration = Duration::from_secs(2);
/// How long the first look into a grammar may take, of that.
const FIRST: Duration = Duration::from_secs(2);
/// The longest reason in a message, in characters.
const REASON: usize = 300;

/// Grammars are compiled one at a time in a process, so that hostile ones take few cores.
static PLACES: Places = Places::new();

/// What a grammar may come to. Fuel and items are work: of a mask, some milliseconds at most.
fn limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 2_000,
        initial_lexer_fuel: 1_000_000,
        step_lexer_fuel: 100_000,
        step_max_items: 25_000,
        max_lexer_states: 20_000,
        max_grammar_size: 200_000,
        precompute_large_lexemes: false,
        verbose_errors: false,
    }
}

/// What the grammars of a model need of it: made with the first of them.
struct Prepared {
    vocabulary: Arc<Vocabulary>,
    factory: ParserFactory,
    eos: Vec<u32>,
    vocab_size: usize,
}

impl Prepared {
    fn new(tokenizer: Arc<Tokenizer>, vocab_size: u32, eos: &[u32]) -> Result<Self> {
        let vocabulary = Arc::new(Vocabulary::new(tokenizer, vocab_size, eos)?);
        let env: TokEnv = Arc::clone(&vocabulary) as TokEnv;
        let capabilities = InferenceCapabilities { ff_tokens: true, ..InferenceCapabilities::default() };
        let mut factory =
            ParserFactory::new(&env, capabilities, &llguidance::earley::SlicedBiasComputer::general_slices()).map_err(|error| {
                Error::new(Code::ServerError, "the model's vocabulary cannot be prepared for grammars").detail(error.to_string())
            })?;
        *factory.limits_mut() = limits();
        factory.quiet();
        Ok(Self { vocabulary, factory, eos: eos.to_vec(), vocab_size: vocab_size as usize })
    }

    /// The grammar as the library takes it.
    fn top(&self, grammar: &Grammar) -> Result<TopLevelGrammar> {
        let long = |text: &str, most: usize| {
            let length = text.len();
            if length > most {
                let what = format!("the {} has {length} bytes, above {most}", grammar.kind());
                return Err(refused(what).hint("make it shorter"));
            }
            Ok(())
        };
        Ok(match grammar {
            Grammar::JsonSchema(text) => TopLevelGrammar::from_json_schema(schema(text)?),
            Grammar::JsonObject => TopLevelGrammar::from_json_schema(schema("{\"type\":\"object\"}")?),
            Grammar::Regex(text) => {
                long(text, bound::TEXT)?;
                TopLevelGrammar::from_regex(text)
            }
            Grammar::Lark(text) => {
                long(text, bound::TEXT)?;
                bound::check_lark(text)?;
                TopLevelGrammar::from_lark(text.to_string())
            }
            Grammar::Tagged(tags) => {
                let text = tagged::lark(tags, |text| self.vocabulary.is_special(text))?;
                long(&text, bound::CALLS)?;
                TopLevelGrammar::from_lark(text)
            }
            Grammar::Whole(whole) => {
                let text = whole::lark(whole, &|text| self.vocabulary.cut(text))?;
                long(&text, bound::CALLS)?;
                let mut top = TopLevelGrammar::from_lark(text);
                if let Some(form) = &whole.form {
                    for mut part in self.top(form)?.grammars {
                        part.name = Some(whole::FORM.to_owned());
                        top.grammars.push(part);
                    }
                }
                top
            }
        })
    }

    fn compile(&self, grammar: &Grammar) -> Result<Rule> {
        let top = self.top(grammar)?;
        let unusable = |error: String| {
            let what = format!("the {} cannot be used: {}", grammar.kind(), reason(&error));
            refused(what).hint("correct or simplify it").detail(error)
        };
        let parser = self.factory.create_parser(top).map_err(|error| unusable(format!("{error:#}")))?;
        // A grammar that allows nothing, or too much, shows at its start.
        Rule::new(Matcher::new(Ok(parser)), &self.eos, self.vocab_size, FIRST).map_err(|error| {
            unusable(match error {
                ConstraintError::Stuck(why) => why,
                other => other.to_string(),
            })
        })
    }
}

/// The library's reason as a client is told it: one line, without what follows for its developers.
fn reason(error: &str) -> String {
    if error.starts_with("panic") {
        return "it is beyond what this server's grammar library can do".to_owned();
    }
    if error.starts_with("operation cancelled") {
        return "it takes too long to find out what it allows".to_owned();
    }
    if error.starts_with("NoExtension") {
        return "it allows no text at all".to_owned();
    }
    // Of a regular expression the library shows the whole first, and says last what is wrong.
    if let Some(what) = error.lines().find_map(|line| line.trim_start().strip_prefix("error: ")) {
        let place = error.split_once(": ").map(|(place, _)| place).filter(|place| place.starts_with("at "));
        return place.map_or_else(|| what.to_owned(), |place| format!("{place}: {what}"));
    }
    let end = ["\n<", "\nbacktrace"].iter().filter_map(|mark| error.find(mark)).min().unwrap_or(error.len());
    // Nor the lines that show the place once more.
    let shows = |line: &&str| {
        let line = line.trim_start();
        line.starts_with('^') || line.trim_start_matches(|ch: char| ch.is_ascii_digit()).starts_with(" |")
    };
    let words = error.get(..end).unwrap_or_default().lines().filter(|line| !shows(line)).flat_map(str::split_whitespace);
    let line = words.collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(REASON) {
        Some((end, _)) => format!("{}…", line.get(..end).unwrap_or_default()),
        None => line,
    }
}

/// Compiles one grammar for one vocabulary, on the calling thread: what [`Compiler`] does for a server, without keeping anything. `vocab_size`: ids are below this;
/// `eos`: the ids that end an answer.
///
/// # Errors
/// As [`Compiler::constraint`].
pub fn compile(tokenizer: Arc<Tokenizer>, vocab_size: u32, eos: &[u32], grammar: &Grammar) -> Result<Constraint> {
    let grammar = grammar.clone();
    let eos = eos.to_vec();
    let work = move || Prepared::new(tokenizer, vocab_size, &eos)?.compile(&grammar);
    let thread = worker().spawn(work).map_err(|error| no_thread(&error))?;
    let rule = thread.join().map_err(|_| fault())??;
    Ok(Arc::new(rule).constraint())
}

/// The grammars of one model: those that were asked for last, ready for the next request. What it keeps goes with it.
pub struct Compiler {
    tokenizer: Arc<Tokenizer>,
    capabilities: Arc<Capabilities>,
    prepared: OnceLock<Prepared>,
    /// The latest first.
    kept: Mutex<VecDeque<(Grammar, Arc<Rule>)>>,
}

impl Compiler {
    /// For a model with this tokenizer and these ids. Costs nothing before the first grammar.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>, capabilities: Arc<Capabilities>) -> Self {
        Self { tokenizer, capabilities, prepared: OnceLock::new(), kept: Mutex::default() }
    }

    /// The constraint of a new request under this grammar.
    ///
    /// # Errors
    /// `unsupported_parameter` where the engine or the tokenizer cannot do it; `invalid_value` with the reason for a grammar that is wrong, that the library does not know,
    /// or that would cost too much; `queue_full` while grammars of others that do not come to an end take all the room there is.
    pub async fn constraint(self: &Arc<Self>, grammar: Grammar) -> Result<Constraint> {
        if !self.capabilities.constraints {
            return Err(Error::new(Code::UnsupportedParameter, "this engine cannot hold an answer to a grammar").hint("use plain text"));
        }
        if let Some(rule) = self.found(&grammar) {
            return Ok(rule.constraint());
        }
        self.compiled(grammar).await.map(|rule| rule.constraint())
    }

    async fn compiled(self: &Arc<Self>, grammar: Grammar) -> Result<Arc<Rule>> {
        let place = PLACES.take(WAIT).await?;
        // Somebody else may have waited for the same one.
        if let Some(rule) = self.found(&grammar) {
            return Ok(rule);
        }
        let compiler = Arc::clone(self);
        place.work(ALONE, WAIT, move || compiler.compile(grammar)).await
    }

    fn compile(&self, grammar: Grammar) -> Result<Arc<Rule>> {
        let prepared = match self.prepared.get() {
            Some(prepared) => prepared,
            None => {
                let Capabilities { vocab_size, eos_ids, .. } = &*self.capabilities;
                let prepared = Prepared::new(Arc::clone(&self.tokenizer), *vocab_size, eos_ids)?;
                self.prepared.get_or_init(|| prepared)
            }
        };
        let rule = Arc::new(prepared.compile(&grammar)?);
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.truncate(KEPT - 1);
        kept.push_front((grammar, Arc::clone(&rule)));
        Ok(rule)
    }

    fn found(&self, grammar: &Grammar) -> Option<Arc<Rule>> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|(_, rule)| !rule.spent());
        let at = kept.iter().position(|(known, _)| known == grammar)?;
        let entry = kept.remove(at)?;
        let rule = Arc::clone(&entry.1);
        kept.push_front(entry);
        Some(rule)
    }
}
