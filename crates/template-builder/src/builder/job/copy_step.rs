//! `COPY` and `ADD` steps: their files, and the way of these into the sandbox.

use super::super::copy::{self, ROOT, STAGING, Wanted};
use super::super::failure::Failure;
use super::super::transfer;
use super::Job;
use super::stage::Progressed;
use crate::spec::{Action, Copy, CopyFrom, Step};
use jiffy_agent_client::AgentClient;
use jiffy_engine::Engine;

/// Files of a step.
pub(super) enum Files {
    Upload {
        path: std::path::PathBuf,
        sum: String,
    },
    Stage {
        number: usize,
        key: String,
    },
    Inline(Vec<(String, String)>),
}

impl Files {
    /// What they are.
    pub(super) fn key(&self) -> &str {
        match self {
            Self::Upload { sum, .. } => sum,
            Self::Stage { key, .. } => key,
            Self::Inline(_) => "",
        }
    }
}

impl<E: Engine> Job<E> {
    /// What a step copies.
    pub(super) fn files(
        &self,
        step: &Step,
        before: &[Option<Progressed>],
    ) -> Result<Option<Files>, Failure> {
        let Action::Copy(copy) = &step.action else {
            return Ok(None);
        };
        Ok(Some(match &copy.from {
            CopyFrom::Files(name) => {
                let owner = self.template.owner.as_deref();
                let found = self.inner.uploads.find(owner, name);
                let found = found.map_err(|e| Failure::of(e.to_string()))?;
                let (path, sum) = found.ok_or_else(|| {
                    Failure::of("its files were not uploaded, or were removed since: build again")
                })?;
                Files::Upload { path, sum }
            }
            CopyFrom::Stage(n) => {
                let stage = before.get(*n).and_then(Option::as_ref);
                let stage = stage
                    .ok_or_else(|| Failure::of("it copies from a stage that is not before it"))?;
                Files::Stage {
                    number: *n,
                    key: stage.key.clone(),
                }
            }
            CopyFrom::Inline(files) => Files::Inline(files.clone()),
        }))
    }

    pub(super) async fn copy(
        &self,
        agent: &AgentClient,
        at: &Progressed,
        copy: &Copy,
        files: Option<Files>,
        before: &mut [Option<Progressed>],
    ) -> Result<(), Failure> {
        let wanted = Wanted::new(copy, &at.setting).map_err(Failure::of)?;
        let nothing_left = agent.remove(STAGING, Some(ROOT)).await;
        nothing_left.map_err(|e| Failure::agent(&format!("clear {STAGING}"), e))?;
        let items = match files {
            Some(Files::Upload { path, .. }) => {
                transfer::upload(agent, &path, STAGING, &wanted).await?;
                copy::matches(agent, STAGING, &wanted.sources).await?
            }
            Some(Files::Stage { number, .. }) => {
                let stage = before.get_mut(number).and_then(Option::as_mut);
                let stage = stage.ok_or_else(|| Failure::of("that stage is gone"))?;
                let from = self.agent(stage).await?;
                // Authorities of the network that is built in are not for what is copied.
                let withdrawn = from.withdraw_site().await;
                withdrawn.map_err(|e| Failure::agent("take out what is the host's", e))?;
                let found = copy::matches(&from, "/", &wanted.sources).await?;
                transfer::between(&from, agent, &found, STAGING, &wanted).await?
            }
            Some(Files::Inline(files)) => {
                let sources: Vec<String> = files.iter().map(|(name, _)| name.clone()).collect();
                let filled = files
                    .into_iter()
                    .map(|(name, content)| Ok::<_, String>((name, at.setting.expand(&content)?)));
                let files = filled.collect::<Result<Vec<_>, _>>().map_err(Failure::of)?;
                transfer::inline(agent, &files, STAGING, &wanted).await?;
                copy::matches(agent, STAGING, &sources).await?
            }
            None => return Ok(()),
        };
        if wanted.unpack {
            transfer::unpack(agent, &items, &wanted.to).await?;
        }
        let packed = |item: &copy::Item| wanted.unpack && transfer::is_archive(item);
        let items: Vec<_> = items.into_iter().filter(|item| !packed(item)).collect();
        if !items.is_empty() {
            copy::place(agent, &items, &wanted.to).await?;
        }
        let cleared = agent.remove(STAGING, Some(ROOT)).await;
        cleared.map_err(|e| Failure::agent(&format!("clear {STAGING}"), e))
    }
}
