//! Places the downloaded files of a snapshot of another host in the directory of the new snapshot,
//! and describes the reasons for which an import fails. Both engines use these functions.

use jiffy_engine_api::{EngineError, ImportedFiles, SnapshotImport};
use std::io;
use std::path::Path;

/// Maximum length of a file name, in bytes.
const MAX_NAME_BYTES: usize = 64;

/// Moves all files into `dir`. The names come from another host, so names that could leave the
/// directory or hide a file are rejected.
pub(crate) fn place_all(files: &ImportedFiles, dir: &Path) -> io::Result<()> {
    for file in files {
        let name = file.name();
        let good = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
        let plain = name.len() <= MAX_NAME_BYTES && name.bytes().all(good);
        if !plain || name.is_empty() || name.starts_with('.') {
            let reason = format!("invalid name of a snapshot file: {name:?}");
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        file.place(&dir.join(name))?;
    }
    Ok(())
}

/// Returns the error for a snapshot that needs `what`, which this host lacks.
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

/// Returns the error for an import whose template version (NAME@VERSION) does not exist on this
/// host.
pub(crate) fn without_template(
    import: &SnapshotImport,
    template: &impl std::fmt::Display,
    cause: &EngineError,
) -> EngineError {
    let what = format!("template {template}");
    let remedy = format!(
        "run `jiffy template push` on a host that has it and `jiffy template pull {template}` on this one"
    );
    incompatible(import, &what, cause, &remedy)
}
