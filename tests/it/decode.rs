//! Incremental detokenising against the tokenizers crate's own decoding of the whole.

use std::sync::Arc;

use emberd::text::Detokeniser;
use proptest::prelude::*;
use serde_json::Value;
use tokenizers::Tokenizer;

use crate::vocab;

fn pair(file: &Value) -> (Arc<Tokenizer>, Arc<Detokeniser>) {
    let tokenizer = Arc::new(vocab::load(file));
    (Arc::clone(&tokenizer), Arc::new(Detokeniser::new(tokenizer)))
}

/// The pieces that come out, one for each id, and the rest.
fn pieces(detokeniser: &Arc<Detokeniser>, ids: &[u32]) -> Vec<String> {
    let mut stream = detokeniser.stream();
    let mut found: Vec<String> = ids
        .iter()
        .map(|&id| {
            let mut piece = String::new();
            stream.push(id, &mut piece);
            piece
        })
        .collect();
    let mut rest = String::new();
    stream.finish(&mut rest);
    found.push(rest);
    found
}

fn ids_of(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode_fast(text, false).unwrap().get_ids().to_vec()
}

/// Texts with everything that is cut in the middle by byte tokens.
fn any_text() -> impl Strategy<Value = String> {
    prop_oneof!["[a-z the]{0,40}", "\\PC{0,20}", "( |🙂|é|日|\u{200d}|👩|hell|\n){0,20}"]
}

proptest! {
    #[test]
    fn byte_level_text_comes_back_piece_by_piece(text in any_text()) {
        let (tokenizer, detokeniser) = pair(&vocab::byte_level());
        let ids = ids_of(&tokenizer, &text);
        let found = pieces(&detokeniser, &ids);
        prop_assert_eq!(found.concat(), &*tokenizer.decode(&ids, true).unwrap());
        // Nothing is left for the end, and no piece holds a broken character.
        prop_assert_eq!(found.last().unwrap(), "");
        prop_assert!(text.contains(char::REPLACEMENT_CHARACTER) || !found.concat().contains(char::REPLACEMENT_CHARACTER));
    }

    #[test]
    fn byte_level_decoding_of_any_ids_is_that_of_the_whole(ids in prop::collection::vec(0_u32..270, 0..40)) {
        let (tokenizer, detokeniser) = pair(&vocab::byte_level());
        prop_assert_eq!(pieces(&detokeniser, &ids).concat(), tokenizer.decode(&ids, true).unwrap());
    }

    #[test]
    fn byte_fallback_text_comes_back_piece_by_piece(text in any_text()) {
        let (tokenizer, detokeniser) = pair(&vocab::byte_fallback());
        let ids = ids_of(&tokenizer, &text);
        let found = pieces(&detokeniser, &ids);
        prop_assert_eq!(found.concat(), &*tokenizer.decode(&ids, true).unwrap());
        prop_assert_eq!(found.last().unwrap(), "");
    }

    #[test]
    fn byte_fallback_never_stalls_on_any_ids(ids in prop::collection::vec(0_u32..290, 0..40)) {
        let (tokenizer, detokeniser) = pair(&vocab::byte_fallback());
        let found = pieces(&detokeniser, &ids).concat();
        let whole = tokenizer.decode(&ids, true).unwrap();
        // The whole turns a run of bytes to U+FFFD if any of it is broken; a stream has shown the good part by then.
        if whole.contains(char::REPLACEMENT_CHARACTER) {
            prop_assert!(found.contains(char::REPLACEMENT_CHARACTER));
        } else {
            prop_assert_eq!(found, whole);
        }
    }

    #[test]
    fn decoders_that_look_around_give_what_the_whole_gives(ids in prop::collection::vec(0_u32..12, 0..30)) {
        for file in [vocab::metaspace(), vocab::word_piece(), vocab::bare()] {
            let (tokenizer, detokeniser) = pair(&file);
            prop_assert_eq!(pieces(&detokeniser, &ids).concat(), tokenizer.decode(&ids, true).unwrap());
        }
    }

    #[test]
    fn the_split_into_pushes_does_not_matter(ids in prop::collection::vec(0_u32..270, 0..30), cut in 0_usize..30) {
        let (_, detokeniser) = pair(&vocab::byte_level());
        let cut = cut.min(ids.len());
        let mut text = String::new();
        let mut stream = detokeniser.stream();
        stream.push_all(&ids[..cut], &mut text);
        stream.push_all(&ids[cut..], &mut text);
        stream.finish(&mut text);
        prop_assert_eq!(text, detokeniser.decode(&ids));
    }
}

