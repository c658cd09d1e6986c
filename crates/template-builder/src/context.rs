//! The files that a build copies: a directory, less what `.dockerignore` leaves out.

mod archive;
mod files;
mod ignore;
mod pattern;
mod variables;

pub use archive::ContextArchive;
pub use ignore::DockerIgnore;

use crate::dockerfile::{DockerfileWarning, ParsedDockerfile};
use crate::expand::{ExpandError, escape};
use crate::spec::{BuildSpec, CopySource, StepAction};
use files::{ContextEntries, ContextFiles, SourceError};
use std::io;
use std::path::{Path, PathBuf};

/// A build with its files.
#[derive(Debug)]
pub struct PreparedBuild {
    /// What is to be built.
    pub spec: BuildSpec,
    /// What its [`CopySource::Files`] name, each once.
    pub uploads: Vec<ContextArchive>,
    /// What is accepted and does not do what it does elsewhere.
    pub warnings: Vec<DockerfileWarning>,
}

/// Why the files of a build are not found.
#[derive(Debug, thiserror::Error)]
pub enum ContextError {
    /// A source that leads out.
    #[error("line {line}: '{path}' is outside of the build's context {}: copy it there first, or build from a directory above", context.display())]
    Outside {
        /// Of the Dockerfile.
        line: u32,
        /// The source.
        path: String,
        /// The directory.
        context: PathBuf,
    },
    /// A source that is not there.
    #[error("line {line}: '{path}' is not in the build's context {}", context.display())]
    Missing {
        /// Of the Dockerfile.
        line: u32,
        /// The source.
        path: String,
        /// The directory.
        context: PathBuf,
    },
    /// A source that is there, and left out.
    #[error("line {line}: '{path}' is left out by .dockerignore: except it there with '!{path}'")]
    Ignored {
        /// Of the Dockerfile.
        line: u32,
        /// The source.
        path: String,
    },
    /// A source that makes no sense.
    #[error("line {line}: '{path}' {problem}")]
    Pattern {
        /// Of the Dockerfile.
        line: u32,
        /// The source.
        path: String,
        /// What is wrong.
        problem: &'static str,
    },
    /// A variable that only the image knows.
    #[error(
        "line {line}: what '{path}' means depends on '{name}', which the image may set: give it a value with ARG or ENV before"
    )]
    Variable {
        /// Of the Dockerfile.
        line: u32,
        /// The source.
        path: String,
        /// The variable.
        name: String,
    },
    /// A word that is no word.
    #[error("line {line}: {source}")]
    Expand {
        /// Of the Dockerfile.
        line: u32,
        /// What is wrong.
        source: ExpandError,
    },
    /// A rule that is none.
    #[error("{}, line {line}: {problem}", path.display())]
    Ignore {
        /// The file.
        path: PathBuf,
        /// Its line.
        line: u32,
        /// What is wrong.
        problem: String,
    },
    /// A file that cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's word.
        source: io::Error,
    },
    /// What the archive goes to failed.
    #[error("cannot send the files: {0}")]
    Send(io::Error),
}

impl ContextError {
    pub(crate) fn read(path: &Path, source: io::Error) -> Self {
        Self::Read {
            path: path.to_path_buf(),
            source,
        }
    }
}

/// Finds the files that a Dockerfile copies from the directory `context`, and names them in its steps. `dockerfile` is where the
/// file lies, for what it says itself is to be left out.
pub fn prepare(
    parsed: ParsedDockerfile,
    context: &Path,
    dockerfile: Option<&Path>,
) -> Result<PreparedBuild, ContextError> {
    let ParsedDockerfile { mut spec, warnings } = parsed;
    let mut uploads: Vec<ContextArchive> = Vec::new();
    let mut known = variables::KnownVariables::default();
    let mut files = None;
    for stage in &mut spec.stages {
        known.begin(&stage.from);
        for step in &mut stage.steps {
            let line = step.line.unwrap_or(0);
            known.learn(&step.action, line)?;
            let StepAction::Copy(copy) = &mut step.action else {
                continue;
            };
            if !matches!(copy.from, CopySource::Files(_)) {
                continue;
            }
            let files = match &mut files {
                Some(files) => files,
                none => {
                    let ignore = DockerIgnore::find(context, dockerfile)?;
                    none.insert(ContextFiles::new(context, ignore)?)
                }
            };
            let mut found = ContextEntries::new();
            for source in &mut copy.sources {
                let path = known.expand(source, line)?;
                files
                    .add(&path, &mut found)
                    .map_err(|e| explain(e, line, &path, context))?;
                *source = escape(&path);
            }
            let upload = ContextArchive::new(found)?;
            copy.from = CopySource::Files(upload.name.clone());
            if uploads.iter().all(|known| known.name != upload.name) {
                uploads.push(upload);
            }
        }
        known.end();
    }
    Ok(PreparedBuild {
        spec,
        uploads,
        warnings,
    })
}

fn explain(nothing: SourceError, line: u32, path: &str, context: &Path) -> ContextError {
    let (path, context) = (path.to_owned(), context.to_path_buf());
    match nothing {
        SourceError::Outside => ContextError::Outside {
            line,
            path,
            context,
        },
        SourceError::Missing => ContextError::Missing {
            line,
            path,
            context,
        },
        SourceError::Ignored => ContextError::Ignored { line, path },
        SourceError::Pattern(problem) => ContextError::Pattern {
            line,
            path,
            problem,
        },
        SourceError::Error(e) => e,
    }
}
