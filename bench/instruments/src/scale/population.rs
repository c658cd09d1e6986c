//! Fabricated snapshots, paused sandboxes, templates and keys in a data directory.

use crate::data_directory::DataDirectory;
use anyhow::Context;
use jiffy_engine_api::{new_id, now_ms};
use jiffy_image::{
    DEFAULT_TAG, Defaults, ImageSum, MANIFEST_FORMAT, TemplateManifest, Templates, Visibility,
};
use jiffy_proto::layer::{LayerIndex, MEMORY_CHUNK};
use jiffy_sandbox_manager::{
    FabricatedJournal, FabricatedSandbox, FabricatedSnapshot, SandboxSettings,
};
use jiffy_snapshot::{Manifest, MemorySizes, SNAPSHOT_FORMAT, Versions};
use nix::unistd::syncfs;
use rusqlite::{Connection, params};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Memory of a fabricated snapshot in bytes.
const MEMORY_BYTES: u64 = 512 << 20;
/// State of a fabricated snapshot.
const STATE: &str = "fabricated";
/// Number of snapshots whose files are links to the same files. ext4 allows 65,000 links.
const LINKS: usize = 50_000;
/// Number of snapshots without a paused sandbox that each call of [`Population::fill`] adds. The
/// benchmark calls it with increasing numbers of items.
const FREE_SNAPSHOTS: usize = 64;
/// Number of snapshots per commit, each with a sandbox.
const COMMIT: usize = 5_000;
/// Creation time of the first item, in milliseconds since 1970.
const FIRST_CREATED_MS: u64 = 1_700_000_000_000;
/// Template of fabricated sandboxes.
const TEMPLATE: &str = "base";

/// Fabricated items of a data directory.
#[derive(Default)]
pub(super) struct Population {
    /// Ids of paused sandboxes, oldest first.
    pub sandboxes: Vec<String>,
    /// Ids of the snapshots of these sandboxes.
    pub snapshots: Vec<String>,
    /// Ids of snapshots that no sandbox requires.
    pub free: Vec<String>,
}

impl Population {
    /// Adds items until `number` fabricated snapshots, paused sandboxes, templates and keys each
    /// exist. Adds 64 snapshots without a sandbox. The daemon must not be running.
    pub fn fill(&mut self, directory: &DataDirectory, number: usize) -> anyhow::Result<()> {
        let first = self.snapshots.len();
        let journal = FabricatedJournal::open(&directory.path().join("state.db"))?;
        let (mut snapshots, mut sandboxes) = (Vec::new(), Vec::new());
        for at in first..number {
            let (snapshot, sandbox) = (new_id()?, new_id()?);
            link_snapshot(directory.path(), &snapshot, at)?;
            snapshots.push(fabricated_snapshot(&snapshot, &sandbox, at));
            sandboxes.push(fabricated_sandbox(&sandbox, &snapshot, at));
            // A commit of many rows is fast. The limit bounds the memory of this process.
            if snapshots.len() >= COMMIT {
                journal.add(snapshots.drain(..), sandboxes.drain(..))?;
            }
            write_template(directory.path(), at)?;
            self.snapshots.push(snapshot);
            self.sandboxes.push(sandbox);
        }
        // The benchmark measures how long the removal of these snapshots takes.
        for at in number..number + FREE_SNAPSHOTS {
            let snapshot = new_id()?;
            link_snapshot(directory.path(), &snapshot, at)?;
            snapshots.push(FabricatedSnapshot {
                name: None,
                ..fabricated_snapshot(&snapshot, "", at)
            });
            self.free.push(snapshot);
        }
        journal.add(snapshots, sandboxes)?;
        add_keys(directory.path(), first, number)?;
        // The file system's journal is full of these changes. Without this, later snapshots of
        // guests would wait until it is written.
        syncfs(File::open(directory.path())?).context("cannot write the data directory back")
    }

