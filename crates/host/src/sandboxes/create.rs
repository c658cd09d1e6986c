//! `create`: a new sandbox from a template or a snapshot.

use super::entry::{Entry, lock};
use super::{OperationError, Sandboxes, detached};
use crate::identity::new_id;
use crate::record::{SandboxRecord, State, now_ms};
use jiffy_engine::{Arrival, BootMode, Engine, Guest, Persona, SandboxSize};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// What a sandbox starts from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// A template by name.
    Template(String),
    /// A snapshot by id, the beginning of it, or name.
    Snapshot(String),
}

/// What is wanted of a new sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreateSpec {
    /// What it starts from.
    pub source: Source,
    /// Resources; a snapshot decides for itself.
    #[serde(default)]
    pub size: Option<SandboxSize>,
    /// Environment of every process in it.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
}

/// Where a new guest comes from.
pub(super) struct Origin<A> {
    pub arrival: A,
    pub mode: BootMode,
    /// Snapshot it was restored from.
    pub snapshot: Option<String>,
}

impl<E: Engine> Sandboxes<E> {
    /// Makes a sandbox and returns when its agent has answered.
    pub async fn create(&self, spec: CreateSpec) -> Result<SandboxRecord, OperationError> {
        let this = self.clone();
        detached(async move { this.create_now(spec).await }).await
    }

    async fn create_now(&self, spec: CreateSpec) -> Result<SandboxRecord, OperationError> {
        let asked = Instant::now();
        match spec.source {
            Source::Template(template) => {
                let size = spec.size.unwrap_or_default();
                size.check()?;
                let new = self.enter(&template, size, spec.env, None)?;
                let origin = self.origin_in_template(&template, size).await;
                self.bring_up(new, asked, origin).await
            }
            Source::Snapshot(_) if spec.size.is_some() => Err(OperationError::FixedSize),
            Source::Snapshot(id) => {
                let (snapshot, _pin) = self.pin(&id)?;
                let new = self.enter(&snapshot.template, snapshot.size, spec.env, None)?;
                let origin = self
                    .origin_in_snapshot(&snapshot.template, &snapshot.id, BootMode::Snapshot)
                    .await;
                self.bring_up(new, asked, origin).await
            }
        }
    }

    pub(super) async fn origin_in_snapshot(
        &self,
        template: &str,
        id: &str,
        mode: BootMode,
    ) -> Result<Origin<E::Arrival>, OperationError> {
        let arrival = self.0.engine.restore(template, id).await;
        Ok(Origin {
            arrival: arrival.map_err(OperationError::engine(format!("restore snapshot {id}")))?,
            mode,
            snapshot: Some(id.to_owned()),
        })
    }

    /// Enters a sandbox that is being made. The journal hears of it when it is up: until then there is none.
    pub(super) fn enter(
        &self,
        template: &str,
        size: SandboxSize,
        env: BTreeMap<String, String>,
        forked_from: Option<String>,
    ) -> Result<Arc<Entry<E::Guest>>, OperationError> {
        let now = now_ms();
        let entry = Arc::new(Entry::new(SandboxRecord {
            id: new_id()?,
            state: State::Creating,
            template: template.to_owned(),
            size,
            env,
            snapshot: None,
            forked_from,
            boot_mode: None,
            boot_ms: None,
            created_ms: now,
            changed_ms: now,
        }));
        lock(&self.0.entries).insert(entry.record().id, entry.clone());
        Ok(entry)
    }

    /// Makes a sandbox that was entered into one that runs, or into none.
    pub(super) async fn bring_up(
        &self,
        entry: Arc<Entry<E::Guest>>,
        asked: Instant,
        origin: Result<Origin<E::Arrival>, OperationError>,
    ) -> Result<SandboxRecord, OperationError> {
        let _turn = entry.turn.lock().await;
        let result = match origin {
            Ok(origin) => self.install(&entry, asked, origin).await,
            Err(e) => Err(e),
        };
        if result.is_err() {
            lock(&self.0.entries).remove(&entry.record().id);
        }
        result
    }

    /// Welcomes an arrival as the sandbox and puts it in the place of the guest there was, which ends. Needs the turn.
    pub(super) async fn install(
        &self,
        entry: &Arc<Entry<E::Guest>>,
        asked: Instant,
        origin: Origin<E::Arrival>,
    ) -> Result<SandboxRecord, OperationError> {
        let persona = {
            let record = entry.record();
            Persona {
                id: record.id,
                env: record.env,
            }
        };
        let id = &persona.id;
        let guest = origin.arrival.welcome(&persona).await;
        let guest = guest.map_err(OperationError::engine(format!("bring up sandbox {id}")))?;
        let guest = Arc::new(guest);
        let record = SandboxRecord {
            snapshot: origin.snapshot,
            boot_mode: Some(origin.mode),
            boot_ms: Some(asked.elapsed().as_secs_f64() * 1000.0),
            ..entry.record_in(State::Running)
        };
        if let Err(e) = self
            .0
            .journal
            .commit(&[crate::journal::Change::Sandbox(record.clone())])
        {
            guest.stop().await;
            return Err(e.into());
        }
        let before = entry.replace_guest(Some(guest.clone()));
        entry.set_record(record.clone());
        self.watch(entry, &guest);
        if let Some(before) = before {
            before.stop().await;
        }
        Ok(record)
    }
}
