//! What the records say about templates, held against those that there are: whoever may write to the data directory removes templates
//! without asking the builder.

use super::records::{BuildRecord, Status, TemplateRecord};
use super::{Builder, BuilderError, job, lock};
use jiffy_engine::Engine;
use jiffy_image::TemplateError;

impl<E: Engine> Builder<E> {
    /// What is recorded of the template with this id or name. Tags that were removed without the builder are forgotten, and with
    /// the last one the record.
    pub fn known(&self, which: &str) -> Result<Option<TemplateRecord>, BuilderError> {
        let _naming = lock(&self.0.naming);
        self.known_alone(which)
    }

    /// The same for whoever has the turn to change names.
    pub(super) fn known_alone(&self, which: &str) -> Result<Option<TemplateRecord>, BuilderError> {
        let records = &self.0.records;
        let Some(template) = records.template(which)? else {
            return Ok(None);
        };
        let mut builds = records.builds(&template.id)?;
        let mut changed = false;
        for build in builds.iter_mut().filter(|b| b.status == Status::Ready) {
            let before = build.tags.len();
            build
                .tags
                .retain(|tag| !self.is_gone(&job::tagged(&template.name, tag)));
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
        Status::Ready => !build.tags.is_empty(),
        status => !status.is_over(),
    }
}
