//! Modules of this host's functions in the shared store.
//!
//! The *root* of a snapshot is the hash that identifies it in the store. A *tenant* is an owner of
//! snapshots in the store, usually an API key. The objects of a tenant are encrypted with its keys.
//! A *module* is the WebAssembly program of a function, which answers HTTP requests. A host *holds*
//! a module while a function of this host needs it.
//!
//! A module is pushed as a snapshot of one file. The manifest does not depend on the host, so that
//! all hosts push an identical snapshot. A module is found by the BLAKE3 hash of its content among
//! the modules of its tenant, and remains while a host holds it.

use crate::host::module_book::{HeldModule, ModuleBook};
use crate::host::{FoundSnapshot, LOCAL_TENANT, MemoryPull, RemoteError, RemoteStore};
use crate::{
    Attributes, EngineKind, LayerKind, PartSource, PushOptions, PushReport, SnapshotSource,
    StoreError, Tenant,
};
use jiffy_engine_api::now_ms;
use std::fs::File;
use std::sync::Arc;

/// Name of the part with the module.
const MODULE_PART: &str = "module.wasm";

/// Modules of this host's functions in the store. Digests are BLAKE3 hashes in hexadecimal. An
/// owner is the id of an API key, or `None` for the host's owner.
#[derive(Debug)]
pub struct StoredModules {
    remote: Arc<RemoteStore>,
    book: ModuleBook,
}

fn tenant_name(owner: Option<&str>) -> &str {
    owner.unwrap_or(LOCAL_TENANT)
}

impl StoredModules {
    /// Reads the record of held modules. Sends no request. Blocks.
    pub fn open(remote: Arc<RemoteStore>) -> Result<Self, RemoteError> {
        let book = ModuleBook::open(&remote)?;
        Ok(Self { remote, book })
    }

    /// Returns whether other hosts can fetch the module, for as long as this host holds it.
    pub fn is_stored(&self, owner: Option<&str>, digest: &str) -> bool {
        let held = self.book.find(tenant_name(owner), digest);
        held.is_some_and(|module| module.stored)
    }

    /// Returns the owners of modules that are in the store or being pushed.
    pub fn owners(&self) -> Vec<Option<String>> {
        let tenants = self.book.tenants().into_iter();
        let owner = |name: String| Some(name).filter(|name| name != LOCAL_TENANT);
        tenants.map(owner).collect()
    }

    /// Returns the digests of an owner's modules that are in the store or being pushed.
    pub fn digests(&self, owner: Option<&str>) -> Vec<String> {
        self.book.digests(tenant_name(owner))
    }

    /// Marks a module as not stored until it is stored again.
    pub fn doubt(&self, owner: Option<&str>, digest: &str) {
        self.book.doubt(tenant_name(owner), digest);
    }

    /// Stores a module and holds it. Chunks that exist in the store are not uploaded. At most one
    /// call per owner may run at a time.
    pub async fn store(
        &self,
        owner: Option<&str>,
        digest: &str,
        file: File,
    ) -> Result<PushReport, RemoteError> {
        let name = tenant_name(owner);
        let stored = self.store_known(owner, digest, Arc::new(file)).await;
        if let Err(RemoteError::Store(StoreError::Key { .. })) = &stored {
            // Another host may have rotated the keys since they were read. The next call reads them
            // again.
            self.remote.forget_tenant(name);
        }
        stored
    }

    /// Pushes a module, under the root of an earlier push if there is one.
    async fn store_known(
        &self,
        owner: Option<&str>,
        digest: &str,
        file: Arc<File>,
    ) -> Result<PushReport, RemoteError> {
        let tenant = self.remote.tenant(owner).await?;
        let held = self.book.find(tenant.name(), digest);
        // 0 on all hosts, so that they push the same snapshot. Only a host that pushed the module
        // under a new root (see below) has recorded another time.
        let created_ms = held.map_or(0, |module| module.created_ms);
        match self.push(&tenant, digest, file.clone(), created_ms).await {
            // The last holder has just released the module. A removed root stays removed, so push
            // the module with the current time, which results in a new root.
            Err(e) if e.is_gone() => self.push(&tenant, digest, file, now_ms()).await,
            pushed => pushed,
        }
    }

