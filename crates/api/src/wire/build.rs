//! Builds of templates as clients describe and see them.

use super::moment;
use crate::error::ApiError;
use jiffy_build_spec::expand::escape;
use jiffy_build_spec::spec::{
    BuildSpec, BuildStage, BuildStep, CopyAction, CopySource, ImageSource, StageBase, StepAction,
    StepCommand,
};
use jiffy_engine_api::{Readiness, StartCommand, Startup};
use jiffy_template_builder::{BuildProgress, BuildRecord, LogLevel, LogLine, WantedSize};
use serde::Deserialize;
use serde_json::{Value, json};

/// User of a template's programs, and their directory, unless it says otherwise.
const USER: &str = "user";
const HOME: &str = "/home/user";
/// Time that a template of E2B's clients may take to get ready, in seconds.
const READY_S: u32 = 600;
/// Most steps that are looked at.
const MAX_STEPS: usize = 1000;

/// `POST /v3/templates`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NewTemplate {
    pub name: Option<String>,
    /// Name in older clients.
    pub alias: Option<String>,
    #[serde(default)]
    pub tags: Option<Vec<String>>,
    pub cpu_count: Option<u8>,
    #[serde(rename = "memoryMB")]
    pub memory_mb: Option<u32>,
    pub min_free_disk_mb: Option<u64>,
}

impl NewTemplate {
    pub fn size(&self) -> WantedSize {
        WantedSize {
            vcpus: self.cpu_count,
            memory_mib: self.memory_mb,
            disk_mib: self.min_free_disk_mb,
        }
    }
}

