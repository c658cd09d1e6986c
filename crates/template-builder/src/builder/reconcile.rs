//! Reconciliation of the database with the image store. Other programs can remove templates from
//! the data directory, and the database must not report their tags any longer.

use super::records::{BuildRecord, BuildStatus, TemplateRecord};
use super::{Builder, BuilderError};
use jiffy_image::TemplateError;

impl Builder {
    /// Returns the record of the template `name` in the namespace of `owner`. `None` stands for the
    /// host's owner. Deletes tags that were removed without the builder; if no tag remains, also
    /// deletes the record.
    pub fn template_named(
        &self,
        owner: Option<&str>,
        name: &str,
    ) -> Result<Option<TemplateRecord>, BuilderError> {
        let _naming = self.0.names_lock.lock();
        self.reconcile(self.0.records.template_by_name(owner, name)?)
    }

    /// Returns the reconciled record of the template with this id.
    pub(super) fn template_with_id(
        &self,
        id: &str,
    ) -> Result<Option<TemplateRecord>, BuilderError> {
        let _naming = self.0.names_lock.lock();
        self.reconcile(self.0.records.template(id)?)
    }

    /// Reconciles a record with the image store. The caller must hold `names_lock`.
    pub(super) fn reconcile(
        &self,
        template: Option<TemplateRecord>,
    ) -> Result<Option<TemplateRecord>, BuilderError> {
        let records = &self.0.records;
        let Some(template) = template else {
            return Ok(None);
        };
        let mut builds = records.builds(&template.id)?;
        let mut changed = false;
        for build in builds.iter_mut().filter(|b| b.status == BuildStatus::Ready) {
            let before = build.tags.len();
            build
                .tags
                .retain(|tag| !self.is_removed(&template.reference(tag)));
            if build.tags.len() != before {
                // The build remains in the history of the template, without its removed tags.
                records.set_tags(&build.id, &build.tags)?;
                changed = true;
            }
        }
        // A template whose first build failed is retained: only removed tags delete the record.
        if changed && !builds.iter().any(retains_template) {
            records.delete_template(&template.id)?;
            return Ok(None);
        }
        Ok(Some(template))
    }

    /// Returns whether the template has a tagged image, or a build that may produce one.
    pub fn exists(&self, template: &TemplateRecord) -> Result<bool, BuilderError> {
        Ok(self
            .0
            .records
            .builds(&template.id)?
            .iter()
            .any(retains_template))
    }

    fn is_removed(&self, reference: &str) -> bool {
        // A template that cannot be read still exists.
        let found = self.0.templates.manifest(reference);
        matches!(found, Err(TemplateError::Unknown { .. }))
    }
}

/// Returns whether a build has an image, or may still produce one.
fn retains_template(build: &BuildRecord) -> bool {
    match build.status {
        BuildStatus::Ready => !build.tags.is_empty(),
        status => !status.is_final(),
    }
}
