//! Whose request is next: clients take turns, however many requests each of them has.
//!
//! A client's share is what it has in the engine. The next place goes to the client that has least there, and of those to the one that asked first.
//! Where there are several places, the last free one is kept for a client that has none: whoever comes next, with one short request, does not wait for
//! another's long ones.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};

use super::{State, Waiting};
use crate::metrics::Door;

/// With fewer places than this, each is worth too much to be kept free.
const KEPT_FROM: usize = 4;

/// Whom a request is for: a connection, or whatever else is to have a share of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Client(u64, Door);

impl Client {
    /// One that nobody else is, at the HTTP door.
    #[must_use]
    pub fn new() -> Self {
        Self::at(Door::Http)
    }

    /// One that nobody else is, at this door.
    #[must_use]
    pub fn at(door: Door) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed), door)
    }

    /// Where its requests come in.
    #[must_use]
    pub fn door(self) -> Door {
        self.1
    }
}

impl Default for Client {
    fn default() -> Self {
        Self::new()
    }
}

/// Takes those out of the queue that the engine has places for, in the order in which it is to hear of them.
pub(super) fn next(state: &mut State, places: usize) -> Vec<Waiting> {
    let mut free = places.saturating_sub(state.running.len());
    if free == 0 || state.waiting.is_empty() {
        return Vec::new();
    }
    let mut shares: HashMap<Client, usize> = HashMap::new();
    for running in state.running.values() {
        *shares.entry(running.client).or_default() += 1;
    }
    let mut queues: HashMap<Client, VecDeque<usize>> = HashMap::new();
    for (at, waiting) in state.waiting.iter().enumerate() {
        queues.entry(waiting.client).or_default().push_back(at);
    }
    let mut heads = BinaryHeap::with_capacity(queues.len());
    for (client, queue) in &mut queues {
        heads.extend(queue.pop_front().map(|at| Reverse((shares.get(client).copied().unwrap_or(0), at, *client))));
    }
    let mut chosen = Vec::new();
    while let Some(Reverse((share, at, client))) = heads.pop() {
        if free == 0 || (free == 1 && share > 0 && places >= KEPT_FROM) {
            break;
        }
        chosen.push(at);
        free -= 1;
        heads.extend(queues.get_mut(&client).and_then(VecDeque::pop_front).map(|next| Reverse((share + 1, next, client))));
    }
    let mut queue: Vec<Option<Waiting>> = std::mem::take(&mut state.waiting).into_iter().map(Some).collect();
    let taken = chosen.into_iter().filter_map(|at| queue.get_mut(at).and_then(Option::take)).collect();
    state.waiting = queue.into_iter().flatten().collect();
    taken
}
