//! emberd.
