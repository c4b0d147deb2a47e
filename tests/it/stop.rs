//! Stop strings against a plain reference that sees the whole text, for every way of cutting it.

use emberd::text::StopMatcher;
use proptest::prelude::*;

/// The text before the stop that is complete first (of those complete together, the longest), and which stop that is.
fn reference(text: &str, stops: &[String], keep: bool) -> (String, Option<usize>) {
    for end in 1..=text.len() {
        let hit = (0..stops.len())
            .filter(|&index| !stops[index].is_empty() && text.as_bytes()[..end].ends_with(stops[index].as_bytes()))
            .max_by_key(|&index| (stops[index].len(), std::cmp::Reverse(index)));
        if let Some(index) = hit {
            let cut = if keep { end } else { end - stops[index].len() };
            return (text[..cut].to_owned(), Some(index));
        }
    }
    (text.to_owned(), None)
}

/// What a matcher makes of the pieces. Checks on the way that what is held back may still become a stop.
fn run<'a>(pieces: impl IntoIterator<Item = &'a str>, stops: &[String], keep: bool) -> (String, Option<usize>) {
    let mut matcher = StopMatcher::new(stops.to_vec()).keep_stop(keep);
    let (mut seen, mut out) = (String::new(), String::new());
    for piece in pieces {
        let stopped = matcher.push(piece, &mut out);
        seen.push_str(piece);
        if stopped.is_none() {
            let tail = &seen[out.len()..];
            assert_eq!(tail.len(), matcher.held());
            assert!(tail.is_empty() || stops.iter().any(|stop| stop.len() > tail.len() && stop.starts_with(tail)));
        }
    }
    matcher.finish(&mut out);
    (out, matcher.stopped())
}

fn texts() -> impl Strategy<Value = String> {
    prop_oneof!["[ab]{0,14}", "[abé🙂]{0,8}"]
}

proptest! {
    #[test]
    fn any_two_cuts_give_what_the_whole_gives(
        text in texts(),
        stops in prop::collection::vec(prop_oneof!["[ab]{0,5}", "[abé🙂]{1,3}"], 0..4),
        keep: bool,
    ) {
        let expected = reference(&text, &stops, keep);
        let places: Vec<usize> = (0..=text.len()).filter(|&at| text.is_char_boundary(at)).collect();
        for &first in &places {
            for &second in places.iter().filter(|&&second| second >= first) {
                let pieces = [&text[..first], &text[first..second], &text[second..]];
                prop_assert_eq!(run(pieces, &stops, keep), expected.clone(), "cut at {} and {}", first, second);
            }
        }
    }

    #[test]
    fn one_character_at_a_time_gives_what_the_whole_gives(text in texts(), stops in prop::collection::vec("[ab]{1,5}", 0..4)) {
        let pieces: Vec<String> = text.chars().map(String::from).collect();
        prop_assert_eq!(run(pieces.iter().map(String::as_str), &stops, false), reference(&text, &stops, false));
    }
}

fn stops(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|&text| text.to_owned()).collect()
}

#[test]
fn only_what_may_still_be_a_stop_is_held_back() {
    let mut matcher = StopMatcher::new(stops(&["</tool>"]));
    let mut out = String::new();
    assert_eq!(matcher.push("x < y </to", &mut out), None);
    assert_eq!(out, "x < y ");
    assert_eq!(matcher.push("day", &mut out), None);
    assert_eq!(out, "x < y </today");
}

#[test]
fn text_after_a_stop_is_ignored() {
    let mut matcher = StopMatcher::new(stops(&["\n\n", "END"]));
    let mut out = String::new();
    assert_eq!(matcher.push("one EN", &mut out), None);
    assert_eq!(matcher.push("D two", &mut out), Some(1));
    assert_eq!(matcher.push("three\n\n", &mut out), Some(1));
    matcher.finish(&mut out);
    assert_eq!((out.as_str(), matcher.stop(1)), ("one ", Some("END")));
}

#[test]
fn the_longest_of_stops_that_end_together_wins() {
    assert_eq!(run(["a b", "c d"], &stops(&["c", "bc"]), false), ("a ".to_owned(), Some(1)));
}

#[test]
fn no_stops_hold_nothing_back() {
    assert_eq!(run(["a", "b"], &[], false), ("ab".to_owned(), None));
    assert_eq!(run(["a", "b"], &stops(&[""]), false), ("ab".to_owned(), None));
}
