//! Records: the serialised form of sandboxes and snapshots in the journal and in shared stores.
//!
//! The *journal* is the database of the daemon with the records of sandboxes and snapshots.
//!
//! All fields are in one flat structure. `#[serde(flatten)]` would first parse each unknown field
//! into an intermediate value, and most of the time for reading a large journal would be spent on
//! this.

use crate::lineage_record::{PrunedAncestors, Rollback};
use crate::sandbox::Sandbox;
use crate::sandbox_settings::SandboxSettings;
use crate::snapshot::Snapshot;
use crate::store_copies::StoreCopies;
use jiffy_api_types::{
    BootMode, BrokenBy, PauseCause, SandboxSize, SandboxState, SnapshotContent, SnapshotPurpose,
    StateName,
};
use jiffy_engine_api::MICROVM;
use jiffy_proto::agent::SiteSettings;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// Text of a record: borrowed from the sandbox when the record is written, and owned after it is
/// read.
type Text<'a> = Cow<'a, str>;
/// Environment variables of a record.
type Environment<'a> = Cow<'a, BTreeMap<String, String>>;

/// Record of a [`Sandbox`].
#[derive(Serialize, Deserialize)]
pub(crate) struct SandboxRecord<'a> {
    id: Text<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<Text<'a>>,
    state: StateName,
    #[serde(skip_serializing_if = "Option::is_none")]
    cause: Option<Text<'a>>,
    #[serde(default, skip_serializing_if = "is_guest_end")]
    broken_by: BrokenBy,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pause_cause: Option<PauseCause>,
    template: Text<'a>,
    vcpus: u8,
    memory_mib: u32,
    disk_mib: u64,
    env: Environment<'a>,
    // Earlier versions call this field `terms`, and must be able to read new records.
    #[serde(default, rename = "terms")]
    settings: Cow<'a, SandboxSettings>,
    deadline_ms: Option<u64>,
    agent_token: Option<Text<'a>>,
    traffic_token: Option<Text<'a>>,
    snapshot: Option<Text<'a>>,
    forked_from: Option<Text<'a>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    started_from: Option<Text<'a>>,
    #[serde(default, skip_serializing_if = "has_no_rollbacks")]
    rollbacks: Cow<'a, [Rollback]>,
    boot_mode: Option<BootMode>,
    engine: Option<Text<'a>>,
    boot_ms: Option<f64>,
    created_ms: u64,
    changed_ms: u64,
}

fn has_no_rollbacks(rollbacks: &[Rollback]) -> bool {
    rollbacks.is_empty()
}

// The default is omitted, as in records of earlier versions, which do not have this field.
fn is_guest_end(broken_by: &BrokenBy) -> bool {
    *broken_by == BrokenBy::GuestEnd
}

fn borrowed(text: &Option<String>) -> Option<Text<'_>> {
    text.as_deref().map(Cow::Borrowed)
}

fn owned(text: Option<Text<'_>>) -> Option<String> {
    text.map(Cow::into_owned)
}

impl<'a> From<&'a Sandbox> for SandboxRecord<'a> {
    fn from(sandbox: &'a Sandbox) -> Self {
        let (cause, broken_by) = match &sandbox.state {
            SandboxState::Broken { cause, broken_by } => {
                (Some(Cow::Borrowed(&**cause)), *broken_by)
            }
            _ => (None, BrokenBy::GuestEnd),
        };
        Self {
            id: Cow::Borrowed(&sandbox.id),
            name: borrowed(&sandbox.name),
            state: sandbox.state.kind(),
            cause,
            broken_by,
            pause_cause: sandbox.pause_cause,
            template: Cow::Borrowed(&sandbox.template),
            vcpus: sandbox.size.vcpus,
            memory_mib: sandbox.size.memory_mib,
            disk_mib: sandbox.size.disk_mib,
            env: Cow::Borrowed(&sandbox.env),
            settings: Cow::Borrowed(&sandbox.settings),
            deadline_ms: sandbox.deadline_ms,
            agent_token: borrowed(&sandbox.agent_token),
            traffic_token: borrowed(&sandbox.traffic_token),
            snapshot: borrowed(&sandbox.snapshot),
            forked_from: borrowed(&sandbox.forked_from),
            started_from: borrowed(&sandbox.started_from),
            rollbacks: Cow::Borrowed(&sandbox.rollbacks),
            boot_mode: sandbox.boot_mode,
            engine: borrowed(&sandbox.engine),
            boot_ms: sandbox.boot_ms,
            created_ms: sandbox.created_ms,
            changed_ms: sandbox.changed_ms,
        }
    }
}

