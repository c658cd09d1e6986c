//! Tests for `jiffy store` with a directory and with a real S3 server (versitygw on the loopback
//! device).
//!
//! A *pack* is an object of the store with chunks of snapshots.
//!
//! A *tenant* is an owner of snapshots in the store.

use crate::support::s3::{self, S3Server};
use crate::support::skip;
use jiffy_store::host::{LastStore, RemoteSettings, RemoteStore, STORE_TIMEOUT};
use jiffy_store::{
    Attributes, EngineKind, LayerKind, PartSource, PushOptions, Selection, SnapshotSource,
};
use jiffy_test_attributes::jiffy_test;
use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;

/// Size of a chunk in bytes.
const CHUNK: usize = 64 << 10;

/// Data directory, and the store that it uses.
struct Host {
    dir: tempfile::TempDir,
    url: String,
    variables: Vec<(&'static str, String)>,
    /// Directory with the store's objects.
    objects: PathBuf,
}

impl Host {
    fn jiffy(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_jiffy"))
            .arg("store")
            .args(arguments)
            .env("JIFFY_HOME", self.home())
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .output()
            .unwrap()
    }

    fn home(&self) -> PathBuf {
        self.dir.path().join("home")
    }

    /// Runs a command, which must succeed, and returns the tenant's part of its result.
    fn json(&self, arguments: &[&str]) -> Value {
        let output = self.jiffy(&[arguments, &["--json"]].concat());
        assert!(output.status.success(), "{output:?}");
        let value: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(value["requests"]["lists"].as_u64().unwrap() > 0);
        value["tenants"][0].clone()
    }

    /// Opens the store in this process.
    fn remote(&self) -> Arc<RemoteStore> {
        for (name, value) in &self.variables {
            // SAFETY: a single test of this program sets variables, in one thread.
            unsafe { std::env::set_var(name, value) };
        }
        let settings = RemoteSettings {
            url: self.url.parse().unwrap(),
            keyring: None,
            home: self.home(),
            cache_bytes: u64::MAX,
            upload_bytes_per_second: None,
            timeout: STORE_TIMEOUT,
        };
        let remote = RemoteStore::open(&settings).unwrap();
        LastStore::write(&settings).unwrap();
        remote
    }

    /// Returns the files of the store below `kind`.
    fn files(&self, kind: &str) -> Vec<PathBuf> {
        let mut found = Vec::new();
        walk(&self.objects, &mut found);
        found.retain(|path| path.to_string_lossy().contains(&format!("/{kind}/")));
        found
    }
}

/// Appends the files below a directory to `found`.
fn walk(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            walk(&path, found)
        } else {
            found.push(path)
        }
    }
}

/// Creates snapshot `id` with chunks generated from `seeds`.
fn snapshot(dir: &Path, id: &str, seeds: &[u8]) -> SnapshotSource {
    let path = dir.join(format!("{id}.layer"));
    let mut file = File::options();
    let file = file.read(true).write(true).create(true).truncate(true);
    let file = file.open(path).unwrap();
    for (at, &seed) in seeds.iter().enumerate() {
        let mut numbers = u64::from(seed) << 32 | 1;
        let chunk = (0..CHUNK).map(|_| {
            numbers = numbers
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(99);
            (numbers >> 56) as u8
        });
        let chunk: Vec<u8> = chunk.collect();
        file.write_all_at(&chunk, (at * CHUNK) as u64).unwrap();
    }
    SnapshotSource {
        engine: EngineKind::Microvm,
        created_ms: 0,
        attributes: Attributes {
            id: id.to_owned(),
            ..Attributes::default()
        },
        lineage: Vec::new(),
        parts: vec![PartSource {
            kind: LayerKind::Memory,
            name: "memory.layer".into(),
            file: Arc::new(file),
            inherited: Vec::new(),
        }],
        working_set: Vec::new(),
    }
}

