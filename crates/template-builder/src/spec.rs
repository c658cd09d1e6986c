//! What is to be built: stages of steps, as its author sends them to the builder.

use jiffy_engine::Startup;
use serde::{Deserialize, Serialize};

/// A build. The last stage becomes the template; of the others only those are built that it needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BuildSpec {
    /// In the order of their writing; a stage refers to earlier ones only.
    pub stages: Vec<BuildStage>,
    /// What runs in every sandbox of the template, and when that is ready.
    #[serde(default)]
    pub startup: Startup,
    /// Whether the command that the image would run (`ENTRYPOINT`, `CMD`) is what is started.
    #[serde(default)]
    pub start_image_command: bool,
    /// Whether nothing of earlier builds is taken up.
    #[serde(default)]
    pub force: bool,
}

/// What its steps make of a beginning.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BuildStage {
    /// `AS` what; only for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What it begins with.
    pub from: StageBase,
    /// What is done, in order.
    pub steps: Vec<BuildStep>,
}

/// What a stage begins with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum StageBase {
    /// A template of this host if there is one of that name, else an image in a registry: what `FROM` says.
    Name(String),
    /// An image in a registry.
    Image(ImageSource),
    /// A template of this host: `name` or `name:tag`.
    Template(String),
    /// An earlier stage, by its number from 0.
    Stage(usize),
    /// Nothing at all: only files can be copied, and nothing can run.
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
    /// Whether it is spoken to without TLS.
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

/// One step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BuildStep {
    /// As its author wrote it, on one line: for logs and errors.
    pub text: String,
    /// Line of the file it was written in, from 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<u32>,
    /// It and what follows are done anew, whatever earlier builds did.
    #[serde(default)]
    pub force: bool,
    /// What is done.
    pub action: StepAction,
}

/// What a step does. Words of `CopyAction`, `Env`, `Arg`, `Workdir`, `User`, `Expose` and `Label` may hold `$NAME`, `${NAME}`,
/// `${NAME:-word}` and `${NAME:+word}` of the environment and the build arguments so far (`\$` is a dollar; see
/// [`crate::expand`]), and so may the content of files that a step holds itself; quotes are gone already.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum StepAction {
    /// Runs a program to its end.
    Run {
        /// What runs.
        command: StepCommand,
        /// As whom, if not as the user so far.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        user: Option<String>,
    },
    /// Puts files into the sandbox.
    Copy(CopyAction),
    /// Variables of the environment, from here on and in the template.
    Env(Vec<(String, String)>),
    /// A build argument: a variable of the environment, from here to the end of the stage, and not in the template.
    Arg(String, String),
    /// The directory of what follows; made if it is not there.
    Workdir(String),
    /// The user of what follows: `name`, `uid`, either with `:group`.
    User(String),
    /// Makes a user of that name, with a home directory, unless there is one.
    AddUser(String),
    /// The shell of what follows.
    Shell(Vec<String>),
    /// What the image would run; recorded, and not run.
    Entrypoint(Vec<String>),
    /// Its arguments, likewise.
    Cmd(Vec<String>),
    /// Ports it says it listens on: `80/tcp`.
    Expose(Vec<String>),
    /// Words about the template.
    Label(Vec<(String, String)>),
}

/// A command of a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum StepCommand {
    /// For the stage's shell: `/bin/sh -c` unless a step said otherwise.
    Line(String),
    /// A program and its arguments.
    Exec(Vec<String>),
}

/// Files for the sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CopyAction {
    /// Where they come from.
    pub from: CopySource,
    /// Which, as paths or patterns (`*`, `?`, `[a-z]`); relative to the root of where they come from.
    pub sources: Vec<String>,
    /// Where they go, relative to the directory so far. Ends with `/`, or there are several sources, or one is a directory: a directory.
    pub to: String,
    /// `user`, `user:group`, by name or number. Unless said, files of uploads are root's, and those of stages whose they were there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Permissions, in octal digits; as they were unless said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// Whether sources that are tar archives are unpacked, as `ADD` does.
    #[serde(default)]
    pub unpack: bool,
}

/// Where files come from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum CopySource {
    /// An archive that was uploaded under this name (a gzipped tar of the sources, their paths relative to the context).
    Files(String),
    /// An earlier stage, by its number from 0.
    Stage(usize),
    /// Files that the step itself holds: name and content.
    Inline(Vec<(String, String)>),
}
