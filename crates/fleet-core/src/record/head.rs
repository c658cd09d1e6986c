//! [`Head`]: the record that decides which member may run a sandbox. It names the *owner* (the
//! member that runs the sandbox, with its epoch), the state and the newest stored snapshot. Each
//! change is a conditional replacement, and increments the *revision*.

use super::{Checked, Format, RecordError, UnknownFields, check_text, decode, encode, rule};
use crate::ids::{Digest, MAX_REVISION, MemberId, Owner, Revision, SandboxId};
use serde::{Deserialize, Serialize};

/// Maximum size of an inlined sandbox record. Larger records are separate objects.
pub const MAX_INLINE_RECORD_BYTES: usize = 64 << 10;
/// Maximum size of an encoded head. The JSON of an inlined record may need escapes.
pub const MAX_HEAD_BYTES: usize = 192 << 10;
/// Maximum length of the id of a snapshot, and of the key of a record.
const MAX_KEY_BYTES: usize = 255;

/// Name of the state in the encoded head. The owner and the time of a kill are separate fields of
/// the encoded head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HeadKind {
    /// The sandbox is paused and has no owner.
    Paused,
    /// The sandbox runs on its owner.
    Running,
    /// The sandbox was killed. This state is final.
    Killed,
}

/// State of a head together with the fields that exist only in this state. [`Head::state`] combines
/// the value from the encoded fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadState {
    /// Paused, without an owner.
    Paused,
    /// Running on this owner.
    Running(Owner),
    /// Killed.
    Killed(KilledAt),
}

/// Kill of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KilledAt {
    /// Wall clock of the member that wrote the kill, in milliseconds since 1970. Used for the
    /// minimum time of retention only.
    pub at_ms: u64,
    /// Member that still has files of the sandbox and has not confirmed the kill.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub home: Option<MemberId>,
}

/// Stored snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Id of the snapshot.
    pub id: String,
    /// Root of the snapshot: digest of its manifest.
    pub root: Digest,
    /// Wall clock at the pause, in milliseconds since 1970. For display only.
    pub taken_ms: u64,
    /// Fields of newer formats.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// Action after the loss of the host of a running sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NodeLoss {
    /// The sandbox waits for the return of its host.
    #[default]
    Wait,
    /// The sandbox is restored on another host.
    Restore,
}

/// Options of a sandbox that decisions of the fleet depend on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// Action after the loss of the host.
    #[serde(default)]
    pub on_node_loss: NodeLoss,
    /// Fields of newer formats.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// Sandbox record: tokens, name, metadata, timeout and network rules, for another host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SandboxRecord {
    /// Text of the record, at most [`MAX_INLINE_RECORD_BYTES`].
    Inline(String),
    /// Immutable object in the store.
    Object {
        /// Key of the object.
        key: String,
        /// Digest of its content.
        digest: Digest,
    },
}

/// Head of a sandbox that was stored at least once, or killed while its home was unreachable. The
/// *home* is the member that has the files of a sandbox while no member owns it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    version: Format,
    /// Sandbox.
    pub id: SandboxId,
    /// Number of replacements.
    pub revision: Revision,
    state: HeadKind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    owner: Option<Owner>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    killed: Option<KilledAt>,
    /// Member that created the head, until the next change of the head by this member. `None`
    /// afterwards.
    ///
    /// The journal is the database in which a member records its own sandboxes. The member may
    /// fail after it has created the head and before it has recorded the head in the journal.
    /// After its return, the member treats the sandbox like a sandbox without a head, which it may
    /// run without permission of the fleet. A kill by another member must therefore not be
    /// forgotten: the killed head is retained until the member in this field confirms the kill.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<MemberId>,
    /// Newest stored snapshot. Required unless the sandbox was killed before it was stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<Snapshot>,
    /// Options.
    #[serde(default)]
    pub policy: Policy,
    /// Sandbox record. `None` if the sandbox was killed before it was stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub record: Option<SandboxRecord>,
    /// Fields of newer formats.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

