//! From a conversation to token ids: chat templates and tokenizers.
//!
//! [`template`] renders turns to text exactly as Hugging Face transformers would, [`messages`] makes turns fit templates that are strict about
//! them, and [`tokenizer`] turns text into ids. Doors come in through [`Prompter`]. Nothing here knows a door, an engine or a request.

mod builtins;
mod json;
mod lazy;
pub mod messages;
mod python;
mod repr;
mod source;
pub mod template;
pub mod tokenizer;
mod turn;

pub use template::{ChatTemplate, RenderInput, Specials, TemplateError};
pub use tokenizer::{Tokenizer, TokenizerError};
pub use turn::{Prompter, Role, Turn};
