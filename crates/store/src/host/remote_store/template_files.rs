//! Files of templates in the store, found by the name of the template.
//!
//! A *tenant* is an owner of snapshots in the store, usually an API key. The objects of a tenant
//! are encrypted with its keys.

use crate::host::{LOCAL_TENANT, RemoteError, RemoteStore};
use crate::{
    Attributes, EngineKind, LayerKind, PartSource, PushOptions, PushReport, RemoteSnapshot,
    SHARED_TENANT, Selection, SnapshotSource,
};
use std::fs::File;
use std::sync::Arc;

/// Template in the store.
#[derive(Debug)]
pub struct StoredTemplate(RemoteSnapshot);

/// Returns the id of a template in the store. It cannot equal the id of a snapshot, because those
/// contain no spaces.
fn id_of(name: &str) -> String {
    format!("template {name}")
}

impl RemoteStore {
    /// Pushes the files of a template under `names`. All tenants may use the template if `shared`
    /// is true, otherwise only the host's owner. If another template has one of these names, that
    /// name moves to this template.
    pub async fn push_template(
        &self,
        names: &[String],
        files: Vec<(String, Arc<File>)>,
        shared: bool,
    ) -> Result<PushReport, RemoteError> {
        let tenant = if shared { SHARED_TENANT } else { LOCAL_TENANT };
        let tenant = self.tenant(Some(tenant)).await?;
        let parts = files.into_iter().map(|(name, file)| PartSource {
            kind: LayerKind::File,
            name,
            file,
            inherited: Vec::new(),
        });
        let source = SnapshotSource {
            // A template is stored in the format of a snapshot, which requires an engine. No reader
            // of a template uses this value.
            engine: EngineKind::Microvm,
            // The time is part of the content from which the store derives the root. With a
            // constant time, a push of the same files and names results in the same root.
            created_ms: 0,
            attributes: Attributes {
                id: names.first().map(|name| id_of(name)).unwrap_or_default(),
                ..Attributes::default()
            },
            lineage: Vec::new(),
            parts: parts.collect(),
            working_set: Vec::new(),
        };
        let options = PushOptions::new(self.index_cache().to_owned());
        // `self.shared` is the client of the store, and not related to the argument `shared`.
        let (pushed, report) = self.shared.push(&tenant, &source, &options).await?;
        for name in names {
            self.shared
                .move_name(&tenant, &id_of(name), pushed.root)
                .await?;
        }
        Ok(report)
    }

    /// Finds the template that was pushed under `name` by this host's owner or for all tenants.
    pub async fn find_template(&self, name: &str) -> Result<Option<StoredTemplate>, RemoteError> {
        for tenant in [LOCAL_TENANT, SHARED_TENANT] {
            let Some(tenant) = self.find_tenant(tenant).await? else {
                continue;
            };
            if let Some(root) = self.shared.named(&tenant, &id_of(name)).await? {
                let snapshot = self.shared.open(&tenant, root).await?;
                return Ok(Some(StoredTemplate(snapshot)));
            }
        }
        Ok(None)
    }

    /// Fetches the file `name` of a template. `None` if the template has no such file. The cache
    /// may evict the file at any time, but the returned open file stays readable.
    pub async fn template_file(
        &self,
        template: &StoredTemplate,
        name: &str,
    ) -> Result<Option<File>, RemoteError> {
        let Some((number, _)) = template.0.part(name) else {
            return Ok(None);
        };
        let pulled = self
            .shared
            .pull(&template.0, number, Selection::All, &self.cache)
            .await;
        let (layer, _) = pulled?;
        let file = layer.file().try_clone();
        file.map(Some).map_err(RemoteError::io(layer.path()))
    }
}
