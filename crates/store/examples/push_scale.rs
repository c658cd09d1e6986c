//! Measures pushes to a store with many snapshots: requests, memory of this process and duration.
//! Each snapshot is the second pause of a sandbox, based on one of ten first pauses, and has four
//! chunks of its own.
//!
//! usage: push_scale STORE_URL DIRECTORY SNAPSHOTS...
//!
//! SNAPSHOTS are ascending numbers of pushes. After each of these numbers of pushes, the program
//! prints the measurement of the last push.

use jiffy_store::*;
use serde_json::json;
use std::error::Error;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

const CHUNK: usize = CHUNK_BYTES as usize;

fn source(
    dir: &Path,
    number: u64,
    lineage: Vec<SnapshotName>,
) -> Result<SnapshotSource, Box<dyn Error>> {
    let path = dir.join("memory");
    let memory = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)?;
    for chunk in 0..4u64 {
        let mut bytes = vec![0; CHUNK];
        let mut hasher = blake3::Hasher::new();
        hasher
            .update(&number.to_le_bytes())
            .update(&chunk.to_le_bytes());
        hasher.finalize_xof().fill(&mut bytes);
        memory.write_all_at(&bytes, chunk * CHUNK as u64)?;
    }
    Ok(SnapshotSource {
        engine: EngineKind::Microvm,
        created_ms: number,
        attributes: Attributes {
            id: format!("s{number}"),
            ..Attributes::default()
        },
        lineage,
        parts: vec![PartSource {
            kind: LayerKind::Memory,
            name: "memory".to_owned(),
            file: Arc::new(memory),
            inherited: Vec::new(),
        }],
        working_set: Vec::new(),
    })
}

/// Returns the resident memory of this process in KiB.
fn resident_kib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [url, dir, counts @ ..] = arguments.as_slice() else {
        return Err("usage: push_scale STORE_URL DIRECTORY SNAPSHOTS...".into());
    };
    let dir = Path::new(dir);
    let backend = url.parse::<StoreUrl>()?.open(BackendSettings::default())?;
    let key = "1".repeat(64);
    let keys = format!("locator = \"{key}\"\ncurrent = \"k\"\n[keys]\nk = \"{key}\"\n");
    let store = SharedStore::new(backend, Keyring::parse(&keys)?);
    let tenant = store.tenant("figures").await?;
    let options = PushOptions::new(dir.join("index"));
    let mut bases = Vec::new();
    let mut number = 0;
    for count in counts {
        let count: u64 = count.parse()?;
        let mut last = json!(null);
        while number < count {
            let lineage = match bases.get((number % 10) as usize) {
                Some(base) if bases.len() == 10 => vec![*base],
                _ => Vec::new(),
            };
            let is_base = lineage.is_empty();
            let source = source(dir, number, lineage)?;
            let before = store.backend().traffic();
            let start = std::time::Instant::now();
            let (name, _) = store.push(&tenant, &source, &options).await?;
            store
                .set_name(&tenant, &source.attributes.id, name.root)
                .await?;
            let now = store.backend().traffic();
            if is_base {
                bases.push(name);
            }
            number += 1;
            last = json!({
                "snapshots": number,
                "ms": start.elapsed().as_secs_f64() * 1e3,
                "put": now.puts - before.puts,
                "list": now.lists - before.lists,
                "delete": now.deletes - before.deletes,
                "get": now.gets - before.gets,
                "head": now.heads - before.heads,
                "bytes_read": now.bytes_read - before.bytes_read,
                "resident_kib": resident_kib(),
            });
        }
        println!("{last}");
    }
    Ok(())
}
