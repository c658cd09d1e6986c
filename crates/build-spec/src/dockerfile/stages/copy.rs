//! `COPY` and `ADD` instructions.

use super::steps::json;
use crate::dockerfile::error::DockerfileError;
use crate::dockerfile::flags;
use crate::dockerfile::instructions::{HereDocument, Instruction, document};
use crate::dockerfile::stages::StageParser;
use crate::expand::escape;
use crate::spec::{CopyAction, CopySource, GitSource, StepAction, UrlSource};

/// Flags of the instruction.
#[derive(Default)]
struct CopyFlags {
    from: Option<String>,
    owner: Option<String>,
    mode: Option<String>,
    checksum: Option<String>,
    keep_git_dir: bool,
}

impl StageParser<'_> {
    /// Parses a `COPY` or `ADD`.
    pub(in crate::dockerfile) fn copy(
        &mut self,
        line: &Instruction,
    ) -> Result<(), DockerfileError> {
        let add = line.keyword == "ADD";
        let (flags, rest) = flags::split(&line.arguments);
        let mut how = CopyFlags::default();
        for flag in &flags {
            match flag.name.as_str() {
                "from" if !add => how.from = Some(flag.value(line)?.to_owned()),
                "chown" => how.owner = Some(self.word(line, flag.value(line)?)?),
                "chmod" => how.mode = Some(self.mode(line, flag.value(line)?)?),
                // `--link` affects only the storage of layers and not the files.
                "link" => {}
                "exclude" => return Err(flag.unsupported(line, ": use .dockerignore")),
                "parents" => {
                    return Err(flag.unsupported(line, ": COPY each directory separately"));
                }
                "checksum" if add => how.checksum = Some(self.word(line, flag.value(line)?)?),
                "keep-git-dir" if add => match flag.value.as_deref() {
                    None | Some("true" | "1") => how.keep_git_dir = true,
                    Some("false" | "0") => {}
                    Some(_) => {
                        return Err(line.error("--keep-git-dir must be `true` or `false`"));
                    }
                },
                "unpack" => {
                    return Err(flag.unsupported(
                        line,
                        ": archives of the context are always unpacked, and downloaded ones never; \
                         unpack the file with RUN",
                    ));
                }
                _ => {
                    return Err(
                        flag.unsupported(line, ": only --from, --chown and --chmod are supported")
                    );
                }
            }
        }
        // Here-documents are recognized before quotes are removed, since quotes around a delimiter
        // disable the expansion of variables.
        let mut words = match json(rest) {
            // Words of a JSON array have no quotes, but may contain variables.
            Some(words) => words,
            None => {
                let words = rest.split_whitespace().map(|word| match document(word) {
                    Some(_) => Ok(word.to_owned()),
                    None => self.word(line, word),
                });
                words.collect::<Result<Vec<_>, _>>()?
            }
        };
        let to = match words.pop() {
            Some(to) if !words.is_empty() && !to.is_empty() && document(&to).is_none() => to,
            _ => {
                return Err(line.error(format!("must be `{} source… destination`", line.keyword)));
            }
        };
        let (documents, sources): (Vec<_>, Vec<_>) =
            words.into_iter().partition(|word| document(word).is_some());
        if !documents.is_empty() {
            self.inline(line, &how, documents.len(), &to)?;
        }
        if sources.is_empty() {
            return Ok(());
        }
        let sources = if add {
            self.remote(line, &how, sources, &to)?
        } else {
            sources
        };
        if sources.is_empty() {
            return Ok(());
        }
        if how.checksum.is_some() || how.keep_git_dir {
            return Err(line.error(format!(
                "--checksum and --keep-git-dir require a remote source, which '{}' is not",
                sources[0]
            )));
        }
        let from = match &how.from {
            Some(name) => CopySource::Stage(self.copy_source(line, name)?),
            // `context::prepare` sets the name of the archive.
            None => CopySource::Files(String::new()),
        };
        let copy = CopyAction {
            from,
            sources: sources.iter().map(|s| relative(s)).collect(),
            to,
            owner: how.owner,
            mode: how.mode,
            unpack: add,
        };
        self.push(line, StepAction::Copy(copy));
        Ok(())
    }

    /// Adds the remote sources of an `ADD`, one step each. Returns the other sources.
    fn remote(
        &mut self,
        line: &Instruction,
        how: &CopyFlags,
        sources: Vec<String>,
        to: &str,
    ) -> Result<Vec<String>, DockerfileError> {
        let count = sources.len();
        let (remote, local): (Vec<_>, Vec<_>) = sources.into_iter().partition(|s| is_remote(s));
        // Each remote source becomes a step of its own, so the builder cannot check that the
        // destination of all of them is a directory.
        if !remote.is_empty() && count > 1 && !to.ends_with('/') {
            return Err(line.error(format!(
                "the destination of several sources must be a directory: write `{to}/`"
            )));
        }
        if how.checksum.is_some() && count > 1 {
            return Err(line.error("--checksum requires exactly one source"));
        }
        for url in remote {
            let (from, mode) = if is_git(&url) {
                let git = GitSource {
                    url,
                    commit: how
                        .checksum
                        .as_deref()
                        .map(|c| commit(line, c))
                        .transpose()?,
                    keep_git_dir: how.keep_git_dir,
                };
                (CopySource::Git(git), None)
            } else if !url.starts_with("https://") && !url.starts_with("http://") {
                return Err(line.error(format!(
                    "'{url}': only https URLs, and Git repositories with a URL such as \
                     https://host/name.git, are supported"
                )));
            } else if how.keep_git_dir {
                return Err(line.error(format!(
                    "--keep-git-dir: '{url}' is not a Git repository, whose URL ends with .git"
                )));
            } else {
                let sha256 = how.checksum.as_deref().map(|c| sha256(line, c));
                let sha256 = sha256.transpose()?;
                // As in Docker, a downloaded file is accessible only for its owner.
                (
                    CopySource::Url(UrlSource { url, sha256 }),
                    Some("600".to_owned()),
                )
            };
            let copy = CopyAction {
                from,
                // The builder determines the name from the expanded URL.
                sources: Vec::new(),
                to: to.to_owned(),
                owner: how.owner.clone(),
                mode: how.mode.clone().or(mode),
                unpack: false,
            };
            self.push(line, StepAction::Copy(copy));
        }
        Ok(local)
    }

    /// Parses the value of `--chmod`: one to four octal digits, or a word with variables.
    fn mode(&self, line: &Instruction, value: &str) -> Result<String, DockerfileError> {
        let mode = self.word(line, value)?;
        let octal = mode.len() <= 4 && mode.bytes().all(|b| (b'0'..=b'7').contains(&b));
        if mode.contains('$') || octal && !mode.is_empty() {
            Ok(mode)
        } else {
            Err(line.error(format!(
                "--chmod={value}: use octal digits, as in --chmod=755"
            )))
        }
    }

    /// Adds the here-documents of an instruction as inline files.
    fn inline(
        &mut self,
        line: &Instruction,
        how: &CopyFlags,
        count: usize,
        to: &str,
    ) -> Result<(), DockerfileError> {
        if how.from.is_some() {
            return Err(line.error("a here-document cannot be combined with --from"));
        }
        if count != line.documents.len() {
            return Err(line.error("the destination cannot be a here-document"));
        }
        let name = |document: &HereDocument| document.name.clone();
        let copy = CopyAction {
            from: CopySource::Inline(
                line.documents
                    .iter()
                    .map(|d| (name(d), content(d)))
                    .collect(),
            ),
            sources: line.documents.iter().map(name).collect(),
            to: to.to_owned(),
            owner: how.owner.clone(),
            mode: how.mode.clone(),
            unpack: false,
        };
        self.push(line, StepAction::Copy(copy));
        Ok(())
    }
}

