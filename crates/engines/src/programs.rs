//! Paths of the other programs of Jiffy.

use jiffy_microvm::Vmm;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

/// The VMM, the guest agent, the helper for gVisor, and the process of functions.
#[derive(Debug, Clone)]
pub struct Programs {
    /// `jiffy-vmm`.
    pub vmm: Vmm,
    /// `jiffy-agent`, which goes into the guest.
    pub agent: PathBuf,
    /// `jiffy-gvisor`; a host can do without.
    pub gvisor: Result<PathBuf, ProgramError>,
    /// `jiffy-functions`; a host can do without.
    pub functions: Result<PathBuf, ProgramError>,
}

/// Why there are no programs to use.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ProgramError {
    /// It is not there.
    #[error("cannot find {name} ({why}): run `make build`, or name it in {variable}")]
    Missing {
        /// Its name.
        name: &'static str,
        /// Places that were searched.
        why: String,
        /// Environment variable that names it.
        variable: &'static str,
    },
    /// The jail of VMMs is not configured.
    #[error("JIFFY_JAIL is {0:?}; it may be `on`, `off`, or not set (on for root)")]
    Jail(String),
}

impl Programs {
    /// `$JIFFY_VMM`, `$JIFFY_AGENT`, `$JIFFY_GVISOR` and `$JIFFY_FUNCTIONS`, else beside the
    /// running program, else in `../lib/jiffy` from there. VMMs are jailed as `$JIFFY_JAIL` says:
    /// `on`, `off`, or, if nothing does, if the caller is root of the host.
    pub fn find() -> Result<Self, ProgramError> {
        Ok(Self {
            vmm: Vmm::new(find("jiffy-vmm", "JIFFY_VMM")?, jailed()?),
            agent: find("jiffy-agent", "JIFFY_AGENT")?,
            gvisor: find("jiffy-gvisor", "JIFFY_GVISOR"),
            functions: find("jiffy-functions", "JIFFY_FUNCTIONS"),
        })
    }
}

fn jailed() -> Result<bool, ProgramError> {
    let word = env::var_os("JIFFY_JAIL").unwrap_or_default();
    match word.to_str() {
        Some("") => Ok(jiffy_rootless::is_host_root()),
        Some("on") => Ok(true),
        Some("off") => Ok(false),
        _ => Err(ProgramError::Jail(word.to_string_lossy().into_owned())),
    }
}

fn find(name: &'static str, variable: &'static str) -> Result<PathBuf, ProgramError> {
    let failed = |why: String| ProgramError::Missing {
        name,
        why,
        variable,
    };
    if let Some(path) = env::var_os(variable).filter(|v| !v.is_empty()) {
        let path = PathBuf::from(path);
        return usable(&path)
            .map(|()| path.clone())
            .map_err(|e| failed(format!("{}: {e}", path.display())));
    }
    let own = env::current_exe().map_err(|e| failed(e.to_string()))?;
    let beside = own.parent().unwrap_or(Path::new("/"));
    // Tests run from `deps/` below the directory that holds the programs.
    let places = [
        beside.join(name),
        beside.join("../lib/jiffy").join(name),
        beside.join("..").join(name),
    ];
    places
        .into_iter()
        .find(|p| usable(p).is_ok())
        .ok_or_else(|| failed(format!("looked beside {}", own.display())))
}

fn usable(path: &Path) -> io::Result<()> {
    if fs::metadata(path)?.is_file() {
        Ok(())
    } else {
        Err(io::Error::other("not a file"))
    }
}
