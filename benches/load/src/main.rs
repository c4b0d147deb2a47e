//! Load generator and bare peers.
fn main() {}
