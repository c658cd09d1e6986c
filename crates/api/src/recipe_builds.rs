//! [`RecipeBuilds`]: builds of stock templates that clients have started, with their logs.
//!
//! A *recipe* is the source of a stock template, which the program contains.

use crate::error::ApiError;
use jiffy_api_types::{BuildProgress, BuildState, FailureReason, RecipeBuild};
use jiffy_image::Progress;
use parking_lot::Mutex;
use std::collections::HashMap;

/// Maximum number of lines of a log. Further lines are dropped.
const MAX_LINES: usize = 20_000;
/// Maximum length of a line in characters.
const MAX_LINE: usize = 1000;
/// Last line of a log that is full.
const FULL: &str = "the log is full: further lines are dropped";

/// Latest build of each recipe since the start of the daemon.
#[derive(Debug, Default)]
pub(crate) struct RecipeBuilds(Mutex<HashMap<String, StartedBuild>>);

/// Build of a recipe.
#[derive(Debug)]
struct StartedBuild {
    status: BuildState,
    lines: Vec<String>,
    progress: Option<BuildProgress>,
    failure: Option<String>,
}

impl StartedBuild {
    fn write(&mut self, text: &str) {
        for line in text.lines() {
            match self.lines.len() {
                n if n < MAX_LINES => self.lines.push(line.chars().take(MAX_LINE).collect()),
                MAX_LINES => self.lines.push(FULL.to_owned()),
                _ => return,
            }
        }
    }
}

impl RecipeBuilds {
    /// Registers a build. Packages of several templates are not installed at the same time, because
    /// each build uses a processor and the network.
    ///
    /// # Errors
    /// Another build is running.
    pub fn begin(&self, recipe: &str) -> Result<(), ApiError> {
        let mut builds = self.0.lock();
        let mut all = builds.iter();
        if let Some((other, _)) = all.find(|(_, build)| build.status == BuildState::Building) {
            return Err(ApiError::conflict(
                "build_started",
                format!("the template `{other}` is being built: wait for its end"),
            ));
        }
        let build = StartedBuild {
            status: BuildState::Building,
            lines: Vec::new(),
            progress: None,
            failure: None,
        };
        builds.insert(recipe.to_owned(), build);
        Ok(())
    }

    /// Records progress of a running build.
    pub fn on_progress(&self, recipe: &str, progress: Progress<'_>) {
        let mut builds = self.0.lock();
        let Some(build) = builds.get_mut(recipe) else {
            return;
        };
        match progress {
            Progress::Line(line) => build.write(line),
            Progress::Phase(phase) => {
                let text = phase.to_string();
                build.write(&text);
                // A new phase starts with the percentage of the previous one.
                let percent = build.progress.as_ref().map_or(0, |before| before.percent);
                build.progress = Some(BuildProgress { text, percent });
            }
            Progress::Percent(percent) => {
                if let Some(progress) = &mut build.progress {
                    progress.percent = percent;
                }
            }
        }
    }

    /// Records the end of a build. `failure` is the reason if it failed.
    pub fn end(&self, recipe: &str, failure: Option<String>) {
        let mut builds = self.0.lock();
        let Some(build) = builds.get_mut(recipe) else {
            return;
        };
        build.progress = None;
        match failure {
            None => {
                build.write("the template is ready");
                build.status = BuildState::Ready;
            }
            Some(failure) => {
                build.write(&failure);
                build.status = BuildState::Error;
                build.failure = Some(failure);
            }
        }
    }

    /// Returns whether a build of the recipe is running.
    pub fn is_running(&self, recipe: &str) -> bool {
        let builds = self.0.lock();
        builds
            .get(recipe)
            .is_some_and(|build| build.status == BuildState::Building)
    }

    /// Returns the latest build of a recipe with at most `limit` lines from the line `from`. `None`
    /// if no client has started one.
    pub fn get(&self, recipe: &str, from: usize, limit: usize) -> Option<RecipeBuild> {
        let builds = self.0.lock();
        let build = builds.get(recipe)?;
        let reason = build.failure.clone().map(|message| FailureReason {
            message,
            step: None,
        });
        Some(RecipeBuild {
            name: recipe.to_owned(),
            status: build.status,
            logs: build.lines.iter().skip(from).take(limit).cloned().collect(),
            progress: build.progress.clone(),
            reason,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_are_bounded_and_read_in_pages() {
        let builds = RecipeBuilds::default();
        builds.begin("base").unwrap();
        builds.on_progress("base", Progress::Line(&"é".repeat(2 * MAX_LINE)));
        for n in 1..=MAX_LINES {
            builds.on_progress("base", Progress::Line(&n.to_string()));
        }
        let first = builds.get("base", 0, 2).unwrap();
        assert_eq!(first.logs, ["é".repeat(MAX_LINE), "1".to_owned()]);
        let last = builds.get("base", MAX_LINES - 1, 100).unwrap();
        assert_eq!(last.logs, [(MAX_LINES - 1).to_string(), FULL.to_owned()]);
        builds.end("base", Some("no network".to_owned()));
        let failed = builds.get("base", MAX_LINES + 1, 100).unwrap();
        assert_eq!((failed.status, failed.logs.len()), (BuildState::Error, 0));
        assert_eq!(failed.reason.unwrap().message, "no network");
        assert!(builds.get("node", 0, 1).is_none());
    }
}
