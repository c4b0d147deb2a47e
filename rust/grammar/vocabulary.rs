//! A model's tokens as llguidance wants them: a trie of their bytes, and the tokenizer for what is certain to come.

use std::sync::Arc;

use llguidance::toktrie::{TokRxInfo, TokTrie, TokenId, TokenizerEnv};

use super::refused;
use super::whole::Piece;
use crate::error::{Code, Error, Result};
use crate::prompt::Tokenizer;

/// Begins a text that is encoded to see how its rest is: a character that no word contains, so that it is a token (or some) of its own.
const START: &str = "\u{2}";

/// The tokens of one model.
pub(super) struct Vocabulary {
    trie: TokTrie,
    tokenizer: Arc<Tokenizer>,
    /// The ids of [`START`] alone.
    start: Vec<u32>,
}

impl Vocabulary {
    /// The tokens of `tokenizer`, of which the model knows those below `vocab_size`, and ends its answers with those of `eos`.
    ///
    /// # Errors
    /// `unsupported_parameter` where a text is more than its tokens' bytes in a row, and where nothing ends an answer.
    pub(super) fn new(tokenizer: Arc<Tokenizer>, vocab_size: u32, eos: &[u32]) -> Result<Self> {
        let unsupported = |what: &str| Error::new(Code::UnsupportedParameter, what.to_owned()).hint("use another model");
        let Some(first) = eos.first().copied().filter(|_| eos.iter().all(|id| *id < vocab_size)) else {
            return Err(unsupported("the model has no token that ends an answer, so a grammar could not end one"));
        };
        let detokeniser = tokenizer.detokeniser();
        if !detokeniser.is_bytewise() {
            return Err(unsupported("the model's tokenizer joins tokens in a way that grammars cannot follow"));
        }
        let words: Vec<Vec<u8>> = (0..vocab_size)
            .map(|id| {
                let mut bytes = detokeniser.bytes(id);
                // A token of its own kind is never part of a text, whatever its name looks like.
                if (tokenizer.is_special(id) || eos.contains(&id)) && !bytes.is_empty() {
                    bytes.insert(0, TokTrie::SPECIAL_TOKEN_MARKER);
                }
                bytes
            })
            .collect();
        let longest = words.iter().map(Vec::len).max().unwrap_or(0);
        if longest > LONGEST_TOKEN {
            return Err(refused(format!("the model has a token of {longest} bytes, above {LONGEST_TOKEN}")).hint("use another model"));
        }
        let trie = TokTrie::from(&TokRxInfo::new(vocab_size, first), &words).with_eos_tokens(eos);
        let start = tokenizer.encode(START, false).unwrap_or_default();
        Ok(Self { trie, tokenizer, start })
    }

    /// Whether this text is a special token of the model's.
    pub(super) fn is_special(&self, text: &str) -> bool {
        self.tokenizer.token_to_id(text).is_some_and(|id| self.tokenizer.is_special(id))
    }

    /// A text as its special tokens and what is spelt between them.
    pub(super) fn cut(&self, text: &str) -> Vec<Piece> {
        let detokeniser = self.tokenizer.detokeniser();
        let named = |id: &u32| Some((*id, self.tokenizer.id_to_token(*id)?));
        let specials: Vec<(u32, String)> = detokeniser.specials(&[text]).iter().filter_map(named).collect();
        let mut pieces = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            // The first, and of those that begin there the longest.
            let found = specials.iter().filter_map(|(id, token)| Some((rest.find(token)?, std::cmp::Reverse(token.len()), *id))).min();
            let (at, length, id) = found.map_or((rest.len(), 0, None), |(at, length, id)| (at, length.0, Some(id)));
            let (spelt, after) = rest.split_at(at);
            if !spelt.is_empty() {
                pieces.push(Piece::Text(spelt.to_owned()));
            }
            pieces.extend(id.filter(|id| (*id as usize) < self.trie.vocab_size()).map(Piece::Special));
            rest = after.get(length..).unwrap_or_default();
        }
        pieces
    }

    /// The ids of a text as the tokenizer cuts it; `None` where it makes something else of it, such as a blank in front or a special token.
    fn encode(&self, text: &str) -> Option<Vec<TokenId>> {
        let same =
            |ids: &[TokenId]| ids.iter().all(|id| (*id as usize) < self.trie.vocab_size()) && self.trie.decode_raw(ids) == text.as_bytes();
        let ids = self.tokenizer.encode(text, false).ok()?;
        if same(&ids) {
            return Some(ids);
        }
        let ids = self.tokenizer.encode(&format!("{START}{text}"), false).ok()?;
        let rest = ids.strip_prefix(self.start.as_slice()).filter(|_| !self.start.is_empty())?;
        same(rest).then(|| rest.to_vec())
    }
}

/// What the trie has room for.
const LONGEST_TOKEN: usize = 1000;

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie
            .tokenize_with_greedy_fallback(bytes, |text| self.encode(text).unwrap_or_else(|| self.trie.greedy_tokenize(text.as_bytes())))
    }
}
