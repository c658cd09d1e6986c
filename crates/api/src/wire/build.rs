//! Conversion of template builds to and from the bodies of the API.

use super::moment;
use crate::error::ApiError;
use crate::network::check_template;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiffy_api_types::{
    BuildStart, BuildState, BuildStatus, BuildStep as WireStep, FailureReason, ImageRegistry,
    LogEntry, MAX_BUILD_STEPS, NewTemplate,
};
use jiffy_build_spec::expand::escape;
use jiffy_build_spec::spec::{
    BuildSpec, BuildStage, BuildStep, CloudCredentials, CopyAction, CopySource, ImageSource,
    StageBase, StepAction, StepCommand,
};
use jiffy_engine_api::{Readiness, StartCommand, Startup, TemplateNetwork};
use jiffy_template_builder::{
    BuildProgress, BuildRecord, BuildSecrets, LogLevel, LogLine, SshClients, WantedSize,
};

/// Default user and home directory of a template's programs.
const USER: &str = "user";
const HOME: &str = "/home/user";
/// Timeout in seconds within which a template of E2B's clients must become ready.
const READY_S: u32 = 600;
/// Maximum number of characters of a client's text in an error.
const MAX_SHOWN_CHARS: usize = 64;

/// Returns the requested size of a template.
pub(crate) fn size(new: &NewTemplate) -> WantedSize {
    WantedSize {
        vcpus: new.cpu_count,
        memory_mib: new.memory_mb,
        disk_mib: new.min_free_disk_mb,
    }
}

/// Removes the secrets of a build from the request.
pub(crate) fn secrets(start: &mut BuildStart<BuildSpec>) -> Result<BuildSecrets, ApiError> {
    let secrets = start.secrets.take().unwrap_or_default();
    if start.spec.is_none() && !secrets.is_empty() {
        return Err(ApiError::invalid(
            "`secrets` requires `spec`: steps cannot use secrets",
        ));
    }
    let decoded = secrets.into_iter().map(|secret| {
        let value = STANDARD.decode(&secret.value).map_err(|_| {
            ApiError::invalid(format!(
                "the value of `{}` is not base64",
                short(&secret.id)
            ))
        })?;
        Ok((secret.id, value))
    });
    let decoded = decoded.collect::<Result<Vec<_>, ApiError>>()?;
    BuildSecrets::new(decoded).map_err(ApiError::invalid)
}

/// Removes the names of SSH agents from the request.
pub(crate) fn ssh_clients(start: &mut BuildStart<BuildSpec>) -> Result<SshClients, ApiError> {
    let names = start.ssh.take().unwrap_or_default();
    if start.spec.is_none() && !names.is_empty() {
        return Err(ApiError::invalid(
            "`ssh` requires `spec`: steps cannot use SSH agents",
        ));
    }
    SshClients::new(names).map_err(ApiError::invalid)
}

