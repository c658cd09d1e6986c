//! Description of a build: stages of steps, in the form in which clients send them to the builder.

use jiffy_engine_api::Startup;
use serde::{Deserialize, Serialize};

/// A build. The last stage becomes the template. Other stages are built only if the last stage
/// depends on them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BuildSpec {
    /// Stages in the order of the source. Each refers only to earlier stages.
    pub stages: Vec<BuildStage>,
    /// Command that runs in every sandbox of the template, and its readiness check.
    #[serde(default)]
    pub startup: Startup,
    /// If set, the command of the image (`ENTRYPOINT`, `CMD`) is started.
    #[serde(default)]
    pub start_image_command: bool,
    /// If set, results of earlier builds are ignored.
    #[serde(default)]
    pub force: bool,
    /// Default idle timeout of the template's sandboxes in seconds. 0 means none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_timeout_s: Option<u64>,
}

/// A base, and the steps that are applied to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BuildStage {
    /// Name after `AS`. Only for display.
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
    /// Argument of `FROM`. It refers to a template of this host if one has this name, otherwise to
    /// an image in a registry.
    Name(String),
    /// An image in a registry.
    Image(ImageSource),
    /// A template of this host: `name` or `name:tag`.
    Template(String),
    /// An earlier stage by its index, starting at 0.
    Stage(usize),
    /// Empty base. Files can be copied, but commands cannot run.
    Scratch,
}

/// An image in a registry.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ImageSource {
    /// `alpine`, `ghcr.io/owner/name:tag`, `host:5000/name@sha256:…`
    pub reference: String,
    /// User name and password, if the registry requires them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credentials: Option<(String, String)>,
    /// If set, plain HTTP is used instead of TLS.
    #[serde(default)]
    pub plain_http: bool,
}

impl std::fmt::Debug for ImageSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ImageSource")
            .field("reference", &self.reference)
            .field(
                // The password is omitted, because logs contain this text.
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
    /// Source text on one line for logs and errors. Empty for generated steps.
    pub text: String,
    /// Line in the source file, starting at 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<u32>,
    /// If set, this step and all later steps are executed without results of earlier builds.
    #[serde(default)]
    pub force: bool,
    /// Operation of the step.
    pub action: StepAction,
}

/// Operation of a step.
///
/// The values of `Copy`, `Env`, `Arg`, `Workdir`, `User`, `Expose` and `Label` may contain
/// variables, and so may the content of inline files. Variables have the form `$NAME`, `${NAME}`,
/// `${NAME:-word}` or `${NAME:+word}` and refer to the environment and the build arguments so far.
/// `\$` is a dollar (see [`crate::expand`]). The parser has already removed quotes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum StepAction {
    /// Runs a program until it exits.
    Run {
        /// The command.
        command: StepCommand,
        /// User of the program. Defaults to the user of the stage.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        user: Option<String>,
    },
    /// Copies files into the sandbox.
    Copy(CopyAction),
    /// Sets environment variables for later steps and for the template.
    Env(Vec<(String, String)>),
    /// Sets a build argument: a variable for the rest of the stage, which does not become part of
    /// the template.
    Arg(String, String),
    /// Sets the working directory. Creates it if it is missing.
    Workdir(String),
    /// Sets the user of later steps: `name` or `uid`, optionally with `:group`.
    User(String),
    /// Creates a user with a home directory, unless it exists.
    AddUser(String),
    /// Sets the shell of later steps.
    Shell(Vec<String>),
    /// Sets the entry point of the image. It is started only with
    /// [`BuildSpec::start_image_command`].
    Entrypoint(Vec<String>),
    /// Sets the arguments of the entry point. Without an entry point, they are the command.
    Cmd(Vec<String>),
    /// Declares ports of the image, in the form `80/tcp`.
    Expose(Vec<String>),
    /// Sets labels of the template.
    Label(Vec<(String, String)>),
}

/// Command of a `Run` step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum StepCommand {
    /// Command line for the stage's shell, which defaults to `/bin/sh -c`.
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
    /// Destination, relative to the working directory. A file is copied into it if it ends with `/`
    /// or is an existing directory. Several files or directories require such a destination. A
    /// source directory copies only its contents.
    pub to: String,
    /// Owner as `user` or `user:group`, by name or number. By default, uploaded files belong to
    /// root, and files of stages retain their owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Permissions in octal digits. Unchanged by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// If set, sources that are tar archives are unpacked, as `ADD` does.
    #[serde(default)]
    pub unpack: bool,
}

/// Origin of copied files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum CopySource {
    /// Name of an uploaded archive: a gzipped tar of the sources, with paths relative to the
    /// context.
    Files(String),
    /// Index of an earlier stage, starting at 0.
    Stage(usize),
    /// Files in the step itself: names and contents.
    Inline(Vec<(String, String)>),
}
