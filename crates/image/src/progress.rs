//! Progress of builds and imports.

use std::fmt;

/// Progress of a build or import, which takes minutes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress<'a> {
    /// Start of a phase.
    Phase(Phase),
    /// Completed part of the current build or import in percent. Starts again for a template after
    /// the build of its base, and for layers that must be downloaded again.
    Percent(u8),
    /// Output line of a program.
    Line(&'a str),
}

/// A phase of a build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Waiting for another build or import.
    Waiting,
    Packages,
    /// Downloading manifest and layers.
    Download,
    Layers,
    Image,
    Verification,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Waiting => "waiting for another build of this template",
            Self::Packages => "installing Debian packages",
            Self::Download => "downloading the image",
            Self::Layers => "unpacking layers",
            Self::Image => "writing the root filesystem image",
            Self::Verification => "computing the image's checksum",
        })
    }
}
