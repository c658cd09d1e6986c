//! What the host asks of an isolation engine.
//!
//! A guest comes up in two steps, whatever it comes from: the engine brings it to where its agent waits to be told who it is
//! ([`UnassignedGuest`]), and the host welcomes it with a [`SandboxIdentity`] ([`UnassignedGuest::welcome`]). Only then is it a [`Guest`] that may be
//! handed out. A warm pool is nothing but unassigned_guests that nobody has welcomed yet, so their identity is always fresh.
//!
//! Arrivals and guests end with the process that made them, however that ends, unless a guest is kept ([`Guest::keep`]): then it
//! runs on, and another process adopts it by its [`GuestHandle`] ([`Engine::adopt`]). What was kept and is not adopted is to be ended
//! ([`Engine::end_unadopted`]).

use crate::{
    BootReport, ConnectionLog, EngineDescription, ExitReason, NetworkRules, SandboxSize, Startup,
};
use jiffy_proto::agent::SiteSettings;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::sync::Arc;
use tokio::net::UnixStream;

/// Who a sandbox is told to be. Clock and entropy are added at the moment of telling.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxIdentity {
    /// Sandbox id; also its host name.
    pub id: String,
    /// Environment of every process, beside the template's own.
    pub env: BTreeMap<String, String>,
    /// What clients must show its agent; none: it answers anybody who reaches it.
    #[serde(default)]
    pub access_token: Option<String>,
    /// It is put back to an earlier moment of its life, rather than made or woken where it fell asleep.
    pub rewound: bool,
    /// What it may reach.
    #[serde(default)]
    pub network: NetworkRules,
    /// Certificate authorities and proxy of the network it is in.
    #[serde(default)]
    pub site: SiteSettings,
}

/// By what a kept guest is found again: the engine's own words, to be written down as they are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GuestHandle(pub String);

/// A kept guest that is to be adopted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptGuest {
    /// By what it is found.
    pub handle: GuestHandle,
    /// Latest snapshot it descends from, be it one that was complete when its maker ended ([`Engine::snapshots`]).
    pub snapshot: Option<String>,
    /// What it may reach.
    pub network: NetworkRules,
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

/// What became of a snapshot since it was sealed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerifiedSnapshot {
    /// Snapshot.
    pub id: String,
    /// Whether it was sealed; nothing can be said of one that was not.
    pub sealed: bool,
    /// What is not as it was.
    pub damaged: Vec<DamagedChunk>,
}

/// A piece of a snapshot that is not as it was sealed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DamagedChunk {
    /// File of the snapshot.
    pub file: String,
    /// Number of the piece of 64 KiB; none if the file is damaged as a whole.
    pub chunk: Option<u64>,
}

