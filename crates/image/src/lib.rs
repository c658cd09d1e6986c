//! Files of sandboxes on the host: guest kernel, templates, blank disks and the initial ramdisk.
//!
//! All files are in one data directory ([`Home`]). A file is written under a lock to a temporary
//! name in its final directory, flushed and renamed, so that it is complete or missing. It is used
//! through an open descriptor, whose content has been verified.
//!
//! docs/design-images.md explains how a registry, a recipe or a Dockerfile becomes a template.

mod agent_root;
mod apt;
mod build;
mod command;
mod cpio;
mod deadline;
mod derive;
mod disk;
mod erofs;
mod file;
mod home;
mod images;
mod import;
mod initrd;
mod jail;
mod kernel;
mod layer;
mod lock;
mod progress;
mod rootfs;
mod rootfs_layer;
mod template_model;
mod templates;
mod transfer;
mod verified;
mod version;
mod work_dir;

pub use agent_root::AgentRoot;
pub use build::{BuildError, RecipeStatus, build_if_needed, recipe_status};
pub use command::CommandError;
pub use derive::DerivedTemplate;
pub use disk::{BlankDisk, DiskError, MAX_DISK_MIB, MIN_DISK_MIB};
pub use erofs::{ImageError, LayerOfImageError, WriteImageError};
pub use file::FileError;
pub use home::{Home, HomeError};
pub use import::{
    DiskBudget, Import, ImportError, ImportSource, ImportStart, PullSettings, RegistryAccess,
    RegistryError, SignaturePolicy, VerifyKey,
};
pub use initrd::{Initrd, InitrdError};
pub use kernel::{Kernel, KernelError};
pub use layer::confined::{UNPACK_ARGUMENT, set_unpacker_program, unpacker};
pub use layer::{EntryProblem, LayerError, UnpackLimits, UnpackedLayer, unpack, unpack_image};
pub use progress::{Phase, Progress};
pub use template_model::{
    DEFAULT_TAG, Defaults, HistoryStep, ImageOrigin, ImageSum, MANIFEST_FORMAT, MAX_IMAGES,
    MAX_TAG, MAX_TEMPLATE_NAME, Recipe, RecipeError, Reference, Template, TemplateError,
    TemplateManifest, Visibility, image_on_demand, imported_image, is_image_on_demand, stock_names,
    unfinished_build,
};
pub use templates::{MovedTemplate, PrunedImages, TemplateSummary, Templates};
pub use transfer::{
    FileImport, FileTrust, KnownDigests, TemplateFiles, UnusableFile, download_file,
    download_template, export_template,
};
pub use verified::{VerifiedFile, VerifyError};

/// Records that a test is skipped, in the output of the test and in the list that
/// `scripts/rust-tests` counts.
#[cfg(test)]
fn skipped(test: &str, reason: &str) {
    use std::io::Write;
    println!("SKIPPED {test}: {reason}");
    if let Some(log) = std::env::var_os("JIFFY_SKIP_LOG") {
        let mut log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(log)
            .unwrap();
        writeln!(log, "{test}: {reason}").unwrap();
    }
}
