//! Engines: token ids in, token ids out. Knows no text, no sockets and no Python.
//!
//! [`port`] is the boundary itself (the contract is `docs/port.md`); [`order`], [`constraint`] and [`step`] are what crosses it; [`generation`] is the
//! reader's end, whose drop is the cancellation; [`host`] starts an engine and waits for it; [`mock`] is an engine in Rust, and [`script`] what it is told
//! to say; `patience` ends what a hostile constraint would make last.

pub mod constraint;
pub mod generation;
pub mod host;
pub mod mock;
pub mod order;
mod patience;
pub mod port;
pub mod script;
pub mod step;

pub use constraint::{Constraint, ConstraintError};
pub use generation::{Chunk, Generation, Timing};
pub use host::{Activations, Choice, Kernels, Launch, Launcher, Launches, Settings, named};
pub use order::{Admit, Order, Reuse, Sampling};
pub use port::{Capabilities, Client, Engine, Place, Port, PortError, Request};
pub use step::{Finish, Logprob, Step};

/// A request's number: never used twice in the life of its port.
pub type Id = u64;

/// A snapshot's name: whoever asks for it to be kept chooses one that is not in use.
pub type SnapshotId = u64;
