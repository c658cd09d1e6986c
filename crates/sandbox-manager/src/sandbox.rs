//! [`Sandbox`]: the record of a sandbox of this host, and the operations that its state allows.

use crate::lineage_record::Rollback;
use crate::records::SandboxRecord;
use crate::sandbox_settings::SandboxSettings;
use jiffy_api_types::{BootMode, BrokenBy, PauseCause, SandboxInfo, SandboxSize, SandboxState};
use jiffy_engine_api::{ExitReason, NetworkRules, Workload};
use std::collections::BTreeMap;

/// Record of a sandbox of this host, as of one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Sandbox {
    /// Id: letters and digits.
    pub(crate) id: String,
    /// Name, unique among the sandboxes of its owner that are not killed.
    pub(crate) name: Option<String>,
    /// State.
    pub(crate) state: SandboxState,
    /// Cause of the pause. `None` if a request paused the sandbox, or the sandbox is not paused.
    pub(crate) pause_cause: Option<PauseCause>,
    /// Template that the sandbox descends from.
    pub(crate) template: String,
    /// Resources.
    pub(crate) size: SandboxSize,
    /// Environment in addition to the template's.
    pub(crate) env: BTreeMap<String, String>,
    /// Settings chosen by the creator.
    pub(crate) settings: SandboxSettings,
    /// Deadline, in milliseconds since 1970: the time of its timeout. `None` if there is no limit.
    pub(crate) deadline_ms: Option<u64>,
    /// Token that clients must present to the agent.
    pub(crate) agent_token: Option<String>,
    /// Token that clients must present to reach restricted ports.
    pub(crate) traffic_token: Option<String>,
    /// Latest snapshot that the sandbox descends from. `None` if it was booted and has no snapshot.
    pub(crate) snapshot: Option<String>,
    /// Sandbox that this one was forked from.
    pub(crate) forked_from: Option<String>,
    /// Snapshot from which the sandbox was created or forked. `None` if it was created from a
    /// template, or by a version that did not record the snapshot.
    pub(crate) started_from: Option<String>,
    /// Latest rollbacks, oldest first.
    pub(crate) rollbacks: Vec<Rollback>,
    /// Boot mode of the guest.
    pub(crate) boot_mode: Option<BootMode>,
    /// Name of the engine of the current or the last guest. `None` before the first guest.
    pub(crate) engine: Option<String>,
    /// Time from the request that started the current or the last guest until the guest was ready,
    /// in milliseconds.
    pub(crate) boot_ms: Option<f64>,
    /// Time of the creation, in milliseconds since 1970.
    pub(crate) created_ms: u64,
    /// Time of the last change of the state, in milliseconds since 1970.
    pub(crate) changed_ms: u64,
}

impl Sandbox {
    /// Returns the record as text, for other hosts of the fleet.
    ///
    /// # Errors
    /// A description of the failure.
    pub fn to_text(&self) -> Result<String, String> {
        serde_json::to_string(&SandboxRecord::from(self)).map_err(|e| e.to_string())
    }

    /// Returns the sandbox with this text of [`Self::to_text`].
    ///
    /// # Errors
    /// A description of the defect.
    pub fn from_text(text: &str) -> Result<Self, String> {
        let record: SandboxRecord = serde_json::from_str(text).map_err(|e| e.to_string())?;
        let record = Box::<Self>::try_from(record).map_err(str::to_owned)?;
        record.size.check().map_err(|e| e.to_string())?;
        Ok(*record)
    }

    /// Returns the sandbox as other hosts show it after the loss of its host.
    #[must_use]
    pub fn lost(self, cause: String) -> Self {
        Self {
            state: SandboxState::broken(cause),
            deadline_ms: None,
            ..self
        }
    }

    /// Returns the id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns the name.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Returns the state.
    pub fn state(&self) -> &SandboxState {
        &self.state
    }

    /// Returns the reference of the template that the sandbox descends from.
    pub fn template(&self) -> &str {
        &self.template
    }

    /// Returns the resources.
    pub fn size(&self) -> SandboxSize {
        self.size
    }

    /// Returns the environment in addition to the template's.
    pub fn env(&self) -> &BTreeMap<String, String> {
        &self.env
    }

    /// Returns the settings chosen by the creator.
    pub fn settings(&self) -> &SandboxSettings {
        &self.settings
    }

    /// Returns the egress rules of the sandbox, for its engine.
    pub fn network_rules(&self) -> NetworkRules {
        let mut rules = self.settings.rules(&self.id, self.name.as_deref());
        let tokens = &self.settings.identity_tokens;
        if let Some(headers) = rules.headers.as_mut().filter(|_| !tokens.is_empty()) {
            headers.workload = Some(Workload {
                sandbox: self.id.clone(),
                owner: self.settings.owner.clone(),
                template: self.template.clone(),
                tokens: tokens.clone(),
            });
        }
        rules
    }

    /// Returns the API key of the owner. `None` if the sandbox belongs to the host's owner.
    pub fn owner(&self) -> Option<&str> {
        self.settings.owner.as_deref()
    }

    /// Returns the time of the timeout, in milliseconds since 1970. `None` if there is no limit.
    pub fn deadline_ms(&self) -> Option<u64> {
        self.deadline_ms
    }

