//! [`Programs`]: finds the other programs of Jiffy, which this process starts: VMM, guest agent,
//! gVisor helper and function runtime.
//!
//! The *helper* is the process `jiffy-gvisor` that starts and drives the sandboxes of a daemon.

use jiffy_installation::{Component, Installation, Package};
use jiffy_microvm_engine::Vmm;
use std::env;
use std::path::PathBuf;

/// VMM, guest agent, gVisor helper and function runtime.
#[derive(Debug, Clone)]
pub struct Programs {
    /// `jiffy-vmm`.
    pub vmm: Vmm,
    /// `jiffy-agent`, which runs in the guest.
    pub agent: PathBuf,
    /// `jiffy-gvisor`. Optional.
    pub gvisor: Result<PathBuf, ProgramError>,
    /// `jiffy-functions`. Optional.
    pub functions: Result<PathBuf, ProgramError>,
}

/// Error of the search for programs.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ProgramError {
    /// A program of Jiffy does not exist.
    #[error("cannot find {name} ({searched}): {remedy}, or set {variable} to its path")]
    Missing {
        /// File name.
        name: &'static str,
        /// Places that were searched.
        searched: String,
        /// Command that installs the program.
        remedy: &'static str,
        /// Environment variable that may contain the path.
        variable: &'static str,
    },
    /// The variable that selects the jail of VMMs has an invalid value.
    #[error("JIFFY_JAIL is {0:?}; it may be `on`, `off`, or not set (on for root)")]
    Jail(String),
}

impl Programs {
    /// Finds the programs: `$JIFFY_VMM`, `$JIFFY_AGENT`, `$JIFFY_GVISOR` and `$JIFFY_FUNCTIONS`, or
    /// else in the directory of the running program, or else in `../lib/jiffy` relative to it.
    /// `$JIFFY_JAIL` (`on` or `off`) selects whether VMMs are jailed. Defaults to `on` if the
    /// caller is root of the host.
    pub fn find() -> Result<Self, ProgramError> {
        Ok(Self {
            vmm: Vmm::new(find("jiffy-vmm", "JIFFY_VMM")?, jailed()?),
            agent: find("jiffy-agent", "JIFFY_AGENT")?,
            // The errors are reported only when the programs are needed.
            gvisor: find("jiffy-gvisor", "JIFFY_GVISOR"),
            functions: find("jiffy-functions", "JIFFY_FUNCTIONS"),
        })
    }
}

/// Returns whether VMMs are jailed, according to `$JIFFY_JAIL`.
fn jailed() -> Result<bool, ProgramError> {
    let word = env::var_os("JIFFY_JAIL").unwrap_or_default();
    match word.to_str() {
        Some("") => Ok(jiffy_rootless::is_host_root()),
        Some("on") => Ok(true),
        Some("off") => Ok(false),
        // A typing error must not disable the jail.
        _ => Err(ProgramError::Jail(word.to_string_lossy().into_owned())),
    }
}

/// Returns the path of a program: the environment variable, or else the installation's directory.
fn find(name: &'static str, variable: &'static str) -> Result<PathBuf, ProgramError> {
    let component = match name {
        "jiffy-gvisor" => Component::Gvisor,
        _ => Component::Host,
    };
    let missing = |searched: String, package: Package| ProgramError::Missing {
        name,
        searched,
        remedy: package.remedy(component),
        variable,
    };
    let installation =
        Installation::current().map_err(|e| missing(e.to_string(), Package::Source))?;
    let package = installation.package();
    // A variable that is set but wrong is an error, and not ignored.
    if let Some(path) = env::var_os(variable).filter(|v| !v.is_empty()) {
        let path = PathBuf::from(path);
        return if path.is_file() {
            Ok(path)
        } else {
            Err(missing(
                format!("{} is not a file", path.display()),
                package,
            ))
        };
    }
    let directory = installation.programs().display().to_string();
    installation
        .file(name)
        .ok_or_else(|| missing(format!("searched {directory} and ../lib/jiffy"), package))
}
