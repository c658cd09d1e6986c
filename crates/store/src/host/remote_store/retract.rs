//! Retraction: removes snapshots of this host from the store.
//!
//! The *root* of a snapshot is the hash that identifies it in the store. The *resume bundle* of a
//! snapshot is an object with copies of the content that a host reads first to resume it.

use crate::Hash;
use crate::host::{RemoteError, RemoteStore};

impl RemoteStore {
    /// Removes snapshot `id` of `tenant`. Removes its name if the name refers to `root` or `root`
    /// is `None`, and its content if `content` is true. Content that another snapshot is based on
    /// remains until that snapshot is removed.
    ///
    /// Succeeds without effect if `root` is not a hash. Also succeeds if the snapshot does not
    /// exist.
    pub async fn retract(
        &self,
        tenant: &str,
        id: &str,
        root: Option<&str>,
        content: bool,
    ) -> Result<(), RemoteError> {
        self.recent_finds.forget(tenant, id);
        let tenant = self.tenant(Some(tenant)).await?;
        let wanted = match root.map(str::parse::<Hash>) {
            None => None,
            Some(Ok(root)) => Some(root),
            // The snapshot to remove is unknown, so none is removed.
            Some(Err(_)) => {
                tracing::warn!(id, root, "cannot retract a snapshot whose root is invalid");
                return Ok(());
            }
        };
        let named = self.shared.named(&tenant, id).await?;
        if named.is_some() && (wanted.is_none() || named == wanted) {
            self.shared.remove_name(&tenant, id).await?;
        }
        let Some(root) = wanted.or(named) else {
            return Ok(());
        };
        self.shared.remove_resume_bundle(&tenant, root).await?;
        if content {
            self.shared.remove(&tenant, root).await?;
        }
        Ok(())
    }

    /// Retracts the snapshot `id` with the root `former`, which the snapshot with the root
    /// `current` has replaced as the state of its sandbox. Any host may call this function, whether
    /// it pushed the former snapshot, fetched it or never had it. The caller must have committed
    /// the replacement. Can be repeated.
    ///
    /// If `current` is based on `former`, only the name and the resume bundle are removed. The
    /// content is not marked for removal, because a push that is based on marked content must
    /// upload that content again. The caller must retract the content later: when the sandbox is
    /// removed, or when the sandbox's state is no longer based on `former`. Returns whether the
    /// content was marked for removal.
    ///
    /// # Errors
    /// [`StoreError::Missing`](crate::StoreError::Missing) if the store lacks `current`. The former
    /// snapshot then remains.
    pub async fn retract_replaced(
        &self,
        tenant: &str,
        id: &str,
        former: Hash,
        current: Hash,
    ) -> Result<bool, RemoteError> {
        if former == current {
            return Ok(false);
        }
        let opened = self.tenant(Some(tenant)).await?;
        let (_, manifest) = self.shared.manifest(&opened, current).await?;
        let is_ancestor = manifest.lineage.iter().any(|name| name.root == former);
        let root = former.to_string();
        self.retract(tenant, id, Some(&root), !is_ancestor).await?;
        Ok(!is_ancestor)
    }
}