impl TryFrom<SandboxRecord<'_>> for Box<Sandbox> {
    type Error = &'static str;

    fn try_from(record: SandboxRecord<'_>) -> Result<Self, Self::Error> {
        let state = match record.state {
            StateName::Creating => SandboxState::Creating,
            StateName::Running => SandboxState::Running,
            StateName::Paused => SandboxState::Paused,
            StateName::Broken => SandboxState::Broken {
                // Every broken sandbox has a cause, so a record without one is damaged.
                cause: owned(record.cause).ok_or("missing field `cause`")?,
                broken_by: record.broken_by,
            },
            StateName::Killed => SandboxState::Killed,
        };
        Ok(Box::new(Sandbox {
            id: record.id.into_owned(),
            name: owned(record.name),
            state,
            pause_cause: record.pause_cause,
            template: record.template.into_owned(),
            size: SandboxSize {
                vcpus: record.vcpus,
                memory_mib: record.memory_mib,
                disk_mib: record.disk_mib,
            },
            env: record.env.into_owned(),
            settings: record.settings.into_owned(),
            deadline_ms: record.deadline_ms,
            agent_token: owned(record.agent_token),
            traffic_token: owned(record.traffic_token),
            snapshot: owned(record.snapshot),
            forked_from: owned(record.forked_from),
            started_from: owned(record.started_from),
            rollbacks: record.rollbacks.into_owned(),
            boot_mode: record.boot_mode,
            engine: owned(record.engine),
            boot_ms: record.boot_ms,
            created_ms: record.created_ms,
            changed_ms: record.changed_ms,
        }))
    }
}

/// Record of a [`Snapshot`].
#[derive(Serialize, Deserialize)]
pub(crate) struct SnapshotRecord<'a> {
    id: Text<'a>,
    name: Option<Text<'a>>,
    purpose: SnapshotPurpose,
    sandbox: Text<'a>,
    owner: Option<Text<'a>>,
    #[serde(default)]
    env: Environment<'a>,
    #[serde(default, skip_serializing_if = "is_default_site")]
    site: Cow<'a, SiteSettings>,
    template: Text<'a>,
    fingerprint: Text<'a>,
    vcpus: u8,
    memory_mib: u32,
    disk_mib: u64,
    engine: Option<Text<'a>>,
    parent: Option<Text<'a>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pruned: Option<Cow<'a, PrunedAncestors>>,
    // `Snapshot::retained`, under the name that earlier versions gave it.
    kept: bool,
    stopped_ms: f64,
    total_ms: f64,
    #[serde(default)]
    bytes: u64,
    created_ms: u64,
    #[serde(default, skip_serializing_if = "SnapshotContent::is_full")]
    content: SnapshotContent,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    storing: bool,
    #[serde(default, skip_serializing_if = "has_no_copies")]
    store: Cow<'a, StoreCopies>,
}

fn is_default_site(site: &SiteSettings) -> bool {
    site.is_empty()
}

fn has_no_copies(store: &StoreCopies) -> bool {
    store.is_empty()
}

impl<'a> From<&'a Snapshot> for SnapshotRecord<'a> {
    fn from(snapshot: &'a Snapshot) -> Self {
        Self {
            id: Cow::Borrowed(&snapshot.id),
            name: borrowed(&snapshot.name),
            purpose: snapshot.purpose,
            sandbox: Cow::Borrowed(&snapshot.sandbox),
            owner: borrowed(&snapshot.owner),
            env: Cow::Borrowed(&snapshot.env),
            site: Cow::Borrowed(&snapshot.site),
            template: Cow::Borrowed(&snapshot.template),
            fingerprint: Cow::Borrowed(&snapshot.fingerprint),
            vcpus: snapshot.size.vcpus,
            memory_mib: snapshot.size.memory_mib,
            disk_mib: snapshot.size.disk_mib,
            engine: Some(Cow::Borrowed(&snapshot.engine)),
            parent: borrowed(&snapshot.parent),
            pruned: snapshot.pruned.as_ref().map(Cow::Borrowed),
            kept: snapshot.retained,
            stopped_ms: snapshot.stopped_ms,
            total_ms: snapshot.total_ms,
            bytes: snapshot.bytes,
            created_ms: snapshot.created_ms,
            content: snapshot.content,
            storing: snapshot.storing,
            store: Cow::Borrowed(&snapshot.store),
        }
    }
}

