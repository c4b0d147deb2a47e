//! The Responses API as such: what may be asked, what is answered, which events tell of it. Knows no HTTP.
//!
//! In the order a request meets them: [`request`] reads and checks it (with `validate`, `item` for its input, `controls` for its sampling and [`format`] for its form), [`answer`] gets it an answer,
//! [`stream`] turns text into [`event`]s and the [`object`]; `told` is what clients hear of an error.

pub mod answer;
mod controls;
pub mod event;
pub mod format;
pub mod item;
pub mod object;
pub mod request;
pub mod stream;
mod told;
mod validate;

pub use answer::{Running, now};
pub use event::{Event, Sink, Unheard};
pub use format::Format;
pub use object::{Arrival, Begin, Effective, Response, Usage};
pub use request::Request;
pub use stream::Stream;
pub(crate) use told::{log, told};
