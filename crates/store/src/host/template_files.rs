//! Templates in the store: files that are found by a name.

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

/// Id under which the store has a template. No snapshot has one with a space.
fn id_of(name: &str) -> String {
    format!("template {name}")
}

impl RemoteStore {
    /// Pushes the files of a template, which is found under `names`; for all tenants if `shared`.
    /// Another one that had one of them keeps its other names.
    pub async fn push_template(
        &self,
        names: &[String],
        files: Vec<(String, Arc<File>)>,
        shared: bool,
    ) -> Result<PushReport, RemoteError> {
        let tenant = match shared {
            true => SHARED_TENANT,
            false => LOCAL_TENANT,
        };
        let tenant = self.tenant(Some(tenant)).await?;
        let parts = files.into_iter().map(|(name, file)| PartSource {
            kind: LayerKind::File,
            name,
            file,
            inherited: Vec::new(),
        });
        let source = SnapshotSource {
            engine: EngineKind::Microvm,
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
        let (pushed, report) = self.shared.push(&tenant, &source, &options).await?;
        for name in names {
            self.shared
                .move_name(&tenant, &id_of(name), pushed.root)
                .await?;
        }
        Ok(report)
    }

    /// Finds the template that was pushed under `name`, by this host's owner or for all tenants.
    pub async fn find_template(&self, name: &str) -> Result<Option<StoredTemplate>, RemoteError> {
        for tenant in [LOCAL_TENANT, SHARED_TENANT] {
            let Some(tenant) = self.find_tenant(tenant).await? else {
                continue;
            };
            if let Some(root) = self.shared.named(&tenant, &id_of(name)).await? {
                let found = self.shared.open(&tenant, root).await?;
                return Ok(Some(StoredTemplate(found)));
            }
        }
        Ok(None)
    }

    /// Fetches the file `name` of a template; none: it has no such file. It may be gone from the
    /// cache when the file is closed.
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
