//! Snapshot files of the fake engine: each contains the text of a guest. An incomplete file is a
//! *draft*, whose name starts with a dot.
//!
//! To *merge* the lineage of a snapshot is to make the snapshot independent of its ancestors. To
//! *fold* a snapshot is to merge its files into the files of its only child.

use super::OTHER;
use super::engine::{DAMAGED, FAKE};
use super::world::World;
use async_trait::async_trait;
use jiffy_engine_api::{
    EngineError, ExistingSnapshot, FoldPace, FoldPreparation, FoldResult, ImportedFiles,
    LineageLimits, PreparedFold, SnapshotFile, SnapshotFileKind, SnapshotFiles, SnapshotImport,
    SnapshotParts, SnapshotWalk, VerifiedSnapshot,
};
use jiffy_proto::snapshot::{FileIdentity, FoldedLayers, SnapshotLayerFiles};
use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

const MEMORY: &str = "memory.layer";

/// Snapshot files of one engine, in a directory that all engines share.
pub struct FakeFiles {
    /// Name of the engine.
    pub name: &'static str,
    pub world: Arc<World>,
    pub dir: PathBuf,
    /// Names of the files that this process is writing.
    pub writing: Arc<Mutex<BTreeSet<String>>>,
}

impl FakeFiles {
    fn names(&self, matches: impl Fn(&str) -> bool) -> Vec<String> {
        let names = fs::read_dir(&self.dir).unwrap().flatten();
        let names = names.map(|e| e.file_name().into_string().unwrap());
        names.filter(|name| matches(name)).collect()
    }

    /// Returns whether this process is writing the file.
    fn writes(&self, name: &str) -> bool {
        self.writing.lock().unwrap().contains(name)
    }

    /// Returns whether snapshot `id` belongs to this engine.
    fn owns(&self, id: &str) -> bool {
        let is_of_other = self.world.of_other.lock().unwrap().contains(id);
        match self.name {
            FAKE => !is_of_other,
            OTHER => is_of_other,
            _ => false,
        }
    }
}

#[async_trait]
impl SnapshotFiles for FakeFiles {
    fn ids(&self) -> Result<Vec<String>, EngineError> {
        Ok(self.names(|name| !name.starts_with('.') && self.owns(name)))
    }

    fn walk(&self) -> Result<SnapshotWalk, EngineError> {
        let world = self.world.clone();
        let ids = self.ids()?.into_iter();
        Ok(Box::new(ids.map(move |id| {
            *world.walked.lock().unwrap() += 1;
            Ok(id)
        })))
    }

    /// Records the name of the calling thread, so that tests can check which thread reads sizes.
    fn size(&self, id: &str) -> Option<u64> {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or_default().to_owned();
        self.world.measured_by.lock().unwrap().push(name);
        fs::metadata(self.dir.join(id)).map(|m| m.len()).ok()
    }

    fn remove(&self, id: &str) -> Result<(), EngineError> {
        let folds = self.world.folds_snapshots.load(Ordering::Relaxed);
        let depends_on_it = |child: &String| self.parent(child).as_deref() == Some(id);
        if folds && self.names(|_| true).iter().any(depends_on_it) {
            return Err(EngineError::failed("another snapshot depends on it"));
        }
        // This function cannot wait. A step that is set to hang fails here, as for a file in use.
        if self.world.hanging.lock().unwrap().contains("remove") {
            return Err(EngineError::failed("it is in use"));
        }
        self.world.removed.lock().unwrap().push(id.to_owned());
        match fs::remove_file(self.dir.join(id)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(EngineError::failed(e)),
            _ => Ok(()),
        }
    }

    fn discard_captured(&self, id: &str) {
        self.world.discarded.lock().unwrap().push(id.to_owned());
    }

    fn gc(&self) -> Result<usize, EngineError> {
        // The engines share one directory, which the default engine cleans for all.
        if self.name != FAKE {
            return Ok(0);
        }
        let unfinished = self.names(|name| name.starts_with('.') && !self.writes(name));
        for name in &unfinished {
            fs::remove_file(self.dir.join(name)).unwrap();
        }
        *self.world.gc_runs.lock().unwrap() += 1;
        Ok(unfinished.len())
    }

