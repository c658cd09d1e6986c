//! The engine: snapshots are files with the text of a guest.

use super::OTHER;
use super::guest::{FakeGuest, UnassignedFakeGuest};
use super::world::World;
use jiffy_engine_api::{
    AfterSnapshot, Capabilities, CaptureNotice, Engine, EngineDescription, EngineError,
    ExistingSnapshot, FoldPace, FoldPreparation, FoldResult, Guest, GuestHandle, ImportedFiles,
    KeptGuest, LineageLimits, PreparedFold, RollbackFailure, SandboxIdentity, SandboxSize,
    SnapshotFile, SnapshotFileKind, SnapshotImport, SnapshotParts, SnapshotTimes, SnapshotWalk,
    VerifiedSnapshot,
};
use jiffy_proto::agent::SiteSettings;
use jiffy_proto::snapshot::{FileIdentity, FoldedLayers, SnapshotLayerFiles};
use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use tokio::io::AsyncReadExt;

const MEMORY: &str = "memory.layer";
/// Content of a snapshot's file that shows that it is damaged.
pub const DAMAGED: &str = "damaged";

pub struct FakeEngine {
    pub world: Arc<World>,
    pub dir: PathBuf,
    pub(super) writing: Mutex<BTreeSet<String>>,
}

impl FakeEngine {
    fn names(&self, wanted: impl Fn(&str) -> bool) -> Vec<String> {
        let names = fs::read_dir(&self.dir).unwrap().flatten();
        let names = names.map(|e| e.file_name().into_string().unwrap());
        names.filter(|name| wanted(name)).collect()
    }

    async fn store(
        &self,
        guest: &FakeGuest,
        id: &str,
        memory: String,
        then: AfterSnapshot,
    ) -> Result<SnapshotTimes, EngineError> {
        fs::write(self.dir.join(id), memory).map_err(EngineError::failed)?;
        if guest.0.engine == OTHER {
            self.world.of_other.lock().unwrap().insert(id.to_owned());
        }
        // Of an earlier daemon it may have been collected.
        let _ = fs::remove_file(self.dir.join(format!(".{id}")));
        self.world.step("snapshot-named").await?;
        *guest.0.undecided.lock().unwrap() = None;
        let below = guest.0.parent.lock().unwrap().replace(id.to_owned());
        if let Some(below) = below {
            let mut parents = self.world.parents.lock().unwrap();
            parents.insert(id.to_owned(), below);
        }
        if then == AfterSnapshot::Stop {
            guest.halt().await;
        }
        self.world.step("snapshot-complete").await?;
        Ok(SnapshotTimes::default())
    }

    /// True if a file is one that this engine is writing.
    fn writes(&self, name: &str) -> bool {
        self.writing.lock().unwrap().contains(name)
    }
}

impl Engine for FakeEngine {
    type Guest = FakeGuest;
    type UnassignedGuest = UnassignedFakeGuest;

    fn engines(&self) -> Vec<EngineDescription> {
        let engine = |name: &str, default, why: Option<&str>| EngineDescription {
            name: name.to_owned(),
            version: None,
            usable: why.is_none(),
            why: why.map(str::to_owned),
            default,
            capabilities: Capabilities {
                snapshot: true,
                rollback: true,
                ..Capabilities::default()
            },
        };
        vec![
            engine("fake", true, Some("it is made up")),
            engine(OTHER, false, None),
            engine("absent", false, Some("it is not there")),
        ]
    }

    async fn fingerprint(
        &self,
        engine: Option<&str>,
        template: &str,
        size: SandboxSize,
    ) -> Result<String, EngineError> {
        self.world.step("fingerprint").await?;
        let version = *self.world.version.lock().unwrap();
        let engine = engine.unwrap_or_default();
        Ok(format!("{template}{version}m{}{engine}", size.memory_mib))
    }

    async fn boot(
        &self,
        engine: Option<&str>,
        template: &str,
        _: SandboxSize,
    ) -> Result<UnassignedFakeGuest, EngineError> {
        *self.world.boots.lock().unwrap() += 1;
        self.world.step("boot").await?;
        let engine = match engine {
            Some(name) => {
                assert_eq!(name, OTHER);
                OTHER
            }
            None => "fake",
        };
        let body = self.world.new_body(engine, format!("fresh {template}"));
        Ok(UnassignedFakeGuest(self.world.clone(), Some(body)))
    }

