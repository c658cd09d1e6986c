//! Records as they are read: all fields side by side.
//!
//! `#[serde(flatten)]` keeps every field that it does not know as a value of its own first, which
//! takes most of the time in which a large journal is read.

use super::{SandboxRecord, SnapshotRecord};
use crate::sandbox_settings::SandboxSettings;
use crate::store_copies::StoreCopies;
use jiffy_api_types::{BootMode, BrokenBy, SandboxSize, SandboxState, SnapshotPurpose, StateName};
use jiffy_engine_api::MICROVM;
use jiffy_proto::agent::SiteSettings;
use serde::Deserialize;
use std::collections::BTreeMap;

/// [`SandboxRecord`].
#[derive(Deserialize)]
pub(super) struct FlatSandbox {
    id: String,
    name: Option<String>,
    state: StateName,
    cause: Option<String>,
    #[serde(default)]
    broken_by: BrokenBy,
    template: String,
    vcpus: u8,
    memory_mib: u32,
    disk_mib: u64,
    env: BTreeMap<String, String>,
    #[serde(default, rename = "terms")]
    settings: SandboxSettings,
    deadline_ms: Option<u64>,
    agent_token: Option<String>,
    traffic_token: Option<String>,
    snapshot: Option<String>,
    forked_from: Option<String>,
    boot_mode: Option<BootMode>,
    engine: Option<String>,
    boot_ms: Option<f64>,
    created_ms: u64,
    changed_ms: u64,
}

impl TryFrom<FlatSandbox> for SandboxRecord {
    type Error = &'static str;

    fn try_from(flat: FlatSandbox) -> Result<Self, Self::Error> {
        let state = match flat.state {
            StateName::Creating => SandboxState::Creating,
            StateName::Running => SandboxState::Running,
            StateName::Paused => SandboxState::Paused,
            StateName::Broken => SandboxState::Broken {
                cause: flat.cause.ok_or("missing field `cause`")?,
                broken_by: flat.broken_by,
            },
            StateName::Killed => SandboxState::Killed,
        };
        Ok(Self {
            id: flat.id,
            name: flat.name,
            state,
            template: flat.template,
            size: SandboxSize {
                vcpus: flat.vcpus,
                memory_mib: flat.memory_mib,
                disk_mib: flat.disk_mib,
            },
            env: flat.env,
            settings: flat.settings,
            deadline_ms: flat.deadline_ms,
            agent_token: flat.agent_token,
            traffic_token: flat.traffic_token,
            snapshot: flat.snapshot,
            forked_from: flat.forked_from,
            boot_mode: flat.boot_mode,
            engine: flat.engine,
            boot_ms: flat.boot_ms,
            created_ms: flat.created_ms,
            changed_ms: flat.changed_ms,
        })
    }
}

/// [`SnapshotRecord`].
#[derive(Deserialize)]
pub(super) struct FlatSnapshot {
    id: String,
    name: Option<String>,
    purpose: SnapshotPurpose,
    sandbox: String,
    owner: Option<String>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    #[serde(default)]
    site: SiteSettings,
    template: String,
    fingerprint: String,
    vcpus: u8,
    memory_mib: u32,
    disk_mib: u64,
    engine: Option<String>,
    parent: Option<String>,
    kept: bool,
    stopped_ms: f64,
    total_ms: f64,
    #[serde(default)]
    bytes: u64,
    created_ms: u64,
    #[serde(default)]
    storing: bool,
    #[serde(default)]
    store: StoreCopies,
}

impl From<FlatSnapshot> for SnapshotRecord {
    fn from(flat: FlatSnapshot) -> Self {
        Self {
            id: flat.id,
            name: flat.name,
            purpose: flat.purpose,
            sandbox: flat.sandbox,
            owner: flat.owner,
            env: flat.env,
            site: flat.site,
            template: flat.template,
            fingerprint: flat.fingerprint,
            size: SandboxSize {
                vcpus: flat.vcpus,
                memory_mib: flat.memory_mib,
                disk_mib: flat.disk_mib,
            },
            // Versions that had only this engine did not write its name.
            engine: flat.engine.unwrap_or_else(|| MICROVM.to_owned()),
            parent: flat.parent,
            kept: flat.kept,
            stopped_ms: flat.stopped_ms,
            total_ms: flat.total_ms,
            bytes: flat.bytes,
            created_ms: flat.created_ms,
            storing: flat.storing,
            store: flat.store,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_as_they_are_written_in_every_state() {
        let text = r#"{"id":"a","name":"n","state":"broken","cause":"why",
            "broken_by":"missing_memory","template":"base","vcpus":2,"memory_mib":512,
            "disk_mib":1024,"env":{"A":"1"},"terms":{"owner":"k","metadata":{"m":"1"}},
            "deadline_ms":1,"agent_token":"t","traffic_token":"u","snapshot":"s",
            "forked_from":"f","boot_mode":"fork","engine":"microvm","boot_ms":1.5,
            "created_ms":1,"changed_ms":2,"of a later version":1}"#;
        let read: SandboxRecord = serde_json::from_str(text).unwrap();
        use SandboxState::{Creating, Killed, Paused, Running};
        let broken = read.state.clone();
        for state in [
            broken,
            SandboxState::broken("x"),
            Creating,
            Killed,
            Paused,
            Running,
        ] {
            let record = SandboxRecord {
                state,
                ..read.clone()
            };
            let text = serde_json::to_string(&record).unwrap();
            assert_eq!(
                serde_json::from_str::<SandboxRecord>(&text).unwrap(),
                record
            );
        }
        let text = r#"{"id":"s","name":null,"purpose":"pause","sandbox":"a","template":"base",
            "fingerprint":"f","vcpus":1,"memory_mib":128,"disk_mib":64,"parent":"p","kept":true,
            "stopped_ms":1.5,"total_ms":2.5,"created_ms":3}"#;
        let mut read: SnapshotRecord = serde_json::from_str(text).unwrap();
        read.owner = Some("k".to_owned());
        read.store.revision = 7;
        let text = serde_json::to_string(&read).unwrap();
        assert_eq!(serde_json::from_str::<SnapshotRecord>(&text).unwrap(), read);
    }
}