    fn prefetch(&self, id: &str) -> Result<(), EngineError> {
        assert!(self.dir.join(id).exists(), "{id} is missing");
        self.world.prefetched.lock().unwrap().push(id.to_owned());
        Ok(())
    }

    fn request_memory(&self, _: &str) -> Result<(), EngineError> {
        if self.world.fails("request_memory") {
            Err(EngineError::failed("the disk is full"))
        } else {
            Ok(())
        }
    }

    fn find_damage(&self, id: &str) -> Option<String> {
        match fs::read_to_string(self.dir.join(id)) {
            Ok(text) if text != DAMAGED => None,
            Ok(_) => Some("it is damaged".to_owned()),
            Err(e) => Some(e.to_string()),
        }
    }

    fn write_checksums(&self, id: &str) -> Result<(), EngineError> {
        fs::read(self.dir.join(id)).map_err(EngineError::failed)?;
        self.world.checksummed.lock().unwrap().insert(id.to_owned());
        Ok(())
    }

    fn verify(&self, _: &str) -> Result<Vec<VerifiedSnapshot>, EngineError> {
        Err(EngineError::Unsupported {
            engine: self.name,
            what: "verify snapshots",
            instead: Some("the engine microvm"),
        })
    }

    fn is_independent(&self, id: &str) -> bool {
        *self.world.independence_queries.lock().unwrap() += 1;
        self.world.merged.lock().unwrap().contains(id)
    }

    fn parent(&self, id: &str) -> Option<String> {
        let merged = self.world.merged.lock().unwrap().contains(id);
        let parents = self.world.parents.lock().unwrap();
        parents.get(id).filter(|_| !merged).cloned()
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
        // The fake merge adds no bytes.
        (length > limits.longest).then_some(0)
    }

    async fn merge(&self, id: &str, limits: LineageLimits) -> Result<(), EngineError> {
        if self.merge_growth(id, limits).is_some() {
            self.world.merged.lock().unwrap().insert(id.to_owned());
        }
        Ok(())
    }

    fn prepare_fold(&self, id: &str, max_copy: u64, pace: &mut FoldPace<'_>) -> FoldResult {
        let Some(parent) = self.parent(id) else {
            return Ok(FoldPreparation::Refused);
        };
        // The first try of a fold has a limit of 2 MiB, and the retry has one of 256 MiB.
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
                // The child depends on the parent of the folded snapshot, or on no snapshot if this
                // parent does not exist.
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

    fn parts(&self, id: &str) -> Result<SnapshotParts, EngineError> {
        let file = fs::File::open(self.dir.join(id)).map_err(EngineError::failed)?;
        let mut manifest = tempfile::tempfile().map_err(EngineError::failed)?;
        manifest.write_all(id.as_bytes()).unwrap();
        let parents = self.world.parents.lock().unwrap();
        let parent = parents.get(id).filter(|_| !self.is_independent(id));
        Ok(SnapshotParts {
            id: id.to_owned(),
            parent: parent.cloned(),
            engine: self.name.to_owned(),
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

    async fn import(
        &self,
        import: &SnapshotImport,
        files: ImportedFiles,
        existing: ExistingSnapshot,
    ) -> Result<(), EngineError> {
        let (place, draft) = (
            self.dir.join(&import.id),
            self.dir.join(format!(".{}", import.id)),
        );
        let replaced = existing == ExistingSnapshot::Replace;
        assert!(replaced || !place.exists(), "{} already exists", import.id);
        if let Some(parent) = &import.parent {
            assert!(self.dir.join(parent).exists(), "parent {parent} is missing");
            let mut parents = self.world.parents.lock().unwrap();
            parents.insert(import.id.clone(), parent.clone());
        }
        let memory = files.iter().find(|file| file.name() == MEMORY).unwrap();
        // Real engines use a new name for each draft, so the draft of a killed daemon must not
        // matter.
        let _ = fs::remove_file(&draft);
        memory.place(&draft).map_err(EngineError::failed)?;
        if let Err(e) = self.world.step("import").await {
            fs::remove_file(draft).unwrap();
            return Err(e);
        }
        fs::rename(draft, place).map_err(EngineError::failed)
    }
}
