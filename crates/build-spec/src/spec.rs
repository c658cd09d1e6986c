//! Description of a build: stages of steps, in the form in which clients send them to the builder.

use jiffy_engine_api::{SignerIdentity, Startup, TemplateNetwork};
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
    /// Network rules of the template's sandboxes. If empty, the rules of the base apply.
    #[serde(default, skip_serializing_if = "TemplateNetwork::is_empty")]
    pub network: TemplateNetwork,
    /// Public keys in PEM. If keys or identities are given, one of them must have signed each image
    /// of a registry.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub verify_keys: Vec<String>,
    /// Identities whose certificates sign images.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub verify_identities: Vec<SignerIdentity>,
    /// Content of a `trusted_root.json` of Sigstore, which identities require.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verify_trust_root: Option<String>,
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
    /// Credentials of a cloud, instead of user name and password.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cloud: Option<CloudCredentials>,
    /// If set, plain HTTP is used instead of TLS.
    #[serde(default)]
    pub plain_http: bool,
}

/// Credentials of a cloud, from which a password for its registry is obtained.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum CloudCredentials {
    /// Access key for Amazon ECR.
    Aws {
        /// Access key id.
        access_key_id: String,
        /// Secret access key.
        secret_access_key: String,
        /// Region, such as `eu-west-1`.
        region: String,
    },
    /// Key file of a service account for Google Artifact Registry, in JSON.
    Gcp(String),
}

impl std::fmt::Debug for CloudCredentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Without the secrets, because logs contain this text.
        match self {
            Self::Aws { access_key_id, .. } => f.debug_tuple("Aws").field(access_key_id).finish(),
            Self::Gcp(_) => f.write_str("Gcp"),
        }
    }
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
            .field("cloud", &self.cloud)
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
        /// Files that only this command sees.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        mounts: Vec<RunMount>,
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
    /// Adds an instruction that runs in builds based on the template.
    OnBuild(String),
}

/// Mount of a `Run` step. Paths may contain variables, and are relative to the working directory.
/// No mount becomes part of the template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum RunMount {
    /// A file or directory of the context or of a stage. Changes by the command are discarded.
    Bind {
        /// Origin of the files. [`CopySource::Inline`] and [`CopySource::Git`] are not allowed.
        from: CopySource,
        /// Path relative to the root of the origin.
        source: String,
        /// Path in the sandbox.
        target: String,
        /// If set, the command may write.
        #[serde(default)]
        writable: bool,
    },
    /// A directory that builds with the same owner and id share.
    Cache {
        /// Name of the directory's content.
        id: String,
        /// Path in the sandbox.
        target: String,
        /// If set, the command cannot write.
        #[serde(default)]
        read_only: bool,
        /// Owner of a new directory.
        #[serde(default)]
        uid: u32,
        /// Group of a new directory.
        #[serde(default)]
        gid: u32,
        /// Permissions of a new directory.
        mode: u32,
    },
    /// An empty directory in memory.
    Tmpfs {
        /// Path in the sandbox.
        target: String,
        /// Maximum size in bytes. Defaults to half of the sandbox's memory.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        size_bytes: Option<u64>,
    },
    /// A secret of the build, as a file or as an environment variable.
    Secret {
        /// Name of the secret.
        id: String,
        /// Path of the file. `None` if only a variable is set.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        target: Option<String>,
        /// Name of the variable.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        env: Option<String>,
        /// If set, the step fails without the secret. Otherwise the mount is omitted.
        #[serde(default)]
        required: bool,
        /// Owner of the file.
        #[serde(default)]
        uid: u32,
        /// Group of the file.
        #[serde(default)]
        gid: u32,
        /// Permissions of the file.
        mode: u32,
    },
    /// Socket of an SSH agent of the build's client.
    Ssh {
        /// Name of the agent.
        id: String,
        /// Path of the socket.
        target: String,
        /// If set, the step fails without the agent. Otherwise the mount is omitted.
        #[serde(default)]
        required: bool,
        /// Owner of the socket.
        #[serde(default)]
        uid: u32,
        /// Group of the socket.
        #[serde(default)]
        gid: u32,
        /// Permissions of the socket.
        mode: u32,
    },
}

impl RunMount {
    /// Returns the origin of the mounted files. `None` if the mount has no origin.
    pub fn origin(&self) -> Option<&CopySource> {
        match self {
            Self::Bind { from, .. } => Some(from),
            _ => None,
        }
    }
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
    /// A file on a web server.
    Url(UrlSource),
    /// A commit of a Git repository.
    Git(GitSource),
}

/// A file on a web server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct UrlSource {
    /// An `https` URL. May contain variables.
    pub url: String,
    /// SHA-256 of the file in hexadecimal. May contain variables.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
}

/// A commit of a Git repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GitSource {
    /// `http` or `https` URL of the repository, optionally with `#REF:DIRECTORY`. May contain
    /// variables.
    pub url: String,
    /// Commit that the reference must have, in hexadecimal. May contain variables.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// If set, the directory `.git` is retained.
    #[serde(default)]
    pub keep_git_dir: bool,
}
