//! Instructions in a stage (`ENV`, `WORKDIR`, `USER` and others), except `COPY`, `ADD` and `RUN`.

use crate::dockerfile::error::DockerfileError;
use crate::dockerfile::instructions::Instruction;
use crate::dockerfile::stages::StageParser;
use crate::dockerfile::words;
use crate::spec::StepAction;

/// Instructions that are accepted and ignored, with the text of their warning.
const IGNORED_INSTRUCTIONS: [(&str, &str); 4] = [
    (
        "HEALTHCHECK",
        "is ignored: use --ready to define when the template is ready",
    ),
    (
        "STOPSIGNAL",
        "is ignored: sandboxes are paused or terminated as a whole",
    ),
    (
        "VOLUME",
        "is ignored: each sandbox has its own disk; the directory is not created",
    ),
    ("MAINTAINER", "is ignored: use LABEL"),
];
/// Supported instructions, in the order in which an error lists them.
const INSTRUCTIONS: [&str; 14] = [
    "FROM",
    "ARG",
    "RUN",
    "COPY",
    "ADD",
    "ENV",
    "WORKDIR",
    "USER",
    "EXPOSE",
    "CMD",
    "ENTRYPOINT",
    "LABEL",
    "SHELL",
    "ONBUILD",
];

/// Returns whether an instruction exists.
pub(in crate::dockerfile) fn is_known(instruction: &str) -> bool {
    INSTRUCTIONS.contains(&instruction)
        || IGNORED_INSTRUCTIONS
            .iter()
            .any(|(name, _)| *name == instruction)
}

impl StageParser<'_> {
    /// Parses an instruction of a stage.
    pub(in crate::dockerfile) fn step(
        &mut self,
        line: &Instruction,
    ) -> Result<(), DockerfileError> {
        if let Some((_, message)) = IGNORED_INSTRUCTIONS
            .iter()
            .find(|(name, _)| *name == line.keyword)
        {
            self.warn(line, *message);
            return Ok(());
        }
        // An empty `CMD` is valid: it removes the command of the base image.
        if is_known(&line.keyword) && line.arguments.is_empty() && line.keyword != "CMD" {
            return Err(line.error("needs arguments"));
        }
        let action = match line.keyword.as_str() {
            "RUN" => return self.run(line),
            "COPY" | "ADD" => return self.copy(line),
            "ENV" => StepAction::Env(self.pairs(line)?),
            "LABEL" => StepAction::Label(self.pairs(line)?),
            "WORKDIR" => StepAction::Workdir(self.word(line, &line.arguments)?),
            "USER" => StepAction::User(self.word(line, &line.arguments)?),
            "EXPOSE" => StepAction::Expose(self.ports(line)?),
            "SHELL" => StepAction::Shell(self.shell(line)?),
            "ONBUILD" => self.on_build(line)?,
            "CMD" => StepAction::Cmd(self.command(line)),
            "ENTRYPOINT" => StepAction::Entrypoint(self.command(line)),
            _ => {
                return Err(line.error(format!(
                    "unknown instruction; known instructions are {}",
                    INSTRUCTIONS.join(", ")
                )));
            }
        };
        self.push(line, action);
        Ok(())
    }

    /// Removes the quotes of a word. Variables are not expanded.
    pub(in crate::dockerfile) fn word(
        &self,
        line: &Instruction,
        word: &str,
    ) -> Result<String, DockerfileError> {
        words::unquote(word, self.escape).map_err(|e| line.error(e))
    }

    /// Parses `NAME=value NAME=value`, or `NAME value` for a single pair.
    fn pairs(&self, line: &Instruction) -> Result<Vec<(String, String)>, DockerfileError> {
        let words = words::split(&line.arguments, self.escape).map_err(|e| line.error(e))?;
        // The old form, `ENV NAME value`. The value extends to the end of the line.
        if words.first().is_some_and(|first| !first.contains('=')) {
            let pair = line.arguments.split_once(char::is_whitespace);
            let (name, value) = pair.ok_or_else(|| {
                line.error(format!("'{}' has no value: use NAME=value", line.arguments))
            })?;
            return Ok(vec![(
                self.word(line, name)?,
                self.word(line, value.trim())?,
            )]);
        }
        let pair = |word: &String| match word.split_once('=') {
            Some((name, value)) if !name.is_empty() => {
                Ok((self.word(line, name)?, self.word(line, value)?))
            }
            _ => Err(line.error(format!(
                "'{word}' is not NAME=value: quote values that contain spaces"
            ))),
        };
        words.iter().map(pair).collect()
    }

    /// Parses the ports of `EXPOSE`.
    fn ports(&self, line: &Instruction) -> Result<Vec<String>, DockerfileError> {
        let port = |word: &str| {
            let port = self.word(line, word)?;
            let (numbers, protocol) = port.split_once('/').unwrap_or((&port, "tcp"));
            // The value is known only during the build, which checks it.
            if port.contains('$') {
                return Ok(port.clone());
            }
            let valid = numbers
                .split('-')
                .all(|n| n.parse::<u16>().is_ok_and(|n| n > 0));
            let known = ["tcp", "udp", "sctp"].contains(&protocol.to_ascii_lowercase().as_str());
            // A port or a range of ports.
            if valid && known && numbers.split('-').count() <= 2 {
                Ok(format!("{numbers}/{}", protocol.to_ascii_lowercase()))
            } else {
                Err(line.error(format!(
                    "'{word}' is not a port: use a form such as 8080, 8080/udp or 8000-8010"
                )))
            }
        };
        line.arguments.split_whitespace().map(port).collect()
    }

    /// Handles `SHELL`.
    fn shell(&mut self, line: &Instruction) -> Result<Vec<String>, DockerfileError> {
        let shell = json(&line.arguments)
            .filter(|shell| !shell.is_empty())
            .ok_or_else(|| {
                line.error(
                "must be a JSON array, as in SHELL [\"/bin/bash\", \"-o\", \"pipefail\", \"-c\"]",
            )
            })?;
        // Later instructions in shell form of this stage use the new shell.
        if let Some(current) = &mut self.current {
            current.shell.clone_from(&shell);
        }
        Ok(shell)
    }

    /// Returns the command of an instruction in exec form (a JSON array) or shell form.
    fn command(&mut self, line: &Instruction) -> Vec<String> {
        if let Some(words) = self.maybe_json(line, &line.arguments) {
            return words;
        }
        if line.arguments.is_empty() {
            return Vec::new();
        }
        let shell = self.current.as_ref().map(|c| c.shell.clone());
        // In shell form, the command is the last argument of the shell.
        let mut command = shell.unwrap_or_default();
        command.push(line.arguments.clone());
        command
    }

    /// Returns the words of a JSON array. Adds a warning for text that resembles a JSON array.
    pub(in crate::dockerfile) fn maybe_json(
        &mut self,
        line: &Instruction,
        text: &str,
    ) -> Option<Vec<String>> {
        let words = json(text);
        if words.is_none()
            && text.starts_with('[')
            && text.ends_with(']')
            // `[[` is a test of the shell.
            && !text.starts_with("[[")
            && text.contains('"')
        {
            self.warn(
                line,
                "is not a JSON array, so the shell runs it: use double quotes and commas",
            );
        }
        words
    }
}

/// Parses `["a", "b"]`.
pub(in crate::dockerfile) fn json(text: &str) -> Option<Vec<String>> {
    text.starts_with('[')
        .then(|| serde_json::from_str(text).ok())
        .flatten()
}
