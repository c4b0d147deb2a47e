//! The cutting of a stream into lines, for every way the stream may come, against a splitter that sees it whole.

use emberd::worker::{Frames, Line};
use proptest::prelude::*;

/// What the whole stream holds: lines within the cap, lengths of those over it, nothing for blank ones.
fn reference(stream: &[u8], max: usize) -> Vec<Result<Vec<u8>, u64>> {
    stream
        .split(|byte| *byte == b'\n')
        .filter(|line| line.len() > max || !line.iter().all(u8::is_ascii_whitespace))
        .map(|line| if line.len() > max { Err(line.len() as u64) } else { Ok(line.to_vec()) })
        .collect()
}

fn feed<'a>(chunks: impl IntoIterator<Item = &'a [u8]>, max: usize) -> Vec<Result<Vec<u8>, u64>> {
    let mut frames = Frames::new(max);
    let mut found = Vec::new();
    let keep = |line| match line {
        Line::Whole(line) => Ok(line.to_vec()),
        Line::TooLong { length, .. } => Err(length),
    };
    for chunk in chunks {
        frames.buffer().extend_from_slice(chunk);
        found.extend(std::iter::from_fn(|| frames.line()).map(keep));
        assert!(frames.buffer().len() <= max, "what is over the cap is not kept");
    }
    found.extend(frames.finish().map(keep));
    found
}

fn streams() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(prop_oneof![4 => Just(b'a'), 2 => Just(b'\n'), 1 => Just(b'\r'), 1 => Just(b' '), 1 => any::<u8>()], 0..40)
}

proptest! {
    #[test]
    fn any_two_cuts_give_what_the_whole_gives(stream in streams(), max in 1_usize..12) {
        let expected = reference(&stream, max);
        for first in 0..=stream.len() {
            for second in first..=stream.len() {
                let chunks = [&stream[..first], &stream[first..second], &stream[second..]];
                prop_assert_eq!(feed(chunks, max), expected.clone(), "cut at {} and {}", first, second);
            }
        }
    }

    #[test]
    fn any_chunks_give_what_the_whole_gives(
        stream in prop::collection::vec(prop_oneof![9 => Just(b'x'), 1 => Just(b'\n')], 0..2000),
        sizes in prop::collection::vec(1_usize..200, 1..20),
        max in 1_usize..60,
    ) {
        let mut rest = &stream[..];
        let mut chunks = Vec::new();
        for size in sizes.iter().cycle() {
            if rest.is_empty() { break }
            let (chunk, after) = rest.split_at(rest.len().min(*size));
            chunks.push(chunk);
            rest = after;
        }
        prop_assert_eq!(feed(chunks, max), reference(&stream, max));
    }
}

#[test]
fn a_line_at_the_cap_is_taken_and_one_byte_more_is_not() {
    assert_eq!(feed([&b"12345\n123456\n1\n"[..]], 5), [Ok(b"12345".to_vec()), Err(6), Ok(b"1".to_vec())]);
}

#[test]
fn carriage_returns_are_left_to_json_and_blank_lines_are_nothing() {
    assert_eq!(feed([&b"{}\r\n\r\n \t\n\n{}"[..]], 9), [Ok(b"{}\r".to_vec()), Ok(b"{}".to_vec())]);
}

#[test]
fn a_line_of_64_mib_over_the_cap_costs_no_memory_and_the_next_is_fine() {
    const CHUNK: &[u8] = &[b'x'; 4096];
    let mut frames = Frames::new(1 << 20);
    let mut most = 0;
    for _ in 0..(64 << 20) / CHUNK.len() {
        frames.buffer().extend_from_slice(CHUNK);
        assert_eq!(frames.line(), None);
        most = most.max(frames.buffer().capacity());
    }
    assert!(most <= 4 << 20, "{most} bytes were held");
    frames.buffer().extend_from_slice(b"\nnext\n");
    assert!(matches!(frames.line(), Some(Line::TooLong { length, head }) if length == 64 << 20 && head.len() == 4096));
    assert_eq!(frames.line(), Some(Line::Whole(b"next"[..].into())));
}

#[test]
fn a_line_of_64_mib_within_the_cap_is_searched_once() {
    const CHUNK: &[u8] = &[b'x'; 4096];
    let mut frames = Frames::new(64 << 20);
    for _ in 0..(64 << 20) / CHUNK.len() {
        frames.buffer().extend_from_slice(CHUNK);
        assert_eq!(frames.line(), None); // Looking at all of it each time would be 550 GB.
    }
    frames.buffer().extend_from_slice(b"\nnext");
    assert!(matches!(frames.line(), Some(Line::Whole(line)) if line.len() == 64 << 20));
    assert_eq!(frames.line(), None);
    assert!(frames.buffer().capacity() <= 1 << 20, "the long line's memory went with it");
    assert_eq!(frames.finish(), Some(Line::Whole(b"next"[..].into())));
}
