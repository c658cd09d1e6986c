//! Parser of Dockerfiles into a [`BuildSpec`].
//!
//! * `instructions`: the file as instructions, with joined continuations and here-documents.
//! * `words`: words of an instruction, with quotes and escapes.
//! * `stages`: `FROM`, `ARG` and references to stages; `steps`: instructions inside a stage;
//!   `copy`, `run`: those two instructions.

mod error;
mod flags;
mod instructions;
mod stages;
mod words;

pub use error::{DockerfileError, DockerfileWarning};

use crate::spec::BuildSpec;
use jiffy_engine_api::Startup;
use std::collections::BTreeMap;

/// Options of the parser.
#[derive(Debug, Clone, Default)]
pub struct DockerfileOptions {
    /// `--build-arg`: values for `ARG`.
    pub build_args: BTreeMap<String, String>,
    /// `--target`: name or number of the stage that becomes the template; the last one by default.
    pub target: Option<String>,
}

/// A parsed Dockerfile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParsedDockerfile {
    /// Description of the build. [`crate::context::prepare`] sets the names of its archives.
    pub spec: BuildSpec,
    /// Warnings about instructions with a different effect than in Docker.
    pub warnings: Vec<DockerfileWarning>,
}

/// Parses a Dockerfile. The result includes stages that the target does not need.
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
