//! The route of Chat Completions: the way of a Responses request, with what it says written in the other form.
//!
//! What the forms are is known in [`crate::completions`]; here they are sent.

use hyper::{Response, StatusCode};

use super::inbound::Inbound;
use super::outbound::{self, Body, Envelope};
use super::routes::{Arrived, asked, going_away, streamed};
use super::server::App;
use super::sse::{DONE, Wire, data};
use crate::completions::{Chunks, Completion, Said, in_terms, read};
use crate::error::Result;
use crate::responses::{Event, Running};

/// Creates a completion.
pub(super) async fn create(app: &App, body: &mut Inbound, arrived: Arrived) -> Result<Response<Body>> {
    let (model, request, wanted, arrival) = asked(app, body, arrived, read).await.map_err(in_terms)?;
    let stream = request.stream;
    let mut running = Running::start(model, request, arrival, arrived.time, app.options.reasoning_events).await.map_err(in_terms)?;
    if stream {
        let chunks = Chunks::new(running.response(), wanted);
        return Ok(streamed(app, running, Box::new(chunks)));
    }
    tokio::select! {
        whole = running.whole() => Ok(outbound::json(StatusCode::OK, &Completion::new(whole.map_err(in_terms)?, wanted))),
        () = app.cut() => Err(going_away()),
    }
}

impl Wire for Chunks {
    fn write(&mut self, event: Event<'_>, into: &mut Vec<u8>) {
        self.tell(event, |said| match said {
            Said::Chunk(chunk) => data(chunk, into),
            // A stream that failed is not done: it ends with what went wrong.
            Said::Failed(error) => data(&Envelope::of(error), into),
            Said::Done => into.extend_from_slice(DONE),
        });
    }
}
