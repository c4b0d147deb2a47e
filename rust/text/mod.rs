//! From token ids to the text a reader may see.
//!
//! [`decode`] turns ids into whole characters as they arrive, [`stop`] cuts the text before a stop string. Nothing here knows a door or an engine.

pub mod decode;
pub mod stop;

pub use decode::{DecodeStream, Detokeniser};
pub use stop::StopMatcher;
