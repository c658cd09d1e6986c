//! `jiffy template`.

use super::{HostArgs, StoreTargetArgs};
use crate::units;
use clap::{Args, Subcommand};
use jiffy_pull::RegistryAddress;
use std::path::PathBuf;
use std::time::Duration;

/// `jiffy template`.
#[derive(Debug, Subcommand)]
pub enum TemplateCommand {
    /// List the templates on this host
    Ls {
        /// Also those that builds made for themselves
        #[arg(long, short)]
        all: bool,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Build a template, unless it is there already: from a recipe, or of an image
    Build(Box<TemplateBuildArgs>),
    /// Show what is known about a template
    Inspect {
        /// Template
        name: String,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Show how a template was made
    History {
        /// Template
        name: String,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Give what a template is now another name as well
    Tag {
        /// Template
        from: String,
        /// NAME or NAME:TAG
        to: String,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Let every API key make sandboxes of a template, under all its tags
    Publish {
        /// Templates
        #[arg(required = true)]
        names: Vec<String>,
        /// Let its owner alone again
        #[arg(long)]
        private: bool,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Write a template to one file, which `import` takes on any host
    Export {
        /// Template
        name: String,
        /// File to write (`-`: standard output)
        file: PathBuf,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Import a template from an exported file
    Import(TemplateImportArgs),
    /// Put a template into the store that hosts share; what the store has is not sent again
    Push {
        /// Template
        name: String,
        /// Store that it goes into
        #[command(flatten)]
        target: StoreTargetArgs,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Fetch a template from the store that hosts share, for sandboxes and for snapshots of it
    Pull {
        /// NAME, NAME:TAG, or NAME@VERSION as a snapshot asks for it
        name: String,
        /// Let every API key use it
        #[arg(long)]
        public: bool,
        /// Store that it comes from
        #[command(flatten)]
        target: StoreTargetArgs,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove templates: NAME, or NAME:TAG; what was made with them goes on
    Rm {
        /// Templates
        #[arg(required = true)]
        names: Vec<String>,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove images and versions that no template, snapshot or sandbox needs, and what only makes
    /// later builds faster
    Prune {
        /// Of what makes builds faster (finished steps, uploaded files), only what no build used
        /// for so long
        #[arg(long, value_name = "TIME", value_parser = units::duration)]
        older_than: Option<Duration>,
        /// As JSON
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
    /// Replace a stock template by a file with another recipe or an unknown digest
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

Credentials for a registry: JIFFY_REGISTRY_USER and JIFFY_REGISTRY_PASSWORD, else those of `docker login`.")]
pub struct TemplateBuildArgs {
    /// A directory with a Dockerfile or a recipe.toml, or a stock template's name [default: base]
    #[arg(conflicts_with = "source")]
    pub recipe: Option<String>,
    /// The Dockerfile, if it is not CONTEXT/Dockerfile (`-`: standard input)
    #[arg(short, long, value_name = "FILE", conflicts_with = "source")]
    pub file: Option<PathBuf>,
    /// Value of an ARG of the Dockerfile; without =VALUE, from here
    #[arg(long, value_name = "KEY[=VALUE]", conflicts_with = "source")]
    pub build_arg: Vec<String>,
    /// Stage of the Dockerfile that becomes the template (default: the last)
    #[arg(long, value_name = "STAGE", conflicts_with = "source")]
    pub target: Option<String>,
    /// Take up nothing that earlier builds did
    #[arg(long, conflicts_with = "source")]
    pub no_cache: bool,
    /// A further tag
    #[arg(long, value_name = "TAG", conflicts_with = "source")]
    pub tag: Vec<String>,
    /// Of what
    #[command(flatten)]
    pub source: TemplateSource,
    /// Name of the template, perhaps with a tag (default: after the directory, image or file)
    #[arg(long)]
    pub name: Option<String>,
    /// vCPUs its sandboxes get unless their creator says otherwise, 1 to 8
    #[arg(long, value_name = "N")]
    pub cpus: Option<u8>,
    /// Memory they get, likewise
    #[arg(long, value_parser = units::memory_mib, value_name = "SIZE")]
    pub memory: Option<u32>,
    /// Writable disk they get, likewise
    #[arg(long, value_parser = units::mebibytes, value_name = "SIZE")]
    pub disk: Option<u64>,
    /// Run this once with /bin/sh -c, before the template's snapshot
    #[arg(long, value_name = "COMMAND", conflicts_with = "start_image_command")]
    pub start: Option<String>,
    /// Run the image's own command once, before the template's snapshot
    #[arg(long)]
    pub start_image_command: bool,
    /// Take the snapshot when this port in the sandbox accepts connections
    #[arg(long, value_name = "PORT")]
    pub ready_port: Option<u16>,
    /// Take it when this page on the port answers with 2xx
    #[arg(long, requires = "ready_port", value_name = "PATH")]
    pub ready_path: Option<String>,
    /// Take it when this command, run with /bin/sh -c, succeeds
    #[arg(long, value_name = "COMMAND", conflicts_with = "ready_port")]
    pub ready_command: Option<String>,
    /// Longest to wait for that
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = units::duration)]
    pub ready_timeout: Duration,
    /// Speak to this registry (HOST or HOST:PORT) without TLS
    #[arg(long, requires = "image", value_name = "HOST")]
    pub plain_http: Vec<String>,
    /// Reach this registry of the host's own network, too (HOST or HOST:PORT); may be repeated
    #[arg(long, requires = "image", value_name = "HOST")]
    pub registry_allow: Vec<RegistryAddress>,
    /// Let every API key use it
    #[arg(long)]
    pub public: bool,
    /// Place where a Dockerfile is built
    #[command(flatten)]
    pub host: HostArgs,
    /// Print the template as JSON
    #[arg(long)]
    pub json: bool,
}

impl TemplateBuildArgs {
    /// True if they set something that a recipe sets itself.
    pub fn describes(&self) -> bool {
        let size = self.cpus.is_some() || self.memory.is_some() || self.disk.is_some();
        let ready = self.ready_port.is_some() || self.ready_command.is_some();
        let dockerfile = !self.build_arg.is_empty() || self.target.is_some() || self.no_cache;
        let start = self.start.is_some() || self.start_image_command;
        let named = self.name.is_some() || !self.tag.is_empty();
        size || ready || dockerfile || start || named || self.public
    }
}

/// Source of a template's image.
#[derive(Debug, Args)]
#[group(id = "source", multiple = false)]
pub struct TemplateSource {
    /// An image in a registry: [HOST[:PORT]/]NAME[:TAG|@DIGEST]
    #[arg(long, value_name = "REF")]
    pub image: Option<String>,
    /// A tar file (`-`: standard input): an OCI layout, what `docker save` writes, or a root file
    /// system
    #[arg(long, value_name = "FILE")]
    pub from_tar: Option<PathBuf>,
    /// A directory: an OCI layout, or a root file system
    #[arg(long, value_name = "DIR")]
    pub from_dir: Option<PathBuf>,
}
