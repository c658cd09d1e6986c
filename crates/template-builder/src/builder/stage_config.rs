//! Configuration of a stage: environment, user, working directory and shell, as determined by the
//! steps executed so far.
//!
//! A *stage* is a part of a build that starts with a base image (`FROM`) and executes steps.

use jiffy_build_spec::expand::expand;
use jiffy_build_spec::spec::StepAction;
use jiffy_image::Defaults;
use std::collections::BTreeMap;

/// Configuration for the next step, and finally for the template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageConfig {
    pub env: BTreeMap<String, String>,
    /// Build arguments (`ARG`). They are not part of the template.
    args: BTreeMap<String, String>,
    pub workdir: String,
    pub user: String,
    /// Program and arguments that run a command line.
    shell: Vec<String>,
    pub entrypoint: Vec<String>,
    pub cmd: Vec<String>,
    pub exposed: Vec<String>,
    pub labels: BTreeMap<String, String>,
    /// Instructions for builds based on the template.
    pub on_build: Vec<String>,
}

impl StageConfig {
    /// Creates the configuration from a template's defaults.
    pub fn from_defaults(defaults: &Defaults) -> Self {
        Self {
            env: defaults.env.clone(),
            args: BTreeMap::new(),
            workdir: defaults.workdir.clone(),
            user: defaults.user.clone(),
            shell: vec!["/bin/sh".to_owned(), "-c".to_owned()],
            entrypoint: Vec::new(),
            cmd: Vec::new(),
            exposed: Vec::new(),
            labels: BTreeMap::new(),
            on_build: Vec::new(),
        }
    }

    /// Returns the initial configuration of a stage that is based on this stage. Build arguments
    /// are not inherited.
    pub fn inherited(&self) -> Self {
        Self {
            args: BTreeMap::new(),
            // The parser of the Dockerfile has already inserted the `ONBUILD` instructions of the
            // base stage as steps.
            on_build: Vec::new(),
            ..self.clone()
        }
    }

    /// Expands the variables of a word.
    pub fn expand(&self, word: &str) -> Result<String, String> {
        // The environment takes precedence over build arguments, as in Docker.
        let value = |name: &str| self.env.get(name).or_else(|| self.args.get(name)).cloned();
        expand(word, value).map_err(|e| e.to_string())
    }

    /// Returns a path in the sandbox: absolute, or relative to the working directory. A trailing
    /// slash is preserved.
    pub fn path(&self, word: &str) -> Result<String, String> {
        let path = self.expand(word)?;
        Ok(if path.starts_with('/') {
            path
        } else {
            format!(
                "{}/{}",
                self.workdir.trim_end_matches('/'),
                path.trim_start_matches("./")
            )
        })
    }

    /// Returns the environment for the commands of steps.
    pub fn environment(&self) -> BTreeMap<String, String> {
        // Variables of the environment replace build arguments of the same name.
        let mut all = self.args.clone();
        all.extend(self.env.clone());
        all
    }

    /// Returns the arguments that run `line` in the shell.
    pub fn shell_words(&self, line: &str) -> Vec<String> {
        let mut words = self.shell.clone();
        words.push(line.to_owned());
        words
    }

