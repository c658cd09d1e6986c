//! Tests for modules in a shared store: deployed on one host, and by digest on another host.

use super::{KEY, NAME, deploy, deploy_module, get, open, try_get};
use crate::support::constant;
use jiffy_function_manager::{
    DeployChanges, DeployQuota, FunctionError, FunctionRecord, Functions, ModuleDigest,
};
use jiffy_store::host::{LastStore, RemoteSettings, RemoteStore, StoredModules};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Another owner.
const OTHER: Option<&str> = Some("k2");

/// Data directories of hosts, next to the directory of their store.
struct Hosts(tempfile::TempDir);

impl Hosts {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn bucket(&self) -> PathBuf {
        self.0.path().join("bucket")
    }

    /// Opens the bucket as the host whose data directory is `host`. All hosts use the keys of host
    /// `a`.
    fn remote(&self, host: &str) -> Arc<RemoteStore> {
        let keys = self.0.path().join("a/store/keys.toml");
        let settings = RemoteSettings {
            url: format!("file://{}", self.bucket().display())
                .parse()
                .unwrap(),
            keyring: keys.exists().then_some(keys),
            home: self.0.path().join(host),
            cache_bytes: 1 << 30,
            upload_bytes_per_second: None,
            timeout: Duration::from_millis(200),
        };
        let remote = RemoteStore::open(&settings).unwrap();
        LastStore::write(&settings).unwrap();
        remote
    }

    fn open(&self, host: &str) -> Functions {
        let functions = open(&self.0.path().join(host).join("functions"));
        functions.share_modules(self.remote(host)).unwrap();
        functions
    }

    /// Returns the objects of the store below directories named `folder`, with their sizes in
    /// bytes.
    fn objects(&self, folder: &str) -> Vec<(PathBuf, u64)> {
        let (mut objects, mut directories) = (Vec::new(), vec![self.bucket()]);
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
                let path = entry.path();
                if path.is_dir() {
                    directories.push(path);
                } else if path.iter().any(|part| part == folder) {
                    objects.push((path, entry.metadata().map_or(0, |metadata| metadata.len())));
                }
            }
        }
        objects.sort();
        objects
    }
}

fn digest(record: &FunctionRecord) -> ModuleDigest {
    record.version().unwrap().module.parse().unwrap()
}