/// Tests `stats`, `verify`, `gc` and `rotate` on a store with two snapshots, one of which is
/// removed.
async fn test_all_commands(host: &Host) {
    let remote = host.remote();
    let tenant = remote.tenant(None).await.unwrap();
    let options = PushOptions::new(remote.index_cache().to_owned());
    let mut roots = Vec::new();
    for (id, seeds) in [("one", &[1, 2, 3, 4, 5, 6][..]), ("two", &[6, 7])] {
        let source = snapshot(host.dir.path(), id, seeds);
        let (name, _) = remote
            .shared
            .push(&tenant, &source, &options)
            .await
            .unwrap();
        remote
            .shared
            .set_name(&tenant, id, name.root)
            .await
            .unwrap();
        roots.push(name.root);
    }
    // The chunk of seed 6 is in both snapshots.
    let stats = host.json(&["stats"]);
    assert_eq!(
        (&stats["tenant"], &stats["snapshots"]),
        (&"host".into(), &2.into())
    );
    assert_eq!(
        (&stats["chunks"], &stats["snapshot_chunks"]),
        (&7.into(), &8.into())
    );
    let ratio = stats["deduplication"].as_f64().unwrap();
    assert!((ratio - 8.0 / 7.0).abs() < 1e-6, "{stats}");
    assert!(host.jiffy(&["verify"]).status.success());
    verify_and_repair(host, &remote, roots[1]).await;
    a_damaged_name_is_no_success(host, &remote).await;
    // The removal makes five of the six chunks of the first pack unneeded: `two` has the sixth.
    remote.shared.remove_name(&tenant, "one").await.unwrap();
    remote.shared.remove(&tenant, roots[0]).await.unwrap();
    // S3 times have a resolution of one second.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let dry = host.json(&["gc", "--dry-run", "--grace", "0"]);
    assert_eq!(dry["removed"], 0);
    let before = host.files("packs").len();
    // The first collection condemns unneeded objects. The second one removes them.
    let first = host.json(&["gc", "--grace", "0"]);
    assert_eq!(
        (&first["removed"], &first["repacked"]),
        (&0.into(), &dry["repacked"])
    );
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let second = host.json(&["gc", "--grace", "0"]);
    assert!(second["removed"].as_u64().unwrap() >= 3, "{second}");
    assert!(host.files("packs").len() <= before);
    // The chunks of `two`.
    assert_eq!(host.json(&["stats"])["chunks"], 2);
    let table = host.jiffy(&["verify"]);
    assert!(table.status.success(), "{table:?}");
    assert!(String::from_utf8_lossy(&table.stdout).contains("no damage found"));
    rotate(host).await;
}

/// A flipped bit is reported, and repaired if this host has the chunk in its cache.
async fn verify_and_repair(host: &Host, remote: &RemoteStore, root: jiffy_store::Hash) {
    let mut packs = host.files("packs");
    packs.sort_by_key(|path| fs::metadata(path).unwrap().len());
    let mut bytes = fs::read(&packs[0]).unwrap();
    // The smaller pack has only chunk 1 of `two`, because chunk 0 was already in the store. A pack
    // starts with a header of 64 bytes.
    bytes[64 + 1000] ^= 4;
    fs::write(&packs[0], &bytes).unwrap();
    let found = host.jiffy(&["verify", "two"]);
    let text = String::from_utf8_lossy(&found.stdout).into_owned();
    assert_eq!(found.status.code(), Some(1), "{found:?}");
    assert!(text.contains("snapshot two memory.layer chunk 1"), "{text}");
    // The chunk is not in the cache yet, so it cannot be repaired.
    let unrepaired = host.jiffy(&["verify", "--repair"]);
    assert_eq!(unrepaired.status.code(), Some(1), "{unrepaired:?}");
    // Undo the damage, and pull the snapshot into the cache.
    bytes[64 + 1000] ^= 4;
    fs::write(&packs[0], &bytes).unwrap();
    let tenant = remote.tenant(None).await.unwrap();
    let snapshot = remote.shared.open(&tenant, root).await.unwrap();
    let pulled = remote
        .shared
        .pull(&snapshot, 0, Selection::All, &remote.cache);
    pulled.await.unwrap();
    // Damage the pack again.
    bytes[64 + 1000] ^= 4;
    fs::write(&packs[0], &bytes).unwrap();
    let repaired = host.jiffy(&["verify", "--repair"]);
    let text = String::from_utf8_lossy(&repaired.stdout).into_owned();
    assert!(repaired.status.success(), "{repaired:?}");
    assert!(text.contains("repaired 1 of 1"), "{text}");
    let missing = host.jiffy(&["verify", "three"]);
    assert!(String::from_utf8_lossy(&missing.stderr).contains("no snapshot three"));
}

/// A tenant with an unreadable name is skipped, and no command reports success.
async fn a_damaged_name_is_no_success(host: &Host, remote: &RemoteStore) {
    let names = host.files("tenants");
    let name = names.iter().find(|path| path.ends_with("name")).unwrap();
    let mut bytes = fs::read(name).unwrap();
    bytes[30] ^= 1;
    fs::write(name, &bytes).unwrap();
    let mut before = Vec::new();
    walk(&host.objects, &mut before);
    for command in [
        &["verify"][..],
        &["gc", "--grace", "0"],
        &["stats"],
        &["rotate"],
    ] {
        let failed = host.jiffy(command);
        assert_eq!(failed.status.code(), Some(1), "{failed:?}");
        let report = String::from_utf8_lossy(&failed.stderr);
        assert!(report.contains("/name is damaged"), "{report}");
        let shown = String::from_utf8_lossy(&failed.stdout);
        assert!(!shown.contains("no damage found"), "{shown}");
    }
    let mut after = Vec::new();
    walk(&host.objects, &mut after);
    assert_eq!(before, after);
    // Opening the tenant by its name writes the name again.
    remote.shared.tenant("host").await.unwrap();
    assert!(host.jiffy(&["verify"]).status.success());
}

