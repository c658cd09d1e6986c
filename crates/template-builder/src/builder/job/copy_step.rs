//! `COPY` and `ADD` steps of a build: determines the source of the files, and transfers the files
//! into the stage's sandbox.
//!
//! The *key* of a step is a hash of everything that determines its result. Equal steps of later
//! builds reuse its snapshot. A *stage* is a part of a build that starts with a base image (`FROM`)
//! and executes steps.

use super::super::copy::{self, CopyRequest, ROOT_USER, STAGING};
use super::super::failure::BuildFailure;
use super::super::transfer;
use super::BuildJob;
use super::stage::StageState;
use jiffy_agent_client::AgentClient;
use jiffy_build_spec::spec::{BuildStep, CopyAction, CopySource, StepAction};

/// Files of a step.
pub(super) enum CopiedFiles {
    /// Files that the client uploaded: an archive and the hash of its bytes.
    Upload {
        path: std::path::PathBuf,
        sum: String,
    },
    /// Files of an earlier stage: its number and the key of its last step.
    Stage { number: usize, key: String },
    /// Names and contents of files that the Dockerfile itself contains.
    Inline(Vec<(String, String)>),
}

impl CopiedFiles {
    /// Returns the part of the step's key that identifies the files.
    pub(super) fn key(&self) -> &str {
        match self {
            Self::Upload { sum, .. } => sum,
            Self::Stage { key, .. } => key,
            // The key of the step already covers the contents.
            Self::Inline(_) => "",
        }
    }
}

impl BuildJob {
    /// Finds the files that a step copies.
    pub(super) fn copied_files(
        &self,
        step: &BuildStep,
        before: &[Option<StageState>],
    ) -> Result<Option<CopiedFiles>, BuildFailure> {
        let StepAction::Copy(copy) = &step.action else {
            return Ok(None);
        };
        Ok(Some(match &copy.from {
            CopySource::Files(name) => {
                let owner = self.template.owner.as_deref();
                let found = self.inner.uploads.find(owner, name);
                let found = found.map_err(|e| BuildFailure::new(e.to_string()))?;
                let found = found.ok_or_else(|| {
                    BuildFailure::new(
                        "the files of the step were not uploaded or have expired: build again",
                    )
                })?;
                CopiedFiles::Upload {
                    path: found.path,
                    sum: found.sum,
                }
            }
            // The key of the stage identifies the state of its files.
            CopySource::Stage(n) => {
                let stage = before.get(*n).and_then(Option::as_ref);
                let stage =
                    stage.ok_or_else(|| BuildFailure::new("cannot copy from a later stage"))?;
                CopiedFiles::Stage {
                    number: *n,
                    key: stage.key.clone(),
                }
            }
            CopySource::Inline(files) => CopiedFiles::Inline(files.clone()),
        }))
    }

    /// Runs a `COPY` or `ADD`. `before` contains the earlier stages; the sandbox of a source stage
    /// is created if none is running.
    pub(super) async fn run_copy(
        &self,
        agent: &AgentClient,
        at: &StageState,
        copy: &CopyAction,
        files: Option<CopiedFiles>,
        before: &mut [Option<StageState>],
    ) -> Result<(), BuildFailure> {
        let request = CopyRequest::new(copy, &at.config).map_err(BuildFailure::new)?;
        // An earlier attempt or a program of the image may have left files.
        let cleared = agent.remove(STAGING, Some(ROOT_USER)).await;
        cleared.map_err(|e| BuildFailure::agent(&format!("clear {STAGING}"), e))?;
        let items = match files {
            Some(CopiedFiles::Upload { path, .. }) => {
                transfer::unpack_upload(agent, &path, STAGING, &request).await?;
                copy::find_sources(agent, STAGING, &request.sources).await?
            }
            Some(CopiedFiles::Stage { number, .. }) => {
                let stage = before.get_mut(number).and_then(Option::as_mut);
                let stage =
                    stage.ok_or_else(|| BuildFailure::new("the source stage does not exist"))?;
                let from = self.agent(stage).await?;
                // Remove the certificate authorities and the proxy of the host's network, which
                // must not be copied.
                let withdrawn = from.withdraw_site().await;
                withdrawn.map_err(|e| BuildFailure::agent("remove the host's certificates", e))?;
                // Patterns are expanded in the source stage, so that only matching files are
                // transferred.
                let found = copy::find_sources(&from, "/", &request.sources).await?;
                transfer::copy_between(&from, agent, &found, STAGING, &request).await?
            }
            Some(CopiedFiles::Inline(files)) => {
                let sources: Vec<String> = files.iter().map(|(name, _)| name.clone()).collect();
                let filled = files
                    .into_iter()
                    .map(|(name, content)| Ok::<_, String>((name, at.config.expand(&content)?)));
                let files = filled
                    .collect::<Result<Vec<_>, _>>()
                    .map_err(BuildFailure::new)?;
                transfer::write_inline(agent, &files, STAGING, &request).await?;
                copy::find_sources(agent, STAGING, &sources).await?
            }
            // Not reachable: `copied_files` returns files for every `COPY` and `ADD`.
            None => return Ok(()),
        };
        // `ADD` unpacks archives at the destination. All other files are moved there.
        if request.unpack {
            transfer::unpack_archives(agent, &items, &request.to).await?;
        }
        let packed = |item: &copy::StagedFile| request.unpack && transfer::is_archive(item);
        let items: Vec<_> = items.into_iter().filter(|item| !packed(item)).collect();
        if !items.is_empty() {
            copy::move_into_place(agent, &items, &request.to).await?;
        }
        let cleared = agent.remove(STAGING, Some(ROOT_USER)).await;
        cleared.map_err(|e| BuildFailure::agent(&format!("clear {STAGING}"), e))
    }
}
