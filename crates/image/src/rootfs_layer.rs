//! Creates the layer that a recipe adds to the root file system of another template. The layer
//! consists of additional packages and the changes of the recipe's script.
//!
//! A *recipe* is the source of a stock template: a directory with its packages, files and settings.

use crate::apt;
use crate::command::Tool;
use crate::erofs::EPOCH;
use crate::file::OnPath;
use crate::rootfs::{BuildSite, InstallProgress, RootfsError, normalize_times, write_files};
use crate::template_model::Recipe;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Shell script that creates the layer.
const SCRIPT: &str = include_str!("rootfs_layer.sh");

/// Prefix of overlayfs's extended attributes. Only [`OPAQUE`] is also valid in another overlay.
const OVERLAY_XATTR_PREFIX: &str = "trusted.overlay.";
const OPAQUE: &str = "trusted.overlay.opaque";

/// Maximum length of a file's attribute list in bytes (XATTR_LIST_MAX of the kernel).
const MAX_XATTR_LIST_BYTES: usize = 65_536;

/// Creates `<work>/upper` with the changes of `recipe` to the image `below`. Deletions are recorded
/// as overlayfs's marks. `on_progress` receives output lines and percentages.
pub(crate) fn build(
    recipe: &Recipe,
    below: &Path,
    site: &BuildSite<'_>,
    on_progress: &mut dyn FnMut(&str, u8),
) -> Result<PathBuf, RootfsError> {
    // Files that are newer than the marker were created by this build (`normalize_times`).
    let marker = site.work.join("started");
    fs::write(&marker, "").on("create", &marker)?;
    let upper = site.work.join("upper");
    fs::create_dir(&upper).on("create", &upper)?;
    // The directory becomes the root of the layer. The umask must not influence its mode.
    fs::set_permissions(&upper, fs::Permissions::from_mode(0o755)).on("set the mode of", &upper)?;
    install(recipe, below, site, on_progress)?;
    // overlayfs's attributes refer to inodes of this overlay. In the image they would be wrong.
    remove_overlay_xattrs(&upper)?;
    normalize_times(&upper, &marker, site.lock)?;
    Ok(upper)
}

/// Runs the script that installs the packages on an overlay of the image.
fn install(
    recipe: &Recipe,
    below: &Path,
    site: &BuildSite<'_>,
    on_progress: &mut dyn FnMut(&str, u8),
) -> Result<(), RootfsError> {
    let mut shell = Tool::new("sh", "dash");
    shell.private_mounts();
    let customize = write_files(recipe, site.work)?;
    let customize = customize.unwrap_or_default();
    shell
        .env("SOURCE_DATE_EPOCH", EPOCH.to_string())
        .env("JIFFY_CACHE", site.cache)
        .env("JIFFY_FILES", site.work.join("files"))
        .env("JIFFY_CUSTOMIZE", customize)
        .env("JIFFY_SOURCES", sources(recipe))
        .env("JIFFY_APT", options());
    shell.args(["-c", SCRIPT, "rootfs_layer.sh"]);
    // `$1`, `$2` and the further arguments of the script. The last argument above is its `$0`.
    shell.arg(site.work).arg(below).args(&recipe.spec.packages);
    let mut meter = InstallProgress::of_one_round();
    shell.run(Some(site.lock), &mut |line| {
        on_progress(line, meter.percent(line))
    })?;
    Ok(())
}

/// Returns the sources of packages, one per line.
fn sources(recipe: &Recipe) -> String {
    apt::build_sources(recipe.suite()).join("\n")
}

/// Returns apt's options for this build.
fn options() -> String {
    let mut options = apt::host_options();
    let own = [
        "APT::Install-Recommends \"false\";",
        "APT::Sandbox::User \"root\";",
        "APT::Keep-Downloaded-Packages \"true\";",
        // `rootfs_layer.sh` writes `JIFFY_SOURCES` to this file, and mounts a new `/tmp` before.
        "Dir::Etc::SourceList \"/tmp/sources.list\";",
        "Dir::Etc::SourceParts \"/dev/null\";",
        "Dir::Cache::pkgcache \"\";",
        "Dir::Cache::srcpkgcache \"\";",
        // Packages are not flushed to disk, since an interrupted build is discarded.
        "DPkg::Options:: \"--force-unsafe-io\";",
    ];
    options.extend(own.map(str::to_owned));
    options.join("\n")
}

/// Removes overlayfs's attributes about lower files, such as inode numbers of this host.
fn remove_overlay_xattrs(path: &Path) -> Result<(), RootfsError> {
    let mut names = vec![0; MAX_XATTR_LIST_BYTES];
    let n = rustix::fs::llistxattr(path, &mut names[..])
        .map_err(std::io::Error::from)
        .on("read the attributes of", path)?;
    // The list contains zero-terminated names.
    for name in names[..n].split(|&b| b == 0) {
        let name = String::from_utf8_lossy(name);
        if name.starts_with(OVERLAY_XATTR_PREFIX) && name != OPAQUE {
            let removed = rustix::fs::lremovexattr(path, &*name);
            removed
                .map_err(std::io::Error::from)
                .on("remove an attribute of", path)?;
        }
    }
    let kind = fs::symlink_metadata(path).on("examine", path)?;
    if kind.is_dir() {
        for entry in fs::read_dir(path).on("list", path)? {
            remove_overlay_xattrs(&entry.on("list", path)?.path())?;
        }
    }
    Ok(())
}
