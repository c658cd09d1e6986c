//! `RUN` instructions.

use crate::dockerfile::error::DockerfileError;
use crate::dockerfile::flags::{self, Flag};
use crate::dockerfile::instructions::{Instruction, document};
use crate::dockerfile::stages::StageParser;
use crate::spec::{RunMount, StepAction, StepCommand};

/// Script that executes its first argument, a here-document with an interpreter line, as a program.
const RUN_SCRIPT: &str = r#"f=$(mktemp) || exit 1; trap 'rm -f "$f"' EXIT; printf %s "$1" >"$f" && chmod 700 "$f" && "$f""#;

impl StageParser<'_> {
    /// Parses a `RUN`.
    pub(in crate::dockerfile) fn run(&mut self, line: &Instruction) -> Result<(), DockerfileError> {
        let (flags, rest) = flags::split(&line.arguments);
        let mut mounts = Vec::new();
        for flag in &flags {
            self.run_flag(line, flag, &mut mounts)?;
        }
        if rest.is_empty() {
            return Err(line.error("needs a command"));
        }
        let command = match self.maybe_json(line, rest) {
            Some(words) if words.is_empty() => return Err(line.error("needs a command")),
            Some(words) => StepCommand::Exec(words),
            None => with_documents(line, rest),
        };
        let action = StepAction::Run {
            command,
            user: None,
            mounts,
        };
        self.push(line, action);
        Ok(())
    }

    /// Handles a flag of `RUN`. Flags that this parser does not support are errors.
    fn run_flag(
        &mut self,
        line: &Instruction,
        flag: &Flag,
        mounts: &mut Vec<RunMount>,
    ) -> Result<(), DockerfileError> {
        match flag.name.as_str() {
            "mount" => self.mount(line, flag.value(line)?, mounts),
            "network" if flag.value(line)? == "default" => Ok(()),
            "network" => {
                Err(flag.unsupported(line, ": commands of a build use the network of its sandbox"))
            }
            "security" => Err(flag.unsupported(
                line,
                ": commands run in a separate virtual machine, as \
                root unless USER specifies another user",
            )),
            _ => Err(flag.unsupported(line, "; put -- before a command that begins with a dash")),
        }
    }
}

/// Returns the command of a line with here-documents. If a here-document is the only word of the
/// line, its content is the script. Otherwise the shell receives the line and its documents, as in
/// `RUN <<EOF python3`.
fn with_documents(line: &Instruction, rest: &str) -> StepCommand {
    // The document is the script. An interpreter line needs a file, since a shell cannot execute it
    // otherwise.
    if let ([only], Some(_)) = (&line.documents[..], document(rest)) {
        let script = &only.content;
        return if script.starts_with("#!") {
            StepCommand::Exec(
                ["/bin/sh", "-c", RUN_SCRIPT, "-", script]
                    .map(str::to_owned)
                    .to_vec(),
            )
        } else {
            StepCommand::Line(script.clone())
        };
    }
    // The documents are appended in the syntax of the shell.
    let mut whole = rest.to_owned();
    for document in &line.documents {
        whole.push('\n');
        whole.push_str(&document.content);
        whole.push_str(&document.name);
    }
    if !line.documents.is_empty() {
        whole.push('\n');
    }
    StepCommand::Line(whole)
}
