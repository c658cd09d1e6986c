//! What the records say about templates, held against those that there are: whoever may write to the data directory removes templates
//! without asking the builder.

use super::records::{BuildRecord, BuildStatus, TemplateRecord};
use super::{Builder, BuilderError, lock};
use jiffy_engine::Engine;
use jiffy_image::TemplateError;

impl<E: Engine> Builder<E> {
    /// Record of the template with this name in the namespace of `owner`; none: of the host's
    /// owner. Tags that were removed without the builder are forgotten, and with the last one the
    /// record.
    pub fn known(
        &self,
        owner: Option<&str>,
        name: &str,
    ) -> Result<Option<TemplateRecord>, BuilderError> {
        let _naming = lock(&self.0.naming);
        self.current(self.0.records.named(owner, name)?)
    }

    /// The same of the template with this id.
    pub(super) fn known_id(&self, id: &str) -> Result<Option<TemplateRecord>, BuilderError> {
        let _naming = lock(&self.0.naming);
        self.current(self.0.records.template(id)?)
    }

    /// A record as it is after what was removed without the builder. Needs the turn to change
    /// names.
    pub(super) fn current(
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
                .retain(|tag| !self.is_gone(&template.called(tag)));
            if build.tags.len() != before {
                records.set_tags(&build.id, &build.tags)?;
                changed = true;
            }
        }
        if changed && !builds.iter().any(counts) {
            records.forget_template(&template.id)?;
            return Ok(None);
        }
        Ok(Some(template))
    }

    /// Whether there is something by the template's name, or a build that may come to it.
    pub fn is_there(&self, template: &TemplateRecord) -> Result<bool, BuilderError> {
        Ok(self.0.records.builds(&template.id)?.iter().any(counts))
    }

    fn is_gone(&self, reference: &str) -> bool {
        // One that cannot be read is still there.
        let found = self.0.templates.manifest(reference);
        matches!(found, Err(TemplateError::Unknown { .. }))
    }
}

fn counts(build: &BuildRecord) -> bool {
    match build.status {
        BuildStatus::Ready => !build.tags.is_empty(),
        status => !status.is_over(),
    }
}
