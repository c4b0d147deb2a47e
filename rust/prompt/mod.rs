//! From a conversation to token ids: chat templates and tokenizers.
//!
//! [`template`] renders turns to text exactly as Hugging Face transformers would, [`messages`] makes turns fit templates that are strict about
//! them, `dialect` calls of tools those that know nothing of them, and [`tokenizer`] turns text into ids. Doors come in through [`Prompter`]. Nothing here knows a door, an engine or a request.

mod builtins;
mod dialect;
mod json;
mod lazy;
pub mod messages;
mod python;
mod repr;
mod source;
pub mod template;
pub mod tokenizer;
mod turn;

pub(crate) use dialect::definition;
pub use template::{ChatTemplate, RenderInput, Specials, TemplateError};
pub use tokenizer::{Tokenizer, TokenizerError};
pub use turn::{Call, Prompter, Role, Turn, Writing};
