//! Errors of TLS at the listener.

use std::io;
use std::path::PathBuf;
use thiserror::Error;
use tokio_rustls::rustls;
use tokio_rustls::rustls::pki_types::pem;

/// Why there is no TLS.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A PEM file cannot be read, or is none.
    #[error("cannot read {}: {source}; give a PEM file with {what}", path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// Expected contents.
        what: &'static str,
        /// Why not.
        source: pem::Error,
    },
    /// Certificate and key do not fit, or are of a kind that is not known.
    #[error("cannot use the certificate of {} with its key: {source}", path.display())]
    Unusable {
        /// The certificate's file.
        path: PathBuf,
        /// Why not.
        source: rustls::Error,
    },
    /// A generated certificate cannot be kept.
    #[error("cannot keep a generated certificate in {}: {source}", path.display())]
    Store {
        /// File or directory.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A certificate cannot be made for these names.
    #[error("cannot make a certificate for {names}: {source}")]
    Generate {
        /// The names.
        names: String,
        /// Why not.
        source: rcgen::Error,
    },
}
