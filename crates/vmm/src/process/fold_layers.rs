//! Folds of layers in the event loop, which does not wait for a disk in use.

use super::Vm;
use jiffy_proto::snapshot::FoldedLayers;

/// Maximum number of folds that wait for a disk. Further folds are dropped: their files remain open
/// until the VM ends.
const MAX_WAITING: usize = 64;

impl Vm {
    pub(super) fn on_fold_layers(&mut self, layers: FoldedLayers) {
        if self.unfolded.len() < MAX_WAITING {
            self.unfolded.push(layers);
        }
        self.fold_layers();
    }

    /// Folds layers as requested. Folds of a disk that is in use are deferred to the next call.
    pub(super) fn fold_layers(&mut self) {
        let machine = &mut self.machine;
        self.unfolded.retain(|layers| !machine.fold_layers(layers));
    }
}
