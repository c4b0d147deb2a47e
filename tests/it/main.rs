//! The one binary of integration tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, clippy::print_stderr, unreachable_pub)]

mod answer;
mod calls;
mod corpus;
mod decode;
mod fetch;
mod grammar;
mod hosted;
mod http_disconnect;
mod http_door;
mod http_faults;
mod http_grammar;
mod http_limits;
mod http_shutdown;
mod http_stream;
mod http_support;
mod http_tools;
mod hub;
mod listen;
mod messages;
mod models;
mod port;
mod responses_input;
mod responses_request;
mod responses_stream;
mod stop;
mod templates;
mod tokenizer;
mod vocab;
mod worker_door;
mod worker_frames;
mod worker_idle;
mod worker_life;
mod worker_matrix;
mod worker_message;
mod worker_support;
