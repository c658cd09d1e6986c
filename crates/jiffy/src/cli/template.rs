//! Arguments of `jiffy template` and its subcommands.
//!
//! A *recipe* is the source of a stock template: a directory with its packages, files and settings.
//! A *stock template* is a template whose recipe Jiffy contains.

use super::{HostArgs, StoreTargetArgs};
use crate::units;
use clap::{Args, Subcommand};
use jiffy_registry_pull::{RegistryAddress, RegistryMirror};
use std::path::PathBuf;
use std::time::Duration;

/// `jiffy template`.
#[derive(Debug, Subcommand)]
pub enum TemplateCommand {
    /// List templates
    Ls {
        /// Include internal templates of builds
        #[arg(long, short)]
        all: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Build a template from a recipe, a Dockerfile or an image, unless it exists
    Build(Box<TemplateBuildArgs>),
    /// Show details of a template
    Inspect {
        /// Template
        name: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the build history of a template
    History {
        /// Template
        name: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Tag the current version of a template with another name
    Tag {
        /// Template
        from: String,
        /// NAME or NAME:TAG
        to: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Make a template and all its tags available to all API keys
    Publish {
        /// Templates
        #[arg(required = true)]
        names: Vec<String>,
        /// Make the template private
        #[arg(long)]
        private: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Export a template to a file for `jiffy template import`
    Export {
        /// Template
        name: String,
        /// Output file (`-`: standard output)
        file: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Import a template from an exported file
    Import(TemplateImportArgs),
    /// Push a template to the shared store. Existing data is not sent again
    Push {
        /// Template
        name: String,
        /// Store to push to.
        #[command(flatten)]
        target: StoreTargetArgs,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Pull a template from the shared store
    Pull {
        /// NAME, NAME:TAG, or NAME@VERSION of a snapshot
        name: String,
        /// Make the template available to all API keys
        #[arg(long)]
        public: bool,
        /// Store to pull from.
        #[command(flatten)]
        target: StoreTargetArgs,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove templates (NAME or NAME:TAG). Existing sandboxes and snapshots are not affected
    Rm {
        /// Templates
        #[arg(required = true)]
        names: Vec<String>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove unused images, template versions and build caches
    Prune {
        /// Minimum time without use of cached build steps and uploaded files
        #[arg(long, value_name = "TIME", value_parser = units::duration)]
        older_than: Option<Duration>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// `jiffy template import`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  jiffy template import base.tpl                      a file of the installed package
  jiffy template import mine.tpl --name other
  jiffy template import https://HOST/base.tpl --sha256 DIGEST

A file becomes a stock template (such as `base`) if it has the recipe of this version, and if its
SHA-256 is in the list of the installed package or given with --sha256. A downloaded file always
needs such a digest.")]
pub struct TemplateImportArgs {
    /// File to read (`-`: standard input), or an https URL
    pub file: PathBuf,
    /// Name of the template (default: the name in the file)
    #[arg(long)]
    pub name: Option<String>,
    /// SHA-256 that the file must have, in hexadecimal
    #[arg(long, value_name = "DIGEST")]
    pub sha256: Option<String>,
    /// Replace a stock template with a file that has another recipe or an unknown digest
    #[arg(long)]
    pub force: bool,
    /// Make the template available to all API keys
    #[arg(long)]
    pub public: bool,
    /// Print the template as JSON
    #[arg(long)]
    pub json: bool,
}

/// `jiffy template build`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  jiffy template build                                    the stock template `base`
  jiffy template build ./mine                             the recipe in a directory
  jiffy template build --image python:3.12-slim           an image, as template `python-3.12-slim`
  jiffy template build --image ghcr.io/me/app --name app --start-image-command --ready-port 8080
  docker save app | jiffy template build --from-tar - --name app
  jiffy template build --from-dir ./rootfs --name mine

Credentials for a registry: JIFFY_REGISTRY_USER and JIFFY_REGISTRY_PASSWORD, or if they are not set,
the credentials that `docker login` has stored.")]
pub struct TemplateBuildArgs {
    /// Directory with a Dockerfile or a recipe.toml, or name of a stock template [default: base]
    #[arg(conflicts_with = "source")]
    pub recipe: Option<String>,
    /// Dockerfile (`-`: standard input) [default: the Dockerfile in the directory]
    #[arg(short, long, value_name = "FILE", conflicts_with = "source")]
    pub file: Option<PathBuf>,
    /// Build argument (ARG). Without =VALUE, its value in the current environment is used
    #[arg(long, value_name = "KEY[=VALUE]", conflicts_with = "source")]
    pub build_arg: Vec<String>,
    /// Secret for RUN --mount=type=secret: id=NAME with src=FILE or env=VARIABLE. Can be repeated
    #[arg(long, value_name = "SPEC", conflicts_with = "source")]
    pub secret: Vec<String>,
    /// SSH agent for RUN --mount=type=ssh: default (the agent of SSH_AUTH_SOCK) or NAME=SOCKET. Can
    /// be repeated
    #[arg(long, value_name = "SPEC", conflicts_with = "source")]
    pub ssh: Vec<String>,
    /// Target stage of the Dockerfile [default: the last]
    #[arg(long, value_name = "STAGE", conflicts_with = "source")]
    pub target: Option<String>,
    /// Do not use the build cache
    #[arg(long, conflicts_with = "source")]
    pub no_cache: bool,
    /// Signatures that images must have.
    #[command(flatten)]
    pub signatures: SignatureArgs,
    /// Additional tag
    #[arg(long, value_name = "TAG", conflicts_with = "source")]
    pub tag: Vec<String>,
    /// Image to build from.
    #[command(flatten)]
    pub source: TemplateSource,
    /// Name of the template, optionally with a tag [default: from the directory, image or file]
    #[arg(long)]
    pub name: Option<String>,
    /// Default number of virtual CPUs of its sandboxes, 1 to 8
    #[arg(long, value_name = "N")]
    pub cpus: Option<u8>,
    /// Default memory of its sandboxes
    #[arg(long, value_parser = units::memory_mib, value_name = "SIZE")]
    pub memory: Option<u32>,
    /// Default writable disk of its sandboxes
    #[arg(long, value_parser = units::mebibytes, value_name = "SIZE")]
    pub disk: Option<u64>,
    /// Default idle timeout of its sandboxes: 90s, 30m, 12h. 0 means none
    #[arg(long, value_name = "TIME", value_parser = units::idle_timeout, conflicts_with = "source")]
    pub idle_timeout: Option<u64>,
    /// Start command, run with /bin/sh -c before the snapshot of the template is taken
    #[arg(long, value_name = "COMMAND", conflicts_with = "start_image_command")]
    pub start: Option<String>,
    /// Run the command of the image before the snapshot of the template is taken
    #[arg(long)]
    pub start_image_command: bool,
    /// Wait until this port accepts connections before the snapshot is taken
    #[arg(long, value_name = "PORT")]
    pub ready_port: Option<u16>,
    /// Wait until this path on the port answers with status 2xx
    #[arg(long, requires = "ready_port", value_name = "PATH")]
    pub ready_path: Option<String>,
    /// Wait until this command, run with /bin/sh -c, succeeds
    #[arg(long, value_name = "COMMAND", conflicts_with = "ready_port")]
    pub ready_command: Option<String>,
    /// Timeout for the template to become ready
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = units::duration)]
    pub ready_timeout: Duration,
    /// Access this registry (HOST or HOST:PORT) without TLS
    #[arg(long, requires = "image", value_name = "HOST")]
    pub plain_http: Vec<String>,
    /// Registry in the host's private network (HOST or HOST:PORT) that may be accessed. Can be
    /// repeated
    #[arg(long, requires = "image", value_name = "HOST")]
    pub registry_allow: Vec<RegistryAddress>,
    /// Mirror of a registry, such as docker.io=https://mirror.example:5000, that is used before the
    /// registry. Can be repeated
    #[arg(long, requires = "image", value_name = "HOST=URL")]
    pub registry_mirror: Vec<RegistryMirror>,
    /// Make the template available to all API keys
    #[arg(long)]
    pub public: bool,
    /// Daemon that builds a Dockerfile.
    #[command(flatten)]
    pub host: HostArgs,
    /// Print the template as JSON
    #[arg(long)]
    pub json: bool,
}

impl TemplateBuildArgs {
    /// Returns whether an option is set that cannot be combined with a recipe: the recipe defines
    /// the value itself, or the option is only for Dockerfiles and images.
    pub fn overrides_recipe(&self) -> bool {
        let size = self.cpus.is_some() || self.memory.is_some() || self.disk.is_some();
        let ready = self.ready_port.is_some() || self.ready_command.is_some();
        let dockerfile = !self.build_arg.is_empty()
            || !self.secret.is_empty()
            || !self.ssh.is_empty()
            || self.signatures.are_required()
            || self.target.is_some()
            || self.no_cache;
        let start = self.start.is_some() || self.start_image_command;
        let has_name = self.name.is_some() || !self.tag.is_empty();
        let size = size || self.idle_timeout.is_some();
        size || ready || dockerfile || start || has_name || self.public
    }
}

/// Signatures that images must have: of any of the keys and identities.
#[derive(Debug, Args)]
pub struct SignatureArgs {
    /// Public key in PEM, for example cosign.pub. Each image must have a signature by one of these
    /// keys. Can be repeated
    #[arg(long, value_name = "FILE", conflicts_with_all = ["from_tar", "from_dir"])]
    pub verify_key: Vec<PathBuf>,
    /// Signer of each image, as its certificate names it: an e-mail address or a URI. `*` at the
    /// end stands for any rest. Can be repeated: one of the signers must have signed
    #[arg(
        long,
        value_name = "SUBJECT",
        requires_all = ["verify_issuer", "trust_root"],
        conflicts_with_all = ["from_tar", "from_dir"],
    )]
    pub verify_identity: Vec<String>,
    /// OpenID Connect issuer of the signers, such as https://token.actions.githubusercontent.com
    #[arg(long, value_name = "URL", requires = "verify_identity")]
    pub verify_issuer: Option<String>,
    /// Authorities and logs that are trusted for signatures: a trusted_root.json of Sigstore.
    /// Signatures by --verify-key must then be in a log, too
    #[arg(long, value_name = "FILE", conflicts_with_all = ["from_tar", "from_dir"])]
    pub trust_root: Option<PathBuf>,
}

impl SignatureArgs {
    /// Returns whether images must have signatures.
    pub fn are_required(&self) -> bool {
        !self.verify_key.is_empty() || !self.verify_identity.is_empty() || self.trust_root.is_some()
    }
}

/// Source of a template's image.
#[derive(Debug, Args)]
#[group(id = "source", multiple = false)]
pub struct TemplateSource {
    /// Image in a registry: [HOST[:PORT]/]NAME[:TAG|@DIGEST]
    #[arg(long, value_name = "REF")]
    pub image: Option<String>,
    /// Tar file (`-`: standard input): an OCI layout, the output of `docker save`, or a root file
    /// system
    #[arg(long, value_name = "FILE")]
    pub from_tar: Option<PathBuf>,
    /// Directory: an OCI layout or a root file system
    #[arg(long, value_name = "DIR")]
    pub from_dir: Option<PathBuf>,
}