    /// Applies the settings of a step. Steps that change files are executed elsewhere.
    pub fn apply(&mut self, action: &StepAction) -> Result<(), String> {
        match action {
            StepAction::Env(pairs) => {
                // Values of one instruction cannot refer to each other.
                let before = self.clone();
                for (name, value) in pairs {
                    let name = before.expand(name)?;
                    if name.is_empty() || name.contains(['=', '\0']) {
                        return Err(format!("`{name}` is not a valid variable name"));
                    }
                    self.env.insert(name, before.expand(value)?);
                }
            }
            StepAction::Arg(name, value) => {
                let value = self.expand(value)?;
                self.args.insert(name.clone(), value);
            }
            StepAction::Workdir(path) => {
                let path = self.path(path)?;
                self.workdir = match path.trim_end_matches('/') {
                    // The path consisted of slashes only.
                    "" => "/".to_owned(),
                    path => path.to_owned(),
                };
            }
            StepAction::User(user) => {
                let user = self.expand(user)?;
                if user.is_empty() {
                    return Err("the user name is empty".to_owned());
                }
                self.user = user;
            }
            StepAction::Shell(words) if words.is_empty() => {
                return Err("SHELL requires a program".to_owned());
            }
            StepAction::Shell(words) => self.shell.clone_from(words),
            StepAction::Entrypoint(words) => {
                // The previous command belongs to the previous entrypoint, as in Docker.
                self.entrypoint.clone_from(words);
                self.cmd.clear();
            }
            StepAction::Cmd(words) => self.cmd.clone_from(words),
            StepAction::Expose(ports) => {
                for port in ports {
                    self.exposed.push(self.expand(port)?);
                }
            }
            StepAction::Label(pairs) => {
                for (name, value) in pairs {
                    let (name, value) = (self.expand(name)?, self.expand(value)?);
                    self.labels.insert(name, value);
                }
            }
            StepAction::OnBuild(trigger) => self.on_build.push(trigger.clone()),
            StepAction::Run { .. } | StepAction::Copy(_) | StepAction::AddUser(_) => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a configuration with `/bin` as `PATH`.
    fn config() -> StageConfig {
        StageConfig::from_defaults(&Defaults {
            user: "root".into(),
            workdir: "/".into(),
            env: [("PATH".to_owned(), "/bin".to_owned())].into(),
            ..serde_json::from_str(r#"{"user":"x","workdir":"/","disk_mib":1}"#).unwrap()
        })
    }

    /// Returns an `ENV` step.
    fn env(pairs: &[(&str, &str)]) -> StepAction {
        StepAction::Env(
            pairs
                .iter()
                .map(|(k, v)| (k.to_string(), v.to_string()))
                .collect(),
        )
    }

    #[test]
    fn variables_are_expanded_with_values_of_earlier_instructions() {
        let mut s = config();
        s.apply(&env(&[("PATH", "/opt/bin:$PATH"), ("COPY", "${PATH}")]))
            .unwrap();
        assert_eq!(s.env["PATH"], "/opt/bin:/bin");
        assert_eq!(s.env["COPY"], "/bin");
        s.apply(&StepAction::Arg("V".into(), "1".into())).unwrap();
        s.apply(&env(&[("V", "2")])).unwrap();
        assert_eq!(s.expand("$V").unwrap(), "2", "the environment wins");
        assert!(s.apply(&env(&[("", "x")])).is_err());
    }

    #[test]
    fn build_arguments_reach_programs_and_end_with_their_stage() {
        let mut s = config();
        s.apply(&StepAction::Arg("TOKEN".into(), "t".into()))
            .unwrap();
        assert_eq!(s.environment()["TOKEN"], "t");
        assert!(!s.env.contains_key("TOKEN"));
        assert!(!s.inherited().environment().contains_key("TOKEN"));
    }

    #[test]
    fn working_directories_are_relative_to_the_previous_one() {
        let mut s = config();
        for (word, workdir) in [
            ("app", "/app"),
            ("./src/", "/app/src"),
            ("/", "/"),
            ("/srv/", "/srv"),
        ] {
            s.apply(&StepAction::Workdir(word.into())).unwrap();
            assert_eq!(s.workdir, workdir);
        }
        assert_eq!(s.path("x/").unwrap(), "/srv/x/");
        assert_eq!(s.path(".").unwrap(), "/srv/.");
    }

    #[test]
    fn an_entrypoint_clears_the_arguments_of_the_previous_one() {
        let mut s = config();
        s.apply(&StepAction::Cmd(vec!["a".into()])).unwrap();
        s.apply(&StepAction::Entrypoint(vec!["b".into()])).unwrap();
        assert!(s.cmd.is_empty());
    }
}
