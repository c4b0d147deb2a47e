//! What a client is told of an error. The failures of models, engines and the server itself are made of paths and of other libraries' words,
//! which are the log's: a client gets one fixed sentence for each code.
//!
//! Which form the sentence takes on the wire (an envelope, an event, a line of the health) is decided where it is written.

use crate::engine::constraint::SIMPLIFY;
use crate::error::{Code, Error};

/// How the hint of an engine begins that lacks a package. It holds names of packages alone, and is what the client's user needs to know.
const INSTALL: &str = "pip install";

/// What a client is told: what happened and what to do, on one line.
pub(crate) fn told(error: &Error) -> String {
    hidden(error).map_or_else(|| error.one_line(), str::to_owned)
}

/// Writes the whole error to the log, as an error where clients are told less than all.
pub(crate) fn log(error: &Error) {
    let Error { code, param, detail, .. } = error;
    let (code, detail) = (code.row().name, detail.as_deref());
    if hidden(error).is_some() {
        tracing::error!(code, detail, hint = error.hint.as_deref(), "{}", error.message);
    } else {
        tracing::debug!(code, param, detail, "{}", error.message);
    }
}

/// The sentence in place of an error that is not for clients.
fn hidden(error: &Error) -> Option<&'static str> {
    let sentence = match error.code {
        Code::ModelLoadFailed => "the model could not be loaded (hint: the server's log says why)",
        Code::DownloadFailed => "the model could not be fetched (hint: the server's log says why)",
        // The client's own grammar, which the engine could not follow to its end: the same again would end the same.
        Code::EngineFailed if error.hint.as_deref() == Some(SIMPLIFY) => {
            "the answer's form took more work than this server does, so it was given up (hint: simplify the schema or grammar)"
        }
        Code::EngineFailed => "the engine failed while it worked on the request (hint: try again; the server's log says why)",
        Code::ServerError => "a fault of the server (hint: the server's log says more)",
        // Of the others, the server says itself what happened: to the request, or that it is busy.
        _ => return None,
    };
    let missing = error.hint.as_ref().is_some_and(|hint| hint.starts_with(INSTALL));
    (!missing).then_some(sentence)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_failure_of_the_server_is_told_without_its_words_unless_they_are_its_own() {
        for code in Code::ALL {
            let own = matches!(code, Code::ModelLoading | Code::ShuttingDown) || code.row().status < 500;
            let text = told(&Error::new(code, "could not open /home/me/model").hint("look at /home/me"));
            assert_eq!(text.contains("/home/me"), own, "{code:?}: {text}");
            assert!(text.contains("(hint: "), "{code:?}: {text}");
        }
    }

    #[test]
    fn a_grammar_that_got_stuck_is_to_be_simplified_and_not_tried_again() {
        let text = told(&Error::new(Code::EngineFailed, "the grammar cannot go on: /home/me").hint(SIMPLIFY));
        assert!(text.contains(SIMPLIFY) && !text.contains("try again") && !text.contains("/home/me"), "{text}");
    }

    #[test]
    fn a_missing_package_is_named() {
        let error = Error::new(Code::ModelLoadFailed, "the onnx engine needs onnxruntime").hint("pip install 'emberd[onnx]'");
        assert_eq!(told(&error), "the onnx engine needs onnxruntime (hint: pip install 'emberd[onnx]')");
    }
}
