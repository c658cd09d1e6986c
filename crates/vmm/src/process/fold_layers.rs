//! Handles requests to fold layers. A *layer* is the content of a memory or disk that one snapshot
//! stores. A fold merges two adjacent layers into one ([`crate::machine::Machine::fold_layers`]). A
//! fold is deferred while its disk is in use, because the event loop must not wait for storage.

use super::Vm;
use jiffy_proto::snapshot::FoldedLayers;

/// Maximum number of folds that wait for a disk. Further folds are dropped: their files remain open
/// until the VM ends.
const MAX_WAITING: usize = 64;

impl Vm {
    /// Handles a request to fold layers.
    pub(super) fn on_fold_layers(&mut self, layers: FoldedLayers) {
        if self.unfolded.len() < MAX_WAITING {
            self.unfolded.push(layers);
        }
        self.fold_layers();
    }

    /// Performs all requested folds. A fold whose disk is in use is retried by the next call.
    pub(super) fn fold_layers(&mut self) {
        let machine = &mut self.machine;
        self.unfolded.retain(|layers| !machine.fold_layers(layers));
    }
}
