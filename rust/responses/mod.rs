//! The Responses API as such: what may be asked, what is answered, which events tell of it. Knows no HTTP.
//!
//! In the order a request meets them: [`request`] reads and checks it (with `validate`, `input` for its conversation, `file` for files in it, [`sealed`] for thoughts that come back, `tools`, `controls` for its sampling and [`format`] for its form), [`answer`]
//! (with `held` for what it is held to, `strict` for the schemas of tools, and `truncate` for conversations that are too long)
//! gets it an answer, [`stream`] (with `custom` for the texts of custom tools) turns what it says into [`event`]s, [`item`]s and the [`object`]; `told` is what clients hear of an error.

pub mod answer;
pub(crate) mod controls;
mod custom;
pub mod event;
mod file;
pub mod format;
mod held;
pub mod ids;
pub(crate) mod input;
pub mod item;
pub mod object;
pub mod request;
pub mod schema;
pub mod sealed;
pub mod stream;
mod strict;
mod told;
pub mod tools;
mod truncate;
pub(crate) mod validate;

pub use answer::{Running, count, now};
pub use event::{Event, Sink, Unheard};
pub use format::Format;
pub use ids::Ids;
pub use object::{Arrival, Begin, Effective, Response, Usage};
pub use request::Request;
pub use sealed::Seal;
pub use stream::{ReasoningEvents, Stream};
pub use strict::check;
pub(crate) use told::{log, told};
pub use tools::Tools;
