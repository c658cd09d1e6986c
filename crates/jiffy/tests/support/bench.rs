//! Dockerfiles that are built in a place of their own.

use super::place::Place;
use super::{Done, jiffy};
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Stdio};

/// A place with templates of its own beside the stock one, and a context to build.
pub struct Bench {
    pub place: Place,
    pub context: PathBuf,
}

impl Bench {
    pub fn new(test: &str) -> Option<Self> {
        let place = Place::with_templates(test)?;
        let context = place.dir.path().join("context");
        fs::create_dir(&context).unwrap();
        Some(Self { place, context })
    }

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
        self.place.call(&[&args, more].concat())
    }

    pub fn built(&self, name: &str, more: &[&str]) -> Done {
        let done = self.build(name, more);
        assert_eq!(done.code, Some(0), "{done:?}");
        done
    }

    /// Begins to build, and does not wait.
    pub fn begin(&self, name: &str) -> Child {
        let context = self.context.to_str().unwrap();
        let mut command = jiffy(&["template", "build", context, "--name", name]);
        command
            .env("JIFFY_HOME", self.place.dir.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    /// Output of a command in a fresh sandbox of a template.
    pub fn run(&self, name: &str, script: &str) -> String {
        let id = self.place.ok(&["create", "--template", name]);
        let said = self.place.sh(&id, script);
        self.place.ok(&["kill", &id]);
        said
    }

    /// Ids of sandboxes that live.
    pub fn alive(&self) -> Vec<String> {
        let all = self.place.json(&["ls"]);
        let id = |s: &Value| s["id"].as_str().unwrap().to_owned();
        all.as_array().unwrap().iter().map(id).collect()
    }
}

/// Steps that were not done again.
pub fn cached(done: &Done) -> usize {
    done.stderr
        .lines()
        .filter(|l| l.starts_with("CACHED"))
        .count()
}
