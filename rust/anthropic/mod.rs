//! The Messages API of Anthropic, as another form of the same request and the same answer. Knows no HTTP.
//!
//! [`request`] (with `conversation` and `blocks` for its messages) makes a request of the Responses API of one of this kind, which is then answered as every
//! other is; [`message`] is what the response is in this form, [`stream`] what its events are, and [`error`] what its errors are.

mod blocks;
mod conversation;
mod error;
mod message;
mod request;
pub(crate) mod schema;
mod stream;

pub(crate) use error::Envelope;
pub(crate) use message::Message;
pub(crate) use request::Request;
pub(crate) use stream::{Event, Stream};