    async fn restore(&self, _: &str, id: &str) -> Result<UnassignedFakeGuest, EngineError> {
        *self.world.restores.lock().unwrap() += 1;
        self.world.step("restore").await?;
        let memory = fs::read_to_string(self.dir.join(id)).map_err(EngineError::failed)?;
        if memory == DAMAGED {
            return Err(EngineError::failed("it is damaged"));
        }
        let engine = match self.world.of_other.lock().unwrap().contains(id) {
            true => OTHER,
            false => "fake",
        };
        let body = self.world.new_body(engine, memory);
        *body.parent.lock().unwrap() = Some(id.to_owned());
        Ok(UnassignedFakeGuest(self.world.clone(), Some(body)))
    }

    async fn adopt(&self, orphan: &KeptGuest) -> Result<FakeGuest, EngineError> {
        let at: usize = orphan.handle.0.parse().map_err(EngineError::failed)?;
        let body = self.world.guests.lock().unwrap()[at].clone();
        if let Err(e) = self.world.step("adopt").await {
            body.stop();
            return Err(e);
        }
        if !body.lives() {
            return Err(EngineError::failed("it ended"));
        }
        let undecided = body.undecided.lock().unwrap().take();
        match undecided {
            Some(id) if self.snapshots()?.contains(&id) => {
                *body.parent.lock().unwrap() = Some(id);
            }
            Some(id) if orphan.captured.as_ref() != Some(&id) => {
                *body.captured.lock().unwrap() = None;
            }
            _ => {}
        }
        assert_eq!(*body.parent.lock().unwrap(), orphan.snapshot);
        Ok(FakeGuest(body, self.world.clone()))
    }

    async fn end_unadopted(&self, known: &[GuestHandle]) -> Result<usize, EngineError> {
        let guests = self.world.guests.lock().unwrap().clone();
        let others = guests.iter().enumerate().filter(|(at, body)| {
            let handle = GuestHandle(at.to_string());
            body.lives() && body.kept.load(Ordering::Relaxed) && !known.contains(&handle)
        });
        Ok(others.map(|(_, body)| body.stop()).count())
    }

    async fn roll_back(
        &self,
        guest: &FakeGuest,
        id: &str,
        identity: &SandboxIdentity,
        begin: impl FnOnce() -> bool + Send,
    ) -> Result<(), RollbackFailure> {
        let refused = |reason: &str| RollbackFailure::Refused {
            reason: reason.to_owned(),
        };
        if !self.world.goes_back.load(Ordering::Relaxed) {
            return Err(refused("it cannot"));
        }
        if !begin() {
            return Err(refused("it was not written down"));
        }
        self.world.began.store(true, Ordering::Relaxed);
        let may = self.world.step("go-back").await;
        may.map_err(|e| refused(&e.to_string()))?;
        let memory = fs::read_to_string(self.dir.join(id));
        *guest.0.memory.lock().unwrap() = memory.map_err(|e| refused(&e.to_string()))?;
        *guest.0.parent.lock().unwrap() = Some(id.to_owned());
        let went = self.world.step("going-back").await;
        went.map_err(RollbackFailure::Lost)?;
        *guest.0.sandbox_identity.lock().unwrap() = identity.clone();
        Ok(())
    }

    async fn snapshot(
        &self,
        guest: &FakeGuest,
        id: &str,
        parent: Option<&str>,
        then: AfterSnapshot,
        max_bytes: Option<u64>,
        notice: Option<CaptureNotice>,
    ) -> Result<SnapshotTimes, EngineError> {
        if let Some(parent) = parent {
            assert!(self.dir.join(parent).exists(), "parent {parent} is gone");
        }
        assert_eq!(guest.0.parent.lock().unwrap().as_deref(), parent);
        let half = format!(".{id}");
        self.writing.lock().unwrap().insert(half.clone());
        fs::write(self.dir.join(half), "half").map_err(EngineError::failed)?;
        *guest.0.undecided.lock().unwrap() = Some(id.to_owned());
        self.world.step("snapshot").await?;
        let memory = guest.0.memory.lock().unwrap().clone();
        let needed = memory.len() as u64;
        if let Some(most) = max_bytes.filter(|most| needed > *most) {
            fs::remove_file(self.dir.join(format!(".{id}"))).unwrap();
            *guest.0.undecided.lock().unwrap() = None;
            return Err(EngineError::SnapshotTooLarge { needed, most });
        }
        if let Some(notice) = notice {
            *guest.0.captured.lock().unwrap() = Some((id.to_owned(), memory));
            notice.send(7_000).unwrap();
            return self.finish_captured(guest).await;
        }
        self.store(guest, id, memory, then).await
    }

