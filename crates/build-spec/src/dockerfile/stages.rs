//! Stages of a Dockerfile: `FROM`, `ARG` and references between stages. The submodules parse the
//! other instructions.

mod copy;
mod mounts;
mod run;
mod steps;
mod triggers;

pub use triggers::parse_triggers;

use super::error::{DockerfileError, DockerfileWarning};
use super::instructions::Instruction;
use super::{DockerfileOptions, flags, words};
use crate::expand::expand;
use crate::spec::{BuildStage, BuildStep, ImageSource, StageBase, StepAction};
use std::collections::{BTreeMap, BTreeSet};

/// Maximum number of stages.
const MAX_STAGES: usize = 1000;
/// Build arguments that are available without `ARG`.
const PROXY_ARGUMENTS: [&str; 10] = [
    "HTTP_PROXY",
    "http_proxy",
    "HTTPS_PROXY",
    "https_proxy",
    "FTP_PROXY",
    "ftp_proxy",
    "NO_PROXY",
    "no_proxy",
    "ALL_PROXY",
    "all_proxy",
];
/// Predefined build arguments of the target platform and of the build platform, which is the same.
const PLATFORM_ARGUMENTS: [(&str, &str); 8] = [
    ("TARGETPLATFORM", "linux/amd64"),
    ("TARGETOS", "linux"),
    ("TARGETARCH", "amd64"),
    ("TARGETVARIANT", ""),
    ("BUILDPLATFORM", "linux/amd64"),
    ("BUILDOS", "linux"),
    ("BUILDARCH", "amd64"),
    ("BUILDVARIANT", ""),
];

/// Parser of a Dockerfile's stages.
pub(super) struct StageParser<'o> {
    options: &'o DockerfileOptions,
    pub(super) escape: char,
    /// `ARG`s before the first `FROM`.
    global: BTreeMap<String, String>,
    /// Completed stages, including stages that were added for images in `COPY --from`.
    finished: Vec<BuildStage>,
    /// Stages that the file declares: name, and index in `finished`.
    named_stages: Vec<(Option<String>, usize)>,
    /// Images in `COPY --from`, with the indexes of the stages that were added for them.
    images: BTreeMap<String, usize>,
    /// `ONBUILD` instructions by the index of their stage in `finished`.
    triggers: BTreeMap<usize, Vec<Instruction>>,
    pub(super) current: Option<CurrentStage>,
    pub(super) warnings: Vec<DockerfileWarning>,
    /// Names of all declared `ARG`s.
    declared_args: BTreeSet<String>,
}

/// Stage that is being parsed.
pub(super) struct CurrentStage {
    name: Option<String>,
    from: StageBase,
    pub(super) steps: Vec<BuildStep>,
    /// Shell for command lines.
    pub(super) shell: Vec<String>,
    /// `ONBUILD` instructions.
    triggers: Vec<Instruction>,
}

impl<'o> StageParser<'o> {
    pub(super) fn new(options: &'o DockerfileOptions, escape: char) -> Self {
        Self {
            options,
            escape,
            global: BTreeMap::new(),
            finished: Vec::new(),
            named_stages: Vec::new(),
            images: BTreeMap::new(),
            triggers: BTreeMap::new(),
            current: None,
            warnings: Vec::new(),
            declared_args: BTreeSet::new(),
        }
    }

    /// Parses one instruction.
    pub(super) fn instruction(&mut self, line: &Instruction) -> Result<(), DockerfileError> {
        match line.keyword.as_str() {
            "FROM" => self.from(line),
            "ARG" => self.arg(line),
            _ if self.current.is_none() && steps::is_known(&line.keyword) => {
                Err(line.error("is not allowed before the first FROM, where only ARG is allowed"))
            }
            _ => self.step(line),
        }
    }

    /// Completes the last stage, and returns the stages up to the target.
    pub(super) fn finish(
        mut self,
    ) -> Result<(Vec<BuildStage>, Vec<DockerfileWarning>), DockerfileError> {
        self.close();
        let about_target = |problem| DockerfileError {
            line: 1,
            instruction: String::new(),
            problem,
        };
        if self.finished.is_empty() {
            return Err(about_target("the file has no FROM".to_owned()));
        }
        if let Some(target) = &self.options.target {
            // As in Docker, the target is a name or a number.
            let Some(last) = self.stage(target) else {
                let names = self
                    .named_stages
                    .iter()
                    .filter_map(|(name, _)| name.clone());
                let names = names.collect::<Vec<_>>().join(", ");
                return Err(about_target(format!(
                    "stage '{target}' does not exist: the file has {} stage(s); names: {}",
                    self.named_stages.len(),
                    if names.is_empty() { "none" } else { &names },
                )));
            };
            // Earlier stages remain, since the target may refer to them.
            self.finished.truncate(last + 1);
        }
        for name in self.options.build_args.keys() {
            // A misspelled name would otherwise have no effect without a message.
            if !self.declared_args.contains(name) && !PROXY_ARGUMENTS.contains(&name.as_str()) {
                self.warnings.push(DockerfileWarning {
                    line: None,
                    instruction: "ARG".to_owned(),
                    message: format!(
                        "the build argument '{name}' has no effect, since no ARG declares it"
                    ),
                });
            }
        }
        Ok((self.finished, self.warnings))
    }