#[test]
fn an_emoji_cut_in_four_tokens_leaves_whole() {
    let (tokenizer, detokeniser) = pair(&vocab::byte_fallback());
    let ids: Vec<u32> = ["<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "a"].map(|t| tokenizer.token_to_id(t).unwrap()).to_vec();
    assert_eq!(pieces(&detokeniser, &ids), ["", "", "", "🙂", "a", ""]);
}

#[test]
fn bytes_that_become_no_character_leave_at_once() {
    let (tokenizer, detokeniser) = pair(&vocab::byte_level());
    let id = |token: &str| tokenizer.token_to_id(token).unwrap();
    // 0xFF begins nothing; 0xE2 begins something, until an `a` comes.
    assert_eq!(pieces(&detokeniser, &[id("ÿ"), id("ÿ"), id("â"), id("a")]), ["\u{fffd}", "\u{fffd}", "", "\u{fffd}a", ""]);
    // The end of the text is the end of the character too.
    assert_eq!(pieces(&detokeniser, &[id("â")]), ["", "\u{fffd}"]);
}

#[test]
fn special_tokens_and_unknown_ids_are_not_shown() {
    let (tokenizer, detokeniser) = pair(&vocab::byte_level());
    let id = |token: &str| tokenizer.token_to_id(token).unwrap();
    let ids = [id("<|im_start|>"), id("hell"), 999_999, id("<tool_call>"), id("été 🙂"), id("<|im_end|>")];
    assert_eq!(pieces(&detokeniser, &ids), ["", "hell", "", "<tool_call>", "été 🙂", "", ""]);
    assert!(detokeniser.is_special(id("<|im_end|>")) && !detokeniser.is_special(id("<tool_call>")));
}

#[test]
fn a_leading_blank_is_taken_off_once() {
    let (tokenizer, detokeniser) = pair(&vocab::byte_fallback());
    let id = |token: &str| tokenizer.token_to_id(token).unwrap();
    assert_eq!(pieces(&detokeniser, &[1, id("▁▁"), id("▁the"), id("▁t")]), ["", " ", " the", " t", ""]);
}

#[test]
fn each_token_has_its_own_bytes() {
    let check = |file: &Value, tokens: &[(&str, &[u8])]| {
        let (tokenizer, detokeniser) = pair(file);
        for (token, bytes) in tokens {
            assert_eq!(detokeniser.bytes(tokenizer.token_to_id(token).unwrap()), *bytes, "{token}");
        }
        assert_eq!(detokeniser.bytes(999_999), b"");
    };
    let whole = "été 🙂".as_bytes();
    check(&vocab::byte_level(), &[("hell", b"hell"), ("Ġw", b" w"), ("ðŁ", b"\xf0\x9f"), ("<|im_end|>", b"<|im_end|>"), ("été 🙂", whole)]);
    check(&vocab::byte_fallback(), &[("▁the", b" the"), ("<0xF0>", b"\xf0"), ("<s>", b"<s>")]);
    check(&vocab::metaspace(), &[("▁cat", b" cat"), ("s", b"s"), ("🙂", "🙂".as_bytes())]);
    check(&vocab::bare(), &[("cat", b"cat"), ("é", "é".as_bytes())]);
}
