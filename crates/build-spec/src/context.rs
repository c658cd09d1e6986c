//! Build context: a directory with the files that a build copies, except the files that
//! `.dockerignore` excludes.

mod archive;
mod files;
mod ignore;
mod pattern;
mod variables;

pub use archive::{ContextArchive, archive_name};
pub use ignore::DockerIgnore;

use crate::dockerfile::{DockerfileWarning, ParsedDockerfile};
use crate::expand::{ExpandError, escape};
use crate::spec::{BuildSpec, CopySource, RunMount, StepAction};
use files::{ContextEntries, ContextFiles, SourceError};
use std::io;
use std::path::{Path, PathBuf};

/// A build with its files.
#[derive(Debug)]
pub struct PreparedBuild {
    /// Description of the build.
    pub spec: BuildSpec,
    /// Archives that [`CopySource::Files`] refers to, without duplicates.
    pub uploads: Vec<ContextArchive>,
    /// Warnings about instructions with a different effect than in Docker.
    pub warnings: Vec<DockerfileWarning>,
}

/// Error of a build context.
#[derive(Debug, thiserror::Error)]
pub enum ContextError {
    /// The source is outside of the context.
    #[error("line {line}: '{path}' is outside of the build's context {}: copy it there first, or \
        build from a directory above", context.display())]
    Outside {
        /// Line of the Dockerfile.
        line: u32,
        /// The source.
        path: String,
        /// The context.
        context: PathBuf,
    },
    /// The source does not exist.
    #[error("line {line}: '{path}' does not exist in the build context {}", context.display())]
    Missing {
        /// Line of the Dockerfile.
        line: u32,
        /// The source.
        path: String,
        /// The context.
        context: PathBuf,
    },
    /// `.dockerignore` excludes the source.
    #[error(
        "line {line}: '{path}' is excluded by .dockerignore: add an exception '!{path}' to that file"
    )]
    Ignored {
        /// Line of the Dockerfile.
        line: u32,
        /// The source.
        path: String,
    },
    /// The pattern is invalid.
    #[error("line {line}: '{path}' {problem}")]
    Pattern {
        /// Line of the Dockerfile.
        line: u32,
        /// The source.
        path: String,
        /// Problem with the pattern.
        problem: &'static str,
    },
    /// Only the image determines the value of the variable.
    #[error(
        "line {line}: the value of '{path}' depends on '{name}', which the image may set: define it \
         with ARG or ENV before this line"
    )]
    Variable {
        /// Line of the Dockerfile.
        line: u32,
        /// The source.
        path: String,
        /// The variable.
        name: String,
    },
    /// The word cannot be expanded.
    #[error("line {line}: {source}")]
    Expand {
        /// Line of the Dockerfile.
        line: u32,
        /// Cause.
        source: ExpandError,
    },
    /// The line of an ignore file is invalid.
    #[error("{}, line {line}: {problem}", path.display())]
    Ignore {
        /// The file.
        path: PathBuf,
        /// Line of the file.
        line: u32,
        /// Problem with the line.
        problem: String,
    },
    /// The file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// Writing an archive failed.
    #[error("cannot write the archive of files: {0}")]
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

/// Finds the files that a Dockerfile copies from the directory `context`, and sets the names of
/// their archives in its steps. `dockerfile` is the path of the Dockerfile, or `None` for standard
/// input. The ignore file next to the Dockerfile replaces the ignore file of the context.
pub fn prepare(
    parsed: ParsedDockerfile,
    context: &Path,
    dockerfile: Option<&Path>,
) -> Result<PreparedBuild, ContextError> {
    let ParsedDockerfile { mut spec, warnings } = parsed;
    let mut uploads: Vec<ContextArchive> = Vec::new();
    // Sources are expanded here, on the client, so their variables must be known before the build.
    let mut known = variables::KnownVariables::default();
    let mut files = None;
    for stage in &mut spec.stages {
        known.begin(&stage.from);
        for step in &mut stage.steps {
            // The parser sets the line of every step.
            let line = step.line.unwrap_or(0);
            known.apply(&step.action, line)?;
            for (from, sources) in context_files(&mut step.action) {
                // `files` is created at the first use: a Dockerfile that copies no files needs no
                // context.
                let files = match &mut files {
                    Some(files) => files,
                    none => {
                        let ignore = DockerIgnore::find(context, dockerfile)?;
                        none.insert(ContextFiles::new(context, ignore)?)
                    }
                };
                let mut entries = ContextEntries::new();
                for source in sources {
                    let path = known.expand(source, line)?;
                    files
                        .add(&path, &mut entries)
                        .map_err(|e| explain(e, line, &path, context))?;
                    // The builder expands sources again, so the result is escaped.
                    *source = escape(&path);
                }
                let upload = ContextArchive::new(entries)?;
                *from = CopySource::Files(upload.name.clone());
                // Steps that copy the same files share an archive.
                if uploads.iter().all(|known| known.name != upload.name) {
                    uploads.push(upload);
                }
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

/// Returns, for each use of the context by a step, the origin and the sources. The caller sets the
/// name of the archive in the origin.
fn context_files(action: &mut StepAction) -> Vec<(&mut CopySource, &mut [String])> {
    match action {
        StepAction::Copy(copy) if matches!(copy.from, CopySource::Files(_)) => {
            vec![(&mut copy.from, &mut copy.sources[..])]
        }
        StepAction::Run { mounts, .. } => mounts
            .iter_mut()
            .filter_map(|mount| match mount {
                RunMount::Bind { from, source, .. } if matches!(from, CopySource::Files(_)) => {
                    Some((from, std::slice::from_mut(source)))
                }
                _ => None,
            })
            .collect(),
        _ => Vec::new(),
    }
}

/// Returns the error about `path`, a source in `line` of the Dockerfile.
fn explain(error: SourceError, line: u32, path: &str, context: &Path) -> ContextError {
    let (path, context) = (path.to_owned(), context.to_path_buf());
    match error {
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