/// `POST /v2/templates/{id}/builds/{build}`: one stage as E2B's clients say it, or all that can be
/// said (`spec`).
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct BuildStart {
    spec: Option<BuildSpec>,
    from_image: Option<String>,
    from_template: Option<String>,
    from_image_registry: Option<Registry>,
    #[serde(default)]
    steps: Option<Vec<WireStep>>,
    start_cmd: Option<String>,
    ready_cmd: Option<String>,
    #[serde(default)]
    force: Option<bool>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Registry {
    r#type: String,
    username: Option<String>,
    password: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireStep {
    r#type: String,
    #[serde(default)]
    args: Option<Vec<String>>,
    files_hash: Option<String>,
    #[serde(default)]
    force: Option<bool>,
}

impl BuildStart {
    /// Returns the specification of the build.
    pub fn spec(self) -> Result<BuildSpec, ApiError> {
        if let Some(spec) = self.spec {
            return Ok(spec);
        }
        let wire = self.steps.unwrap_or_default();
        if wire.len() > MAX_STEPS {
            return Err(ApiError::invalid(format!(
                "a template has at most {MAX_STEPS} steps"
            )));
        }
        let from_template = self.from_template.filter(|t| !t.is_empty());
        let mut steps = Vec::new();
        let from = match (from_template, self.from_image) {
            (Some(_), Some(image)) if !image.is_empty() => {
                return Err(ApiError::invalid(
                    "`fromImage` and `fromTemplate` exclude each other",
                ));
            }
            (Some(template), _) => StageBase::Template(template),
            (None, image) => {
                // A template's steps begin as its people, who an image need not know.
                for action in [
                    StepAction::AddUser(USER.to_owned()),
                    StepAction::User(USER.to_owned()),
                    StepAction::Workdir(HOME.to_owned()),
                ] {
                    steps.push(silent(action));
                }
                let reference = image.filter(|i| !i.is_empty());
                StageBase::Image(ImageSource {
                    reference: reference.unwrap_or_else(|| "e2bdev/base".to_owned()),
                    credentials: self
                        .from_image_registry
                        .map(credentials)
                        .transpose()?
                        .flatten(),
                    plain_http: false,
                })
            }
        };
        let shell = ["/bin/bash", "-l", "-c"].map(str::to_owned).to_vec();
        steps.push(silent(StepAction::Shell(shell)));
        for step in wire {
            step.add_to(&mut steps)?;
        }
        Ok(BuildSpec {
            start_image_command: false,
            stages: vec![BuildStage {
                name: None,
                from,
                steps,
            }],
            startup: startup(self.start_cmd, self.ready_cmd),
            force: self.force.unwrap_or_default(),
        })
    }
}

fn credentials(registry: Registry) -> Result<Option<(String, String)>, ApiError> {
    match registry.r#type.as_str() {
        "registry" => Ok(registry.username.zip(registry.password)),
        kind => Err(ApiError::unsupported_option(format!(
            "`fromImageRegistry` of the type `{}` is not supported: use a user name and a password (type `registry`)",
            kind.escape_debug()
        ))),
    }
}

/// A step that nobody wrote.
fn silent(action: StepAction) -> BuildStep {
    BuildStep {
        text: String::new(),
        line: None,
        force: false,
        action,
    }
}

impl WireStep {
    fn add_to(self, steps: &mut Vec<BuildStep>) -> Result<(), ApiError> {
        let args = self.args.unwrap_or_default();
        let text = format!("{} {}", self.r#type, args.join(" "));
        let arg = |n: usize| args.get(n).filter(|a| !a.is_empty()).cloned();
        let wants = |what: &str| {
            ApiError::invalid(format!("a step `{}` wants {what}", short(&self.r#type)))
        };
        let action = match self.r#type.as_str() {
            "RUN" => StepAction::Run {
                command: StepCommand::Line(arg(0).ok_or_else(|| wants("a command"))?),
                user: arg(1),
            },
            "ENV" => StepAction::Env(
                (args.chunks(2))
                    .map(|pair| match pair {
                        [name, value] => Ok((name.clone(), value.clone())),
                        _ => Err(wants("pairs of names and values")),
                    })
                    .collect::<Result<_, _>>()?,
            ),
            "WORKDIR" => StepAction::Workdir(arg(0).ok_or_else(|| wants("a directory"))?),
            "USER" => {
                let user = arg(0).ok_or_else(|| wants("a user"))?;
                let named = user.split(':').next().unwrap_or_default();
                // A user with a number needs no name.
                if named.parse::<u32>().is_err() && !named.contains('$') && named != "root" {
                    steps.push(silent(StepAction::AddUser(named.to_owned())));
                }
                StepAction::User(user)
            }
            "COPY" | "ADD" => StepAction::Copy(CopyAction {
                from: CopySource::Files(self.files_hash.ok_or_else(|| wants("`filesHash`"))?),
                sources: vec![literal(&arg(0).ok_or_else(|| wants("a source"))?)],
                to: arg(1).ok_or_else(|| wants("a target"))?,
                // Empty: the user so far.
                owner: Some(args.get(2).cloned().unwrap_or_default()),
                mode: arg(3),
                unpack: false,
            }),
            other => {
                return Err(ApiError::unsupported_option(format!(
                    "there is no step `{}`: use RUN, COPY, ENV, WORKDIR or USER",
                    short(other)
                )));
            }
        };
        steps.push(BuildStep {
            text: text.trim_end().to_owned(),
            line: None,
            force: self.force.unwrap_or_default(),
            action,
        });
        Ok(())
    }
}

/// The part of a pattern before its first wildcard: what fits the rest, the client has chosen.
fn literal(pattern: &str) -> String {
    let special = |part: &&str| !part.contains(['*', '?', '[', '{']);
    let parts: Vec<&str> = pattern.split('/').take_while(special).collect();
    match parts.join("/") {
        all if all.is_empty() => ".".to_owned(),
        // A dollar is a dollar here.
        all => escape(&all),
    }
}

fn startup(start: Option<String>, ready: Option<String>) -> Startup {
    let said = |word: Option<String>| word.filter(|w| !w.trim().is_empty());
    let start = said(start).map(|line| StartCommand {
        command: "/bin/bash".to_owned(),
        args: Some(vec!["-l".to_owned(), "-c".to_owned(), line]),
        user: None,
        workdir: None,
    });
    let ready = said(ready).map(|line| Readiness {
        port: listening_port(&line),
        path: None,
        command: listening_port(&line).is_none().then_some(line),
        timeout_s: READY_S,
    });
    Startup {
        start,
        ready,
        first_use: None,
    }
}

/// The port that clients' own word for "a server listens" waits for. The agent knows without the
/// program that it names, which images need not have.
fn listening_port(line: &str) -> Option<u16> {
    let port = line.trim().strip_prefix("ss -tuln | grep :")?;
    port.trim().parse().ok().filter(|p| *p > 0)
}

/// Returns the status of a build.
pub(crate) fn status(
    template: &str,
    build: &BuildRecord,
    lines: &[LogLine],
    progress: Option<BuildProgress>,
) -> Value {
    let entries: Vec<Value> = lines.iter().map(entry).collect();
    let logs: Vec<&str> = lines.iter().map(|l| l.message.as_str()).collect();
    let mut status = json!({
        "templateID": template,
        "buildID": build.id,
        "status": build.status.name(),
        "logs": logs,
        "logEntries": entries,
    });
    if let (Some(reason), Some(map)) = (&build.reason, status.as_object_mut()) {
        map.insert("reason".to_owned(), json!(reason));
    }
    if let (Some(now), Some(map)) = (progress, status.as_object_mut()) {
        let now = json!({ "text": now.text, "percent": now.percent });
        map.insert("progress".to_owned(), now);
    }
    status
}

/// A line of a build's log.
pub(crate) fn entry(line: &LogLine) -> Value {
    let mut entry = json!({
        "timestamp": moment(line.at_ms),
        "message": line.message,
        "level": line.level.name(),
    });
    if let (Some(step), Some(map)) = (&line.step, entry.as_object_mut()) {
        map.insert("step".to_owned(), json!(step));
    }
    entry
}

/// The levels by their words.
pub(crate) const LEVELS: [(&str, LogLevel); 4] = [
    ("debug", LogLevel::Debug),
    ("info", LogLevel::Info),
    ("warn", LogLevel::Warn),
    ("error", LogLevel::Error),
];

fn short(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(body: Value) -> Result<BuildSpec, ApiError> {
        let start: BuildStart = serde_json::from_value(body).unwrap();
        start.spec()
    }

    #[test]
    fn build_requests_of_e2b_clients_become_one_stage() {
        let body = json!({
            "fromImage": "python:3", "force": false,
            "steps": [
                { "type": "COPY", "args": ["src/*.py", "/app/", "", ""], "filesHash": "ab", "force": false },
                { "type": "RUN", "args": ["pip install x", "root"], "force": true },
                { "type": "ENV", "args": ["A", "1", "B", "$A"] },
                { "type": "USER", "args": ["app"] },
            ],
            "startCmd": "serve", "readyCmd": "ss -tuln | grep :8000",
        });
        let spec = spec(body).unwrap();
        let stage = &spec.stages[0];
        assert!(matches!(&stage.from, StageBase::Image(i) if i.reference == "python:3"));
        let said: Vec<&BuildStep> = stage.steps.iter().filter(|s| !s.text.is_empty()).collect();
        let StepAction::Copy(copy) = &said[0].action else {
            panic!()
        };
        assert_eq!(
            (copy.sources[0].as_str(), copy.owner.as_deref()),
            ("src", Some(""))
        );
        assert!(matches!(&said[1].action, StepAction::Run { user: Some(u), .. } if u == "root"));
        assert!(said[1].force);
        assert_eq!(said[3].text, "USER app");
        let unsaid = stage.steps.iter().filter(|s| s.text.is_empty());
        let users = unsaid.filter(|s| matches!(s.action, StepAction::AddUser(_)));
        assert_eq!(users.count(), 2, "who is named and is not there is made");
        assert_eq!(spec.startup.ready.unwrap().port, Some(8000));
    }

    #[test]
    fn invalid_build_requests_are_refused_with_a_message() {
        for (body, word) in [
            (json!({ "steps": [{ "type": "FLY", "args": [] }] }), "FLY"),
            (
                json!({ "steps": [{ "type": "RUN", "args": [] }] }),
                "command",
            ),
            (
                json!({ "steps": [{ "type": "ENV", "args": ["A"] }] }),
                "pairs",
            ),
            (
                json!({ "steps": [{ "type": "COPY", "args": ["a", "b"] }] }),
                "filesHash",
            ),
            (json!({ "fromImage": "a", "fromTemplate": "b" }), "exclude"),
            (
                json!({ "fromImage": "a", "fromImageRegistry": { "type": "aws" } }),
                "aws",
            ),
        ] {
            let refused = spec(body).unwrap_err().message;
            assert!(refused.contains(word), "{refused}");
        }
    }

    #[test]
    fn a_pattern_is_copied_from_where_it_begins() {
        for (pattern, from) in [
            ("*.txt", "."),
            ("a/b", "a/b"),
            ("a/*/b", "a"),
            ("./", "./"),
            ("$x", "\\$x"),
        ] {
            assert_eq!(literal(pattern), from);
        }
    }
}
