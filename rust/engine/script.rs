//! What the mock engine is told to answer, and what goes wrong with it: rules, of which the first that fits a prompt holds.
//!
//! A rule looks at the prompt's text, so that whole conversations of real clients are played, in whatever order and however many at a time. How its answer
//! is made, and broken, is `mock`'s business.

use std::fs;
use std::sync::Arc;

use serde::Deserialize;

use crate::engine::mock::vocabulary;

/// What goes wrong with an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Trouble {
    /// No id comes any more, until the request is cancelled.
    Stall,
    /// The request fails.
    Fail,
    /// The engine ends without a word, and with it all that it has.
    Die,
    /// More ids come than were asked for.
    Overrun,
}

/// One rule.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Rule {
    /// What the last turn of the prompt says, among other things; absent: whatever it says.
    pub says: Option<String>,
    /// What stands anywhere in the prompt, such as the name of a tool; absent: whatever stands there.
    pub prompt: Option<String>,
    /// The answer.
    pub answer: String,
    /// Whether the answer has no end of its own: it is said over and over until the limit.
    pub endless: bool,
    /// What goes wrong; absent: nothing.
    pub fault: Option<Trouble>,
    /// After how many ids it goes wrong. An id is a byte of the answer, or its end.
    pub after: u32,
    /// How long each step with an id of this answer takes, in milliseconds.
    pub step_ms: u64,
}

/// The rules, in their order; none: there is no script.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Script(Arc<[Arc<Rule>]>);

impl Script {
    /// The rules of a file: a JSON list of objects with the fields of [`Rule`].
    ///
    /// # Errors
    /// What is wrong with the file, on one line, for the command line.
    pub fn read(path: &str) -> Result<Self, String> {
        let text = fs::read_to_string(path).map_err(|error| error.to_string())?;
        let rules: Vec<Rule> = serde_json::from_str(&text).map_err(|error| error.to_string())?;
        if rules.is_empty() {
            return Err("it has no rules".to_owned());
        }
        Ok(Self::from(rules))
    }

    /// Whether there are no rules.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The first rule that fits a prompt of the mock's vocabulary.
    #[must_use]
    pub fn rule(&self, prompt: &[u32]) -> Option<Arc<Rule>> {
        if self.is_empty() {
            return None; // The prompt is not even looked at: the mock is measured with, too.
        }
        let (last, whole) = (vocabulary::text(last_turn(prompt)), vocabulary::text(prompt));
        let says = |part: &Option<String>, text: &str| part.as_ref().is_none_or(|part| text.contains(part.as_str()));
        self.0.iter().find(|rule| says(&rule.says, &last) && says(&rule.prompt, &whole)).cloned()
    }
}

impl From<Vec<Rule>> for Script {
    fn from(rules: Vec<Rule>) -> Self {
        Self(rules.into_iter().map(Arc::new).collect())
    }
}

/// What stands between the marks of the last turn that is whole; the assistant's, which is still to be said, is not.
fn last_turn(prompt: &[u32]) -> &[u32] {
    let end = prompt.iter().rposition(|id| *id == vocabulary::EOS).unwrap_or(prompt.len());
    let before = prompt.get(..end).unwrap_or_default();
    let start = before.iter().rposition(|id| *id == vocabulary::START).map_or(0, |at| at + 1);
    before.get(start..).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(turns: &[(&str, &str)]) -> Vec<u32> {
        let mut ids = Vec::new();
        for (role, text) in turns {
            ids.push(vocabulary::START);
            ids.extend(format!("{role}\n{text}").bytes().map(u32::from));
            ids.extend([vocabulary::EOS, 10]);
        }
        ids.push(vocabulary::START);
        ids.extend("assistant\n".bytes().map(u32::from));
        ids
    }

    #[test]
    fn the_first_rule_that_fits_the_last_turn_and_the_prompt_holds() {
        let rule = |says: Option<&str>, prompt: Option<&str>, answer: &str| Rule {
            says: says.map(str::to_owned),
            prompt: prompt.map(str::to_owned),
            answer: answer.to_owned(),
            ..Rule::default()
        };
        let script = Script::from(vec![
            rule(Some("weather"), Some("\"look\""), "a call"),
            rule(Some("21 degrees"), None, "it is warm"),
            rule(None, Some("be brief"), "hm"),
        ]);
        let answer = |turns: &[(&str, &str)]| script.rule(&prompt(turns)).map(|rule| rule.answer.clone());
        let system = ("system", "tools: \"look\"; be brief");
        assert_eq!(answer(&[system, ("user", "the weather?")]).as_deref(), Some("a call"));
        assert_eq!(answer(&[system, ("user", "the weather?"), ("user", "21 degrees")]).as_deref(), Some("it is warm"));
        assert_eq!(answer(&[system, ("user", "the weather?"), ("user", "so?")]).as_deref(), Some("hm"));
        assert_eq!(answer(&[("user", "the weather?")]), None);
        assert_eq!(answer(&[("user", "")]), None);
    }

    #[test]
    fn a_file_says_what_is_wrong_with_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("script.json");
        let read = |text: &str| {
            fs::write(&path, text).unwrap();
            Script::read(path.to_str().unwrap())
        };
        let script = read(r#"[{"says": "hi", "answer": "ho", "fault": "stall", "after": 2}, {"answer": "x"}]"#).unwrap();
        let rule = script.rule(&prompt(&[("user", "hi!")])).unwrap();
        assert_eq!((rule.answer.as_str(), rule.fault, rule.after), ("ho", Some(Trouble::Stall), 2));
        for (text, reason) in
            [("[]", "no rules"), ("{}", "sequence"), (r#"[{"anser": "x"}]"#, "anser"), (r#"[{"answer": "x", "fault": "sulk"}]"#, "sulk")]
        {
            assert!(read(text).is_err_and(|error| error.contains(reason)), "{text}");
        }
        assert!(Script::read("/no/such/file").is_err());
    }
}
