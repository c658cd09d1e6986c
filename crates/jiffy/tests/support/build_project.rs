//! Dockerfiles that are built in a separate data directory.

use super::test_home::TestHome;
use super::{Done, jiffy};
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Stdio};

/// Data directory with its own templates in addition to the stock template `base`, and a build
/// context.
pub struct BuildProject {
    pub test_home: TestHome,
    pub context: PathBuf,
}

impl BuildProject {
    pub fn new() -> Self {
        let test_home = TestHome::with_templates();
        let context = test_home.dir.path().join("context");
        fs::create_dir(&context).unwrap();
        Self { test_home, context }
    }

    /// Writes a file of the context.
    pub fn file(&self, name: &str, content: &str) -> PathBuf {
        let path = self.context.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path
    }

    /// Builds the context under `name`.
    pub fn build(&self, name: &str, more: &[&str]) -> Done {
        let context = self.context.to_str().unwrap();
        let args = ["template", "build", context, "--name", name];
        self.test_home.call(&[&args, more].concat())
    }

    /// Builds a template, which must succeed.
    pub fn built(&self, name: &str, more: &[&str]) -> Done {
        let done = self.build(name, more);
        assert_eq!(done.code, Some(0), "{done:?}");
        done
    }

    /// Starts a build without waiting for it.
    pub fn begin(&self, name: &str) -> Child {
        let context = self.context.to_str().unwrap();
        let mut command = jiffy(&["template", "build", context, "--name", name]);
        command
            .env("JIFFY_HOME", self.test_home.dir.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    /// Returns the output of a command in a new sandbox of a template.
    pub fn run(&self, name: &str, script: &str) -> String {
        let id = self.test_home.ok(&["create", "--template", name]);
        let output = self.test_home.sh(&id, script);
        self.test_home.ok(&["kill", &id]);
        output
    }

    /// Returns the ids of existing sandboxes.
    pub fn alive(&self) -> Vec<String> {
        let all = self.test_home.json(&["ls"]);
        let id = |s: &Value| s["id"].as_str().unwrap().to_owned();
        all.as_array().unwrap().iter().map(id).collect()
    }
}

/// Returns the number of cached steps.
pub fn cached(done: &Done) -> usize {
    done.stderr
        .lines()
        .filter(|l| l.starts_with("CACHED"))
        .count()
}
