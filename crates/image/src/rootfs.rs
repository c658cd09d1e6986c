//! Installs Debian packages into a new root file system, with mmdebstrap.
//!
//! A *recipe* is the source of a stock template: a directory with its packages, files and settings.

use crate::apt;
use crate::command::{CommandError, Tool};
use crate::erofs::EPOCH;
use crate::file::{FileError, OnPath};
use crate::lock::Lock;
use crate::template_model::Recipe;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Directories and lock of a build.
pub(crate) struct BuildSite<'a> {
    /// Working directory.
    pub work: &'a Path,
    /// Packages downloaded by earlier builds of the same template.
    pub cache: &'a Path,
    /// Lock of the template. The programs of the build inherit it and hold it until they exit.
    pub lock: &'a Lock,
}

/// Shell script that restores cached packages as hard links. The cache is on the same file system.
const RESTORE_CACHE: &str = r#"mkdir -p "$1/var/cache/apt/archives/partial"
for deb in "$JIFFY_CACHE"/*.deb; do [ ! -e "$deb" ] || ln "$deb" "$1/var/cache/apt/archives/"; done"#;

/// Shell script that replaces the cache with the packages of this build. The rename is the last
/// step: a killed build leaves a complete cache, or none.
const KEEP_CACHE: &str = r#"rm -rf "$JIFFY_CACHE.new" && mkdir -p "$JIFFY_CACHE.new"
ln "$1"/var/cache/apt/archives/*.deb "$JIFFY_CACHE.new/"
rm -rf "$JIFFY_CACHE" && mv "$JIFFY_CACHE.new" "$JIFFY_CACHE""#;

/// Shell script that removes traces of the host, and files whose content is generated when a
/// sandbox starts.
const FINISH: &str = r#"set -eu
rm -f "$1/etc/apt/apt.conf.d/99mmdebstrap" "$1"/etc/*- "$1"/var/cache/debconf/*-old "$1"/var/lib/dpkg/*-old
for empty in hostname machine-id resolv.conf; do : >"$1/etc/$empty"; chmod 0644 "$1/etc/$empty"; done
printf '127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n' >"$1/etc/hosts"
printf '%s\n' "$JIFFY_SOURCES" >"$1/etc/apt/sources.list""#;

/// Installs the recipe's packages into `<work>/root`. Returns this path. `on_progress` receives
/// output lines and percentages.
pub(crate) fn bootstrap(
    recipe: &Recipe,
    site: &BuildSite<'_>,
    on_progress: &mut dyn FnMut(&str, u8),
) -> Result<PathBuf, RootfsError> {
    let spec = &recipe.spec;
    let root = site.work.join("root");
    // Files that are newer than the marker were created by this build (`normalize_times`).
    let marker = site.work.join("started");
    fs::write(&marker, "").on("create", &marker)?;

    let mut mmdebstrap = Tool::new("mmdebstrap", "mmdebstrap");
    // Removes the mounts of `/proc` and others if mmdebstrap is killed.
    mmdebstrap.private_mounts();
    // mmdebstrap and dpkg write this time into files that they create.
    mmdebstrap.env("SOURCE_DATE_EPOCH", EPOCH.to_string());
    // `FINISH` writes these sources into the image. The build itself uses `apt::build_sources`.
    mmdebstrap.env("JIFFY_CACHE", site.cache).env(
        "JIFFY_SOURCES",
        apt::public_sources(recipe.suite()).join("\n"),
    );
    mmdebstrap.args([
        "--mode=root",
        "--variant=minbase",
        "--format=directory",
        "--verbose",
        // The cache needs the downloaded packages, which mmdebstrap would delete early.
        "--skip=essential/unlink",
    ]);
    mmdebstrap.arg(format!("--include={}", spec.packages.join(",")));
    // apt's download user has no access to the data directory. Downloading as root is safe, since
    // packages are verified against signed indexes.
    mmdebstrap.arg(r#"--aptopt=APT::Sandbox::User "root""#);
    mmdebstrap.args(
        apt::host_options()
            .iter()
            .map(|option| format!("--aptopt={option}")),
    );
    mmdebstrap.args(
        spec.exclude
            .iter()
            .map(|path| format!("--dpkgopt=path-exclude={path}")),
    );
    mmdebstrap.args(
        spec.include
            .iter()
            .map(|path| format!("--dpkgopt=path-include={path}")),
    );
    // Packages are not flushed to disk, since an interrupted build is discarded.
    mmdebstrap.arg("--dpkgopt=force-unsafe-io");
    // The script of the recipe runs after the cache was saved, and `FINISH` runs last.
    mmdebstrap
        .arg(format!("--setup-hook={RESTORE_CACHE}"))
        .arg(format!("--customize-hook={KEEP_CACHE}"));
    if let Some(script) = write_files(recipe, site.work)? {
        mmdebstrap.arg(format!("--customize-hook={}", script.display()));
    }
    mmdebstrap.env("JIFFY_FILES", site.work.join("files"));
    mmdebstrap.arg(format!("--customize-hook={FINISH}"));
    mmdebstrap
        .arg(recipe.suite())
        .arg(&root)
        .args(apt::build_sources(recipe.suite()));

    let mut meter = InstallProgress::default();
    mmdebstrap.run(Some(site.lock), &mut |line| {
        on_progress(line, meter.percent(line))
    })?;
    normalize_times(&root, &marker, site.lock)?;
    Ok(root)
}

/// Writes the recipe's files to `<work>/files` and returns the path of its script.
pub(crate) fn write_files(recipe: &Recipe, work: &Path) -> Result<Option<PathBuf>, FileError> {
    let files = work.join("files");
    fs::create_dir(&files).on("create", &files)?;
    for (name, content) in &recipe.files {
        let path = files.join(name);
        fs::write(&path, content).on("write", &path)?;
    }
    // A recipe without a script consists of packages only.
    let Some(script) = &recipe.customize else {
        return Ok(None);
    };
    let path = work.join("customize");
    fs::write(&path, script).on("write", &path)?;
    fs::set_permissions(&path, Permissions::from_mode(0o700)).on("set the mode of", &path)?;
    Ok(Some(path))
}

/// Sets a fixed time on files that the build created, so that equal packages give equal images.
pub(crate) fn normalize_times(root: &Path, marker: &Path, lock: &Lock) -> Result<(), RootfsError> {
    let mut find = Tool::new("find", "findutils");
    // `-newer`: files of packages are older than the marker and retain their times.
    find.arg(root).args(["-xdev", "-newer"]).arg(marker).args([
        "-exec",
        "touch",
        "--no-dereference",
    ]);
    find.arg(format!("--date=@{EPOCH}")).args(["{}", "+"]);
    Ok(find.run(Some(lock), &mut |_| ())?)
}

/// Error of a root file system.
#[derive(Debug, thiserror::Error)]
pub enum RootfsError {
    #[error(transparent)]
    Command(#[from] CommandError),
    #[error(transparent)]
    File(#[from] FileError),
}

/// Progress of an installation, derived from the output of apt and dpkg. mmdebstrap has two rounds:
/// essential packages, then others. Each round announces its number of packages, and unpacks and
/// configures each of them. The packages of a layer on another template are one round.
#[derive(Default)]
pub(crate) struct InstallProgress {
    has_one_round: bool,
    /// Number of the current round.
    round: u32,
    /// Number of packages in this round.
    packages: u32,
    /// Completed steps in this round.
    steps: u32,
    /// Percentage that was returned last.
    percent: u8,
}

impl InstallProgress {
    /// Returns the progress of an installation with one round.
    pub(crate) fn of_one_round() -> Self {
        Self {
            has_one_round: true,
            ..Self::default()
        }
    }

    /// Processes an output line and returns the percentage, which never decreases.
    pub(crate) fn percent(&mut self, line: &str) -> u8 {
        if let Some(packages) = newly_installed(line) {
            self.round += 1;
            (self.packages, self.steps) = (packages, 0);
        } else if line.starts_with("Unpacking ") || line.starts_with("Setting up ") {
            self.steps += 1;
        }
        // Each package takes two steps: unpacking and configuring.
        let done = |share: u32| {
            (share * self.steps)
                .checked_div(2 * self.packages)
                .unwrap_or(0)
                .min(share)
        };
        let percent = match self.round {
            // The first round fills 5 to 50 %, since the package lists are downloaded before it.
            0 => 0,
            _ if self.has_one_round => 5 + done(95),
            1 => 5 + done(45),
            _ => 50 + done(50),
        };
        self.percent = self.percent.max(u8::try_from(percent).unwrap_or(100));
        self.percent
    }
}

/// Parses a line such as `0 upgraded, 69 newly installed, 0 to remove and 0 not upgraded.`
fn newly_installed(line: &str) -> Option<u32> {
    let (before, _) = line.split_once(" newly installed")?;
    before.rsplit(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_rises_through_both_rounds_and_never_falls() {
        let mut meter = InstallProgress::default();
        let install = [
            "Unpacking a (1) ...",
            "Unpacking b (1) ...",
            "Setting up a (1) ...",
            "Setting up b (1) ...",
        ];
        let round = "0 upgraded, 2 newly installed, 0 to remove and 0 not upgraded.";
        let output = ["I: running apt-get update...", round]
            .into_iter()
            .chain(install)
            .chain([round])
            .chain(install);
        let percents: Vec<u8> = output.map(|line| meter.percent(line)).collect();
        // The first round extends from 5 to 50 %, and the second from 50 to 100 %.
        assert_eq!(percents, [0, 5, 16, 27, 38, 50, 50, 62, 75, 87, 100]);
        let mut meter = InstallProgress::of_one_round();
        let percents = [
            round,
            "Unpacking a",
            "Unpacking b",
            "Setting up a",
            "Setting up b",
        ]
        .map(|line| meter.percent(line));
        assert_eq!(percents, [5, 28, 52, 76, 100]);
    }
}