/// Returns the specification of a build. E2B's clients send steps; `jiffy` sends a complete
/// specification, which is used unchanged.
pub(crate) fn spec(start: BuildStart<BuildSpec>) -> Result<BuildSpec, ApiError> {
    if let Some(spec) = start.spec {
        let has_keys = start.verify_keys.is_some_and(|keys| !keys.is_empty());
        let has_identities = start.verify_identities.is_some_and(|all| !all.is_empty());
        for (name, is_set) in [
            ("verifyKeys", has_keys),
            ("verifyIdentities", has_identities),
            ("verifyTrustRoot", start.verify_trust_root.is_some()),
        ] {
            if is_set {
                return Err(ApiError::invalid(format!(
                    "`{name}` and `spec` exclude each other: use `{name}` of `spec`"
                )));
            }
        }
        check_template(&spec.network)?;
        return Ok(spec);
    }
    let wire = start.steps.unwrap_or_default();
    if wire.len() > MAX_BUILD_STEPS {
        return Err(ApiError::invalid(format!(
            "too many steps: a template may have at most {MAX_BUILD_STEPS}"
        )));
    }
    let from_template = start.from_template.filter(|t| !t.is_empty());
    let mut steps = Vec::new();
    let from = match (from_template, start.from_image) {
        // Clients send an empty string for an absent image.
        (Some(_), Some(image)) if !image.is_empty() => {
            return Err(ApiError::invalid(
                "`fromImage` and `fromTemplate` exclude each other",
            ));
        }
        (Some(template), _) => StageBase::Template(template),
        (None, image) => {
            // The steps start as this user. The image may lack the user, which is therefore added
            // first.
            for action in [
                StepAction::AddUser(USER.to_owned()),
                StepAction::User(USER.to_owned()),
                StepAction::Workdir(HOME.to_owned()),
            ] {
                steps.push(implicit_step(action));
            }
            let reference = image.filter(|i| !i.is_empty());
            let credentials = start.from_image_registry.map(credentials).transpose()?;
            let (credentials, cloud) = credentials.unwrap_or_default();
            StageBase::Image(ImageSource {
                // The default image of E2B's clients.
                reference: reference.unwrap_or_else(|| "e2bdev/base".to_owned()),
                credentials,
                cloud,
                plain_http: false,
            })
        }
    };
    // E2B runs commands in a login shell.
    let shell = ["/bin/bash", "-l", "-c"].map(str::to_owned).to_vec();
    steps.push(implicit_step(StepAction::Shell(shell)));
    for step in wire {
        add_step(step, &mut steps)?;
    }
    Ok(BuildSpec {
        start_image_command: false,
        stages: vec![BuildStage {
            name: None,
            from,
            steps,
        }],
        startup: startup(start.start_cmd, start.ready_cmd),
        force: start.force.unwrap_or_default(),
        idle_timeout_s: None,
        network: TemplateNetwork::default(),
        verify_keys: start.verify_keys.unwrap_or_default(),
        verify_identities: start.verify_identities.unwrap_or_default(),
        verify_trust_root: start.verify_trust_root,
    })
}

/// User name and password, or credentials of a cloud.
type ImageCredentials = (Option<(String, String)>, Option<CloudCredentials>);

/// Returns the credentials for an image.
fn credentials(registry: ImageRegistry) -> Result<ImageCredentials, ApiError> {
    let missing = |what: &str| ApiError::invalid(format!("`fromImageRegistry` requires {what}"));
    let cloud = match registry.r#type.as_str() {
        "registry" => return Ok((registry.username.zip(registry.password), None)),
        "aws" => {
            let key = registry
                .aws_access_key_id
                .zip(registry.aws_secret_access_key);
            let key = key.zip(registry.aws_region);
            let ((access_key_id, secret_access_key), region) = key
                .ok_or_else(|| missing("`awsAccessKeyId`, `awsSecretAccessKey` and `awsRegion`"))?;
            CloudCredentials::Aws {
                access_key_id,
                secret_access_key,
                region,
            }
        }
        "gcp" => {
            let key = registry.service_account_json;
            CloudCredentials::Gcp(key.ok_or_else(|| missing("`serviceAccountJson`"))?)
        }
        kind => {
            return Err(ApiError::unsupported_option(format!(
                "`fromImageRegistry` of the type `{}` is not supported: use `registry`, `aws` or \
                 `gcp`",
                kind.escape_debug()
            )));
        }
    };
    Ok((None, Some(cloud)))
}

/// Returns a step that the client did not send. The log does not show it.
fn implicit_step(action: StepAction) -> BuildStep {
    BuildStep {
        text: String::new(),
        line: None,
        force: false,
        action,
    }
}

