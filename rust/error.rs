//! Every failure a user can meet: one table of codes, one error type.
//!
//! The table decides what a code is called on the wire, which HTTP status it has and which `type` the OpenAI envelope gives it.
//! Where an error is written (JSON over HTTP, a line on the worker socket, the terminal) is the doors' business.

use std::borrow::Cow;
use std::fmt;

/// What kind of failure it was. The wire name, status and type of each stand in [`Code::row`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // Each variant is described by its row in the table, which a test renders.
pub enum Code {
    InvalidJson,
    MissingRequiredParameter,
    InvalidType,
    InvalidValue,
    UnsupportedParameter,
    ContextLengthExceeded,
    InvalidEncryptedContent,
    InvalidApiKey,
    InvalidHost,
    ModelNotFound,
    NotFound,
    MethodNotAllowed,
    RequestTimeout,
    BodyTooLarge,
    UnsupportedMediaType,
    QueueFull,
    ModelLoading,
    ModelLoadFailed,
    DownloadFailed,
    EngineFailed,
    ShuttingDown,
    ServerError,
}

/// One row of the table: how a [`Code`] appears outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// The `code` of the error envelope.
    pub name: &'static str,
    /// The HTTP status.
    pub status: u16,
    /// The `type` of the error envelope.
    pub kind: &'static str,
    /// What it means, for the documentation.
    pub meaning: &'static str,
}

impl Code {
    /// Every code, in the order of the table.
    pub const ALL: [Self; 22] = [
        Self::InvalidJson,
        Self::MissingRequiredParameter,
        Self::InvalidType,
        Self::InvalidValue,
        Self::UnsupportedParameter,
        Self::ContextLengthExceeded,
        Self::InvalidEncryptedContent,
        Self::InvalidApiKey,
        Self::InvalidHost,
        Self::ModelNotFound,
        Self::NotFound,
        Self::MethodNotAllowed,
        Self::RequestTimeout,
        Self::BodyTooLarge,
        Self::UnsupportedMediaType,
        Self::QueueFull,
        Self::ModelLoading,
        Self::ModelLoadFailed,
        Self::DownloadFailed,
        Self::EngineFailed,
        Self::ShuttingDown,
        Self::ServerError,
    ];

    /// How this code appears outside.
    #[must_use]
    pub const fn row(self) -> Row {
        const INVALID: &str = "invalid_request_error";
        const SERVER: &str = "server_error";
        let (name, status, kind, meaning) = match self {
            Self::InvalidJson => ("invalid_json", 400, INVALID, "the body or line is not JSON"),
            Self::MissingRequiredParameter => ("missing_required_parameter", 400, INVALID, "a required field is absent"),
            Self::InvalidType => ("invalid_type", 400, INVALID, "a field has the wrong JSON type"),
            Self::InvalidValue => ("invalid_value", 400, INVALID, "a field has the right type and an impossible value"),
            Self::UnsupportedParameter => ("unsupported_parameter", 400, INVALID, "a field asks for something this server does not do"),
            Self::ContextLengthExceeded => ("context_length_exceeded", 400, INVALID, "prompt and answer do not fit the model's window"),
            Self::InvalidEncryptedContent => ("invalid_encrypted_content", 400, INVALID, "sealed content that this server did not seal"),
            Self::InvalidApiKey => ("invalid_api_key", 401, INVALID, "the request brings none of the keys that the server asks for"),
            Self::InvalidHost => ("invalid_host", 403, INVALID, "the Host header names neither loopback nor an allowed host"),
            Self::ModelNotFound => ("model_not_found", 404, INVALID, "no such model here"),
            Self::NotFound => ("not_found", 404, INVALID, "no such route or object"),
            Self::MethodNotAllowed => ("method_not_allowed", 405, INVALID, "the route exists, for other methods"),
            Self::RequestTimeout => ("request_timeout", 408, INVALID, "the request did not arrive in time"),
            Self::BodyTooLarge => ("body_too_large", 413, INVALID, "the body or line is over the limit"),
            Self::UnsupportedMediaType => ("unsupported_media_type", 415, INVALID, "the content type is not application/json"),
            Self::QueueFull => ("queue_full", 429, "rate_limit_error", "as many requests are waiting as the server will hold"),
            Self::ModelLoading => ("model_loading", 503, SERVER, "the model is not ready yet"),
            Self::ModelLoadFailed => ("model_load_failed", 503, SERVER, "the model could not be loaded"),
            Self::DownloadFailed => ("download_failed", 503, SERVER, "the model could not be fetched"),
            Self::EngineFailed => ("engine_failed", 500, SERVER, "the engine failed while it worked on the request"),
            Self::ShuttingDown => ("shutting_down", 503, SERVER, "the server is going away"),
            Self::ServerError => ("server_error", 500, SERVER, "a fault of this server; the log has the detail"),
        };
        Row { name, status, kind, meaning }
    }
}

/// A failure: its code, what happened (with the value), and what to do next.
///
/// `message` says what happened, in lower case without a full stop; `hint` says what to do. `param` is the path of the field at
/// fault (`input[2].content[0].type`). `detail` is for the log alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    /// The kind of failure.
    pub code: Code,
    /// What happened.
    pub message: Cow<'static, str>,
    /// Where in the request.
    pub param: Option<String>,
    /// What to do next.
    pub hint: Option<Cow<'static, str>>,
    /// More, for the log: never sent to a client.
    pub detail: Option<String>,
}

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error with a code and what happened.
    pub fn new(code: Code, message: impl Into<Cow<'static, str>>) -> Self {
        Self { code, message: message.into(), param: None, hint: None, detail: None }
    }

    /// An error from the text of another: what happened, and after a line break and `hint: ` what to do.
    #[must_use]
    pub fn parse(code: Code, text: &str) -> Self {
        match text.split_once("\nhint: ") {
            Some((message, hint)) => Self::new(code, message.to_owned()).hint(hint.to_owned()),
            None => Self::new(code, text.to_owned()),
        }
    }

    /// Names the field at fault.
    #[must_use]
    pub fn at(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// As [`Error::at`], where what the parameter holds is at fault; a full queue and the like are no parameter's.
    #[must_use]
    pub fn at_fault(self, param: impl Into<String>) -> Self {
        if matches!(self.code, Code::InvalidValue | Code::UnsupportedParameter) { self.at(param) } else { self }
    }

    /// Says what to do next.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<Cow<'static, str>>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Adds what only the log should see.
    #[must_use]
    pub fn detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }

    /// What happened and what to do, on one line: the form for an error field on a wire.
    #[must_use]
    pub fn one_line(&self) -> String {
        match &self.hint {
            Some(hint) => format!("{} (hint: {hint})", self.message),
            None => self.message.to_string(),
        }
    }

    /// An error from the operating system, with what was being done and the path it was done to.
    #[must_use]
    pub fn io(code: Code, doing: &str, path: &std::path::Path, error: &std::io::Error) -> Self {
        Self::new(code, format!("could not {doing} {}: {error}", path.display()))
    }
}

impl fmt::Display for Error {
    /// Two lines where there is a hint, for the terminal.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.hint {
            Some(hint) => write!(f, "\nhint: {hint}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {}
