//! Chat Completions as such: a second form of what the Responses API asks and answers. Knows no HTTP.
//!
//! [`read`] makes a request of [`crate::responses`] of one of this form (with `messages` for its conversation and `tools`), so that all that is checked and done is
//! the same; what comes of it is told as one [`Completion`], or event by event as [`Chunks`]. Both say the same: the deltas of the chunks add up to the message. `schema` is what such
//! a request may hold, for the document of the API.

mod chunk;
mod messages;
mod object;
mod request;
pub(crate) mod schema;
mod tools;

pub use chunk::{Chunk, Chunks, Said};
pub use object::Completion;
pub use request::{Wanted, in_terms, read};

use crate::responses::Response;
use crate::responses::item::Item;
use crate::responses::object::{Incomplete, Status};

/// The only choice of a completion.
const INDEX: usize = 0;

/// Why an answer may end.
const FINISH_REASONS: [&str; 4] = ["stop", "length", "tool_calls", "content_filter"];

/// Why an answer ended.
fn finish_reason(response: &Response) -> &'static str {
    let calls = response.output.iter().any(|item| matches!(item, Item::FunctionCall(_) | Item::CustomToolCall(_)));
    match (response.status, response.incomplete_details) {
        (Status::Incomplete, Some(Incomplete { reason: "content_filter" })) => "content_filter",
        (Status::Incomplete, _) => "length",
        _ if calls => "tool_calls",
        _ => "stop",
    }
}

/// The id of a completion, from that of its response.
fn id(response: &Response) -> String {
    format!("chatcmpl-{}", response.id.trim_start_matches("resp_"))
}