/// What a guest takes of its host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GuestUsage {
    /// Processor time of the process that isolates it, in microseconds since that began.
    pub cpu_us: u64,
    /// Memory that is its own, in bytes.
    pub memory_bytes: u64,
    /// What it wrote to its disk since its last snapshot, in bytes; none: cannot be told at the moment.
    pub disk_bytes: Option<u64>,
    /// What it sent and received over its network since it came up, in bytes; none: it has none.
    pub net_bytes: Option<(u64, u64)>,
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
        end: ExitReason,
    },
    /// The guest did not come up.
    #[error("{reason}")]
    Boot {
        /// Failure, its object, and what to do.
        reason: String,
        /// Last output of the guest.
        console: String,
    },
    /// A snapshot would take more disk space than it may. Nothing was written, and the guest runs on.
    #[error("the snapshot takes {needed} bytes of disk space, and may take {most}")]
    SnapshotTooLarge {
        /// Bytes that it would take at most.
        needed: u64,
        /// Bytes that it may take.
        most: u64,
    },
    /// The engine cannot do that at all.
    #[error("the engine {engine} cannot {what}{}", .instead.map(|i| format!("; use {i}")).unwrap_or_default())]
    Unsupported {
        /// Which engine.
        engine: &'static str,
        /// What.
        what: &'static str,
        /// What does it, or does as well.
        instead: Option<&'static str>,
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
    type UnassignedGuest: UnassignedGuest<Guest = Self::Guest>;

    /// What it consists of: itself, or several of which each guest has one. One of them is the default.
    fn engines(&self) -> Vec<EngineDescription>;

    /// What a snapshot of the booted template depends on, as one word: equal words may share a snapshot.
    /// `engine` is one of [`Engine::engines`]; none: the default.
    fn fingerprint(
        &self,
        engine: Option<&str>,
        template: &str,
        size: SandboxSize,
    ) -> impl Future<Output = Result<String, EngineError>> + Send;

    /// What runs in every sandbox of `template` before it is handed out; a snapshot of the booted template contains it.
    fn startup(
        &self,
        _template: &str,
    ) -> impl Future<Output = Result<Startup, EngineError>> + Send {
        std::future::ready(Ok(Startup::default()))
    }

    /// Size of a sandbox of `template` whose creator names none.
    fn default_size(
        &self,
        _template: &str,
    ) -> impl Future<Output = Result<SandboxSize, EngineError>> + Send {
        std::future::ready(Ok(SandboxSize::default()))
    }

    /// Whether rules can be kept here; why not, in words for whoever wrote them.
    fn check_network(&self, _rules: &NetworkRules) -> Result<(), String> {
        Ok(())
    }

    /// Which network sandboxes have here, in a few words.
    fn network(&self) -> String {
        "off".to_owned()
    }

    /// Boots a template from its kernel, on `engine`, one of [`Engine::engines`]; none: the default.
    fn boot(
        &self,
        engine: Option<&str>,
        template: &str,
        size: SandboxSize,
    ) -> impl Future<Output = Result<Self::UnassignedGuest, EngineError>> + Send;

    /// Makes a guest from snapshot `id` of `template`, which may be something else by now, or gone.
    fn restore(
        &self,
        template: &str,
        id: &str,
    ) -> impl Future<Output = Result<Self::UnassignedGuest, EngineError>> + Send;

    /// Writes snapshot `id` of `guest`, whose latest ancestor is `parent`. Either it is complete afterwards or there is none.
    /// One that would take more than `max_bytes` ([`Engine::snapshot_size`]) is refused
    /// ([`EngineError::SnapshotTooLarge`]).
    fn snapshot(
        &self,
        guest: &Self::Guest,
        id: &str,
        parent: Option<&str>,
        then: AfterSnapshot,
        max_bytes: Option<u64>,
    ) -> impl Future<Output = Result<SnapshotTimes, EngineError>> + Send;

    /// Learns from snapshot `id` of `template` what makes the next restores fast. Asked once, when a template's has been made; what
    /// is not learned costs time and nothing else. `site` is what its guest was given.
    fn record_working_set(
        &self,
        _template: &str,
        _id: &str,
        _site: &SiteSettings,
    ) -> impl Future<Output = Result<(), EngineError>> + Send {
        async { Ok(()) }
    }

    /// Sees to it that what restores of snapshot `id` read first is in memory. Blocks.
    fn prefetch(&self, _id: &str) -> Result<(), EngineError> {
        Ok(())
    }

    /// Writes down checksums of snapshot `id` and all it needs, once; it may be removed meanwhile. Blocks.
    fn write_checksums(&self, _id: &str) -> Result<(), EngineError> {
        Ok(())
    }

    /// Compares snapshot `id` and all it needs with those checksums, oldest first. Blocks.
    fn verify(&self, id: &str) -> Result<Vec<VerifiedSnapshot>, EngineError>;

    /// Takes over a guest that an earlier process kept. A snapshot of it that was being taken then happened if it is among
    /// [`Engine::snapshots`]; otherwise, and if it was to end with it, it goes on as if nobody had asked. A guest that cannot be
    /// adopted is ended, if it is the one that the handle means.
    fn adopt(
        &self,
        orphan: &KeptGuest,
    ) -> impl Future<Output = Result<Self::Guest, EngineError>> + Send;

    /// Ends every guest that an earlier process kept and that is not among `known`; returns how many there were.
    fn end_unadopted(
        &self,
        known: &[GuestHandle],
    ) -> impl Future<Output = Result<usize, EngineError>> + Send;

    /// Ends what is not kept and is nobody's any more, and returns when nothing is left of it. Nothing is asked of the engine afterwards.
    fn close(&self) -> impl Future<Output = ()> + Send {
        async {}
    }

    /// The snapshots that are complete on this host, by a look at the disk that changes nothing.
    fn snapshots(&self) -> Result<Vec<String>, EngineError>;

    /// Whether snapshot `id` needs the files of none of its ancestors. An engine may come to this by itself, to keep restores fast.
    /// Answered from memory: others wait for the answer.
    fn is_independent(&self, _id: &str) -> bool {
        false
    }

    /// Removes what nobody finished and nobody will, wherever the engine keeps files, beside whole snapshots; returns how many things
    /// there were. Called soon after the start and every minute, while others use them.
    fn gc(&self) -> Result<usize, EngineError> {
        Ok(0)
    }

    /// Disk space that all snapshots take, in bytes, if it can be told.
    fn snapshot_bytes(&self) -> Option<u64> {
        None
    }

    /// Disk space of snapshot `id` itself, in bytes, without what lies below it. It changes only by [`Engine::merge`].
    fn snapshot_size(&self, _id: &str) -> Option<u64> {
        None
    }

    /// Most bytes of disk space by which snapshot `id` grows when it is made independent of a long lineage, which keeps
    /// restores fast; none: its lineage is short enough.
    fn merge_growth(&self, _id: &str) -> Option<u64> {
        None
    }

    /// Makes snapshot `id` independent of what lies below it, if its lineage is long.
    fn merge(&self, _id: &str) -> impl Future<Output = Result<(), EngineError>> + Send {
        std::future::ready(Ok(()))
    }

    /// Whether a new sandbox of `template` may still start from its snapshot `id`: not when the template has become something else, or
    /// is gone.
    fn is_current(&self, _template: &str, _id: &str) -> bool {
        true
    }

    /// Removes a snapshot's files; one that is not there is no error. Blocks.
    fn remove_snapshot(&self, id: &str) -> Result<(), EngineError>;
}

