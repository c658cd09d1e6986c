//! Files of snapshots that other hosts made.

use jiffy_engine_api::{EngineError, ImportedFiles, SnapshotImport};
use std::io;
use std::path::Path;

/// Longest name of a file.
const MAX_NAME_BYTES: usize = 64;

/// Puts all files into `dir`. Names are those of a snapshot's files, and never paths.
pub(crate) fn place_all(files: &ImportedFiles, dir: &Path) -> io::Result<()> {
    for file in files {
        let name = file.name();
        let good = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
        let plain = name.len() <= MAX_NAME_BYTES && name.bytes().all(good);
        if !plain || name.is_empty() || name.starts_with('.') {
            let reason = format!("{name:?} is no name of a snapshot's file");
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        file.place(&dir.join(name))?;
    }
    Ok(())
}

/// Refusal of a snapshot that needs `what`, which this host lacks.
pub(crate) fn incompatible(
    import: &SnapshotImport,
    what: &str,
    cause: &EngineError,
    remedy: &str,
) -> EngineError {
    EngineError::Incompatible {
        reason: format!(
            "snapshot {} needs {what}, which this host lacks ({cause}); {remedy}",
            import.id
        ),
    }
}

/// Refusal of an import whose version of a template, NAME@VERSION, is not here.
pub(crate) fn without_template(
    import: &SnapshotImport,
    template: &impl std::fmt::Display,
    cause: &EngineError,
) -> EngineError {
    let what = format!("template {template}");
    let remedy = format!(
        "`jiffy template push` on a host that has it and `jiffy template pull {template}` on this one bring it"
    );
    incompatible(import, &what, cause, &remedy)
}
