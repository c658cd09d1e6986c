//! Fake engine: the memory of a guest is a text, and booting takes no time.
//!
//! Each operation calls [`World::step`] with its name, so that a test can make this step fail, hang
//! or wait. [`World`] is the state of all fake guests, and a body ([`World::body`]) is the state of
//! one.

use super::OTHER;
use super::files::FakeFiles;
use super::guest::{FakeGuest, UnassignedFakeGuest};
use super::world::World;
use async_trait::async_trait;
use jiffy_engine_api::{
    Capabilities, DetachedGuest, Engine, EngineDescription, EngineError, Engines, Guest,
    GuestHandle, MICROVM, SandboxIdentity, SandboxSize, SnapshotFiles, Startup, TemplateState,
    UnassignedGuest,
};
use jiffy_proto::agent::SiteSettings;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Name of the default engine. The store accepts only names of real engines.
pub const FAKE: &str = MICROVM;
/// Content of a damaged snapshot file.
pub const DAMAGED: &str = "damaged";

/// Engine whose guests exist in this process only.
pub struct FakeEngine(Arc<FakeFiles>);

impl FakeEngine {
    /// Creates the engines of a host: the default, [`OTHER`], and an engine that cannot be used.
    pub fn all(world: &Arc<World>, dir: &Path) -> Engines {
        let writing = Arc::default();
        let engine = |name| -> Arc<dyn Engine> {
            Arc::new(Self(Arc::new(FakeFiles {
                name,
                world: world.clone(),
                dir: dir.to_owned(),
                writing: Arc::clone(&writing),
            })))
        };
        let all = [FAKE, OTHER, "absent"].map(engine);
        Engines::new(all.into(), FAKE).unwrap()
    }
}

#[async_trait]
impl Engine for FakeEngine {
    fn name(&self) -> &'static str {
        self.0.name
    }

    fn description(&self) -> EngineDescription {
        // The default engine is used even if it is reported as unusable. Tests check the reason,
        // too.
        let why = match self.0.name {
            FAKE => Some("it is a fake"),
            OTHER => None,
            _ => Some("it is missing"),
        };
        EngineDescription {
            name: self.0.name.to_owned(),
            version: None,
            usable: why.is_none(),
            why: why.map(str::to_owned),
            default: false,
            capabilities: Capabilities {
                snapshot: true,
                rollback: true,
                ..Capabilities::default()
            },
        }
    }

    fn snapshot_files(&self) -> &dyn SnapshotFiles {
        &*self.0
    }

    async fn prepare(&self, template: &str) -> Result<TemplateState, EngineError> {
        self.0.world.step("fingerprint").await?;
        let version = *self.0.world.version.lock().unwrap();
        Ok(TemplateState {
            fingerprint: format!("{template}{version}{}", self.0.name),
            startup: Startup::default(),
        })
    }

    async fn boot(
        &self,
        template: &str,
        _: SandboxSize,
    ) -> Result<Box<dyn UnassignedGuest>, EngineError> {
        *self.0.world.boots.lock().unwrap() += 1;
        self.0.world.step("boot").await?;
        let body = self
            .0
            .world
            .new_body(self.0.name, format!("fresh {template}"));
        Ok(Box::new(UnassignedFakeGuest(self.0.clone(), Some(body))))
    }

    async fn restore(
        &self,
        id: &str,
        _: Option<&SandboxIdentity>,
    ) -> Result<Box<dyn UnassignedGuest>, EngineError> {
        *self.0.world.restores.lock().unwrap() += 1;
        self.0.world.step("restore").await?;
        let memory = fs::read_to_string(self.0.dir.join(id)).map_err(EngineError::failed)?;
        if memory == DAMAGED {
            return Err(EngineError::failed("it is damaged"));
        }
        let body = self.0.world.new_body(self.0.name, memory);
        *body.parent.lock().unwrap() = Some(id.to_owned());
        Ok(Box::new(UnassignedFakeGuest(self.0.clone(), Some(body))))
    }

    async fn adopt(&self, orphan: &DetachedGuest) -> Result<Arc<dyn Guest>, EngineError> {
        let at: usize = orphan.handle.0.parse().map_err(EngineError::failed)?;
        let body = self.0.world.guests.lock().unwrap()[at].clone();
        if let Err(e) = self.0.world.step("adopt").await {
            body.stop();
            return Err(e);
        }
        if !body.lives() {
            return Err(EngineError::failed("it ended"));
        }
        // The guest does not know whether its last snapshot was completed when the daemon was
        // killed. If its file exists, it was. Otherwise the guest drops it, unless the daemon had
        // recorded it as captured: then the new daemon completes it.
        let undecided = body.undecided.lock().unwrap().take();
        match undecided {
            Some(id) if self.0.ids()?.contains(&id) => {
                *body.parent.lock().unwrap() = Some(id);
            }
            Some(id) if orphan.captured.as_ref() != Some(&id) => {
                *body.captured.lock().unwrap() = None;
            }
            _ => {}
        }
        // The guest and the journal of the daemon must name the same latest snapshot.
        assert_eq!(*body.parent.lock().unwrap(), orphan.snapshot);
        Ok(Arc::new(FakeGuest(body, self.0.clone())))
    }

    // Stops the guests that a former daemon left running and that are not `known` to the journal.
    async fn end_unadopted(&self, known: &[GuestHandle]) -> Result<usize, EngineError> {
        let guests = self.0.world.guests.lock().unwrap().clone();
        let others = guests.iter().enumerate().filter(|(at, body)| {
            let handle = GuestHandle(at.to_string());
            body.engine == self.0.name
                && body.lives()
                && body.detached.load(Ordering::Relaxed)
                && !known.contains(&handle)
        });
        Ok(others.map(|(_, body)| body.stop()).count())
    }

    async fn record_working_set(
        &self,
        _: &str,
        id: &str,
        _: &SiteSettings,
    ) -> Result<(), EngineError> {
        self.0.world.step("working-set").await?;
        self.0
            .world
            .working_sets
            .lock()
            .unwrap()
            .push(id.to_owned());
        Ok(())
    }
}
