//! Description of a build: stages of steps, as clients send them to the builder.

use jiffy_engine_api::Startup;
use serde::{Deserialize, Serialize};

/// A build. The last stage becomes the template; other stages are built if it needs them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BuildSpec {
    /// Stages in the order of the source; each refers to earlier ones only.
    pub stages: Vec<BuildStage>,
    /// Command that runs in every sandbox of the template, and its readiness check.
    #[serde(default)]
    pub startup: Startup,
    /// Starts the command of the image (`ENTRYPOINT`, `CMD`).
    #[serde(default)]
    pub start_image_command: bool,
    /// Ignores results of earlier builds.
    #[serde(default)]
    pub force: bool,
}

/// A base and the steps that are applied to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BuildStage {
    /// Name after `AS`; for display only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Base of the stage.
    pub from: StageBase,
    /// Steps in order.
    pub steps: Vec<BuildStep>,
}

/// Base of a stage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum StageBase {
    /// Argument of `FROM`: a template of this host if one has that name, else an image in a
    /// registry.
    Name(String),
    /// An image in a registry.
    Image(ImageSource),
    /// A template of this host: `name` or `name:tag`.
    Template(String),
    /// An earlier stage, by its number from 0.
    Stage(usize),
    /// Empty base: files can be copied, but nothing can run.
    Scratch,
}

/// An image in a registry.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ImageSource {
    /// `alpine`, `ghcr.io/owner/name:tag`, `host:5000/name@sha256:…`
    pub reference: String,
    /// User name and password, if the registry wants them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credentials: Option<(String, String)>,
    /// Plain HTTP instead of TLS.
    #[serde(default)]
    pub plain_http: bool,
}

impl std::fmt::Debug for ImageSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ImageSource")
            .field("reference", &self.reference)
            .field(
                "credentials",
                &self.credentials.as_ref().map(|(user, _)| user),
            )
            .field("plain_http", &self.plain_http)
            .finish()
    }
}

/// A step of a stage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BuildStep {
    /// Source text on one line, for logs and errors. Empty for generated steps.
    pub text: String,
    /// Line in the source file, from 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<u32>,
    /// Runs this step and all after it again, without results of earlier builds.
    #[serde(default)]
    pub force: bool,
    /// Operation of the step.
    pub action: StepAction,
}

/// Operation of a step. Values of `Copy`, `Env`, `Arg`, `Workdir`, `User`, `Expose` and `Label`,
/// and the content of inline files, may hold `$NAME`, `${NAME}`, `${NAME:-word}` and
/// `${NAME:+word}` of the environment and build arguments so far (`\$` is a dollar; see
/// [`crate::expand`]). Quotes are removed already.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum StepAction {
    /// Runs a program to its end.
    Run {
        /// The command.
        command: StepCommand,
        /// User to run as; the stage's user unless given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        user: Option<String>,
    },
    /// Copies files into the sandbox.
    Copy(CopyAction),
    /// Sets environment variables for later steps and for the template.
    Env(Vec<(String, String)>),
    /// Sets a build argument: a variable for the rest of the stage, which the template does not
    /// keep.
    Arg(String, String),
    /// Sets the working directory; created if missing.
    Workdir(String),
    /// Sets the user of later steps: `name` or `uid`, optionally with `:group`.
    User(String),
    /// Creates a user with a home directory, unless it exists.
    AddUser(String),
    /// Sets the shell of later steps.
    Shell(Vec<String>),
    /// Sets the entry point of the image; recorded, not run.
    Entrypoint(Vec<String>),
    /// Sets the arguments of the entry point; recorded, not run.
    Cmd(Vec<String>),
    /// Ports that the image declares: `80/tcp`.
    Expose(Vec<String>),
    /// Labels of the template.
    Label(Vec<(String, String)>),
}

/// A command of a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum StepCommand {
    /// Command line for the stage's shell; `/bin/sh -c` by default.
    Line(String),
    /// A program and its arguments.
    Exec(Vec<String>),
}

/// Operands of `COPY` and `ADD`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CopyAction {
    /// Origin of the files.
    pub from: CopySource,
    /// Paths or patterns (`*`, `?`, `[a-z]`), relative to the root of the origin.
    pub sources: Vec<String>,
    /// Destination, relative to the working directory. A directory if it ends with `/`, if there
    /// are several sources, or if a source is a directory.
    pub to: String,
    /// `user` or `user:group`, by name or number. By default files of uploads belong to root, and
    /// files of stages keep their owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Permissions in octal digits; unchanged by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// Unpacks sources that are tar archives, as `ADD` does.
    #[serde(default)]
    pub unpack: bool,
}

/// Origin of copied files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum CopySource {
    /// Uploaded archive of this name: a gzipped tar of the sources, with paths relative to the
    /// context.
    Files(String),
    /// An earlier stage, by its number from 0.
    Stage(usize),
    /// Files inside the step: name and content.
    Inline(Vec<(String, String)>),
}
