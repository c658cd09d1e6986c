//! Parser of Dockerfiles into a [`BuildSpec`].
//!
//! * `instructions`: splits the file into instructions, joins continued lines and extracts
//!   here-documents.
//! * `words`: splits instructions into words, with quotes and escapes.
//! * `stages`: handles `FROM`, `ARG` and references to stages.
//! * `stages::copy`, `stages::run`: handle `COPY`, `ADD` and `RUN`.
//! * `stages::mounts`: handles `--mount` of `RUN`.
//! * `stages::triggers`: handles `ONBUILD`, and the triggers of images.
//! * `stages::steps`: handles all other instructions in a stage.
//! * `flags`: splits flags such as `--from=NAME` from the arguments of an instruction.

mod error;
mod flags;
mod instructions;
mod stages;
mod words;

pub use error::{DockerfileError, DockerfileWarning};
pub use stages::parse_triggers;

use crate::spec::BuildSpec;
use jiffy_engine_api::{Startup, TemplateNetwork};
use std::collections::BTreeMap;

/// Options of the parser.
#[derive(Debug, Clone, Default)]
pub struct DockerfileOptions {
    /// `--build-arg`: values for `ARG`.
    pub build_args: BTreeMap<String, String>,
    /// `--target`: name or number of the stage that becomes the template. Defaults to the last
    /// stage.
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
    // The startup command and `force` are options of the client, and not part of a Dockerfile.
    let (stages, warnings) = stages.finish()?;
    Ok(ParsedDockerfile {
        spec: BuildSpec {
            start_image_command: false,
            stages,
            startup: Startup::default(),
            force: false,
            idle_timeout_s: None,
            network: TemplateNetwork::default(),
            verify_keys: Vec::new(),
            verify_identities: Vec::new(),
            verify_trust_root: None,
        },
        warnings,
    })
}
