//! Steps of a deployment, at each of which tests end a process.

use std::sync::OnceLock;

/// Step of a deployment that comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeployStep {
    /// More of the module arrives, or it was all.
    Receive,
    /// The module gets its name.
    KeepModule,
    /// The tenant's process, which has just started, is noted.
    NoteProcess,
    /// The compiler, which has just started, does its work.
    Compile,
    /// The compiled module gets its name.
    KeepArtifact,
    /// The compiled module is loaded.
    Load,
    /// The process is told who may call the function directly.
    Publish,
    /// The record is written beside the former one.
    WriteRecord,
    /// It is brought to storage.
    SyncRecord,
    /// It replaces the former one, which commits the deployment.
    ReplaceRecord,
    /// Its directory is brought to storage.
    SyncDirectory,
    /// A file that no record needs is removed.
    RemoveFile,
}

impl DeployStep {
    /// All steps, in their order.
    pub const ALL: [Self; 12] = [
        Self::Receive,
        Self::KeepModule,
        Self::NoteProcess,
        Self::Compile,
        Self::KeepArtifact,
        Self::Load,
        Self::Publish,
        Self::WriteRecord,
        Self::SyncRecord,
        Self::ReplaceRecord,
        Self::SyncDirectory,
        Self::RemoveFile,
    ];
}

static OBSERVER: OnceLock<fn(DeployStep)> = OnceLock::new();

/// Has `observer` called before each step from now on. For tests; the first observer stays.
pub fn observe(observer: fn(DeployStep)) {
    let _ = OBSERVER.set(observer);
}

pub(crate) fn reached(step: DeployStep) {
    if let Some(observer) = OBSERVER.get() {
        observer(step);
    }
}