    /// Returns the item for call `round` of `n`. The calls are spread over all items.
    pub fn spread(&self, round: usize, n: usize) -> usize {
        let number = self.sandboxes.len();
        // The divisor is `n + 1`, because round 0 is discarded.
        (round * number / (n + 1)).min(number.saturating_sub(1))
    }
}

/// Kind of item, and its disk space in bytes.
pub(super) type DiskUse = (&'static str, u64);

/// Fails if the template is missing, because the daemon would build it first.
pub(super) fn require_template(directory: &DataDirectory) -> anyhow::Result<()> {
    let templates = Templates::new(&directory.home()?);
    templates.manifest(TEMPLATE).map(drop).map_err(Into::into)
}

/// Returns the disk space of each kind of item in the data directory `root`, in bytes.
pub(super) fn disk_use(root: &Path) -> anyhow::Result<Vec<DiskUse>> {
    // Includes the database's log files.
    let size = |name: &str| -> u64 {
        let files = ["", "-wal"].map(|end| root.join(format!("{name}{end}")));
        let blocks = files.map(|file| fs::metadata(file).map_or(0, |m| m.blocks()));
        blocks.iter().sum::<u64>() * 512
    };
    Ok(vec![
        ("journal on disk", size("state.db")),
        ("keys on disk", size("keys.db")),
        (
            "directories of snapshots on disk",
            directories(&root.join("snapshots"))?,
        ),
        ("templates on disk", directories(&root.join("templates"))?),
    ])
}

/// Creates the directory of a snapshot: its own manifest, and links to an empty memory layer.
fn link_snapshot(root: &Path, id: &str, at: usize) -> anyhow::Result<()> {
    let source = snapshot_files(root, at / LINKS)?;
    let directory = root.join("snapshots").join(id);
    fs::create_dir_all(&directory)?;
    // Links need no blocks of their own, so that 100,000 snapshots fit on the disk.
    for name in ["state.bin", "memory.layer", "memory.index"] {
        fs::hard_link(source.join(name), directory.join(name))?;
    }
    let manifest = Manifest {
        format: SNAPSHOT_FORMAT,
        id: id.to_owned(),
        parent: None,
        template: TEMPLATE.to_owned(),
        created_ms: created_ms(at),
        versions: Versions::default(),
        cpu: String::new(),
        vcpus: 2,
        memory: MemorySizes {
            bytes: MEMORY_BYTES,
            stored: 0,
            zero: 0,
            complete: false,
        },
        disks: Vec::new(),
        net: false,
        modules: None,
        disk_only: false,
    };
    fs::write(
        directory.join("manifest.json"),
        serde_json::to_vec(&manifest)?,
    )?;
    Ok(())
}

/// Returns the directory of the files that all snapshots of a set share.
fn snapshot_files(root: &Path, set: usize) -> anyhow::Result<PathBuf> {
    let directory = root.join("fabricated").join(set.to_string());
    if !directory.exists() {
        fs::create_dir_all(&directory)?;
        fs::write(directory.join("state.bin"), STATE)?;
        File::create(directory.join("memory.layer"))?.set_len(MEMORY_BYTES)?;
        fs::write(directory.join("memory.index"), memory_index())?;
    }
    Ok(directory)
}

/// Writes the manifest of a fabricated template, which has no image.
fn write_template(root: &Path, at: usize) -> anyhow::Result<()> {
    let name = template_name(at);
    let directory = root.join("templates").join(&name);
    let manifest = TemplateManifest {
        format: MANIFEST_FORMAT,
        name,
        tag: DEFAULT_TAG.to_owned(),
        owner: None,
        visibility: Visibility::Private,
        created: created_ms(at) / 1000,
        recipe_sha256: "0".repeat(64),
        // No image has this digest: a list of templates does not read images.
        images: vec![ImageSum {
            sha256: "0".repeat(64),
            size: 1 << 20,
        }],
        defaults: Defaults {
            user: "user".to_owned(),
            workdir: "/home/user".to_owned(),
            disk_mib: 1024,
            memory_mib: None,
            vcpus: None,
            env: BTreeMap::new(),
        },
        startup: Default::default(),
        origin: None,
        history: Vec::new(),
        idle_timeout_s: None,
        network: Default::default(),
    };
    fs::create_dir_all(&directory)?;
    fs::write(
        directory.join("template.json"),
        serde_json::to_vec(&manifest)?,
    )?;
    Ok(())
}

/// Adds API keys with random hashes to the database. No client uses these keys.
fn add_keys(root: &Path, first: usize, number: usize) -> anyhow::Result<()> {
    let database = Connection::open(root.join("keys.db"))?;
    database.execute(
        "WITH RECURSIVE numbers (n) AS
            (SELECT ?1 UNION ALL SELECT n + 1 FROM numbers WHERE n + 1 < ?2)
         INSERT INTO keys (id, hash, name, scope, created_ms)
            SELECT 'scale' || n, randomblob(32), 'scale ' || n, 'create', 0
            FROM numbers WHERE n < ?2",
        params![first, number],
    )?;
    Ok(())
}

/// Returns the disk space of directories below `root` and of their files with one link, in bytes.
fn directories(root: &Path) -> anyhow::Result<u64> {
    let mut bytes = fs::metadata(root)?.blocks() * 512;
    for entry in fs::read_dir(root)? {
        let entry = entry?;
        if !entry.file_type()?.is_dir() {
            continue;
        }
        bytes += entry.metadata()?.blocks() * 512;
        for file in fs::read_dir(entry.path())? {
            let file = file?.metadata()?;
            // Shared files have several links, and do not grow with the number of snapshots.
            if file.nlink() == 1 {
                bytes += file.blocks() * 512;
            }
        }
    }
    Ok(bytes)
}

/// Returns the index of an empty memory layer.
fn memory_index() -> Vec<u8> {
    LayerIndex::empty(MEMORY_CHUNK, MEMORY_BYTES).encode()
}

/// Returns the name of fabricated template `at`.
pub(super) fn template_name(at: usize) -> String {
    format!("scale-{at:07}")
}

/// Returns the name of fabricated sandbox `at`.
pub(super) fn sandbox_name(at: usize) -> String {
    format!("sleeper-{at:07}")
}

/// Returns the name of fabricated snapshot `at`.
pub(super) fn snapshot_name(at: usize) -> String {
    format!("scale/{at:07}")
}

/// Returns the creation time of item `at`. The times of the snapshots with a sandbox are unique. A
/// snapshot without a sandbox has the time of an item that the next [`Population::fill`] adds.
fn created_ms(at: usize) -> u64 {
    FIRST_CREATED_MS + at as u64
}

/// Returns the journal entry of a fabricated snapshot.
fn fabricated_snapshot(id: &str, sandbox: &str, at: usize) -> FabricatedSnapshot {
    FabricatedSnapshot {
        id: id.to_owned(),
        name: Some(snapshot_name(at)),
        sandbox: sandbox.to_owned(),
        template: TEMPLATE.to_owned(),
        bytes: (STATE.len() + memory_index().len()) as u64,
        created_ms: created_ms(at),
        ..FabricatedSnapshot::default()
    }
}

/// Returns the journal entry of a paused sandbox.
fn fabricated_sandbox(id: &str, snapshot: &str, at: usize) -> FabricatedSandbox {
    let metadata = [("purpose", "scale"), ("team", "benchmarks")];
    let metadata = metadata.map(|(key, value)| (key.to_owned(), value.to_owned()));
    FabricatedSandbox {
        id: id.to_owned(),
        name: Some(sandbox_name(at)),
        template: TEMPLATE.to_owned(),
        snapshot: snapshot.to_owned(),
        settings: SandboxSettings {
            metadata: metadata.into(),
            ..SandboxSettings::default()
        },
        agent_token: Some(format!("{at:040x}")),
        created_ms: created_ms(at),
        changed_ms: now_ms(),
    }
}
