//! Files of sandboxes on the host: guest kernel, templates, blank disks and the initial ramdisk.
//!
//! All files are in one data directory ([`Home`]). A file is created under a lock, beside its final
//! path, flushed and renamed, so that it is complete or missing. It is used through an open
//! descriptor whose content has been verified.

mod agent_root;
mod apt;
mod builder;
mod command;
mod cpio;
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
mod manifest;
mod namespace;
mod progress;
mod prune;
mod recipe;
mod reference;
mod rootfs;
mod rootfs_layer;
mod template;
mod template_index;
mod transfer;
mod verified;
mod version;

pub use agent_root::AgentRoot;
pub use builder::BuildError;
pub use command::CommandError;
pub use derive::DerivedTemplate;
pub use disk::{BlankDisk, DiskError, MAX_DISK_MIB, MIN_DISK_MIB};
pub use erofs::{ImageError, LayerOfImageError, WriteImageError};
pub use file::FileError;
pub use home::{Home, HomeError};
pub use import::{
    DiskBudget, Import, ImportError, ImportSource, ImportStart, PullSettings, RegistryAccess,
    RegistryError,
};
pub use initrd::{Initrd, InitrdError};
pub use kernel::{Kernel, KernelError};
pub use layer::confined::{UNPACK_ARGUMENT, set_unpacker_program, unpacker};
pub use layer::{EntryProblem, LayerError, UnpackLimits, UnpackedLayer, unpack, unpack_image};
pub use manifest::{
    Defaults, HistoryStep, ImageOrigin, ImageSum, MANIFEST_FORMAT, MAX_IMAGES, TemplateManifest,
    Visibility,
};
pub use namespace::MovedTemplate;
pub use progress::{Phase, Progress};
pub use prune::PrunedImages;
pub use recipe::{Recipe, RecipeError};
pub use reference::{
    DEFAULT_TAG, MAX_TAG, MAX_TEMPLATE_NAME, Reference, image_on_demand, imported_image,
    is_image_on_demand, unfinished_build,
};
pub use template::{Template, TemplateError, Templates};
pub use template_index::TemplateSummary;
pub use transfer::{FileImport, FileTrust, KnownDigests, TemplateFiles};
pub use verified::{VerifiedFile, VerifyError};

/// Notes that a test is skipped: in its output, and in the list that `scripts/test` counts.
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