    /// Pushes a module, and registers this host as a holder, so that the store retains the module.
    async fn push(
        &self,
        tenant: &Tenant,
        digest: &str,
        file: Arc<File>,
        created_ms: u64,
    ) -> Result<PushReport, RemoteError> {
        let shared = &self.remote.shared;
        let source = source(digest, file, created_ms);
        let root = shared.root(tenant, &source).await?;
        let former = self.book.find(tenant.name(), digest);
        if let Some(former) = former.filter(|former| former.root != root) {
            // The root has changed, for example after a rotation of keys: release the former one.
            let released = shared.release_module(tenant, digest, former.root, &self.book.host);
            released.await?;
        }
        let mut module = HeldModule {
            store: self.remote.url().to_owned(),
            tenant: tenant.name().to_owned(),
            digest: digest.to_owned(),
            root,
            created_ms,
            stored: false,
        };
        // Record the module before the push, so that a later daemon knows the module and can
        // release it.
        self.book.write(module.clone())?;
        let options = PushOptions::new(self.remote.index_cache().to_owned());
        let (name, report) = shared.push(tenant, &source, &options).await?;
        module.root = name.root;
        let holding = shared.hold_module(tenant, digest, name.root, &self.book.host);
        holding.await?;
        module.stored = true;
        self.book.write(module)?;
        Ok(report)
    }

    /// Releases a module that no function of this host needs. Garbage collection removes the module
    /// when no other host holds it.
    pub async fn release(&self, owner: Option<&str>, digest: &str) -> Result<(), RemoteError> {
        let name = tenant_name(owner);
        let Some(mut module) = self.book.find(name, digest) else {
            return Ok(());
        };
        // If the release fails, the record remains, so that a later call can repeat the release.
        module.stored = false;
        let root = module.root;
        self.book.write(module)?;
        if let Some(tenant) = self.remote.find_tenant(name).await? {
            let shared = &self.remote.shared;
            let releasing = shared.release_module(&tenant, digest, root, &self.book.host);
            releasing.await?;
        }
        self.book.forget(name, digest)
    }

    /// Fetches a module of an owner. `None` if the owner has no module with this digest. The cache
    /// may evict the module at any time, but the returned open file stays readable. The caller must
    /// verify the hash: any host with the owner's keys may have written the content.
    pub async fn fetch(
        &self,
        owner: Option<&str>,
        digest: &str,
        max_bytes: u64,
    ) -> Result<Option<File>, RemoteError> {
        let name = tenant_name(owner);
        match self.fetch_known(name, digest, max_bytes).await {
            Err(RemoteError::Store(StoreError::Key { .. })) => {
                self.remote.forget_tenant(name);
                self.fetch_known(name, digest, max_bytes).await
            }
            other => other,
        }
    }

    /// Fetches the module with this digest if the store has it for the tenant `name`.
    async fn fetch_known(
        &self,
        name: &str,
        digest: &str,
        max_bytes: u64,
    ) -> Result<Option<File>, RemoteError> {
        let shared = &self.remote.shared;
        let Some(tenant) = self.remote.find_tenant(name).await? else {
            return Ok(None);
        };
        let Some(root) = shared.module(&tenant, digest).await? else {
            return Ok(None);
        };
        let snapshot = FoundSnapshot {
            id: id(digest),
            parent: None,
            shared: false,
            remote: shared.open(&tenant, root).await?,
            written: Arc::default(),
        };
        let damaged = |reason| RemoteError::Damaged {
            id: id(digest),
            reason,
        };
        let part = snapshot.remote.part(MODULE_PART);
        let (number, part) = part.ok_or_else(|| damaged("has no file"))?;
        if part.bytes > max_bytes {
            return Err(damaged("exceeds the maximum size of a module"));
        }
        let pulling = self
            .remote
            .pull_part(&snapshot, number, MemoryPull::All, name);
        pulling.await?.0.file().map(Some)
    }
}

/// Returns the id of a module in the store. It cannot equal the id of a snapshot, because the
/// ids of snapshots contain no spaces.
fn id(digest: &str) -> String {
    format!("module {digest}")
}