    /// Adds a warning.
    pub(super) fn warn(&mut self, line: &Instruction, message: impl Into<String>) {
        self.warnings.push(DockerfileWarning {
            line: Some(line.number),
            instruction: line.keyword.clone(),
            message: message.into(),
        });
    }

    /// Appends a step to the current stage.
    pub(super) fn push(&mut self, line: &Instruction, action: StepAction) {
        if let Some(current) = &mut self.current {
            current.steps.push(BuildStep {
                text: line.text(),
                line: Some(line.number),
                force: false,
                action,
            });
        }
    }

    /// Returns the index of an earlier stage by its name or its number in the file.
    fn stage(&self, name: &str) -> Option<usize> {
        // As in Docker, a later stage with the same name hides an earlier one.
        let named = self
            .named_stages
            .iter()
            .rev()
            .find(|(known, _)| known.as_ref().is_some_and(|k| k.eq_ignore_ascii_case(name)));
        let numbered = || {
            name.parse()
                .ok()
                .and_then(|n: usize| self.named_stages.get(n))
        };
        named.or_else(numbered).map(|(_, number)| *number)
    }

    /// Returns the stage that `COPY --from` refers to. For an image, adds a stage before the
    /// current one.
    pub(super) fn copy_source(
        &mut self,
        line: &Instruction,
        name: &str,
    ) -> Result<usize, DockerfileError> {
        // `COPY --from` must be resolved now, but the values of variables depend on the base image.
        if name.contains('$') {
            return Err(line.error(format!(
                "--from={name}: variables are not supported here; declare a stage with `FROM {name} AS …` and use its name"
            )));
        }
        if let Some(number) = self.stage(name) {
            return Ok(number);
        }
        // The current stage is not in the list yet, so its own name would be taken for an image.
        let own = self.current.as_ref().and_then(|c| c.name.as_deref());
        if own.is_some_and(|own| own.eq_ignore_ascii_case(name)) {
            return Err(line.error(format!("--from={name} refers to the stage itself")));
        }
        if name.parse::<u32>().is_ok() {
            return Err(line.error(format!(
                "--from={name}: no earlier stage has this name or number"
            )));
        }
        if name == "scratch" {
            return Err(line.error("--from=scratch: the image is empty"));
        }
        if let Some(number) = self.images.get(name) {
            return Ok(*number);
        }
        self.check_stage_limit(line)?;
        let number = self.finished.len();
        // An image without steps. It is pulled only if the target depends on the copy.
        self.finished.push(BuildStage {
            name: None,
            from: StageBase::Image(ImageSource {
                reference: name.to_owned(),
                credentials: None,
                cloud: None,
                plain_http: false,
            }),
            steps: Vec::new(),
        });
        // Several copies from one image share its stage.
        self.images.insert(name.to_owned(), number);
        Ok(number)
    }

    fn check_stage_limit(&self, line: &Instruction) -> Result<(), DockerfileError> {
        if self.finished.len() < MAX_STAGES {
            Ok(())
        } else {
            Err(line.error(format!("the file has more than {MAX_STAGES} stages")))
        }
    }

    /// Completes the current stage.
    fn close(&mut self) {
        if let Some(current) = self.current.take() {
            self.triggers.insert(self.finished.len(), current.triggers);
            self.named_stages
                .push((current.name.clone(), self.finished.len()));
            self.finished.push(BuildStage {
                name: current.name,
                from: current.from,
                steps: current.steps,
            });
        }
    }

