//! Signatures with a valid proof of each kind, and with each part changed.

pub mod documents;

use super::bundle;
use super::certificate::SigningCertificate;
use super::pem;
use super::policy::SignaturePolicy;
use super::signing_key::SigningKey;
use super::test_sigstore::{
    ISSUER_URL, SIGNED_AT, START, SUBJECT, TestSigstore, bundle_of, entry_of_bundle,
    second_entry_of_bundle, statement, unlogged_bundle,
};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiffy_engine_api::SignerIdentity;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::slice::from_ref;

/// Digest of the image.
const IMAGE: &str = "61626364616263646162636461626364616263646162636461626364616263aa";

fn identity(subject: &str, issuer: &str) -> Vec<SignerIdentity> {
    vec![SignerIdentity {
        subject: subject.to_owned(),
        issuer: issuer.to_owned(),
    }]
}

/// Returns the policy for the identity of the tests.
fn policy(root: &Value) -> SignaturePolicy {
    let identities = identity(SUBJECT, ISSUER_URL);
    SignaturePolicy::new(&[], &identities, Some(&root.to_string())).unwrap()
}

fn check(policy: &SignaturePolicy, bundle: &Value) -> Result<(), String> {
    let signature = bundle::signature(bundle.to_string().as_bytes());
    policy.check(&signature.ok_or("it is malformed")?, IMAGE)
}

/// Checks that a bundle is rejected for this reason.
#[track_caller]
fn rejected(policy: &SignaturePolicy, bundle: &Value, reason: &str) {
    let message = check(policy, bundle).unwrap_err();
    assert!(message.contains(reason), "{message}");
}

/// Changes a byte of a value in base64.
fn changed(value: &Value) -> Value {
    let mut bytes = STANDARD.decode(value.as_str().unwrap()).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    json!(STANDARD.encode(bytes))
}

#[test]
fn a_bundle_of_an_identity_is_accepted_and_each_changed_part_rejected() {
    let sigstore = TestSigstore::new();
    let root = sigstore.trust_root();
    let policy = policy(&root);
    let signer = sigstore.signer(SUBJECT);
    let bundle = sigstore.bundle(&signer, IMAGE);
    check(&policy, &bundle).unwrap();

    let entry = "/verificationMaterial/tlogEntries/0";
    for (pointer, reason) in [
        ("/dsseEnvelope/payload".to_owned(), "key of its certificate"),
        (
            "/dsseEnvelope/signatures/0/sig".to_owned(),
            "key of its certificate",
        ),
        ("/verificationMaterial/certificate/rawBytes".to_owned(), ""),
        (
            format!("{entry}/canonicalizedBody"),
            "not signed by the log",
        ),
        (format!("{entry}/logId/keyId"), "log that is not trusted"),
        (
            format!("{entry}/inclusionPromise/signedEntryTimestamp"),
            "not signed by the log",
        ),
        (
            format!("{entry}/inclusionProof/rootHash"),
            "not in the tree",
        ),
    ] {
        let mut bad = bundle.clone();
        let value = bad.pointer_mut(&pointer).unwrap();
        *value = changed(value);
        rejected(&policy, &bad, reason);
    }
    for (pointer, value, reason) in [
        ("logIndex", json!("8"), "not signed by the log"),
        (
            "integratedTime",
            json!((SIGNED_AT + 1).to_string()),
            "not signed by the log",
        ),
        ("inclusionProof/treeSize", json!("2"), "not in the tree"),
        ("inclusionProof/logIndex", json!("1"), "not in the tree"),
        ("inclusionProof/logIndex", json!("-1"), "not in the tree"),
        ("inclusionProof/checkpoint", Value::Null, "no checkpoint"),
        (
            "inclusionProof/checkpoint/envelope",
            json!("a\n1\nAA==\n\n"),
            "no checkpoint",
        ),
        (
            "kindVersion/version",
            json!("0.0.2"),
            "about another signature",
        ),
    ] {
        let mut bad = bundle.clone();
        *bad.pointer_mut(&format!("{entry}/{pointer}")).unwrap() = value;
        rejected(&policy, &bad, reason);
    }
    // One proof suffices, but not none.
    let without = |fields: &[&str]| {
        let mut bundle = bundle.clone();
        let entry = bundle.pointer_mut(entry).unwrap().as_object_mut().unwrap();
        for field in fields {
            entry.remove(*field);
        }
        bundle
    };
    check(&policy, &without(&["inclusionProof"])).unwrap();
    rejected(
        &policy,
        &without(&["inclusionProof", "inclusionPromise"]),
        "no proof",
    );
    // Without its promise, the entry has no confirmed time.
    rejected(
        &policy,
        &without(&["inclusionPromise"]),
        "confirms its time",
    );
    let mut unlogged = bundle.clone();
    unlogged["verificationMaterial"]["tlogEntries"] = json!([]);
    rejected(&policy, &unlogged, "no log has an entry");
}

