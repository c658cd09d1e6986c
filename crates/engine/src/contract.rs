//! What the host asks of an isolation engine.
//!
//! A guest comes up in two steps, whatever it comes from: the engine brings it to where its agent waits to be told who it is
//! ([`Arrival`]), and the host welcomes it with a [`Persona`] ([`Arrival::welcome`]). Only then is it a [`Guest`] that may be
//! handed out. A warm pool is nothing but arrivals that nobody has welcomed yet, so their identity is always fresh.

use crate::{BootReport, SandboxEnd, SandboxSize};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::os::unix::net::UnixStream;

/// Who a sandbox is told to be. Clock and entropy are added at the moment of telling.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Persona {
    /// Sandbox id; also its host name.
    pub id: String,
    /// Environment of every process, beside the template's own.
    pub env: BTreeMap<String, String>,
}

/// What a guest does after its snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterSnapshot {
    /// Runs on.
    Resume,
    /// Ends; its memory is free when the call returns.
    Stop,
}

/// A snapshot that is complete. Times in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotTimes {
    /// How long the guest stood still.
    pub stopped_us: u64,
    /// From the request to the last byte written (to files, not to storage).
    pub total_us: u64,
}

/// Why an engine did not do what it was asked.
#[derive(Debug, Clone, thiserror::Error)]
pub enum EngineError {
    /// It failed; a guest that ran before runs on.
    #[error("{reason}")]
    Failed {
        /// What failed, on what, and what to do.
        reason: String,
    },
    /// The guest is gone.
    #[error("{end}")]
    Ended {
        /// Why.
        end: SandboxEnd,
    },
    /// This engine cannot do that at all.
    #[error("this engine cannot {what}")]
    Unsupported {
        /// What.
        what: &'static str,
    },
}

impl EngineError {
    /// A failure in the words of `error`.
    pub fn failed(error: impl std::fmt::Display) -> Self {
        Self::Failed {
            reason: error.to_string(),
        }
    }
}

/// An isolation engine with the files it starts guests from.
pub trait Engine: Send + Sync + 'static {
    /// A guest of it.
    type Guest: Guest;
    /// A guest before it knows who it is.
    type Arrival: Arrival<Guest = Self::Guest>;

    /// What a snapshot of the booted template depends on, as one word: equal words may share a snapshot.
    fn fingerprint(
        &self,
        template: &str,
        size: SandboxSize,
    ) -> impl Future<Output = Result<String, EngineError>> + Send;

    /// Boots a template from its kernel.
    fn boot(
        &self,
        template: &str,
        size: SandboxSize,
    ) -> impl Future<Output = Result<Self::Arrival, EngineError>> + Send;

    /// Makes a guest from snapshot `id` of `template`.
    fn restore(
        &self,
        template: &str,
        id: &str,
    ) -> impl Future<Output = Result<Self::Arrival, EngineError>> + Send;

    /// Writes snapshot `id` of `guest`, whose latest ancestor is `parent`. Either it is complete afterwards or there is none.
    fn snapshot(
        &self,
        guest: &Self::Guest,
        id: &str,
        parent: Option<&str>,
        then: AfterSnapshot,
    ) -> impl Future<Output = Result<SnapshotTimes, EngineError>> + Send;

    /// The snapshots that are complete on this host. Unfinished ones are removed on the way.
    fn snapshots(&self) -> Result<Vec<String>, EngineError>;

    /// Whether snapshot `id` needs the files of none of its ancestors. An engine may come to this by itself, to keep restores fast.
    fn is_independent(&self, _id: &str) -> bool {
        false
    }

    /// Removes a snapshot's files; one that is not there is no error.
    fn remove_snapshot(&self, id: &str) -> Result<(), EngineError>;
}

/// A guest whose agent waits to be told who it is. Dropping it ends the guest.
pub trait Arrival: Send + 'static {
    /// What it becomes.
    type Guest: Guest;

    /// Whether it still waits.
    fn waits(&self) -> bool;

    /// Tells the agent who it is and returns when all of that is in force.
    fn welcome(
        self,
        persona: &Persona,
    ) -> impl Future<Output = Result<Self::Guest, EngineError>> + Send;
}

/// A running guest. Dropping it ends it.
pub trait Guest: Send + Sync + 'static {
    /// How it came up.
    fn report(&self) -> BootReport;

    /// Process that isolates it, if there is one.
    fn pid(&self) -> Option<u32>;

    /// Opens a stream to `port` in it. A refused connection reads as closed.
    fn connect(&self, port: u32) -> impl Future<Output = io::Result<UnixStream>> + Send;

    /// Waits until it is gone and says why.
    fn ended(&self) -> impl Future<Output = SandboxEnd> + Send;

    /// Its last console output, cleaned for a terminal.
    fn console_tail(&self) -> String;

    /// Ends it without asking it, and returns when nothing of it is left. May be called twice.
    fn stop(&self) -> impl Future<Output = ()> + Send;
}