    async fn finish_captured(&self, guest: &FakeGuest) -> Result<SnapshotTimes, EngineError> {
        let mut storing = self.world.storing_waits.subscribe();
        storing.wait_for(|waits| !waits).await.unwrap();
        self.world.step("store").await?;
        let captured = guest.0.captured.lock().unwrap().take();
        let (id, memory) = captured.ok_or_else(|| EngineError::failed("it has none"))?;
        self.store(guest, &id, memory, AfterSnapshot::Resume).await
    }

    fn discard_captured(&self, id: &str) {
        self.world.discarded.lock().unwrap().push(id.to_owned());
    }

    async fn record_working_set(
        &self,
        _: &str,
        id: &str,
        _: &SiteSettings,
    ) -> Result<(), EngineError> {
        self.world.step("learn").await?;
        self.world.learned.lock().unwrap().push(id.to_owned());
        Ok(())
    }

    fn prefetch(&self, id: &str) -> Result<(), EngineError> {
        assert!(self.dir.join(id).exists(), "{id} is gone");
        self.world.warmed.lock().unwrap().push(id.to_owned());
        Ok(())
    }

    fn write_checksums(&self, id: &str) -> Result<(), EngineError> {
        fs::read(self.dir.join(id)).map_err(EngineError::failed)?;
        self.world.sealed.lock().unwrap().insert(id.to_owned());
        Ok(())
    }

    fn verify(&self, _: &str) -> Result<Vec<VerifiedSnapshot>, EngineError> {
        Err(EngineError::Unsupported {
            engine: "fake",
            what: "verify snapshots",
            instead: Some("the engine microvm"),
        })
    }

    fn snapshots(&self) -> Result<Vec<String>, EngineError> {
        Ok(self.names(|name| !name.starts_with('.')))
    }

    fn walk_snapshots(&self) -> Result<SnapshotWalk, EngineError> {
        let world = self.world.clone();
        let ids = self.snapshots()?.into_iter();
        Ok(Box::new(ids.map(move |id| {
            *world.walked.lock().unwrap() += 1;
            Ok(id)
        })))
    }

    fn gc(&self) -> Result<usize, EngineError> {
        let left = self.names(|name| name.starts_with('.') && !self.writes(name));
        for name in &left {
            fs::remove_file(self.dir.join(name)).unwrap();
        }
        *self.world.gc_runs.lock().unwrap() += 1;
        Ok(left.len())
    }

    fn damage(&self, id: &str) -> Option<String> {
        match fs::read_to_string(self.dir.join(id)) {
            Ok(text) if text != DAMAGED => None,
            Ok(_) => Some("it is damaged".to_owned()),
            Err(e) => Some(e.to_string()),
        }
    }

    fn is_independent(&self, id: &str) -> bool {
        *self.world.asked.lock().unwrap() += 1;
        self.world.merged.lock().unwrap().contains(id)
    }

    fn merge_growth(&self, id: &str, limits: LineageLimits) -> Option<u64> {
        let parents = self.world.parents.lock().unwrap();
        let merged = self.world.merged.lock().unwrap();
        let mut length = 1;
        let mut at = id;
        while let Some(parent) = parents.get(at).filter(|_| !merged.contains(at)) {
            length += 1;
            at = parent;
        }
        (length > limits.longest).then_some(0)
    }

    async fn merge(&self, id: &str, limits: LineageLimits) -> Result<(), EngineError> {
        if self.merge_growth(id, limits).is_some() {
            self.world.merged.lock().unwrap().insert(id.to_owned());
        }
        Ok(())
    }

    fn parent_on_disk(&self, id: &str) -> Option<String> {
        let merged = self.world.merged.lock().unwrap().contains(id);
        let parents = self.world.parents.lock().unwrap();
        parents.get(id).filter(|_| !merged).cloned()
    }