    /// Returns the token that clients must present to the agent.
    pub fn agent_token(&self) -> Option<&str> {
        self.agent_token.as_deref()
    }

    /// Returns the token that clients must present to reach restricted ports.
    pub fn traffic_token(&self) -> Option<&str> {
        self.traffic_token.as_deref()
    }

    /// Returns the id of the latest snapshot that the sandbox descends from.
    pub fn snapshot(&self) -> Option<&str> {
        self.snapshot.as_deref()
    }

    /// Returns the id of the sandbox that this one was forked from.
    pub fn forked_from(&self) -> Option<&str> {
        self.forked_from.as_deref()
    }

    /// Returns the boot mode of the guest.
    pub fn boot_mode(&self) -> Option<BootMode> {
        self.boot_mode
    }

    /// Returns the name of the engine of the current or the last guest.
    pub fn engine(&self) -> Option<&str> {
        self.engine.as_deref()
    }

    /// Returns the time from the request that started the current or the last guest until the guest
    /// was ready, in milliseconds.
    pub fn boot_ms(&self) -> Option<f64> {
        self.boot_ms
    }

    /// Returns the time of the creation, in milliseconds since 1970.
    pub fn created_ms(&self) -> u64 {
        self.created_ms
    }

    /// Returns the time of the last change of the state, in milliseconds since 1970.
    pub fn changed_ms(&self) -> u64 {
        self.changed_ms
    }

    /// Returns whether the sandbox counts as paused in the quota of its owner: it is paused, or
    /// will be at its timeout or when it is idle.
    pub(crate) fn counts_as_paused(&self) -> bool {
        match self.state {
            SandboxState::Killed => false,
            SandboxState::Paused => true,
            // Such a pause is counted in advance, so that it never exceeds the quota.
            _ => self.settings.pauses(),
        }
    }
}

impl From<Sandbox> for SandboxInfo {
    fn from(record: Sandbox) -> Self {
        let is_paused = record.state == SandboxState::Paused;
        Self {
            id: record.id,
            name: record.name,
            state: record.state,
            template: record.template,
            size: record.size,
            env: record.env,
            settings: record.settings.into(),
            deadline_ms: record.deadline_ms,
            agent_token: record.agent_token,
            traffic_token: record.traffic_token,
            snapshot: record.snapshot,
            // Only the catalog of snapshots has this value. The caller sets it.
            pause_mode: None,
            pause_cause: record.pause_cause.filter(|_| is_paused),
            forked_from: record.forked_from,
            boot_mode: record.boot_mode,
            engine: record.engine,
            boot_ms: record.boot_ms,
            created_ms: record.created_ms,
            changed_ms: record.changed_ms,
            steps: None,
        }
    }
}

/// Operation on a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SandboxOperation {
    /// Opens streams to the guest.
    Connect,
    /// Takes a snapshot. The sandbox continues in its state.
    Snapshot,
    /// Creates children.
    Fork,
    /// Restores an earlier snapshot.
    Rollback,
    /// Pauses a running sandbox.
    Pause,
    /// Resumes a paused sandbox, or restarts a sandbox that was broken by missing memory.
    Resume,
}

impl SandboxOperation {
    /// Returns whether the operation is allowed for a sandbox in `state`.
    pub fn is_allowed(self, state: &SandboxState) -> bool {
        use SandboxState::{Broken, Paused, Running};
        match self {
            Self::Connect | Self::Pause => *state == Running,
            Self::Snapshot | Self::Fork => matches!(state, Running | Paused),
            // A rollback replaces the guest, so it also repairs a broken sandbox.
            Self::Rollback => matches!(state, Running | Paused | Broken { .. }),
            Self::Resume => *state == Paused || state.is_broken_and_resumable(),
        }
    }
}

/// Returns the state of a sandbox whose guest exited by itself.
pub(crate) fn broken_by_end(end: &ExitReason) -> SandboxState {
    let broken_by = match end {
        ExitReason::MissingMemory { .. } => BrokenBy::MissingMemory,
        // Only missing memory is a fault of the host that a restart can repair.
        _ => BrokenBy::GuestEnd,
    };
    SandboxState::Broken {
        cause: end.to_string(),
        broken_by,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_allowed_by_state() {
        use SandboxOperation::{Connect, Fork, Pause, Resume, Rollback, Snapshot};
        let all = [Connect, Snapshot, Fork, Rollback, Pause, Resume];
        let starved = broken_by_end(&ExitReason::MissingMemory {
            reason: String::new(),
        });
        let table: [(SandboxState, &[SandboxOperation]); 6] = [
            (SandboxState::Creating, &[]),
            (
                SandboxState::Running,
                &[Connect, Snapshot, Fork, Rollback, Pause],
            ),
            (SandboxState::Paused, &[Snapshot, Fork, Rollback, Resume]),
            (SandboxState::broken(""), &[Rollback]),
            (starved, &[Rollback, Resume]),
            (SandboxState::Killed, &[]),
        ];
        for (state, allowed) in table {
            for operation in all {
                let expected = allowed.contains(&operation);
                assert_eq!(
                    operation.is_allowed(&state),
                    expected,
                    "{state:?} {operation:?}"
                );
            }
        }
    }
}
