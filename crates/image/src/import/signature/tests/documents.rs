//! Signed documents of cosign 2, with annotations that contain the proofs of an identity.

use super::super::image_signature::{ImageSignature, SignatureFormat};
use super::super::test_sigstore::{
    SIGNED_AT, SUBJECT, TestSigner, TestSigstore, entry_of_document,
};
use super::super::{pem, simple_signing};
use super::{IMAGE, policy};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

/// Returns a document that an identity has signed, as cosign 2 writes it.
fn signed_document(sigstore: &TestSigstore, signer: &TestSigner) -> (Vec<u8>, Value) {
    let document = json!({
        "critical": {
            "image": { "docker-manifest-digest": format!("sha256:{IMAGE}") },
            "type": "cosign container image signature",
        },
    });
    let document = document.to_string().into_bytes();
    let annotations = document_annotations(sigstore, signer, &document);
    (document, annotations)
}

/// Returns the annotations of a document that an identity has signed.
pub fn document_annotations(
    sigstore: &TestSigstore,
    signer: &TestSigner,
    document: &[u8],
) -> Value {
    let signature = signer.key.sign(document);
    let verifier = pem::encode(&signer.certificate, pem::CERTIFICATE);
    let body = entry_of_document(document, &signature, &verifier);
    let entry = sigstore.log_entry(&body, SIGNED_AT);
    let id = STANDARD
        .decode(entry["logId"]["keyId"].as_str().unwrap())
        .unwrap();
    let annotated = json!({
        "SignedEntryTimestamp": entry["inclusionPromise"]["signedEntryTimestamp"],
        "Payload": {
            "body": entry["canonicalizedBody"],
            "integratedTime": SIGNED_AT,
            "logIndex": 7,
            "logID": data_encoding::HEXLOWER.encode(&id),
        },
    });
    json!({
        "dev.cosignproject.cosign/signature": STANDARD.encode(&signature),
        "dev.sigstore.cosign/certificate": verifier,
        "dev.sigstore.cosign/bundle": annotated.to_string(),
    })
}

#[test]
fn a_document_of_an_identity_needs_its_certificate_and_log_entry() {
    let sigstore = TestSigstore::new();
    let policy = policy(&sigstore.trust_root());
    let (document, annotations) = signed_document(&sigstore, &sigstore.signer(SUBJECT));
    let check = |annotations: &Value| {
        let layer = json!({ "digest": "", "annotations": annotations });
        let layer = serde_json::from_value(layer).unwrap();
        let parsed = simple_signing::annotations(&layer).ok_or("it is malformed")?;
        let (signature, certificate, log_entries) = parsed;
        let signature = ImageSignature {
            format: SignatureFormat::SimpleSigning,
            payload: document.clone(),
            message: document.clone(),
            signature,
            certificate,
            log_entries,
            timestamps: Vec::new(),
        };
        policy.check(&signature, IMAGE)
    };
    check(&annotations).unwrap();
    for (name, reason) in [
        ("dev.sigstore.cosign/certificate", "another key"),
        ("dev.sigstore.cosign/bundle", "no log has an entry"),
        ("dev.cosignproject.cosign/signature", "malformed"),
    ] {
        let mut bad = annotations.clone();
        bad.as_object_mut().unwrap().remove(name);
        let message = check(&bad).unwrap_err();
        assert!(message.contains(reason), "{message}");
        bad[name] = json!("{}");
        assert!(check(&bad).is_err());
    }
    let (_, of_other) = signed_document(&sigstore, &sigstore.signer("other@example.com"));
    assert!(
        check(&of_other)
            .unwrap_err()
            .contains("it is of other@example.com")
    );
    let mut mixed = annotations.clone();
    mixed["dev.sigstore.cosign/bundle"] = of_other["dev.sigstore.cosign/bundle"].clone();
    assert!(
        check(&mixed)
            .unwrap_err()
            .contains("about another signature")
    );
}