/// A guest whose agent waits to be told who it is. Dropping it ends the guest.
pub trait UnassignedGuest: Send + 'static {
    /// What it becomes.
    type Guest: Guest;

    /// Whether it still waits.
    fn is_waiting(&self) -> bool;

    /// Uses it once under an identity that is taken back afterwards, so that its first real use is
    /// fast. It waits as before then: what it was meanwhile is over when it is welcomed. `site` is
    /// what it was given when its snapshot was taken.
    fn rehearse(
        self,
        _site: &SiteSettings,
    ) -> impl Future<Output = Result<Self, EngineError>> + Send
    where
        Self: Sized,
    {
        std::future::ready(Ok(self))
    }

    /// Tells the agent who it is and returns when all of that is in force.
    fn assign_identity(
        self,
        sandbox_identity: &SandboxIdentity,
    ) -> impl Future<Output = Result<Self::Guest, EngineError>> + Send;
}

/// A running guest. Dropping it ends it, unless it is kept: then dropping it only lets go of it.
pub trait Guest: Send + Sync + 'static {
    /// Name of the engine that isolates it.
    fn engine(&self) -> &'static str;

    /// From now on it outlives this process. Needed once in its life, also if it is adopted later.
    fn keep(&self) -> impl Future<Output = Result<GuestHandle, EngineError>> + Send;

    /// How it came up.
    fn report(&self) -> BootReport;

    /// Process that isolates it, if there is one.
    fn pid(&self) -> Option<u32>;

    /// What it takes of its host, without asking it: an idle guest is not woken. None where that cannot be told.
    fn usage(&self) -> Option<GuestUsage> {
        None
    }

    /// How often the processor left it for the host so far, if that is known.
    fn exits(&self) -> impl Future<Output = Option<u64>> + Send {
        async { None }
    }

    /// Opens a stream to `port` in it. A refused connection reads as closed.
    fn connect(&self, port: u32) -> impl Future<Output = io::Result<UnixStream>> + Send;

    /// Uses it once, so that the first use of what is restored from its next snapshot is fast. That
    /// it cannot be used is not told.
    fn rehearse(&self) -> impl Future<Output = ()> + Send {
        async {}
    }

    /// Puts other rules for its network in force, also for connections that there are.
    fn set_network(
        &self,
        _rules: &NetworkRules,
    ) -> impl Future<Output = Result<(), EngineError>> + Send {
        async { Ok(()) }
    }

    /// Where its connections are recorded, also when it has ended; none: it has no network.
    fn connections(&self) -> Option<Arc<dyn ConnectionLog>> {
        None
    }

    /// Waits until it is gone and says why.
    fn ended(&self) -> impl Future<Output = ExitReason> + Send;

    /// Its last console output, cleaned for a terminal.
    fn console_tail(&self) -> String;

    /// Why the host could not write or read its disk, if that happened: its programs saw I/O errors.
    fn disk_failure(&self) -> Option<String> {
        None
    }

    /// Ends it without asking it, and returns when nothing of it is left. May be called twice.
    fn stop(&self) -> impl Future<Output = ()> + Send;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_engine_cannot_do_is_refused_with_what_can() {
        let refused = |instead| EngineError::Unsupported {
            engine: "gvisor",
            what: "verify snapshots",
            instead,
        };
        assert_eq!(
            refused(None).to_string(),
            "the engine gvisor cannot verify snapshots"
        );
        assert_eq!(
            refused(Some("the engine microvm")).to_string(),
            "the engine gvisor cannot verify snapshots; use the engine microvm"
        );
    }
}
