//! Garbage collection: snapshots that nothing needs, and files that belong to nothing.
//!
//! Records go at once, in memory and in the journal; files go behind the answer, on a thread of
//! their own ([`file_remover`]). What a daemon that ends does not come to is removed by that
//! of the next ([`periodic`]), which runs while that one serves.

use super::Snapshots;

pub(super) mod file_remover;
mod periodic;
mod unneeded;

impl Snapshots<'_> {
    /// Waits until the files of all snapshots that were removed are gone; two seconds for those
    /// that something still holds.
    pub async fn removed_files(self) {
        self.0.file_remover.done().await;
    }
}
