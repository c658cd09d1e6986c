//! Format of cosign 1 and 2: a manifest with the tag `sha256-DIGEST.sig`, whose layers are signed
//! documents. Annotations of a layer contain its signature and the proofs
//! (https://github.com/sigstore/cosign/blob/main/specs/SIGNATURE_SPEC.md).

use super::super::ImportError;
use super::super::document::{Descriptor, Document, parse};
use super::super::registry::RegistryImage;
use super::image_signature::{ImageSignature, SignatureFormat};
use super::json::Base64;
use super::log_entry::{KindVersion, LogEntry, LogId, Promise};
use super::pem;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use data_encoding::HEXLOWER;
use serde::Deserialize;

/// Annotation with the signature in base64.
const SIGNATURE: &str = "dev.cosignproject.cosign/signature";
/// Annotation with the certificate of the key in PEM.
const CERTIFICATE: &str = "dev.sigstore.cosign/certificate";
/// Annotation with the entry of the signature in the log.
const LOG_ENTRY: &str = "dev.sigstore.cosign/bundle";
/// Maximum length of a signed document in bytes.
const MAX_DOCUMENT_BYTES: u64 = 64 << 10;

/// Entry of the log in an annotation.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct AnnotatedEntry {
    signed_entry_timestamp: Base64,
    payload: EntryPayload,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct EntryPayload {
    body: Base64,
    integrated_time: super::json::Integer,
    log_index: super::json::Integer,
    #[serde(rename = "logID")]
    log_id: String,
}

/// Kind of an entry, in its body.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct EntryKind {
    kind: String,
    api_version: String,
}

/// Returns the layers with signatures of the image whose manifest has this SHA-256.
pub(super) fn layers(
    registry: &mut RegistryImage,
    sha256: &str,
) -> Result<Vec<Descriptor>, ImportError> {
    match registry.optional_manifest(&format!("sha256-{sha256}.sig"))? {
        Some(text) => Ok(parse::<Document>("signature manifest", &text)?.layers),
        None => Ok(Vec::new()),
    }
}

/// Reads the signature of a layer. `None` if it is malformed.
pub(super) fn read(
    registry: &mut RegistryImage,
    layer: &Descriptor,
) -> Result<Option<ImageSignature>, ImportError> {
    if layer.size > MAX_DOCUMENT_BYTES {
        return Ok(None);
    }
    let Some((signature, certificate, log_entries)) = annotations(layer) else {
        return Ok(None);
    };
    let document = registry.document(layer)?;
    Ok(Some(ImageSignature {
        format: SignatureFormat::SimpleSigning,
        payload: document.clone(),
        message: document,
        signature,
        certificate,
        log_entries,
        timestamps: Vec::new(),
    }))
}

/// Signature, certificate and entries in logs.
type Annotations = (Vec<u8>, Option<Vec<u8>>, Vec<LogEntry>);

/// Parses the annotations of a layer.
pub(super) fn annotations(layer: &Descriptor) -> Option<Annotations> {
    let annotation = |name: &str| layer.annotations.get(name).map(String::as_str);
    let signature = STANDARD.decode(annotation(SIGNATURE)?).ok()?;
    let certificate = match annotation(CERTIFICATE) {
        Some(text) if !text.is_empty() => Some(pem::decode(text, pem::CERTIFICATE)?),
        _ => None,
    };
    let entries = match annotation(LOG_ENTRY) {
        Some(text) if !text.is_empty() => vec![log_entry(text)?],
        _ => Vec::new(),
    };
    Some((signature, certificate, entries))
}

/// Parses the annotation with the entry of the log.
fn log_entry(text: &str) -> Option<LogEntry> {
    let entry: AnnotatedEntry = serde_json::from_str(text).ok()?;
    let kind: EntryKind = serde_json::from_slice(&entry.payload.body.0).ok()?;
    let log_id = HEXLOWER.decode(entry.payload.log_id.as_bytes()).ok()?;
    Some(LogEntry {
        log_index: entry.payload.log_index,
        log_id: LogId {
            key_id: Base64(log_id),
        },
        kind_version: KindVersion {
            kind: kind.kind,
            version: kind.api_version,
        },
        integrated_time: Some(entry.payload.integrated_time),
        inclusion_promise: Some(Promise {
            signed_entry_timestamp: entry.signed_entry_timestamp,
        }),
        inclusion_proof: None,
        canonicalized_body: entry.payload.body,
    })
}