/// Wraps the secret of the host's tenant with a second master key, and removes the first.
async fn rotate(host: &Host) {
    let rotate = |more: &[&str]| host.json(&[&["rotate"], more].concat());
    // The secret is already encrypted with the current master key.
    assert_eq!(rotate(&[])["rewrapped"], 0);
    let path = host.home().join("store/keys.toml");
    let with_first = fs::read_to_string(&path).unwrap();
    let (head, keys) = with_first.split_once("[keys]").unwrap();
    let head: Vec<&str> = head
        .lines()
        .filter(|line| !line.starts_with("current"))
        .collect();
    let second = format!("second = \"{}\"", "5".repeat(64));
    let with_both = format!(
        "{}\ncurrent = \"second\"\n[keys]{keys}\n{second}\n",
        head.join("\n")
    );
    fs::write(&path, &with_both).unwrap();
    let rotated = rotate(&["host"]);
    assert_eq!(
        (&rotated["rewrapped"], &rotated["generation"]),
        (&1.into(), &1.into())
    );
    fs::write(&path, with_both.replace(keys, "")).unwrap();
    // A new generation of data keys, which encrypt later pushes.
    let further = rotate(&["--data-keys"]);
    assert_eq!(
        (&further["rewrapped"], &further["generation"]),
        (&0.into(), &2.into())
    );
    // Earlier pushes remain readable with the keys of that time.
    let verified = host.jiffy(&["verify"]);
    assert!(verified.status.success(), "{verified:?}");
    let again = host.remote().tenant(None).await.unwrap();
    assert_eq!(again.current().unwrap().generation(), 2);
    let unknown = host.jiffy(&["rotate", "nobody"]);
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("no tenant nobody"));
    // The first key alone decrypts nothing.
    fs::write(&path, with_first).unwrap();
    let refused = host.jiffy(&["stats"]);
    assert!(!refused.status.success(), "{refused:?}");
    let report = String::from_utf8_lossy(&refused.stderr);
    assert!(report.contains("key \"second\" does not exist"), "{report}");
}

fn run(work: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread();
    let mut runtime = runtime;
    runtime.enable_all().build().unwrap().block_on(work);
}

#[test]
fn a_directory_is_collected_verified_repaired_and_measured() {
    let dir = tempfile::tempdir().unwrap();
    let objects = dir.path().join("objects");
    let host = Host {
        url: format!("file://{}", objects.display()),
        objects,
        variables: Vec::new(),
        dir,
    };
    fs::create_dir(host.home()).unwrap();
    let none = host.jiffy(&["stats"]);
    assert!(
        String::from_utf8_lossy(&none.stderr).contains("--store URL"),
        "{none:?}"
    );
    run(test_all_commands(&host));
}

#[jiffy_test(engine = "none")]
fn a_bucket_is_collected_verified_repaired_and_measured() {
    let dir = tempfile::tempdir().unwrap();
    let objects = dir.path().join("objects");
    let Some(server) = S3Server::start(&objects) else {
        return skip("versitygw is not built");
    };
    let host = Host {
        url: "s3://bucket/some/prefix".to_owned(),
        objects,
        variables: s3::variables(server.address, s3::SECRET),
        dir,
    };
    fs::create_dir(host.home()).unwrap();
    run(test_all_commands(&host));
}

#[jiffy_test(engine = "none")]
fn check_accepts_a_suitable_server_and_names_the_defect_of_others() {
    let dir = tempfile::tempdir().unwrap();
    let Some(server) = S3Server::start(&dir.path().join("objects")) else {
        return skip("versitygw is not built");
    };
    let host = Host {
        url: "s3://bucket/prefix".to_owned(),
        variables: s3::variables(server.address, s3::SECRET),
        objects: dir.path().join("objects"),
        dir,
    };
    let checked = host.jiffy(&["check", "--store", &host.url, "--json", "--rounds", "3"]);
    assert!(checked.status.success(), "{checked:?}");
    let report: Value = serde_json::from_slice(&checked.stdout).unwrap();
    assert_eq!(
        (&report["rounds"], &report["writers"]),
        (&3.into(), &32.into())
    );
    assert!(report["replaceP50Ms"].as_f64().unwrap() > 0.0);
    let left = host.objects.join("bucket/prefix/check");
    assert!(!left.exists(), "the check leaves objects");

    let text = |output: Output| String::from_utf8(output.stderr).unwrap();
    let nowhere = host.jiffy(&["check", "--store", "file:///nonexistent/store"]);
    assert_eq!(nowhere.status.code(), Some(1));
    assert!(text(nowhere).contains("does not exist"));
    let etcd = host.jiffy(&["check", "--records", "etcd+http://127.0.0.1:9/x"]);
    assert_eq!(etcd.status.code(), Some(1));
    assert!(text(etcd).contains("Connection refused"));
    let remote = host.jiffy(&["check", "--records", "etcd+http://10.0.0.1:2379"]);
    assert_eq!(remote.status.code(), Some(2));
    assert!(text(remote).contains("limited to loopback addresses"));
}