impl Head {
    /// Returns the first head of a sandbox.
    #[must_use]
    pub fn new(
        id: SandboxId,
        state: HeadState,
        snapshot: Option<Snapshot>,
        record: Option<SandboxRecord>,
    ) -> Self {
        let mut head = Self {
            version: Format::default(),
            id,
            revision: Revision(1),
            state: HeadKind::Paused,
            owner: None,
            killed: None,
            origin: None,
            snapshot,
            policy: Policy::default(),
            record,
            unknown: UnknownFields::new(),
        };
        head.set_state(state);
        head
    }

    /// Returns the state.
    #[must_use]
    pub fn state(&self) -> HeadState {
        match (self.state, self.owner, self.killed) {
            (HeadKind::Running, Some(owner), _) => HeadState::Running(owner),
            (HeadKind::Killed, _, Some(killed)) => HeadState::Killed(killed),
            // Other combinations do not pass `check`.
            _ => HeadState::Paused,
        }
    }

    /// Returns the root of the snapshot.
    #[must_use]
    pub fn root(&self) -> Option<Digest> {
        self.snapshot.as_ref().map(|snapshot| snapshot.root)
    }

    /// Returns the head by which member `by` replaces this one. `None` after the maximum
    /// revision.
    #[must_use]
    pub fn successor(&self, by: MemberId, state: HeadState) -> Option<Self> {
        let mut head = self.clone();
        head.revision = self.revision.next()?;
        head.origin = self.origin.filter(|&origin| origin != by);
        head.set_state(state);
        Some(head)
    }

    fn set_state(&mut self, state: HeadState) {
        (self.state, self.owner, self.killed) = match state {
            HeadState::Paused => (HeadKind::Paused, None, None),
            HeadState::Running(owner) => (HeadKind::Running, Some(owner), None),
            HeadState::Killed(killed) => (HeadKind::Killed, None, Some(killed)),
        };
    }

    /// Returns the JSON of the head.
    ///
    /// # Errors
    /// [`RecordError::TooLarge`], or [`RecordError::Damaged`] if a rule is violated.
    pub fn encode(&self) -> Result<Vec<u8>, RecordError> {
        encode(self)
    }

    /// Returns the head with this JSON.
    ///
    /// # Errors
    /// [`RecordError`] if the head cannot be used.
    pub fn decode(bytes: &[u8], id: SandboxId) -> Result<Self, RecordError> {
        let head: Self = decode(bytes)?;
        if head.id != id {
            return Err(RecordError::ForeignKey {
                record: Self::NAME,
                expected: format!("sandbox {id}"),
                actual: format!("sandbox {}", head.id),
            });
        }
        Ok(head)
    }
}

impl Checked for Head {
    const NAME: &'static str = "head";
    const MAX_BYTES: usize = MAX_HEAD_BYTES;

    fn check(&self) -> Result<(), String> {
        rule(
            (1..=MAX_REVISION).contains(&self.revision.0),
            "`revision` is out of range",
        )?;
        let is_consistent = match self.state {
            HeadKind::Paused => self.owner.is_none() && self.killed.is_none(),
            HeadKind::Running => self.owner.is_some() && self.killed.is_none(),
            HeadKind::Killed => self.owner.is_none() && self.killed.is_some(),
        };
        rule(is_consistent, "`state`, `owner` and `killed` contradict")?;
        rule(
            self.owner
                .is_none_or(|owner| (1..u64::MAX).contains(&owner.epoch.0)),
            "`owner.epoch` is out of range",
        )?;
        rule(
            self.state == HeadKind::Killed || self.snapshot.is_some() && self.record.is_some(),
            "`snapshot` or `record` is missing",
        )?;
        if let Some(snapshot) = &self.snapshot {
            check_text("snapshot.id", &snapshot.id, MAX_KEY_BYTES)?;
        }
        match &self.record {
            Some(SandboxRecord::Inline(text)) => rule(
                text.len() <= MAX_INLINE_RECORD_BYTES,
                "the inlined record is too large",
            ),
            Some(SandboxRecord::Object { key, .. }) => check_text("record.key", key, MAX_KEY_BYTES),
            None => Ok(()),
        }
    }
}
