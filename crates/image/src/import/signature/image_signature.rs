//! [`ImageSignature`]: a signature of an image with its proofs, independent of its format.

use super::log_entry::LogEntry;
use serde::Deserialize;
use std::collections::BTreeMap;

/// Type of a document of [`SignatureFormat::SimpleSigning`].
const DOCUMENT_TYPE: &str = "cosign container image signature";
/// Type of a statement by which cosign signs an image. Statements of other types are, for example,
/// results of scanners, which do not recommend the image.
const STATEMENT_TYPE: &str = "https://sigstore.dev/cosign/sign/v1";

/// Format of the signed content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SignatureFormat {
    /// Document of cosign 1 and 2.
    SimpleSigning,
    /// Statement of in-toto, the default of cosign 3.
    InToto,
}

/// A signature of an image.
#[derive(Clone, Debug)]
pub(super) struct ImageSignature {
    pub format: SignatureFormat,
    /// Content that names the image.
    pub payload: Vec<u8>,
    /// Message that is signed. It contains the payload.
    pub message: Vec<u8>,
    pub signature: Vec<u8>,
    /// Certificate of the key in DER. `None` if the key has no certificate.
    pub certificate: Option<Vec<u8>>,
    /// Entries of the signature in logs.
    pub log_entries: Vec<LogEntry>,
    /// Timestamps of the signature (RFC 3161).
    pub timestamps: Vec<Vec<u8>>,
}

/// Signed document. The name of the image is not compared, as in cosign.
#[derive(Deserialize)]
struct SignedDocument {
    critical: Critical,
}

#[derive(Deserialize)]
struct Critical {
    image: SignedImage,
    r#type: String,
}

#[derive(Deserialize)]
struct SignedImage {
    #[serde(rename = "docker-manifest-digest")]
    digest: String,
}

/// Signed statement (https://github.com/in-toto/attestation).
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SignedStatement {
    subject: Vec<Subject>,
    predicate_type: String,
}

#[derive(Deserialize)]
struct Subject {
    digest: BTreeMap<String, String>,
}

impl ImageSignature {
    /// Returns whether the payload names the image whose manifest has this SHA-256. Only the
    /// payload of a valid signature may be read.
    pub fn names(&self, sha256: &str) -> bool {
        match self.format {
            SignatureFormat::SimpleSigning => {
                let document = serde_json::from_slice::<SignedDocument>(&self.payload);
                document.is_ok_and(|SignedDocument { critical }| {
                    critical.r#type == DOCUMENT_TYPE
                        && critical.image.digest == format!("sha256:{sha256}")
                })
            }
            SignatureFormat::InToto => {
                let statement = serde_json::from_slice::<SignedStatement>(&self.payload);
                statement.is_ok_and(|statement| {
                    let mut subjects = statement.subject.iter();
                    statement.predicate_type == STATEMENT_TYPE
                        && subjects.any(|subject| {
                            subject
                                .digest
                                .get("sha256")
                                .is_some_and(|sum| sum == sha256)
                        })
                })
            }
        }
    }
}
