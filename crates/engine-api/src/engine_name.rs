//! Names of the engines.

use std::fmt;
use std::str::FromStr;

/// Name of the engine that runs virtual machines.
pub const MICROVM: &str = "microvm";
/// Name of the engine that runs gVisor.
pub const GVISOR: &str = "gvisor";

/// An engine by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineName {
    /// One virtual machine per sandbox.
    MicroVm,
    /// One user-space kernel (gVisor) per sandbox.
    Gvisor,
}

impl fmt::Display for EngineName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::MicroVm => MICROVM,
            Self::Gvisor => GVISOR,
        })
    }
}

impl FromStr for EngineName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            MICROVM => Ok(Self::MicroVm),
            GVISOR => Ok(Self::Gvisor),
            _ => Err(format!(
                "unknown engine `{text}`: choose `{MICROVM}` or `{GVISOR}`"
            )),
        }
    }
}
