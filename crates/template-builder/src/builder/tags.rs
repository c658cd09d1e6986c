//! Tags, visibility and removal of templates.
//!
//! A *permit* counts towards a limit until it is dropped.
//!
//! A tag is a name for one build of a template (`NAME:TAG`). Each build creates an immutable
//! version.

use super::records::{BuildRecord, BuildStatus, TemplateRecord};
use super::request::check_name;
use super::{Builder, BuilderError, DEFAULT_TAG, MAX_TAGS, blocking, job, printable};
use jiffy_image::{TemplateError, Visibility};

impl Builder {
    /// Adds tags to the build to which `target` (a template, optionally with a tag) refers. Returns
    /// the build's id.
    pub async fn tag(
        &self,
        template: &TemplateRecord,
        target: &str,
        tags: &[String],
    ) -> Result<String, BuilderError> {
        let tag = target.split_once(':').map_or(DEFAULT_TAG, |(_, tag)| tag);
        let unknown = || BuilderError::UnknownTemplate(printable(target));
        let builds = self.0.records.builds(&template.id)?;
        let ready = |b: &&BuildRecord| b.status == BuildStatus::Ready;
        let mut ready = builds.iter().filter(ready);
        let build = ready.find(|b| b.tags.iter().any(|t| t == tag));
        let build = build.ok_or_else(unknown)?;
        if tags.len() > MAX_TAGS {
            return Err(BuilderError::Tags);
        }
        for tag in tags {
            check_name(&job::tagged(&template.name, tag))?;
        }
        let names: Vec<String> = tags.iter().map(|tag| template.reference(tag)).collect();
        let owner = template.owner.as_deref();
        // The permit is held until the tags exist.
        let _permit = self.0.reserve_template(owner, &names, 0).await?;
        let (from, named) = (template.reference(tag), template.clone());
        let (templates, new_tags) = (self.0.templates.clone(), tags.to_vec());
        let work = move || {
            let mut references = new_tags.iter().map(|tag| named.reference(tag));
            // `Templates::tag` uses this visibility only if the template has no other tag.
            // Otherwise the new tag inherits the visibility of the other tags.
            let visibility = Visibility::default();
            references.try_for_each(|to| templates.tag(&from, &to, visibility).map(drop))
        };
        blocking(work).await??;
        // The database follows the image store, in which a tag takes effect.
        self.0.records.retag(&template.id, Some(&build.id), tags)?;
        Ok(build.id.clone())
    }

    /// Removes tags from a template.
    pub async fn untag(
        &self,
        template: &TemplateRecord,
        tags: &[String],
    ) -> Result<(), BuilderError> {
        for tag in tags {
            check_name(&job::tagged(&template.name, tag))?;
        }
        let (templates, named, removed) =
            (self.0.templates.clone(), template.clone(), tags.to_vec());
        let work = move || {
            for tag in &removed {
                match templates.remove(&named.reference(tag)) {
                    Ok(()) | Err(TemplateError::Unknown { .. }) => {}
                    Err(e) => return Err(e),
                }
            }
            Ok(())
        };
        blocking(work).await??;
        self.0.records.retag(&template.id, None, tags)?;
        self.gc().await
    }

    /// Removes a template with all its tags and builds. Running sandboxes are unaffected.
    pub async fn remove(&self, template: &TemplateRecord) -> Result<(), BuilderError> {
        let builds = self.0.records.builds(&template.id)?;
        for build in &builds {
            // A build in progress would publish the template again.
            self.cancel(build)?;
        }
        // The image store may have a default tag that no recorded build has.
        let mut tags: Vec<String> = builds.into_iter().flat_map(|b| b.tags).collect();
        tags.push(DEFAULT_TAG.to_owned());
        self.untag(template, &tags).await?;
        Ok(self.0.records.delete_template(&template.id)?)
    }

    /// Makes a template public, or private to its owner.
    pub async fn set_public(
        &self,
        template: &TemplateRecord,
        public: bool,
    ) -> Result<(), BuilderError> {
        // The record decides for a build in progress, the manifest for an existing template.
        self.0.records.set_public(&template.id, public)?;
        let visibility = if public {
            Visibility::Public
        } else {
            Visibility::Private
        };
        // The name without a tag stands for the template with all its tags.
        let (templates, name) = (self.0.templates.clone(), template.reference(DEFAULT_TAG));
        match blocking(move || templates.set_visibility(&name, visibility)).await? {
            // The template is not built yet; its build sets the visibility.
            Err(TemplateError::Unknown { .. }) | Ok(()) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Removes sandboxes that were prepared in advance (warm), and snapshots, of removed templates.
    /// The next garbage collection would remove them later.
    async fn gc(&self) -> Result<(), BuilderError> {
        let sandboxes = self.0.sandboxes.clone();
        if let Err(e) = blocking(move || sandboxes.gc()).await? {
            tracing::warn!(error = %e, "cannot remove the data of removed templates");
        }
        Ok(())
    }
}
