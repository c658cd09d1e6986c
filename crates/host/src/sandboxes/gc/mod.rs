//! Garbage collection: snapshots that nothing needs, and files that belong to nothing.
//!
//! Records go at once, in memory and in the journal; files go behind the answer, on a thread of their own ([`remover`]). What
//! a daemon that ends does not come to is removed by the sweep of the next ([`sweep`]), which runs while that one serves.

use super::Sandboxes;
use jiffy_engine::Engine;

mod collect;
pub(super) mod remover;
mod sweep;

impl<E: Engine> Sandboxes<E> {
    /// Waits until the files of all snapshots that were removed are gone, as far as they can be
    /// removed now.
    pub async fn removed_files(&self) {
        self.0.remover.done().await;
    }
}
