//! From token ids to the text a reader may see.
//!
//! [`decode`] turns ids into whole characters as they arrive, [`parse`] tells thoughts, words and calls of tools apart ([`reasoning`] and [`calls`]
//! hold how models mark them), [`stop`] cuts the words before a stop string. Nothing here knows a door or an engine.

pub mod calls;
pub mod decode;
mod harmony;
pub mod parse;
pub mod parsed;
pub mod reasoning;
pub mod stop;

pub use calls::{Family, Signatures, Written};
pub use decode::{DecodeStream, Detokeniser};
pub use parse::{Format, Parser};
pub use parsed::{Kind, Parsed};
pub use stop::StopMatcher;
