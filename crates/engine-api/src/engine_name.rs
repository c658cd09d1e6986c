//! Names of the engines.

use std::fmt;
use std::str::FromStr;

/// Name of the engine of virtual machines.
pub const MICROVM: &str = "microvm";
/// Name of the engine on gVisor.
pub const GVISOR: &str = "gvisor";

/// An engine by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineName {
    /// A virtual machine for each sandbox.
    MicroVm,
    /// A kernel in user space for each sandbox.
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
                "there is no engine `{text}`: there are `{MICROVM}` and `{GVISOR}`"
            )),
        }
    }
}