async fn wait(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Waits until a host has recorded that the store has the module of a version.
async fn wait_until_stored(functions: &Functions, record: &FunctionRecord) {
    let module = &record.version().unwrap().module;
    let is_stored = || functions.is_stored(record.owner.as_deref(), module) == Some(true);
    wait("the store has the module", is_stored).await;
}

/// Deploys a module that the host already has.
async fn deploy_by_digest(
    functions: &Functions,
    key: Option<&str>,
    digest: ModuleDigest,
) -> Result<Arc<FunctionRecord>, FunctionError> {
    let module = functions.find_module(key, digest).await?;
    let module = functions
        .copy_module(key, module, DeployQuota::default())
        .await?;
    let changes = DeployChanges::default();
    functions.deploy(key, NAME, changes, module).await
}

fn flip(path: &Path, at: usize) {
    let mut content = std::fs::read(path).unwrap();
    content[at] ^= 1;
    std::fs::write(path, content).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_module_of_one_host_is_deployed_by_its_digest_on_another_by_its_owner_only() {
    let hosts = Hosts::new();
    let (a, b) = (hosts.open("a"), hosts.open("b"));
    let deployed = deploy(&a, "from a").await;
    let digest = digest(&deployed);
    wait_until_stored(&a, &deployed).await;
    let packs = hosts.objects("packs");

    // The other owner has modules in the store as well.
    let others = deploy_module(&a, OTHER, "other", &constant("other")).await;
    wait_until_stored(&a, &others.unwrap()).await;
    for key in [OTHER, None] {
        for host in [&a, &b] {
            let refused = deploy_by_digest(host, key, digest).await;
            assert!(
                matches!(refused, Err(FunctionError::NoModule(_))),
                "{refused:?}"
            );
        }
    }
    a.remove(OTHER, "other").await.unwrap();

    let on_b = deploy_by_digest(&b, KEY, digest).await.unwrap();
    // `[7..]` removes the prefix `blake3:`.
    assert_eq!(on_b.version().unwrap().module, digest.to_string()[7..]);
    assert_eq!(get(&b).await, "from a");
    wait_until_stored(&b, &on_b).await;
    // Each host has an object below `modules` for each module that it uses. The objects of hosts a
    // and b for the deployed module remain.
    wait("the module of the other owner is released", || {
        hosts.objects("modules").len() == 2
    })
    .await;
    let now = hosts.objects("packs");
    assert!(packs.iter().all(|pack| now.contains(pack)));
    assert_eq!(now.len(), packs.len() + 1, "one pack per owner");

    // After the removal from host a, the store retains the module for host b. After the removal
    // from both hosts, the store removes the module.
    a.remove(KEY, NAME).await.unwrap();
    wait("host a releases the module", || {
        hosts.objects("modules").len() == 1
    })
    .await;
    drop(a.find_module(KEY, digest).await.unwrap());
    b.remove(KEY, NAME).await.unwrap();
    wait("host b releases the module", || {
        hosts.objects("modules").is_empty()
    })
    .await;
    let refused = a.find_module(KEY, digest).await;
    assert!(
        matches!(refused, Err(FunctionError::NoModule(_))),
        "{refused:?}"
    );
    a.stop_all().await;
    b.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_module_damaged_in_the_store_is_rejected_and_a_local_copy_is_used() {
    let hosts = Hosts::new();
    let (a, b) = (hosts.open("a"), hosts.open("b"));
    let deployed = deploy(&a, "sound").await;
    wait_until_stored(&a, &deployed).await;
    for (pack, _) in hosts.objects("packs") {
        // The offset is behind the header, in the frame of the first chunk.
        flip(&pack, 100);
    }
    let refused = deploy_by_digest(&b, KEY, digest(&deployed)).await;
    assert!(
        matches!(refused, Err(FunctionError::ModuleDamaged(_))),
        "{refused:?}"
    );
    assert!(b.find(KEY, NAME).is_err(), "no function was deployed");
    // Host a has a local copy, and deploys it as version 2.
    let again = deploy_by_digest(&a, KEY, digest(&deployed)).await.unwrap();
    assert_eq!((again.answering, get(&a).await.as_str()), (2, "sound"));

    // Another module under this digest, in an undamaged store.
    let wrong = ModuleDigest::from(blake3::hash(b"what it should be"));
    let module = hosts.0.path().join("module");
    std::fs::write(&module, wat::parse_bytes(&constant("wrong")).unwrap()).unwrap();
    let file = std::fs::File::open(&module).unwrap();
    let forger = StoredModules::open(hosts.remote("c")).unwrap();
    let forged = forger.store(KEY, &wrong.to_string()[7..], file).await;
    forged.unwrap();
    let refused = deploy_by_digest(&b, KEY, wrong).await;
    assert!(
        matches!(refused, Err(FunctionError::ModuleDamaged(_))),
        "{refused:?}"
    );
    a.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_module_is_deployed_while_the_store_is_unavailable_and_uploaded_later() {
    let hosts = Hosts::new();
    let a = hosts.open("a");
    let first = deploy(&a, "first").await;
    wait_until_stored(&a, &first).await;
    // Without its directory, the store is unavailable.
    let away = hosts.0.path().join("away");
    std::fs::rename(hosts.bucket(), &away).unwrap();
    let second = deploy(&a, "second").await;
    assert_eq!(get(&a).await, "second");
    let others = deploy_module(&a, OTHER, NAME, &constant("third"))
        .await
        .unwrap();
    let is_stored = |functions: &Functions, record: &FunctionRecord| {
        let module = &record.version().unwrap().module;
        functions.is_stored(record.owner.as_deref(), module)
    };
    // The host cannot find out whether the store has this module.
    let unknown = ModuleDigest::from(blake3::hash(b"unknown"));
    let refused = a.find_module(KEY, unknown).await;
    assert!(
        matches!(refused, Err(FunctionError::StoreUnavailable(_))),
        "{refused:?}"
    );
    assert_eq!(is_stored(&a, &first), Some(true));
    assert_eq!(is_stored(&a, &second), Some(false));
    assert_eq!(is_stored(&a, &others), Some(false));
    a.detach_all().await;
    drop(a);

    // The next daemon completes the remaining work.
    let a = hosts.open("a");
    assert_eq!(is_stored(&a, &second), Some(false));
    std::fs::rename(&away, hosts.bucket()).unwrap();
    wait_until_stored(&a, &second).await;
    wait_until_stored(&a, &others).await;
    assert_eq!(try_get(&a, OTHER, NAME).await.unwrap(), "third");
    let b = hosts.open("b");
    deploy_by_digest(&b, KEY, digest(&second)).await.unwrap();
    assert_eq!(get(&b).await, "second");
    a.stop_all().await;
    b.stop_all().await;
}
