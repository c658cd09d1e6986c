//! Renaming of templates.
//!
//! A *permit* counts towards a limit until it is dropped.

use super::records::TemplateRecord;
use super::request::check_name;
use super::{Builder, BuilderError, BuilderInner, DEFAULT_TAG, blocking};
use jiffy_engine_api::is_reserved;
use jiffy_image::{Reference, TemplateError};

impl Builder {
    /// Renames a template with all its tags. Its id and its builds are unchanged.
    ///
    /// # Errors
    /// [`BuilderError::NameInUse`] if another template of the owner has the name,
    /// [`BuilderError::Building`] if a build of the template waits or runs, and
    /// [`BuilderError::UnknownTemplate`] if no build has succeeded.
    pub async fn rename(
        &self,
        template: &TemplateRecord,
        name: &str,
    ) -> Result<TemplateRecord, BuilderError> {
        let name = name.to_ascii_lowercase();
        check_name(&name)?;
        if name.contains([':', '/']) {
            return Err(BuilderError::Name(name));
        }
        if Reference::in_namespace(None, &name)?.is_stock() {
            return Err(BuilderError::Taken(name));
        }
        if is_reserved(&name) {
            return Err(BuilderError::Reserved(name));
        }
        let renamed = TemplateRecord {
            name,
            ..template.clone()
        };
        let names: Vec<String> = vec![renamed.reference(DEFAULT_TAG)];
        let owner = template.owner.as_deref();
        // The permit is held until the new name exists: both names exist for a moment.
        let _permit = self.0.reserve_template(owner, &names, 0).await?;
        let (inner, old) = (self.0.clone(), template.clone());
        blocking(move || inner.rename(&old, renamed)).await?
    }
}

impl BuilderInner {
    fn rename(
        &self,
        old: &TemplateRecord,
        renamed: TemplateRecord,
    ) -> Result<TemplateRecord, BuilderError> {
        // The lock is held until the end: no request for a build can use one of the names
        // meanwhile.
        let _naming = self.names_lock.lock();
        if old.name == renamed.name {
            return Ok(renamed);
        }
        let owner = renamed.owner.as_deref();
        let is_used = self.records.template_by_name(owner, &renamed.name)?.is_some()
            // The image store may have a template without a record, for example an imported one.
            || !self.templates.tags(&renamed.reference(DEFAULT_TAG))?.is_empty();
        if is_used {
            return Err(BuilderError::NameInUse(renamed.name));
        }
        let builds = self.records.builds(&old.id)?;
        // The build would publish the template under its former name.
        if builds.iter().any(|build| !build.status.is_final()) {
            return Err(BuilderError::Building(old.name.clone()));
        }
        let mut copied = Vec::new();
        let written = self.copy_tags(old, &renamed, &mut copied).and_then(|()| {
            // From here on, the new name is valid. After a crash, the former names remain as well,
            // until their owner removes them.
            self.records.set_name(&old.id, &renamed.name)?;
            Ok(())
        });
        if let Err(error) = written {
            for (_, to) in copied {
                if let Err(error) = self.templates.remove(&to) {
                    tracing::warn!(%error, template = to, "cannot remove a copy of a template");
                }
            }
            return Err(error);
        }
        for (from, to) in copied {
            // Snapshots of the booted template remain usable.
            self.sandboxes.templates().hand_over(&from, &to);
            self.templates.remove(&from)?;
        }
        Ok(renamed)
    }

    /// Copies the tags of a template to its new name. Adds the old and the new reference of each
    /// copied tag to `copied`, also if a later tag fails.
    fn copy_tags(
        &self,
        old: &TemplateRecord,
        renamed: &TemplateRecord,
        copied: &mut Vec<(String, String)>,
    ) -> Result<(), BuilderError> {
        for tag in self.templates.tags(&old.reference(DEFAULT_TAG))? {
            let (from, to) = (tag.to_string(), renamed.reference(tag.tag()));
            let visibility = match self.templates.manifest(&from) {
                Ok(manifest) => manifest.visibility,
                // The tag was removed by another process.
                Err(TemplateError::Unknown { .. }) => continue,
                Err(e) => return Err(e.into()),
            };
            self.templates.tag(&from, &to, visibility)?;
            copied.push((from, to));
        }
        if copied.is_empty() {
            return Err(BuilderError::UnknownTemplate(old.name.clone()));
        }
        Ok(())
    }
}
