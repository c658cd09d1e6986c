//! `COPY` and `ADD` steps of a build: determines the source of the files, and transfers the files
//! into the stage's sandbox.
//!
//! The *key* of a step is a hash of everything that determines its result. Equal steps of later
//! builds reuse its snapshot. A *stage* is a part of a build that starts with a base image (`FROM`)
//! and executes steps.

use super::super::copy::{self, CopyRequest, STAGING, StagedFile};
use super::super::failure::BuildFailure;
use super::super::stage_config::StageConfig;
use super::super::transfer;
use super::BuildJob;
use super::remote_files::{RemoteFile, RepositoryCommit};
use super::stage::StageState;
use jiffy_agent_client::AgentClient;
use jiffy_build_spec::spec::{BuildStep, CopyAction, CopySource, RunMount, StepAction};

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
    /// A file of a web server.
    Remote(RemoteFile),
    /// Files of a Git repository.
    Repository(RepositoryCommit),
}

impl CopiedFiles {
    /// Returns the part of the step's key that identifies the files.
    pub(super) fn key(&self) -> String {
        match self {
            Self::Upload { sum, .. } => sum.clone(),
            Self::Stage { key, .. } => key.clone(),
            // The key of the step already covers the contents.
            Self::Inline(_) => String::new(),
            Self::Remote(file) => file.key(),
            Self::Repository(commit) => commit.key(),
        }
    }
}

impl BuildJob {
    /// Finds the files that a step copies or mounts, in the order of the step.
    pub(super) async fn copied_files(
        &self,
        step: &BuildStep,
        config: &StageConfig,
        before: &[Option<StageState>],
    ) -> Result<Vec<CopiedFiles>, BuildFailure> {
        let mut files = Vec::new();
        match &step.action {
            StepAction::Copy(copy) => {
                files.push(self.files_of(&copy.from, config, before).await?);
            }
            StepAction::Run { mounts, .. } => {
                for from in mounts.iter().filter_map(RunMount::origin) {
                    if !matches!(from, CopySource::Files(_) | CopySource::Stage(_)) {
                        return Err(BuildFailure::new(
                            "only files of the context and of stages can be mounted",
                        ));
                    }
                    files.push(self.files_of(from, config, before).await?);
                }
            }
            _ => {}
        }
        Ok(files)
    }

    async fn files_of(
        &self,
        from: &CopySource,
        config: &StageConfig,
        before: &[Option<StageState>],
    ) -> Result<CopiedFiles, BuildFailure> {
        Ok(match from {
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
            CopySource::Url(source) => CopiedFiles::Remote(self.remote_file(source, config).await?),
            CopySource::Git(source) => {
                CopiedFiles::Repository(self.repository_commit(source, config).await?)
            }
        })
    }

    /// Runs a `COPY` or `ADD`. `before` contains the earlier stages; the sandbox of a source stage
    /// is created if none is running.
    pub(super) async fn run_copy(
        &self,
        agent: &AgentClient,
        at: &StageState,
        copy: &CopyAction,
        files: Vec<CopiedFiles>,
        before: &mut [Option<StageState>],
    ) -> Result<(), BuildFailure> {
        let request = CopyRequest::new(copy, &at.config).map_err(BuildFailure::new)?;
        // An earlier attempt or a program of the image may have left files.
        copy::clear_staging(agent).await?;
        // `files` has one element, because a `COPY` or `ADD` has one source.
        let mut items = Vec::new();
        for files in files {
            items = self
                .stage_files(agent, at, files, &request, STAGING, before)
                .await?;
        }
        // `ADD` unpacks archives at the destination. All other files are moved there.
        if request.unpack {
            transfer::unpack_archives(agent, &items, &request.to).await?;
        }
        let packed = |item: &StagedFile| request.unpack && transfer::is_archive(item);
        let items: Vec<_> = items.into_iter().filter(|item| !packed(item)).collect();
        if !items.is_empty() {
            copy::move_into_place(agent, &items, &request.to).await?;
        }
        copy::clear_staging(agent).await
    }

    /// Transfers files into the directory `place` of a stage's sandbox.
    pub(super) async fn stage_files(
        &self,
        agent: &AgentClient,
        at: &StageState,
        files: CopiedFiles,
        request: &CopyRequest,
        place: &str,
        before: &mut [Option<StageState>],
    ) -> Result<Vec<StagedFile>, BuildFailure> {
        match files {
            CopiedFiles::Upload { path, .. } => {
                transfer::unpack_upload(agent, &path, place, request).await?;
                copy::find_sources(agent, place, &request.sources).await
            }
            CopiedFiles::Stage { number, .. } => {
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
                transfer::copy_between(&from, agent, &found, place, request).await
            }
            CopiedFiles::Inline(files) => {
                let sources: Vec<String> = files.iter().map(|(name, _)| name.clone()).collect();
                let filled = files
                    .into_iter()
                    .map(|(name, content)| Ok::<_, String>((name, at.config.expand(&content)?)));
                let files = filled
                    .collect::<Result<Vec<_>, _>>()
                    .map_err(BuildFailure::new)?;
                transfer::write_inline(agent, &files, place, request).await?;
                copy::find_sources(agent, place, &sources).await
            }
            CopiedFiles::Remote(file) => {
                let name = file.name_for(&request.to)?.to_owned();
                let content = self.download(file).await?;
                transfer::write_file(agent, content, &name, place, request).await?;
                Ok(vec![StagedFile {
                    path: format!("{place}/{name}"),
                    name,
                    directory: false,
                }])
            }
            CopiedFiles::Repository(commit) => {
                self.copy_repository(agent, &commit, place, request).await
            }
        }
    }
}

/// Returns the stages whose files a step copies or mounts.
pub(super) fn sources_of(step: &BuildStep) -> Vec<usize> {
    let stage = |from: &CopySource| match from {
        CopySource::Stage(n) => Some(*n),
        _ => None,
    };
    match &step.action {
        StepAction::Copy(copy) => stage(&copy.from).into_iter().collect(),
        StepAction::Run { mounts, .. } => {
            let origins = mounts.iter().filter_map(RunMount::origin);
            origins.filter_map(stage).collect()
        }
        _ => Vec::new(),
    }
}
