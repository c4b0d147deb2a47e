//! The Responses API as such: what may be asked, what is answered, which events tell of it. Knows no HTTP.
//!
//! In the order a request meets them: [`request`] reads and checks it (with `validate`, and `item` for its input), [`answer`] gets it an answer,
//! [`stream`] turns text into [`event`]s and the [`object`].

pub mod answer;
pub mod event;
pub mod item;
pub mod object;
pub mod request;
pub mod stream;
mod validate;

pub use answer::{Running, now};
pub use event::{Event, Sink, Unheard};
pub use object::{Arrival, Begin, Effective, Response, Usage};
pub use request::Request;
pub use stream::Stream;
