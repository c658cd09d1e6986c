//! Figures of push and pull as one line of JSON: `store_figures STORE_URL MIB DIRECTORY`.
//!
//! Pushes a layer of that many MiB. Half of its chunks compress to a third of their size, and the
//! others do not compress. Then pushes a layer with a tenth of the chunks changed, twice, and pulls
//! it: first its working set, then the rest.

use jiffy_store::*;
use serde_json::json;
use std::error::Error;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

const CHUNK: usize = CHUNK_BYTES as usize;

fn chunk(seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; CHUNK];
    let noise = match seed % 2 {
        0 => CHUNK,
        _ => CHUNK / 3,
    };
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes());
    hasher.finalize_xof().fill(&mut bytes[..noise]);
    bytes
}

fn source(
    path: &Path,
    chunks: u64,
    changed: impl Fn(u64) -> bool,
) -> Result<SnapshotSource, Box<dyn Error>> {
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)?;
    for number in 0..chunks {
        let seed = number + u64::from(changed(number)) * (1 << 32);
        file.write_all_at(&chunk(seed), number * CHUNK as u64)?;
    }
    Ok(SnapshotSource {
        engine: EngineKind::Microvm,
        created_ms: 0,
        attributes: Attributes::default(),
        lineage: Vec::new(),
        parts: vec![PartSource {
            kind: LayerKind::Memory,
            name: "memory.layer".into(),
            file: Arc::new(file),
            inherited: Vec::new(),
        }],
        working_set: (0..chunks / 4).map(|at| (at * 4) as u32).collect(),
    })
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [url, mib, dir] = arguments.as_slice() else {
        return Err("usage: store_figures STORE_URL MIB DIRECTORY".into());
    };
    // A chunk has 64 KiB.
    let (chunks, dir) = (mib.parse::<u64>()? * 16, Path::new(dir));
    let backend = url.parse::<StoreUrl>()?.open(BackendSettings::default())?;
    let key = "1".repeat(64);
    let keys = format!("locator = \"{key}\"\ncurrent = \"k\"\n[keys]\nk = \"{key}\"\n");
    let store = SharedStore::new(backend, Keyring::parse(&keys)?);
    let tenant = store.tenant("figures").await?;
    let options = PushOptions::new(dir.join("index"));
    let mut steps = Vec::new();
    let mib_per_second = |bytes: u64, seconds: f64| bytes as f64 / (1 << 20) as f64 / seconds;
    let mut newest = None;
    for (step, tenth) in [
        ("first push", 0),
        ("a tenth differs", 10),
        ("the same again", 10),
    ] {
        let source = source(&dir.join("layer"), chunks, |number| {
            tenth != 0 && number % tenth == 0
        })?;
        let before = store.backend().traffic();
        let (name, report) = store.push(&tenant, &source, &options).await?;
        newest = Some(name.root);
        steps.push(json!({
            "step": step,
            "mib_per_second": mib_per_second(chunks * CHUNK as u64, report.seconds),
            "deduplicated": 1.0 - report.new_chunks as f64 / report.chunks as f64,
            "report": report,
            "traffic_before": before,
            "traffic": store.backend().traffic(),
        }));
    }
    let remote = store
        .open(&tenant, newest.ok_or("nothing was pushed")?)
        .await?;
    let cache = Arc::new(LayerCache::open(dir.join("cache"), u64::MAX)?);
    for (step, selection) in [
        ("working set", Selection::WorkingSet),
        ("the rest", Selection::All),
    ] {
        let before = store.backend().traffic();
        let (_, report) = store.pull(&remote, 0, selection, &cache).await?;
        steps.push(json!({
            "step": step,
            "mib_per_second": mib_per_second(report.fetched_bytes, report.seconds),
            "report": report,
            "traffic_before": before,
            "traffic": store.backend().traffic(),
        }));
    }
    println!("{}", json!({ "mib": mib, "steps": steps }));
    Ok(())
}
