//! `COPY` and `ADD` instructions.

use super::steps::json;
use crate::dockerfile::error::DockerfileError;
use crate::dockerfile::flags;
use crate::dockerfile::instructions::{HereDocument, Instruction, document};
use crate::dockerfile::stages::StageParser;
use crate::expand::escape;
use crate::spec::{CopyAction, CopySource, StepAction};

/// Flags of the instruction.
#[derive(Default)]
struct CopyFlags {
    from: Option<String>,
    owner: Option<String>,
    mode: Option<String>,
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
                "checksum" | "keep-git-dir" | "unpack" => {
                    return Err(flag.unsupported(
                        line,
                        ": use RUN with a command that downloads, verifies and unpacks the file",
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
        if add && let Some(url) = sources.iter().find(|s| is_remote(s)) {
            return Err(line.error(format!(
                "'{url}' is a remote source, which is not supported: use RUN with curl, wget or git"
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
fn relative(source: &str) -> String {
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
