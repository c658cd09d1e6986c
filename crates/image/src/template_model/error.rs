//! Errors of templates.

use super::name::{MAX_TAG, MAX_TEMPLATE_NAME};
use crate::file::FileError;
use crate::verified::VerifyError;
use std::path::PathBuf;

/// Error of a template.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    #[error(
        "`{name}` is not a template name: use at most {MAX_TEMPLATE_NAME} letters, digits, `.`, `_` \
         and `-`, starting with a letter or digit; a tag (`NAME:TAG`) has at most {MAX_TAG}; in \
         `OWNER/NAME`, OWNER is the id of an API key"
    )]
    Name { name: String },
    #[error(
        "`{name}` is a reserved name: ids and internal templates of builds have names of this form; choose another name"
    )]
    Reserved { name: String },
    #[error("`{name}` is a stock template, which every key may use")]
    Stock { name: String },
    #[error("template `{name}` does not exist; {known}")]
    Unknown { name: String, known: String },
    #[error("cannot read manifest {}: {problem}; run `jiffy template rm` for the template and build it again", path.display())]
    Manifest { path: PathBuf, problem: String },
    #[error("template image {} is missing: run `jiffy template rm` for the template and build it again", path.display())]
    Image { path: PathBuf },
    #[error(
        "version {version} of template `{name}`, which this sandbox or snapshot requires, no longer exists"
    )]
    Version { name: String, version: String },
    /// Pruning stops, because the snapshot may refer to any image.
    #[error(
        "cannot read the manifest of snapshot {id} ({problem}): remove the snapshot with `jiffy rm {id}` and run again"
    )]
    Snapshot { id: String, problem: String },
    #[error(transparent)]
    Verify(#[from] VerifyError),
    #[error("cannot use the template")]
    File(#[from] FileError),
}