/// Describes a module as a snapshot with one file, which the store can push.
fn source(digest: &str, file: Arc<File>, created_ms: u64) -> SnapshotSource {
    SnapshotSource {
        // The format requires an engine. No reader of a module uses this value.
        engine: EngineKind::Microvm,
        created_ms,
        attributes: Attributes {
            id: id(digest),
            ..Attributes::default()
        },
        lineage: Vec::new(),
        parts: vec![PartSource {
            kind: LayerKind::File,
            name: MODULE_PART.to_owned(),
            file,
            inherited: Vec::new(),
        }],
        working_set: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::{LastStore, RemoteSettings};
    use crate::{GcOptions, Hash};
    use std::os::unix::fs::FileExt;
    use std::path::Path;
    use std::time::Duration;

    const OWNER: Option<&str> = Some("k1");
    const LIMIT: u64 = 1 << 20;

    fn open(dir: &Path, home: &str) -> StoredModules {
        let keys = dir.join("one/store/keys.toml");
        let settings = RemoteSettings {
            url: format!("file://{}/bucket", dir.display()).parse().unwrap(),
            keyring: keys.exists().then_some(keys),
            home: dir.join(home),
            cache_bytes: 1 << 30,
            upload_bytes_per_second: None,
            timeout: Duration::from_millis(200),
        };
        let remote = RemoteStore::open(&settings).unwrap();
        LastStore::write(&settings).unwrap();
        StoredModules::open(remote).unwrap()
    }

    fn file(dir: &Path, content: &[u8]) -> File {
        let path = dir.join("module");
        std::fs::write(&path, content).unwrap();
        File::open(path).unwrap()
    }

    async fn fetched(modules: &StoredModules, owner: Option<&str>) -> Option<Vec<u8>> {
        let file = modules.fetch(owner, "d1", LIMIT).await.unwrap()?;
        let mut content = vec![0; file.metadata().unwrap().len() as usize];
        file.read_exact_at(&mut content, 0).unwrap();
        Some(content)
    }

    #[tokio::test]
    async fn a_module_that_hosts_share_is_sent_once_and_stays_for_the_last_of_them() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (open(dir.path(), "one"), open(dir.path(), "two"));
        let content: Vec<u8> = (0..200_000u32).flat_map(|n| n.to_le_bytes()).collect();
        let stored = |modules| {
            let file = file(dir.path(), &content);
            async move {
                StoredModules::store(modules, OWNER, "d1", file)
                    .await
                    .unwrap()
            }
        };
        let sent = stored(&one).await;
        assert!(!sent.existed && sent.new_bytes == content.len() as u64);
        assert_eq!(fetched(&two, OWNER).await.unwrap(), content);
        assert!(
            two.fetch(OWNER, "d1", LIMIT / 2)
                .await
                .unwrap_err()
                .is_damage()
        );
        // Neither another owner nor another digest finds the module.
        assert_eq!(fetched(&two, None).await, None);
        assert!(two.fetch(OWNER, "d2", LIMIT).await.unwrap().is_none());
        let again = stored(&two).await;
        assert!(again.existed && again.new_chunks == 0, "{again:?}");
        assert!(two.is_stored(OWNER, "d1") && !two.is_stored(None, "d1"));

        one.release(OWNER, "d1").await.unwrap();
        assert!(!one.is_stored(OWNER, "d1") && one.owners().is_empty());
        assert_eq!(fetched(&one, OWNER).await.unwrap(), content);
        two.release(OWNER, "d1").await.unwrap();
        assert_eq!(fetched(&one, OWNER).await, None);
        // After the release but before a collection: chunks are not uploaded again, but the root is
        // new.
        let again = stored(&one).await;
        assert!(
            again.new_chunks == 0 && again.root != sent.root,
            "{again:?}"
        );
        // The first collection condemns the removed root, and the second one removes it.
        let (remote, root) = (&one.remote, sent.root.parse::<Hash>().unwrap());
        let tenant = remote.tenant(OWNER).await.unwrap();
        for _ in 0..2 {
            tokio::time::sleep(Duration::from_millis(20)).await;
            let at_once = GcOptions {
                grace: Duration::ZERO,
                ..GcOptions::default()
            };
            remote.shared.collect(&tenant, at_once).await.unwrap();
        }
        assert!(remote.shared.open(&tenant, root).await.is_err());
        assert_eq!(fetched(&two, OWNER).await.unwrap(), content);
    }

    #[tokio::test]
    async fn a_daemon_that_was_killed_leaves_nothing_that_the_next_one_does_not_know() {
        let dir = tempfile::tempdir().unwrap();
        let one = open(dir.path(), "one");
        one.store(OWNER, "d1", file(dir.path(), b"first"))
            .await
            .unwrap();
        let (bucket, away) = (dir.path().join("bucket"), dir.path().join("away"));
        std::fs::rename(&bucket, &away).unwrap();
        let failed = one.store(OWNER, "d2", file(dir.path(), b"second")).await;
        assert!(failed.unwrap_err().retry_after().is_some());
        assert!(one.release(OWNER, "d1").await.is_err());
        let next = open(dir.path(), "one");
        assert_eq!(next.digests(OWNER), ["d1", "d2"]);
        assert!(!next.is_stored(OWNER, "d1") && !next.is_stored(OWNER, "d2"));
        std::fs::rename(&away, &bucket).unwrap();
        for digest in ["d1", "d2"] {
            next.release(OWNER, digest).await.unwrap();
        }
        assert!(next.fetch(OWNER, "d1", LIMIT).await.unwrap().is_none());
        assert!(open(dir.path(), "one").owners().is_empty());
    }
}
