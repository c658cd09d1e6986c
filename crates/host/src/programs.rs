//! Where the other two programs of Jiffy are.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

/// The VMM and the guest agent.
#[derive(Debug, Clone)]
pub struct Programs {
    /// `jiffy-vmm`.
    pub vmm: PathBuf,
    /// `jiffy-agent`, which goes into the guest.
    pub agent: PathBuf,
}

/// A program that is not there.
#[derive(Debug, thiserror::Error)]
#[error("cannot find {name} ({why}): run `make build`, or name it in {variable}")]
pub struct ProgramError {
    name: &'static str,
    why: String,
    variable: &'static str,
}

impl Programs {
    /// `$JIFFY_VMM` and `$JIFFY_AGENT`, else beside the running program, else in `../lib/jiffy` from there.
    pub fn find() -> Result<Self, ProgramError> {
        Ok(Self {
            vmm: find("jiffy-vmm", "JIFFY_VMM")?,
            agent: find("jiffy-agent", "JIFFY_AGENT")?,
        })
    }
}

fn find(name: &'static str, variable: &'static str) -> Result<PathBuf, ProgramError> {
    let failed = |why: String| ProgramError {
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
