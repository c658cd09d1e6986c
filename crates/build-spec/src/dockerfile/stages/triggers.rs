//! `ONBUILD` instructions. A *trigger* is the instruction in the arguments of an `ONBUILD`. It runs
//! in each stage that is based on the stage or the image with the `ONBUILD`.

use crate::dockerfile::error::DockerfileError;
use crate::dockerfile::instructions::{self, Instruction, document};
use crate::dockerfile::stages::{StageParser, steps};
use crate::dockerfile::{DockerfileOptions, words};
use crate::spec::{BuildStep, CopySource, RunMount, StageBase, StepAction};

/// Maximum number of triggers of one stage or image.
const MAX_TRIGGERS: usize = 100;

impl StageParser<'_> {
    /// Parses an `ONBUILD`. The trigger is stored as a text, because its variables and its sources
    /// depend on the stage that runs it.
    pub(super) fn on_build(&mut self, line: &Instruction) -> Result<StepAction, DockerfileError> {
        let trigger = trigger(line, &line.arguments)?;
        if matches!(trigger.keyword.as_str(), "FROM" | "ONBUILD" | "MAINTAINER") {
            return Err(line.error(format!("{} cannot be a trigger", trigger.keyword)));
        }
        if !steps::is_known(&trigger.keyword) {
            return Err(line.error(format!("'{}' is not an instruction", trigger.keyword)));
        }
        let words = words::split_leniently(&trigger.arguments, self.escape);
        if words.iter().any(|word| document(word).is_some()) {
            return Err(line.error("here-documents are not supported in triggers"));
        }
        if let Some(current) = &mut self.current {
            if current.triggers.len() >= MAX_TRIGGERS {
                return Err(line.error(format!("at most {MAX_TRIGGERS} triggers are supported")));
            }
            current.triggers.push(trigger);
        }
        Ok(StepAction::OnBuild(line.arguments.clone()))
    }

    /// Runs the triggers of the stage `number` in the current stage.
    pub(super) fn run_triggers(&mut self, number: usize) -> Result<(), DockerfileError> {
        for trigger in self.triggers.get(&number).cloned().unwrap_or_default() {
            match trigger.keyword.as_str() {
                "ARG" => self.arg(&trigger)?,
                _ => self.step(&trigger)?,
            }
        }
        Ok(())
    }
}

/// Returns the instruction in the arguments of an `ONBUILD`.
fn trigger(line: &Instruction, arguments: &str) -> Result<Instruction, DockerfileError> {
    let (keyword, rest) = arguments
        .split_once(char::is_whitespace)
        .unwrap_or((arguments, ""));
    if keyword.is_empty() {
        return Err(line.error("needs an instruction"));
    }
    Ok(Instruction {
        number: line.number,
        keyword: keyword.to_ascii_uppercase(),
        arguments: rest.trim().to_owned(),
        documents: Vec::new(),
    })
}

/// Parses the triggers of an image or template, which its configuration contains.
///
/// # Errors
/// The error is a message for the author of the build: a trigger is invalid, or needs files or
/// secrets that the author did not intend for it.
pub fn parse_triggers(triggers: &[String]) -> Result<Vec<BuildStep>, String> {
    if triggers.len() > MAX_TRIGGERS {
        return Err(format!("the base has more than {MAX_TRIGGERS} triggers"));
    }
    let mut steps = Vec::new();
    for text in triggers {
        let invalid = |problem: String| format!("ONBUILD {}: {problem}", printable(text));
        // A line break would begin another instruction.
        if text.contains(['\n', '\r']) {
            return Err(invalid("the trigger has several lines".to_owned()));
        }
        let file = instructions::read(&format!("FROM scratch\n{text}\n"));
        let options = DockerfileOptions::default();
        let parsed = file.and_then(|file| {
            let mut parser = StageParser::new(&options, file.escape);
            for line in &file.lines {
                parser.instruction(line)?;
            }
            parser.finish()
        });
        let (mut stages, _) = parsed.map_err(|e| invalid(e.problem))?;
        // An image in `COPY --from` or another `FROM` would be a stage of its own.
        let stage = match stages.pop() {
            Some(stage) if stages.is_empty() && stage.from == StageBase::Scratch => stage,
            _ => return Err(invalid("triggers cannot use images or stages".to_owned())),
        };
        for mut step in stage.steps {
            if let Some(problem) = unsupported(&step.action) {
                return Err(invalid(problem.to_owned()));
            }
            step.text = format!("ONBUILD {text}");
            step.line = None;
            steps.push(step);
        }
    }
    Ok(steps)
}

/// Returns the reason why the trigger of an image cannot run.
fn unsupported(action: &StepAction) -> Option<&'static str> {
    let context = "the trigger needs files of the build context: write the instruction in this \
                   Dockerfile";
    match action {
        StepAction::Copy(copy) if matches!(copy.from, CopySource::Files(_)) => Some(context),
        StepAction::Run { mounts, .. } => mounts.iter().find_map(|mount| match mount {
            RunMount::Bind { .. } => Some(context),
            RunMount::Secret { .. } => Some("triggers of a base cannot use secrets of this build"),
            RunMount::Ssh { .. } => Some("triggers of a base cannot use SSH agents of this build"),
            _ => None,
        }),
        StepAction::OnBuild(_) => Some("a trigger cannot define a trigger"),
        _ => None,
    }
}

fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(120).collect()
}
