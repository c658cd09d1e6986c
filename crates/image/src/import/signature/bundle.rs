//! Format of cosign 3: a manifest that refers to the image and contains a bundle of Sigstore, which
//! is a signed statement with all proofs (https://docs.sigstore.dev/about/bundle/).

use super::super::ImportError;
use super::super::document::{Descriptor, Document, parse};
use super::super::registry::RegistryImage;
use super::image_signature::{ImageSignature, SignatureFormat};
use super::json::Base64;
use super::log_entry::LogEntry;
use serde::Deserialize;

/// Start of the media types of bundles. The version follows.
const BUNDLE_TYPE: &str = "application/vnd.dev.sigstore.bundle";
/// Type of the payload of statements.
const IN_TOTO: &str = "application/vnd.in-toto+json";
/// Maximum length of a bundle in bytes. Bundles of cosign have 10 KiB.
const MAX_BUNDLE_BYTES: u64 = 128 << 10;
/// Maximum number of log entries, and of timestamps, of a bundle. Bundles of cosign have one.
const MAX_PROOFS: usize = 8;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Bundle {
    verification_material: VerificationMaterial,
    dsse_envelope: Option<Envelope>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct VerificationMaterial {
    certificate: Option<Certificate>,
    x509_certificate_chain: Option<Chain>,
    tlog_entries: Option<Vec<LogEntry>>,
    timestamp_verification_data: Option<Timestamps>,
}

#[derive(Deserialize)]
struct Chain {
    certificates: Vec<Certificate>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Certificate {
    raw_bytes: Base64,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Timestamps {
    rfc3161_timestamps: Option<Vec<Timestamp>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Timestamp {
    signed_timestamp: Base64,
}

/// Signed statement (https://github.com/secure-systems-lab/dsse).
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Envelope {
    payload_type: String,
    payload: Base64,
    signatures: Vec<EnvelopeSignature>,
}

#[derive(Deserialize)]
struct EnvelopeSignature {
    sig: Base64,
}

/// Returns the manifests with bundles for the image whose manifest has this SHA-256.
pub(super) fn manifests(
    registry: &mut RegistryImage,
    sha256: &str,
) -> Result<Vec<Descriptor>, ImportError> {
    let mut found = registry.referrers(sha256)?;
    // Some registries do not state the type.
    found.retain(|manifest| {
        let artifact_type = manifest.artifact_type.as_ref();
        artifact_type.is_none_or(|name| name.is_empty() || name.starts_with(BUNDLE_TYPE))
    });
    Ok(found)
}

/// Reads the signature of a manifest. `None` if the manifest has no bundle, or the bundle is
/// malformed.
pub(super) fn read(
    registry: &mut RegistryImage,
    manifest: &Descriptor,
) -> Result<Option<ImageSignature>, ImportError> {
    let manifest = registry.manifest_of_digest(&manifest.digest)?;
    let manifest: Document = parse("signature manifest", &manifest)?;
    let bundle = manifest.layers.iter().find(|layer| {
        let media_type = layer.media_type.as_ref();
        media_type.is_some_and(|name| name.starts_with(BUNDLE_TYPE))
    });
    match bundle.filter(|bundle| bundle.size <= MAX_BUNDLE_BYTES) {
        Some(bundle) => Ok(signature(&registry.document(bundle)?)),
        None => Ok(None),
    }
}

/// Parses a bundle with a signed statement.
pub(super) fn signature(bundle: &[u8]) -> Option<ImageSignature> {
    let bundle: Bundle = serde_json::from_slice(bundle).ok()?;
    let envelope = bundle.dsse_envelope?;
    // All proofs are for one signature.
    let [EnvelopeSignature { sig }] = &envelope.signatures[..] else {
        return None;
    };
    let material = bundle.verification_material;
    let chain = material.x509_certificate_chain;
    let chain = chain.and_then(|chain| chain.certificates.into_iter().next());
    let certificate = material.certificate.or(chain);
    let log_entries = material.tlog_entries.unwrap_or_default();
    let timestamps = material.timestamp_verification_data;
    let timestamps = timestamps.and_then(|all| all.rfc3161_timestamps);
    let timestamps = timestamps.unwrap_or_default();
    if envelope.payload_type != IN_TOTO
        || log_entries.len() > MAX_PROOFS
        || timestamps.len() > MAX_PROOFS
    {
        return None;
    }
    Some(ImageSignature {
        format: SignatureFormat::InToto,
        message: signed_message(&envelope.payload.0),
        payload: envelope.payload.0,
        signature: sig.0.clone(),
        certificate: certificate.map(|certificate| certificate.raw_bytes.0),
        log_entries,
        timestamps: timestamps
            .into_iter()
            .map(|t| t.signed_timestamp.0)
            .collect(),
    })
}

/// Returns the message that is signed for a statement.
pub(super) fn signed_message(statement: &[u8]) -> Vec<u8> {
    let (kind, length) = (IN_TOTO.len(), statement.len());
    let mut message = format!("DSSEv1 {kind} {IN_TOTO} {length} ").into_bytes();
    message.extend_from_slice(statement);
    message
}