    fn prepare_fold(&self, id: &str, max_copy: u64, pace: &mut FoldPace<'_>) -> FoldResult {
        let Some(parent) = self.parent_on_disk(id) else {
            return Ok(FoldPreparation::Refused);
        };
        if self.world.fails("small-fold") && max_copy < 100 << 20 {
            return Ok(FoldPreparation::Refused);
        }
        if pace(1).is_break() || self.world.fails("fold") {
            return Ok(FoldPreparation::Cancelled);
        }
        let (world, dir) = (self.world.clone(), self.dir.clone());
        let (id, folded) = (id.to_owned(), parent.clone());
        Ok(FoldPreparation::Ready(PreparedFold::new(
            parent,
            move || {
                assert!(dir.join(&id).exists() && dir.join(&folded).exists());
                if world.fails("fold-commit") {
                    return Err(EngineError::failed("fold-commit was made to fail"));
                }
                let mut parents = world.parents.lock().unwrap();
                match parents.get(&folded).cloned() {
                    Some(below) => drop(parents.insert(id.clone(), below)),
                    None => drop(world.merged.lock().unwrap().insert(id.clone())),
                }
                world.folds.lock().unwrap().push((folded, id));
                let files = SnapshotLayerFiles {
                    memory: FileIdentity {
                        device: 0,
                        inode: 0,
                    },
                    disks: Vec::new(),
                };
                Ok(FoldedLayers {
                    lower: files.clone(),
                    upper: files,
                })
            },
        )))
    }

    fn snapshot_size(&self, id: &str) -> Option<u64> {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or_default().to_owned();
        self.world.measured_by.lock().unwrap().push(name);
        fs::metadata(self.dir.join(id)).map(|m| m.len()).ok()
    }

    fn snapshot_parts(&self, id: &str) -> Result<SnapshotParts, EngineError> {
        let file = fs::File::open(self.dir.join(id)).map_err(EngineError::failed)?;
        let mut manifest = tempfile::tempfile().map_err(EngineError::failed)?;
        manifest.write_all(id.as_bytes()).unwrap();
        let parents = self.world.parents.lock().unwrap();
        let parent = parents.get(id).filter(|_| !self.is_independent(id));
        Ok(SnapshotParts {
            id: id.to_owned(),
            parent: parent.cloned(),
            engine: "microvm".to_owned(),
            template: "base".to_owned(),
            version: String::new(),
            kernel: String::new(),
            agent: String::new(),
            processor: String::new(),
            files: vec![
                SnapshotFile {
                    name: MEMORY.to_owned(),
                    kind: SnapshotFileKind::Memory,
                    file: Arc::new(file),
                    inherited: Vec::new(),
                },
                SnapshotFile {
                    name: "manifest.json".to_owned(),
                    kind: SnapshotFileKind::Other,
                    file: Arc::new(manifest),
                    inherited: Vec::new(),
                },
            ],
            working_set: Vec::new(),
        })
    }

    async fn check_import(&self, import: &SnapshotImport) -> Result<(), EngineError> {
        assert_eq!(import.manifest, import.id.as_bytes());
        self.world.step("check-import").await
    }

    async fn import_snapshot(
        &self,
        import: &SnapshotImport,
        files: ImportedFiles,
        existing: ExistingSnapshot,
    ) -> Result<(), EngineError> {
        let (place, half) = (
            self.dir.join(&import.id),
            self.dir.join(format!(".{}", import.id)),
        );
        let replaced = existing == ExistingSnapshot::Replace;
        assert!(replaced || !place.exists(), "{} is there", import.id);
        if let Some(parent) = &import.parent {
            assert!(self.dir.join(parent).exists(), "parent {parent} is missing");
            let mut parents = self.world.parents.lock().unwrap();
            parents.insert(import.id.clone(), parent.clone());
        }
        let memory = files.iter().find(|file| file.name() == MEMORY).unwrap();
        // Engines name each draft anew: that of a killed daemon is not in the way.
        let _ = fs::remove_file(&half);
        memory.place(&half).map_err(EngineError::failed)?;
        if let Err(e) = self.world.step("import").await {
            fs::remove_file(half).unwrap();
            return Err(e);
        }
        fs::rename(half, place).map_err(EngineError::failed)
    }

    fn remove_snapshot(&self, id: &str) -> Result<(), EngineError> {
        let folds = self.world.folds_snapshots.load(Ordering::Relaxed);
        let lies_on_it = |one: &String| self.parent_on_disk(one).as_deref() == Some(id);
        if folds && self.names(|_| true).iter().any(lies_on_it) {
            return Err(EngineError::failed("another lies on it"));
        }
        if self.world.hanging.lock().unwrap().contains("remove") {
            return Err(EngineError::failed("it is in use"));
        }
        self.world.removed.lock().unwrap().push(id.to_owned());
        match fs::remove_file(self.dir.join(id)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(EngineError::failed(e)),
            _ => Ok(()),
        }
    }
}