/// Converts a step of E2B's clients and appends it to `steps`.
fn add_step(step: WireStep, steps: &mut Vec<BuildStep>) -> Result<(), ApiError> {
    let args = step.args.unwrap_or_default();
    // The log of the build shows the same text.
    let text = format!("{} {}", step.r#type, args.join(" "));
    let arg = |n: usize| args.get(n).filter(|a| !a.is_empty()).cloned();
    let missing =
        |what: &str| ApiError::invalid(format!("step `{}` requires {what}", short(&step.r#type)));
    let action = match step.r#type.as_str() {
        "RUN" => StepAction::Run {
            command: StepCommand::Line(arg(0).ok_or_else(|| missing("a command"))?),
            user: arg(1),
            mounts: Vec::new(),
        },
        "ENV" => StepAction::Env(
            (args.chunks(2))
                .map(|pair| match pair {
                    [name, value] => Ok((name.clone(), value.clone())),
                    _ => Err(missing("pairs of names and values")),
                })
                .collect::<Result<_, _>>()?,
        ),
        "WORKDIR" => StepAction::Workdir(arg(0).ok_or_else(|| missing("a directory"))?),
        "USER" => {
            let user = arg(0).ok_or_else(|| missing("a user"))?;
            let named = user.split(':').next().unwrap_or_default();
            // The image may lack a named user, which is then added. A numeric user needs no entry,
            // and a variable is not expanded here.
            if named.parse::<u32>().is_err() && !named.contains('$') && named != "root" {
                steps.push(implicit_step(StepAction::AddUser(named.to_owned())));
            }
            StepAction::User(user)
        }
        "COPY" | "ADD" => StepAction::Copy(CopyAction {
            from: CopySource::Files(step.files_hash.ok_or_else(|| missing("`filesHash`"))?),
            sources: vec![literal_prefix(&arg(0).ok_or_else(|| missing("a source"))?)],
            to: arg(1).ok_or_else(|| missing("a target"))?,
            // An empty owner stands for the current user.
            owner: Some(args.get(2).cloned().unwrap_or_default()),
            mode: arg(3),
            unpack: false,
        }),
        // Reject unknown steps: ignoring one would build another template.
        other => {
            return Err(ApiError::unsupported_option(format!(
                "unknown step `{}`: use RUN, COPY, ENV, WORKDIR or USER",
                short(other)
            )));
        }
    };
    steps.push(BuildStep {
        text: text.trim_end().to_owned(),
        line: None,
        force: step.force.unwrap_or_default(),
        action,
    });
    Ok(())
}

/// Returns the part of a pattern before the first component with a wildcard. This directory can be
/// copied as a whole: the client put only matching files into the archive.
fn literal_prefix(pattern: &str) -> String {
    let is_literal = |part: &&str| !part.contains(['*', '?', '[', '{']);
    let parts: Vec<&str> = pattern.split('/').take_while(is_literal).collect();
    match parts.join("/") {
        all if all.is_empty() => ".".to_owned(),
        // A dollar sign is literal in these paths.
        all => escape(&all),
    }
}

/// Returns the start command and the check that the template is ready.
fn startup(start: Option<String>, ready: Option<String>) -> Startup {
    let non_empty = |word: Option<String>| word.filter(|w| !w.trim().is_empty());
    let start = non_empty(start).map(|line| StartCommand {
        command: "/bin/bash".to_owned(),
        args: Some(vec!["-l".to_owned(), "-c".to_owned(), line]),
        user: None,
        workdir: None,
    });
    let ready = non_empty(ready).map(|line| Readiness {
        port: listening_port(&line),
        path: None,
        // Either the agent checks the port, or it runs the command.
        command: listening_port(&line).is_none().then_some(line),
        timeout_s: READY_S,
    });
    Startup {
        start,
        ready,
        first_use: None,
    }
}

/// Returns the port of the command with which E2B's clients wait for a listening server. The agent
/// checks the port itself, because the image may lack the program `ss`.
fn listening_port(line: &str) -> Option<u16> {
    let port = line.trim().strip_prefix("ss -tuln | grep :")?;
    port.trim().parse().ok().filter(|p| *p > 0)
}

/// Returns the status of a build.
pub(crate) fn status(
    template: &str,
    build: BuildRecord,
    lines: &[LogLine],
    progress: Option<BuildProgress>,
) -> BuildStatus {
    BuildStatus {
        template_id: template.to_owned(),
        build_id: build.id,
        status: state(build.status),
        logs: lines.iter().map(|l| l.message.clone()).collect(),
        log_entries: lines.iter().map(entry).collect(),
        reason: build.reason.map(|reason| FailureReason {
            message: reason.message,
            step: reason.step,
        }),
        progress: progress.map(|now| jiffy_api_types::BuildProgress {
            text: now.text,
            percent: now.percent,
        }),
    }
}

/// Returns the state of a build.
pub(crate) fn state(status: jiffy_template_builder::BuildStatus) -> BuildState {
    use jiffy_template_builder::BuildStatus as Status;
    match status {
        Status::Waiting => BuildState::Waiting,
        Status::Building => BuildState::Building,
        Status::Ready => BuildState::Ready,
        Status::Error => BuildState::Error,
    }
}

/// Returns an entry of a build's log.
pub(crate) fn entry(line: &LogLine) -> LogEntry {
    use jiffy_api_types::LogLevel as Level;
    LogEntry {
        timestamp: moment(line.at_ms),
        message: line.message.clone(),
        level: match line.level {
            LogLevel::Debug => Level::Debug,
            LogLevel::Info => Level::Info,
            LogLevel::Warn => Level::Warn,
            LogLevel::Error => Level::Error,
        },
        step: line.step.clone(),
        fields: None,
    }
}

/// Log levels by the names that requests use.
pub(crate) const LEVELS: [(&str, LogLevel); 4] = [
    ("debug", LogLevel::Debug),
    ("info", LogLevel::Info),
    ("warn", LogLevel::Warn),
    ("error", LogLevel::Error),
];

fn short(text: &str) -> String {
    text.chars()
        .filter(|c| !c.is_control())
        .take(MAX_SHOWN_CHARS)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn spec(body: Value) -> Result<BuildSpec, ApiError> {
        let mut start = serde_json::from_value(body).unwrap();
        super::secrets(&mut start)?;
        super::spec(start)
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
        let non_empty: Vec<&BuildStep> =
            stage.steps.iter().filter(|s| !s.text.is_empty()).collect();
        let StepAction::Copy(copy) = &non_empty[0].action else {
            panic!()
        };
        assert_eq!(
            (copy.sources[0].as_str(), copy.owner.as_deref()),
            ("src", Some(""))
        );
        assert!(
            matches!(&non_empty[1].action, StepAction::Run { user: Some(u), .. } if u == "root")
        );
        assert!(non_empty[1].force);
        assert_eq!(non_empty[3].text, "USER app");
        let added = stage.steps.iter().filter(|s| s.text.is_empty());
        let users = added.filter(|s| matches!(s.action, StepAction::AddUser(_)));
        assert_eq!(
            users.count(),
            2,
            "the default user and the named user are added"
        );
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
                json!({ "steps": [], "secrets": [{ "id": "a", "value": "eA==" }] }),
                "`secrets` requires `spec`",
            ),
            (
                json!({ "spec": { "stages": [] }, "verifyKeys": ["x"] }),
                "use `verifyKeys` of `spec`",
            ),
            (
                json!({ "spec": { "stages": [] }, "verifyTrustRoot": "{}" }),
                "use `verifyTrustRoot` of `spec`",
            ),
            (
                json!({ "fromImage": "a", "fromImageRegistry": { "type": "aws" } }),
                "awsRegion",
            ),
            (
                json!({ "fromImage": "a", "fromImageRegistry": { "type": "gcp" } }),
                "serviceAccountJson",
            ),
            (
                json!({ "fromImage": "a", "fromImageRegistry": { "type": "x" } }),
                "`x` is not supported",
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
            assert_eq!(literal_prefix(pattern), from);
        }
    }
}
