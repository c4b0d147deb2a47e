//! `truncation`: which turns of a conversation that is too long the model is still given.
//!
//! Turns are left out whole, the oldest first. A call and what came of it go together.

use super::request::Truncation;
use crate::error::{Code, Error, Result};
use crate::models::{Model, Prompt, PromptOptions};
use crate::prompt::{Role, Turn};

/// The prompt's ids. With `truncation: auto` the oldest turns are left out until there is room for it and for the answer that was asked for (at
/// most half the window); never a system turn, and never the last turn.
pub(super) fn prompt(
    model: &Model,
    turns: &[Turn],
    options: &PromptOptions,
    truncation: Truncation,
    max_output_tokens: Option<u32>,
) -> Result<Prompt> {
    let window = model.capabilities.context_length as usize;
    let asked = max_output_tokens.map_or(1, |most| most as usize).min(window / 2).max(1);
    let fits = |prompt: &Prompt| prompt.ids.len() + asked <= window;
    let whole = model.prompt(turns, options);
    if truncation == Truncation::Disabled || whole.as_ref().is_ok_and(fits) || whole.as_ref().is_err_and(|error| !too_long(error)) {
        return whole;
    }
    let starts = starts(turns);
    // The later it starts, the shorter the prompt: halving finds the earliest start that fits.
    let (mut low, mut high) = (0, starts.len());
    let mut best = None;
    while low < high {
        let middle = usize::midpoint(low, high);
        let Some(start) = starts.get(middle).copied() else { break };
        let kept = kept(turns, start);
        match model.prompt(&kept, options) {
            Ok(prompt) if fits(&prompt) => {
                best = Some((turns.len() - kept.len(), prompt));
                high = middle;
            }
            Err(error) if !too_long(&error) => return Err(error),
            _ => low = middle + 1,
        }
    }
    // Where nothing helps, the caller is told how long the whole prompt is.
    let Some((left_out, prompt)) = best else { return whole };
    tracing::debug!(left_out, tokens = prompt.ids.len(), window, "the oldest turns are left out of the prompt");
    Ok(prompt)
}

/// Where what is kept may begin: with a turn of the user, with one of the assistant that calls tools, or with the last one unless it came of a call.
fn starts(turns: &[Turn]) -> Vec<usize> {
    let old: Vec<(usize, &Turn)> = turns.iter().enumerate().filter(|(_, turn)| turn.role != Role::System).collect();
    let last = old.last().map(|(index, _)| *index);
    let may = |(index, turn): &(usize, &Turn)| match turn.role {
        Role::User => true,
        Role::Tool | Role::System => false,
        Role::Assistant => Some(*index) == last || calls(turn),
    };
    old.into_iter().skip(1).filter(may).map(|(index, _)| index).collect()
}

/// The turns from `start` on, with every system turn. Before calls stands what the user asked for, however many rounds of calls there were since:
/// the model has to know it, and templates insist on it.
fn kept(turns: &[Turn], start: usize) -> Vec<Turn> {
    let before = turns.get(..start).unwrap_or_default();
    let asked = turns.get(start).filter(|turn| calls(turn)).and_then(|_| before.iter().rposition(|turn| turn.role == Role::User));
    let kept = turns.iter().enumerate().filter(|(index, turn)| *index >= start || turn.role == Role::System || Some(*index) == asked);
    kept.map(|(_, turn)| turn.clone()).collect()
}

/// Whether it is a turn of the assistant that calls tools.
fn calls(turn: &Turn) -> bool {
    turn.role == Role::Assistant && !turn.calls.is_empty()
}

fn too_long(error: &Error) -> bool {
    error.code == Code::ContextLengthExceeded
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::Call;

    /// Turns as letters: `c` calls a tool, `t` is what came of it.
    fn turns(roles: &str) -> Vec<Turn> {
        let turn = |(index, role): (usize, char)| {
            let turn = |role| Turn::new(role, index.to_string());
            match role {
                's' => turn(Role::System),
                'u' => turn(Role::User),
                't' => turn(Role::Tool),
                'c' => Turn { calls: vec![Call { name: "f".to_owned(), arguments: "{}".to_owned() }], ..turn(Role::Assistant) },
                _ => turn(Role::Assistant),
            }
        };
        roles.chars().enumerate().map(turn).collect()
    }

    #[test]
    fn a_call_is_kept_with_what_came_of_it_and_with_what_was_asked() {
        for (roles, expected) in [
            ("suau", &["0 3"][..]),
            ("sua", &["0 2"]),
            ("uctctt", &["0 1 2 3 4 5", "0 3 4 5"]),
            ("suctctauctct", &["0 1 2 3 4 5 6 7 8 9 10 11", "0 1 4 5 6 7 8 9 10 11", "0 7 8 9 10 11", "0 7 8 9 10 11", "0 7 10 11"]),
            ("ctctu", &["2 3 4", "4"]),
            ("uctsct", &["0 1 2 3 4 5", "0 3 4 5"]),
            ("su", &[]),
        ] {
            let turns = turns(roles);
            let starts = starts(&turns);
            let found: Vec<Vec<Turn>> = starts.iter().map(|start| kept(&turns, *start)).collect();
            let words = found.iter().map(|kept| kept.iter().map(|turn| turn.text.as_str()).collect::<Vec<_>>().join(" "));
            assert_eq!(words.collect::<Vec<_>>(), expected, "{roles}");
            assert!(found.windows(2).all(|pair| pair[0].len() >= pair[1].len()), "{roles}");
        }
    }
}
