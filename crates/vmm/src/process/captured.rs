//! Captured snapshots: the guest already runs again, but its memory is still being written. Such a
//! snapshot is completed even if the controller disconnects or the guest ends. It is then
//! *prepared*: complete, but neither committed nor aborted.
//!
//! The *controller* is the process that drives this VMM through the control socket: the daemon. A
//! *background copy* is the forked process that writes the memory of a snapshot.

use super::Vm;
use jiffy_proto::snapshot::CapturedSnapshot;
use jiffy_proto::vm::{Event, StopCause};

impl Vm {
    /// Returns the captured snapshot that no controller has committed or aborted yet. The caller
    /// must ensure that a current background copy belongs to a captured snapshot.
    pub(super) fn captured_snapshot(&self) -> Option<Box<CapturedSnapshot>> {
        let writing = self.background_copy.as_ref().map(|copy| (&copy.id, None));
        let prepared = self
            .prepared
            .as_ref()
            .and_then(|s| Some((&s.id, Some(s.report.clone()?))));
        writing.or(prepared).map(|(id, report)| {
            let id = id.clone();
            Box::new(CapturedSnapshot { id, report })
        })
    }

    /// Aborts a captured snapshot that is being written.
    pub(super) fn abort_capture(&mut self) {
        // The controller deletes the files. The exit of the cancelled writer process is handled by
        // `on_background_copy` like any other failure.
        if let Some(copy) = &mut self.background_copy {
            copy.captured = false;
            copy.cancel();
        }
    }

    /// Returns the cause if the VM must end now. `None` if it must continue. While a captured
    /// snapshot is being written, the process continues with a stopped guest.
    pub(super) fn ending(&mut self) -> Option<StopCause> {
        let cause = self.cause.take()?;
        if !self.background_copy.as_ref().is_some_and(|c| c.captured) {
            return Some(cause);
        }
        // Stop the guest and report its end only once: another cause may follow, for example a
        // request to stop.
        if self.ended_cause.is_none() {
            self.halt();
            self.link.send(&Event::Stopped(cause.clone()), &[]);
            self.ended_cause = Some(cause);
        }
        None
    }
}
