//! A vocabulary and a template without files, for engines without a model: each byte is an id, and so is each word that the mock says.

use std::sync::{Arc, OnceLock};

use serde_json::{Map, Value, json};

use crate::engine::Capabilities;
use crate::engine::mock::vocabulary::{EOS, FIRST_WORD, SIZE, SPECIALS, WORDS};
use crate::error::Result;
use crate::grammar::Compiler;
use crate::prompt::{Prompter, Tokenizer};
use crate::text::decode::byte_symbols;

/// It knows no tools, so it is told of them in words. The comment is how it is known for a model that may think.
const TEMPLATE: &str = "{# <think>…</think> #}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}\
                        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// The template and the tokenizer.
///
/// # Errors
/// None that this vocabulary can cause; the signature is the loader's.
pub(crate) fn prompter() -> Result<Prompter> {
    Prompter::new(Arc::new(Tokenizer::from_parts(tokenizer().to_string().as_bytes(), TEMPLATE)?))
}

/// What compiles grammars where there is no model yet: whether one can be used does not depend on the words that a model has, but for special tokens that it names.
///
/// # Errors
/// As [`prompter`].
pub(crate) fn grammars() -> Result<Arc<Compiler>> {
    static COMPILER: OnceLock<Arc<Compiler>> = OnceLock::new();
    if let Some(compiler) = COMPILER.get() {
        return Ok(Arc::clone(compiler));
    }
    let capabilities = Capabilities { context_length: 8192, max_batch: 1, vocab_size: SIZE, eos_ids: vec![EOS], constraints: true };
    let compiler = Compiler::new(Arc::clone(prompter()?.tokenizer()), Arc::new(capabilities));
    Ok(Arc::clone(COMPILER.get_or_init(|| Arc::new(compiler))))
}

/// A byte-level BPE without merges, in the `tokenizer.json` form.
fn tokenizer() -> Value {
    let vocabulary: Map<String, Value> = byte_symbols().enumerate().map(|(id, symbol)| (symbol.to_string(), json!(id))).collect();
    let added = |id: u32, text: &str, special: bool| json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": special});
    let specials = (256..).zip(SPECIALS).map(|(id, text)| added(id, text, true));
    let words = (FIRST_WORD..).zip(WORDS).map(|(id, text)| added(id, text, false));
    json!({
        "version": "1.0",
        "added_tokens": specials.chain(words).collect::<Vec<_>>(),
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::mock::vocabulary::{EOS, SIZE};

    #[test]
    fn every_byte_and_word_is_one_id() {
        let prompter = prompter().unwrap();
        let ids = |text| prompter.tokenizer().encode(text, false).unwrap();
        assert_eq!(ids("a é"), [97, 32, 0xC3, 0xA9]);
        assert_eq!(ids("<|im_end|>"), [EOS]);
        assert_eq!(ids(" warm"), [FIRST_WORD + 4]);
        assert_eq!(prompter.tokenizer().vocab_size(), SIZE as usize);
    }
}
