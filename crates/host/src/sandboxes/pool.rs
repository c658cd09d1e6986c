//! The warm pool: restored sandboxes that wait for somebody to be.
//!
//! Each of them stands before the greeting, so it gets its identity, entropy and clock when it is handed out, and what was
//! handed out never comes back.

use super::Sandboxes;
use super::entry::lock;
use jiffy_engine::{Arrival, Engine};
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

/// Quiet time before a refill, so that it does not compete with a burst of creates.
const DEBOUNCE: Duration = Duration::from_millis(500);
/// Most debounces in a row: a stream of creates must not starve the pool.
const PATIENCE: u32 = 6;

struct Shelf<A> {
    snapshot: String,
    waiting: Vec<A>,
    /// Counts takes, so that a refill sees whether it is quiet.
    takes: u64,
    refilling: bool,
}

/// Arrivals by fingerprint.
pub(super) struct Pool<A> {
    wanted: usize,
    shelves: Mutex<HashMap<String, Shelf<A>>>,
}

impl<A: Arrival> Pool<A> {
    pub fn new(wanted: usize) -> Self {
        Self {
            wanted,
            shelves: Mutex::default(),
        }
    }

    pub fn len(&self) -> usize {
        lock(&self.shelves).values().map(|s| s.waiting.len()).sum()
    }

    /// One that still waits, and the snapshot it was restored from.
    pub fn take(&self, fingerprint: &str) -> Option<(A, String)> {
        let mut shelves = lock(&self.shelves);
        let shelf = shelves.get_mut(fingerprint)?;
        shelf.takes += 1;
        while let Some(arrival) = shelf.waiting.pop() {
            if arrival.waits() {
                return Some((arrival, shelf.snapshot.clone()));
            }
        }
        None
    }

    pub fn drop_shelf(&self, fingerprint: &str) {
        lock(&self.shelves).remove(fingerprint);
    }

    pub fn clear(&self) {
        lock(&self.shelves).clear();
    }

    /// Whether the caller is to refill the shelf.
    fn begin_refill(&self, fingerprint: &str, snapshot: &str) -> bool {
        let mut shelves = lock(&self.shelves);
        let shelf = shelves
            .entry(fingerprint.to_owned())
            .or_insert_with(|| Shelf {
                snapshot: snapshot.to_owned(),
                waiting: Vec::new(),
                takes: 0,
                refilling: false,
            });
        let begin = self.wanted > shelf.waiting.len() && !shelf.refilling;
        shelf.refilling |= begin;
        begin
    }

    fn takes(&self, fingerprint: &str) -> Option<u64> {
        lock(&self.shelves).get(fingerprint).map(|s| s.takes)
    }

    /// Adds an arrival unless the shelf was dropped; whether there is room for more.
    fn put(&self, fingerprint: &str, snapshot: &str, arrival: A) -> bool {
        let mut shelves = lock(&self.shelves);
        match shelves.get_mut(fingerprint) {
            Some(shelf) if shelf.snapshot == snapshot => {
                shelf.waiting.push(arrival);
                shelf.waiting.len() < self.wanted
            }
            _ => false,
        }
    }

    fn end_refill(&self, fingerprint: &str) {
        if let Some(shelf) = lock(&self.shelves).get_mut(fingerprint) {
            shelf.refilling = false;
        }
    }

    async fn quiet(&self, fingerprint: &str) {
        for _ in 0..PATIENCE {
            let before = self.takes(fingerprint);
            tokio::time::sleep(DEBOUNCE).await;
            if self.takes(fingerprint) == before {
                return;
            }
        }
    }
}

impl<E: Engine> Sandboxes<E> {
    /// Fills the shelf in the background, once it is quiet.
    pub(super) fn refill(&self, fingerprint: &str, template: &str, snapshot: &str) {
        if !self.0.pool.begin_refill(fingerprint, snapshot) {
            return;
        }
        let inner = std::sync::Arc::downgrade(&self.0);
        let (fingerprint, template) = (fingerprint.to_owned(), template.to_owned());
        let snapshot = snapshot.to_owned();
        tokio::spawn(async move {
            let Some(this) = inner.upgrade().map(Sandboxes) else {
                return;
            };
            this.0.pool.quiet(&fingerprint).await;
            loop {
                let Ok((_, _pin)) = this.pin(&snapshot) else {
                    break;
                };
                let more = match this.0.engine.restore(&template, &snapshot).await {
                    Ok(arrival) => this.0.pool.put(&fingerprint, &snapshot, arrival),
                    Err(e) => {
                        tracing::warn!(template, "the warm pool could not be filled: {e}");
                        false
                    }
                };
                if !more {
                    break;
                }
            }
            this.0.pool.end_refill(&fingerprint);
        });
    }
}