#[test]
fn bundles_with_changed_bytes_are_read_without_a_panic() {
    let sigstore = TestSigstore::new();
    let policy = policy(&sigstore.trust_root());
    let signer = sigstore.signer(SUBJECT);
    let bundle = sigstore.bundle(&signer, IMAGE).to_string().into_bytes();
    for at in (0..bundle.len()).step_by(11) {
        let mut changed = bundle.clone();
        // Digits and letters become others, so that most inputs remain JSON and base64.
        changed[at] ^= 1 << (at % 3);
        if let Some(signature) = bundle::signature(&changed) {
            // Fields that are not signed may change, so both results are valid.
            let _ = policy.check(&signature, IMAGE);
        }
        let certificate = &signer.certificate;
        let mut changed = certificate.clone();
        changed[at % certificate.len()] ^= 1 << (at % 8);
        if let Ok(changed) = SigningCertificate::parse(&changed) {
            let _ = changed.identity();
        }
    }
}

#[test]
fn other_signers_certificates_and_logs_are_rejected() {
    let (sigstore, other) = (TestSigstore::new(), TestSigstore::new());
    let root = sigstore.trust_root();
    let ours = policy(&root);
    let bundle_by = |subject: &str| sigstore.bundle(&sigstore.signer(subject), IMAGE);
    rejected(
        &ours,
        &bundle_by("other@example.com"),
        "of other@example.com of https://issuer",
    );
    rejected(
        &ours,
        &bundle_by("https://builder@example.com"),
        "it is of https",
    );
    let good = bundle_by(SUBJECT);
    let of_image = |sha256: &str| sigstore.bundle(&sigstore.signer(SUBJECT), sha256);
    rejected(&ours, &of_image(&"0".repeat(64)), "of another image");
    // Complete proofs of other authorities and logs.
    rejected(
        &ours,
        &other.bundle(&other.signer(SUBJECT), IMAGE),
        "log that is not trusted",
    );
    for (field, reason) in [
        ("tlogs", "log that is not trusted"),
        ("certificateAuthorities", "certificate is not valid"),
        ("ctlogs", "no certificate log"),
    ] {
        let mut mixed = root.clone();
        mixed[field] = other.trust_root()[field].clone();
        rejected(&policy(&mixed), &good, reason);
    }
    // A root without certificate logs requires no confirmations.
    let mut without_logs = root.clone();
    without_logs["ctlogs"] = json!([]);
    check(&policy(&without_logs), &good).unwrap();
    let unconfirmed = sigstore.signer_confirmed_by(SUBJECT, &SigningKey::generate());
    rejected(
        &ours,
        &sigstore.bundle(&unconfirmed, IMAGE),
        "no certificate log",
    );

    let with = |subject: &str, issuer: &str| {
        let identities = identity(subject, issuer);
        SignaturePolicy::new(&[], &identities, Some(&root.to_string())).unwrap()
    };
    rejected(&with(SUBJECT, "https://other.example"), &good, "it is of");
    rejected(&with("builder@example.co", ISSUER_URL), &good, "it is of");
    rejected(&with("*@example.com", ISSUER_URL), &good, "it is of");
    check(&with("builder@*", ISSUER_URL), &good).unwrap();
    let workload = "https://ci.example/team/app@refs/tags/v1";
    check(
        &with("https://ci.example/team/app@*", ISSUER_URL),
        &bundle_by(workload),
    )
    .unwrap();
}

#[test]
fn the_time_of_the_log_must_be_in_the_validity_of_certificate_and_authorities() {
    let sigstore = TestSigstore::new();
    let root = sigstore.trust_root();
    let at = |time: i64| {
        let signer = sigstore.signer(SUBJECT);
        let mut bundle = sigstore.bundle(&signer, IMAGE);
        let verifier = pem::encode(&signer.certificate, pem::CERTIFICATE);
        let body = entry_of_bundle(&bundle, &verifier);
        bundle["verificationMaterial"]["tlogEntries"][0] = sigstore.log_entry(&body, time);
        bundle
    };
    let ours = policy(&root);
    for time in [START, START + 600] {
        check(&ours, &at(time)).unwrap();
    }
    for (time, reason) in [
        (START - 1, "certificate is not valid"),
        (START + 601, "certificate is not valid"),
        (START - 86_400 * 10, "not signed by the log"),
        (4_000_000_000, "in the future"),
        (0, "not signed by the log"),
        (i64::MIN, "time of its log entry is not valid"),
    ] {
        rejected(&ours, &at(time), reason);
    }
    for (field, reason) in [
        ("tlogs/0/publicKey", "not signed by the log"),
        ("ctlogs/0/publicKey", "no certificate log"),
        ("certificateAuthorities/0", "no authority was valid"),
    ] {
        let mut ended = root.clone();
        let period = ended.pointer_mut(&format!("/{field}/validFor")).unwrap();
        period["end"] = json!("2024-01-01T00:04:59Z");
        // The confirmation of the certificate log is of the start of the certificate.
        period["start"] = json!("2023-12-31T00:00:00Z");
        if field.starts_with("ctlogs") {
            period["end"] = json!("2023-12-31T23:59:59Z");
        }
        rejected(&policy(&ended), &at(SIGNED_AT), reason);
    }
}

