//! Steps of a deployment. Tests kill the daemon or one of its processes immediately before a step,
//! to check that a deployment is crash-safe.
//!
//! A *tenant* is one owner of functions. A *direct* connection is passed from the daemon to the
//! process of the tenant, which then serves its requests without the gateway.

use std::sync::OnceLock;

/// Next step of a deployment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeployStep {
    /// Receives more of the module, or the end of the module.
    Receive,
    /// Renames the module to its final name.
    StoreModule,
    /// Renames the record of the tenant's process to its final name, after the process was started.
    RecordProcess,
    /// Receives the output of the compiler process, after the process was started.
    Compile,
    /// Renames the compiled module to its final name.
    StoreArtifact,
    /// Loads the compiled module.
    Load,
    /// Informs the process whether the function answers direct requests: requests on connections
    /// that the daemon passes to the process.
    Publish,
    /// Writes the new record to a temporary file.
    WriteRecord,
    /// Syncs the new record to storage.
    SyncRecord,
    /// Replaces the previous record, which commits the deployment.
    ReplaceRecord,
    /// Syncs the directory of the record to storage.
    SyncDirectory,
    /// Removes a file that no record references.
    RemoveFile,
}

impl DeployStep {
    /// All steps in execution order.
    pub const ALL: [Self; 12] = [
        Self::Receive,
        Self::StoreModule,
        Self::RecordProcess,
        Self::Compile,
        Self::StoreArtifact,
        Self::Load,
        Self::Publish,
        Self::WriteRecord,
        Self::SyncRecord,
        Self::ReplaceRecord,
        Self::SyncDirectory,
        Self::RemoveFile,
    ];
}

/// Function that tests set to observe steps.
static OBSERVER: OnceLock<fn(DeployStep)> = OnceLock::new();

/// Calls `observer` before each following step. For tests; later calls have no effect.
pub fn observe(observer: fn(DeployStep)) {
    // The call fails if an observer is already set.
    let _ = OBSERVER.set(observer);
}

/// Calls the observer of the tests, if any, before `step` is executed.
pub(crate) fn reached(step: DeployStep) {
    if let Some(observer) = OBSERVER.get() {
        observer(step);
    }
}
