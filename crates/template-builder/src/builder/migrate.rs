//! Migration of data directories that were created before templates in the image store had owners.

use super::{Builder, BuilderError, blocking};
use jiffy_engine_api::is_id;
use jiffy_image::{TemplateError, Visibility};
use std::collections::HashMap;

/// Name of the migration in the database.
const OWNER_NAMESPACES: &str = "namespaces";

impl Builder {
    /// Moves each template of the image store into the namespace of the owner that the database
    /// records, once. Templates of keys that act for the host's owner become the host's. The
    /// migration is idempotent and can be repeated after a crash. The daemon accepts requests only
    /// afterwards.
    pub(super) async fn migrate(&self) -> Result<(), BuilderError> {
        let records = &self.0.records;
        if records.is_migrated(OWNER_NAMESPACES)? {
            return Ok(());
        }
        let mut owners = HashMap::new();
        let mut public = Vec::new();
        for record in records.templates()? {
            let visibility = if record.public {
                Visibility::Public
            } else {
                Visibility::Private
            };
            match record.owner {
                Some(owner) if self.0.settings.host_keys.contains(&owner) => {
                    records.make_host_owned(&record.id)?;
                    public.extend(record.public.then_some(record.name));
                }
                Some(owner) if is_id(&owner) => {
                    owners.insert(record.name, (owner, visibility));
                }
                Some(owner) => {
                    tracing::warn!(
                        owner,
                        template = record.name,
                        "the owner of a template is not a key"
                    );
                }
                None => public.extend(record.public.then_some(record.name)),
            }
        }
        let templates = self.0.templates.clone();
        let work = move || {
            let moved = templates.move_to_owners(&|name| owners.get(name).cloned())?;
            // Templates of the host's owner are not moved. Public ones are marked in the store.
            for name in public {
                match templates.set_visibility(&name, Visibility::Public) {
                    // The template of a record may have been removed.
                    Err(TemplateError::Unknown { .. }) | Ok(()) => {}
                    Err(e) => return Err(e),
                }
            }
            Ok(moved)
        };
        // Snapshots of the templates follow to the new names.
        for moved in blocking(work).await?? {
            let (from, to) = (moved.from.to_string(), moved.to.to_string());
            tracing::info!(from, to, "moved a template to the namespace of its owner");
            self.0.sandboxes.templates().hand_over(&from, &to);
        }
        // Record the migration last: an interrupted migration is repeated.
        Ok(records.set_migrated(OWNER_NAMESPACES)?)
    }

    /// Removes templates of unfinished builds of an earlier daemon.
    pub(super) async fn remove_unfinished_templates(&self) -> Result<(), BuilderError> {
        let templates = self.0.templates.clone();
        let removed = blocking(move || templates.remove_unfinished_builds()).await??;
        for name in removed {
            tracing::info!(
                template = name,
                "removed the template of an unfinished build"
            );
        }
        Ok(())
    }
}
