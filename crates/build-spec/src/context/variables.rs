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
    /// Known variables of the current stage, set by `ENV`.
    environment: Variables,
    /// Known arguments of the current stage, set by `ARG`.
    arguments: Variables,
    /// Set if all variables are known, because there is no base image.
    all: bool,
}

impl KnownVariables {
    /// Starts a stage.
    pub(super) fn begin(&mut self, from: &StageBase) {
        let (environment, all) = match from {
            StageBase::Stage(number) => self.stages.get(*number).cloned().unwrap_or_default(),
            // An empty image sets no variables.
            StageBase::Scratch => (Variables::new(), true),
            // The environment of an image is known only after it was pulled.
            _ => (Variables::new(), false),
        };
        (self.environment, self.all) = (environment, all);
        // Arguments end with their stage, the environment is inherited.
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
                let mut values = Vec::new();
                for (name, value) in pairs {
                    let value = match self.expand(value, line) {
                        Ok(value) => Some(value),
                        Err(ContextError::Variable { .. }) => None,
                        Err(e) => return Err(e),
                    };
                    values.push((name.clone(), value));
                }
                for (name, value) in values {
                    match value {
                        Some(value) => self.environment.insert(name, value),
                        None => {
                            // An argument of this name is hidden by the variable, whose value is
                            // unknown.
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
            // As in Docker, a variable of the environment hides an argument of the same name.
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