#[test]
fn an_entry_without_time_needs_a_timestamp_of_a_trusted_authority() {
    let (sigstore, other) = (TestSigstore::new(), TestSigstore::new());
    let root = sigstore.trust_root();
    let ours = policy(&root);
    let signer = sigstore.signer(SUBJECT);
    let mut bundle = sigstore.bundle(&signer, IMAGE);
    // Rekor 2 gives no time and no promise.
    let body = second_entry_of_bundle(&bundle, &signer.certificate);
    let mut entry = sigstore.log_entry(&body, SIGNED_AT);
    entry["logIndex"] = json!("0");
    entry.as_object_mut().unwrap().remove("inclusionPromise");
    bundle["verificationMaterial"]["tlogEntries"][0] = entry;
    rejected(&ours, &bundle, "confirms its time");
    let sig = bundle["dsseEnvelope"]["signatures"][0]["sig"]
        .as_str()
        .unwrap();
    let sig = STANDARD.decode(sig).unwrap();
    let with = |timestamps: &[Vec<u8>]| {
        let list = timestamps.iter();
        let list = list.map(|t| json!({ "signedTimestamp": STANDARD.encode(t) }));
        let mut bundle = bundle.clone();
        bundle["verificationMaterial"]["timestampVerificationData"] =
            json!({ "rfc3161Timestamps": list.collect::<Value>() });
        bundle
    };
    let timestamp = sigstore.timestamp(&sig);
    check(&ours, &with(from_ref(&timestamp))).unwrap();
    let of_other = other.timestamp(&sig);
    rejected(
        &ours,
        &with(from_ref(&of_other)),
        "not of a trusted authority",
    );
    rejected(
        &ours,
        &with(&[timestamp.clone(), of_other]),
        "not of a trusted authority",
    );
    rejected(
        &ours,
        &with(&[sigstore.timestamp(b"other")]),
        "of another signature",
    );
    let find = |bytes: &[u8]| {
        timestamp
            .windows(bytes.len())
            .position(|w| w == bytes)
            .unwrap()
    };
    let (time, digest) = (find(b"20240101000500Z"), find(&Sha256::digest(&sig)));
    let end = timestamp.len();
    for at in (time..time + 15)
        .chain(digest..digest + 32)
        .chain(end - 60..end)
    {
        let mut bad = timestamp.clone();
        bad[at] ^= 0x55;
        assert!(
            check(&ours, &with(&[bad])).is_err(),
            "byte {at} can be changed"
        );
    }
    for length in (0..end).step_by(7) {
        assert!(check(&ours, &with(&[timestamp[..length].to_vec()])).is_err());
    }
    let mut ended = root.clone();
    ended["timestampAuthorities"][0]["validFor"] = json!({ "end": "2024-01-01T00:00:00Z" });
    rejected(
        &policy(&ended),
        &with(from_ref(&timestamp)),
        "not of a trusted authority",
    );
}

#[test]
fn a_bundle_of_a_key_is_accepted_without_a_log_unless_a_root_is_given() {
    let sigstore = TestSigstore::new();
    let (key, other) = (SigningKey::generate(), SigningKey::generate());
    let root = sigstore.trust_root().to_string();
    let keys = [key.public_pem.clone()];
    let unlogged = SignaturePolicy::new(&keys, &[], None).unwrap();
    let logged = SignaturePolicy::new(&keys, &[], Some(&root)).unwrap();
    let bundle = unlogged_bundle(&key, IMAGE);
    check(&unlogged, &bundle).unwrap();
    rejected(&logged, &bundle, "no log has an entry");
    let by_key = |key: &SigningKey| {
        let mut bundle = bundle.clone();
        let entry = sigstore.log_entry(&entry_of_bundle(&bundle, &key.public_pem), SIGNED_AT);
        bundle["verificationMaterial"]["tlogEntries"] = json!([entry]);
        bundle
    };
    check(&logged, &by_key(&key)).unwrap();
    rejected(&logged, &by_key(&other), "about another signature");

    rejected(&unlogged, &unlogged_bundle(&other, IMAGE), "another key");
    rejected(
        &unlogged,
        &unlogged_bundle(&key, &"0".repeat(64)),
        "of another image",
    );
    let mut result_of_scan = statement(IMAGE);
    result_of_scan["predicateType"] = json!("https://cosign.sigstore.dev/attestation/vuln/v1");
    rejected(
        &unlogged,
        &bundle_of(&key, &result_of_scan),
        "of another image",
    );
    for (pointer, value) in [
        ("/dsseEnvelope/payloadType", json!("text/plain")),
        ("/dsseEnvelope/signatures", json!([])),
        ("/dsseEnvelope", Value::Null),
        ("/verificationMaterial", Value::Null),
        ("/dsseEnvelope/payload", json!("%")),
    ] {
        let mut bad = bundle.clone();
        *bad.pointer_mut(pointer).unwrap() = value;
        rejected(&unlogged, &bad, "malformed");
    }
    let mut twice = bundle.clone();
    let signature = twice["dsseEnvelope"]["signatures"][0].clone();
    twice["dsseEnvelope"]["signatures"] = json!([signature.clone(), signature]);
    rejected(&unlogged, &twice, "malformed");
}
