//! Dockerfiles: what they say as a [`BuildSpec`].
//!
//! * `lines`: the file as instructions, continuations and here-documents put together.
//! * `words`: an instruction's words, quotes and escapes.
//! * `stages`: `FROM`, `ARG`, and which stage is meant; `steps`: everything within a stage; `copy`, `run`: the two that have much to say.

mod copy;
mod error;
mod flags;
mod instructions;
mod run;
mod stages;
mod steps;
mod words;

pub use error::{DockerfileError, DockerfileWarning};

use crate::spec::BuildSpec;
use jiffy_engine::Startup;
use std::collections::BTreeMap;

/// What a file is read with.
#[derive(Debug, Clone, Default)]
pub struct DockerfileOptions {
    /// `--build-arg`: values for `ARG`.
    pub build_args: BTreeMap<String, String>,
    /// `--target`: the stage that becomes the template, by name or number; the last unless said.
    pub target: Option<String>,
}

/// A file that was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParsedDockerfile {
    /// What is to be built. Files of the context have no name yet: [`crate::context::prepare`] gives them theirs.
    pub spec: BuildSpec,
    /// What is accepted and does not do what it does elsewhere.
    pub warnings: Vec<DockerfileWarning>,
}

/// Reads a Dockerfile. Stages that are not needed are in the result, too.
pub fn parse(text: &str, options: &DockerfileOptions) -> Result<ParsedDockerfile, DockerfileError> {
    let file = instructions::read(text)?;
    let mut stages = stages::StageParser::new(options, file.escape);
    for line in &file.lines {
        stages.instruction(line)?;
    }
    let (stages, warnings) = stages.finish()?;
    Ok(ParsedDockerfile {
        spec: BuildSpec {
            start_image_command: false,
            stages,
            startup: Startup::default(),
            force: false,
        },
        warnings,
    })
}
