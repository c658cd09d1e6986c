//! What is known of a stage's variables before anything runs: what the Dockerfile itself says.

use super::ContextError;
use crate::expand::expand;
use crate::spec::{StageBase, StepAction};
use std::collections::BTreeMap;

type Variables = BTreeMap<String, String>;

/// Variables of the stages so far.
#[derive(Default)]
pub(super) struct KnownVariables {
    /// The environment at each earlier stage's end, and whether that is all of it.
    stages: Vec<(Variables, bool)>,
    environment: Variables,
    arguments: Variables,
    /// Whether nothing else can be set: no image is beneath.
    all: bool,
}

impl KnownVariables {
    /// Begins a stage.
    pub(super) fn begin(&mut self, from: &StageBase) {
        let (environment, all) = match from {
            StageBase::Stage(number) => self.stages.get(*number).cloned().unwrap_or_default(),
            StageBase::Scratch => (Variables::new(), true),
            _ => (Variables::new(), false),
        };
        (self.environment, self.all) = (environment, all);
        self.arguments.clear();
    }

    /// Ends it.
    pub(super) fn end(&mut self) {
        self.stages
            .push((std::mem::take(&mut self.environment), self.all));
    }

    /// Takes what a step sets. A value that depends on what is not known is not known, either.
    pub(super) fn learn(&mut self, action: &StepAction, line: u32) -> Result<(), ContextError> {
        match action {
            StepAction::Arg(name, value) => match self.expand(value, line) {
                Ok(value) => {
                    self.arguments.insert(name.clone(), value);
                }
                Err(ContextError::Variable { .. }) => {
                    self.arguments.remove(name);
                }
                Err(e) => return Err(e),
            },
            StepAction::Env(pairs) => {
                // All of an instruction's words see what was set before it.
                let mut learned = Vec::new();
                for (name, value) in pairs {
                    let value = match self.expand(value, line) {
                        Ok(value) => Some(value),
                        Err(ContextError::Variable { .. }) => None,
                        Err(e) => return Err(e),
                    };
                    learned.push((name.clone(), value));
                }
                for (name, value) in learned {
                    match value {
                        Some(value) => self.environment.insert(name, value),
                        None => {
                            self.arguments.remove(&name);
                            self.environment.remove(&name)
                        }
                    };
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// A word with its variables' values, all of which must be known.
    pub(super) fn expand(&self, word: &str, line: u32) -> Result<String, ContextError> {
        let mut unknown = None;
        let value = |name: &str| {
            let known = self
                .environment
                .get(name)
                .or_else(|| self.arguments.get(name));
            if known.is_none() && !self.all {
                unknown.get_or_insert_with(|| name.to_owned());
            }
            known.cloned()
        };
        let expanded =
            expand(word, value).map_err(|source| ContextError::Expand { line, source })?;
        match unknown {
            None => Ok(expanded),
            Some(name) => Err(ContextError::Variable {
                line,
                path: word.to_owned(),
                name,
            }),
        }
    }
}