impl From<SnapshotRecord<'_>> for Box<Snapshot> {
    fn from(record: SnapshotRecord<'_>) -> Self {
        Box::new(Snapshot {
            id: record.id.into_owned(),
            name: owned(record.name),
            purpose: record.purpose,
            sandbox: record.sandbox.into_owned(),
            owner: owned(record.owner),
            env: record.env.into_owned(),
            site: record.site.into_owned(),
            template: record.template.into_owned(),
            fingerprint: record.fingerprint.into_owned(),
            size: SandboxSize {
                vcpus: record.vcpus,
                memory_mib: record.memory_mib,
                disk_mib: record.disk_mib,
            },
            // Early versions had only this engine and did not write its name.
            engine: owned(record.engine).unwrap_or_else(|| MICROVM.to_owned()),
            parent: owned(record.parent),
            pruned: record.pruned.map(Cow::into_owned),
            retained: record.kept,
            stopped_ms: record.stopped_ms,
            total_ms: record.total_ms,
            bytes: record.bytes,
            created_ms: record.created_ms,
            content: record.content,
            storing: record.storing,
            store: record.store.into_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_sandbox(text: &str) -> Sandbox {
        let record: SandboxRecord = serde_json::from_str(text).unwrap();
        *Box::try_from(record).unwrap()
    }

    fn written_sandbox(sandbox: &Sandbox) -> String {
        serde_json::to_string(&SandboxRecord::from(sandbox)).unwrap()
    }

    fn read_snapshot(text: &str) -> Snapshot {
        let record: SnapshotRecord = serde_json::from_str(text).unwrap();
        *Box::from(record)
    }

    #[test]
    fn records_are_read_as_written_in_every_state() {
        let text = r#"{"id":"a","name":"n","state":"broken","cause":"why",
            "broken_by":"missing_memory","template":"base","vcpus":2,"memory_mib":512,
            "disk_mib":1024,"env":{"A":"1"},"terms":{"owner":"k","metadata":{"m":"1"}},
            "deadline_ms":1,"agent_token":"t","traffic_token":"u","snapshot":"s",
            "forked_from":"f","started_from":"s","rollbacks":[{"snapshot":"r","at_ms":9}],
            "boot_mode":"fork","engine":"microvm","boot_ms":1.5,
            "created_ms":1,"changed_ms":2,"of a later version":1}"#;
        let sandbox = read_sandbox(text);
        use SandboxState::{Creating, Killed, Paused, Running};
        let broken = sandbox.state.clone();
        for state in [
            broken,
            SandboxState::broken("x"),
            Creating,
            Killed,
            Paused,
            Running,
        ] {
            let sandbox = Sandbox {
                state,
                ..sandbox.clone()
            };
            assert_eq!(read_sandbox(&written_sandbox(&sandbox)), sandbox);
        }
        let text = r#"{"id":"s","name":null,"purpose":"pause","sandbox":"a","template":"base",
            "fingerprint":"f","vcpus":1,"memory_mib":128,"disk_mib":64,"parent":"p","kept":true,
            "stopped_ms":1.5,"total_ms":2.5,"created_ms":3}"#;
        let mut snapshot = read_snapshot(text);
        snapshot.owner = Some("k".to_owned());
        snapshot.store.revision = 7;
        snapshot.pruned = Some(PrunedAncestors {
            newest: "q".to_owned(),
            sandbox: "a".to_owned(),
            created_ms: 2,
            count: 4,
        });
        let text = serde_json::to_string(&SnapshotRecord::from(&snapshot)).unwrap();
        assert_eq!(read_snapshot(&text), snapshot);
    }

    #[test]
    fn the_cause_of_a_broken_sandbox_is_readable_by_earlier_versions() {
        let text = r#"{"id":"a","state":"broken","cause":"why","template":"base","vcpus":2,"memory_mib":512,"disk_mib":1024,"env":{},"terms":TERMS,"deadline_ms":null,"agent_token":null,"traffic_token":null,"snapshot":null,"forked_from":null,"boot_mode":null,"engine":null,"boot_ms":null,"created_ms":1,"changed_ms":2}"#;
        let terms = serde_json::to_string(&SandboxSettings::default()).unwrap();
        let text = text.replace("TERMS", &terms);
        let mut sandbox = read_sandbox(&text);
        assert_eq!(sandbox.state, SandboxState::broken("why"));
        assert_eq!(written_sandbox(&sandbox), text);
        sandbox.state = SandboxState::Broken {
            cause: "why".to_owned(),
            broken_by: BrokenBy::MissingMemory,
        };
        let kind = r#""cause":"why","broken_by":"missing_memory","#;
        let text = text.replace(r#""cause":"why","#, kind);
        assert_eq!(written_sandbox(&sandbox), text);
    }
}