    /// Handles `FROM`: ends the current stage and starts the next one.
    fn from(&mut self, line: &Instruction) -> Result<(), DockerfileError> {
        self.close();
        self.check_stage_limit(line)?;
        let (flags, rest) = flags::split(&line.arguments);
        for flag in &flags {
            let "platform" = flag.name.as_str() else {
                return Err(flag.unsupported(line, ": only --platform is supported"));
            };
            let platform = self.expand_global(line, flag.value(line)?)?;
            if !matches!(platform.as_str(), "linux/amd64" | "linux/x86_64" | "linux") {
                return Err(line.error(format!(
                    "--platform={platform}: sandboxes run linux/amd64; remove the flag"
                )));
            }
        }
        let words: Vec<&str> = rest.split_whitespace().collect();
        let (image, name) = match &words[..] {
            [image] => (*image, None),
            [image, keyword, name] if keyword.eq_ignore_ascii_case("as") => (*image, Some(*name)),
            _ => return Err(line.error("must be `FROM image` or `FROM image AS name`")),
        };
        let name = name.map(|name| stage_name(line, name)).transpose()?;
        let base = self.expand_global(line, image)?;
        if base.is_empty() || base.contains(char::is_whitespace) {
            return Err(line.error(format!(
                "'{image}' expands to '{base}', which is not an image name: declare its ARG before \
                 the first FROM with a default, or pass a value for it"
            )));
        }
        let based_on = self.stage_named(&base);
        let from = match based_on {
            Some(number) => StageBase::Stage(number),
            None if base == "scratch" => StageBase::Scratch,
            None => StageBase::Name(base),
        };
        self.current = Some(CurrentStage {
            name,
            from,
            steps: Vec::new(),
            shell: vec!["/bin/sh".to_owned(), "-c".to_owned()],
            triggers: Vec::new(),
        });
        // Proxy arguments are available in each stage without an `ARG` instruction.
        for name in PROXY_ARGUMENTS {
            if let Some(value) = self.options.build_args.get(name) {
                let action = StepAction::Arg(name.to_owned(), crate::expand::escape(value));
                self.push(line, action);
                // The default text would be the text of the `FROM`.
                if let Some(step) = self.current.as_mut().and_then(|c| c.steps.last_mut()) {
                    step.text = format!("ARG {name}");
                }
            }
        }
        if let Some(number) = based_on {
            self.run_triggers(number)?;
        }
        Ok(())
    }

    /// Returns an earlier stage by its name only. In `FROM`, a number is the name of an image.
    fn stage_named(&self, name: &str) -> Option<usize> {
        let named = |(known, _): &&(Option<String>, usize)| {
            known.as_ref().is_some_and(|k| k.eq_ignore_ascii_case(name))
        };
        self.named_stages
            .iter()
            .rev()
            .find(named)
            .map(|(_, number)| *number)
    }

    /// Expands a word with the values of the `ARG`s before the first `FROM`.
    fn expand_global(&self, line: &Instruction, word: &str) -> Result<String, DockerfileError> {
        let word = words::unquote(word, self.escape).map_err(|e| line.error(e))?;
        expand(&word, |name| self.global_value(name)).map_err(|e| line.error(e.to_string()))
    }

    fn global_value(&self, name: &str) -> Option<String> {
        self.global.get(name).cloned().or_else(|| platform(name))
    }

    /// Handles `ARG`: declares build arguments, with the value of `--build-arg` or a default.
    fn arg(&mut self, line: &Instruction) -> Result<(), DockerfileError> {
        let words = words::split(&line.arguments, self.escape).map_err(|e| line.error(e))?;
        if words.is_empty() {
            return Err(line.error("must be `ARG NAME` or `ARG NAME=default`"));
        }
        for word in words {
            let (name, default) = match word.split_once('=') {
                Some((name, default)) => (name, Some(default)),
                None => (word.as_str(), None),
            };
            let name = words::unquote(name, self.escape).map_err(|e| line.error(e))?;
            if name.is_empty() || name.contains(['$', ' ', '\\']) {
                return Err(line.error(format!("'{word}' is not a valid name for an argument")));
            }
            let given = self.options.build_args.get(&name).cloned();
            self.declared_args.insert(name.clone());
            // In a stage, the value may contain variables of the stage, which the builder expands.
            // A value of `--build-arg` is literal and is therefore escaped.
            if self.current.is_some() {
                let value = match (given, default) {
                    (Some(given), _) => Some(crate::expand::escape(&given)),
                    (None, Some(default)) => {
                        Some(words::unquote(default, self.escape).map_err(|e| line.error(e))?)
                    }
                    // As in Docker, an `ARG` without a value takes the value of a global or
                    // predefined `ARG`.
                    (None, None) => self.global_value(&name).map(|v| crate::expand::escape(&v)),
                };
                // An `ARG` without a value remains unset.
                if let Some(value) = value {
                    self.push(line, StepAction::Arg(name, value));
                }
            } else {
                // Before the first `FROM`, only other global arguments can occur, so the value is
                // expanded now.
                let value = match (given, default) {
                    (Some(given), _) => Some(given),
                    (None, Some(default)) => Some(self.expand_global(line, default)?),
                    (None, None) => None,
                };
                self.global.extend(value.map(|value| (name, value)));
            }
        }
        Ok(())
    }
}

fn platform(name: &str) -> Option<String> {
    let found = PLATFORM_ARGUMENTS.iter().find(|(known, _)| *known == name);
    found.map(|(_, value)| (*value).to_owned())
}

fn stage_name(line: &Instruction, name: &str) -> Result<String, DockerfileError> {
    // Names of stages are case-insensitive.
    let lower = name.to_ascii_lowercase();
    let starts_with_letter = lower.starts_with(|c: char| c.is_ascii_lowercase());
    let is_allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_.".contains(c);
    if starts_with_letter && lower.chars().all(is_allowed) && lower != "scratch" {
        Ok(lower)
    } else {
        Err(line.error(format!(
            "'{name}' is not a valid name for a stage: use letters, digits, '-', '_' and '.', starting with a letter"
        )))
    }
}