/// Returns the content of a here-document. Variables are expanded only if its delimiter is not
/// quoted.
fn content(document: &HereDocument) -> String {
    if document.expand {
        document.content.clone()
    } else {
        escape(&document.content)
    }
}

/// Returns the path relative to the root of its origin.
pub(super) fn relative(source: &str) -> String {
    let relative = source.trim_start_matches('/');
    let relative = relative.strip_prefix("./").unwrap_or(relative);
    if relative.is_empty() {
        // "." selects the whole root of the origin.
        ".".to_owned()
    } else {
        relative.to_owned()
    }
}

fn is_remote(source: &str) -> bool {
    let schemes = ["http://", "https://", "ftp://", "git://", "ssh://"];
    schemes.iter().any(|scheme| source.starts_with(scheme)) || source.starts_with("git@")
}

/// Returns whether a remote source is a Git repository that a build can clone: an `http` or `https`
/// URL whose path ends with `.git`.
fn is_git(url: &str) -> bool {
    let path = url.split(['#', '?']).next().unwrap_or_default();
    let is_http = url.starts_with("https://") || url.starts_with("http://");
    is_http && path.ends_with(".git")
}

/// Checks the `--checksum` of a file. Returns its hexadecimal digits.
fn sha256(line: &Instruction, checksum: &str) -> Result<String, DockerfileError> {
    let digits = checksum.strip_prefix("sha256:").filter(|digits| {
        digits.contains('$') || digits.len() == 64 && digits.bytes().all(|b| b.is_ascii_hexdigit())
    });
    // A variable may contain the whole checksum, which the builder checks.
    let digits = digits.or_else(|| checksum.starts_with('$').then_some(checksum));
    digits.map(str::to_owned).ok_or_else(|| {
        line.error(format!(
            "--checksum={checksum}: use sha256: and 64 hexadecimal digits"
        ))
    })
}

/// Checks the `--checksum` of a Git repository, which is a commit.
fn commit(line: &Instruction, checksum: &str) -> Result<String, DockerfileError> {
    let is_commit = checksum.len() == 40 && checksum.bytes().all(|b| b.is_ascii_hexdigit());
    if is_commit || checksum.contains('$') {
        Ok(checksum.to_owned())
    } else {
        Err(line.error(format!(
            "--checksum={checksum}: use the 40 hexadecimal digits of a commit"
        )))
    }
}
