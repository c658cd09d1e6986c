//! Variables of a stage whose values follow from the Dockerfile alone, before the build.

use super::ContextError;
use crate::expand::expand;
use crate::spec::{StageBase, StepAction};
use std::collections::BTreeMap;

type Variables = BTreeMap<String, String>;

/// Known variables of the stages parsed so far.
#[derive(Default)]
pub(super) struct KnownVariables {
    /// Environment at the end of each earlier stage, and whether all of its variables are known.
    stages: Vec<(Variables, bool)>,
    environment: Variables,
    arguments: Variables,
    /// Set if all variables are known, because there is no base image.
    all: bool,
}

impl KnownVariables {
    /// Starts a stage.
    pub(super) fn begin(&mut self, from: &StageBase) {
        let (environment, all) = match from {
            StageBase::Stage(number) => self.stages.get(*number).cloned().unwrap_or_default(),
            StageBase::Scratch => (Variables::new(), true),
            _ => (Variables::new(), false),
        };
        (self.environment, self.all) = (environment, all);
        self.arguments.clear();
    }

    /// Ends the stage.
    pub(super) fn end(&mut self) {
        self.stages
            .push((std::mem::take(&mut self.environment), self.all));
    }

    /// Applies a step. If a value depends on an unknown variable, the variable becomes unknown.
    pub(super) fn apply(&mut self, action: &StepAction, line: u32) -> Result<(), ContextError> {
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
                // The values of one instruction do not depend on each other.
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

    /// Expands a word. All of its variables must be known.
    pub(super) fn expand(&self, word: &str, line: u32) -> Result<String, ContextError> {
        let mut unknown = None;
        let value = |name: &str| {
            let variable = self
                .environment
                .get(name)
                .or_else(|| self.arguments.get(name));
            if variable.is_none() && !self.all {
                unknown.get_or_insert_with(|| name.to_owned());
            }
            variable.cloned()
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
