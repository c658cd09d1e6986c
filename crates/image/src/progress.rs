//! How a build is going.

use std::fmt;

/// A sign of life from a build, which takes minutes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress<'a> {
    /// A new phase has begun.
    Phase(Phase),
    /// How much of the whole build is done, 0 to 100; never falls.
    Percent(u8),
    /// A line of output from the program at work.
    Line(&'a str),
}

/// A phase of a build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Somebody else is building the same template.
    Waiting,
    Packages,
    /// An image's manifest is asked for, its layers are downloaded.
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
