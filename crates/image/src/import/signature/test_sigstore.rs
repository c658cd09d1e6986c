//! Authorities and logs of Sigstore for tests: they issue certificates and log signatures as
//! Fulcio, Rekor and authorities for timestamps do.

use super::bundle::signed_message;
use super::certificate::{CONFIRMATIONS, ISSUER, TIME_STAMPING};
use super::der::{
    GENERALIZED_TIME, INTEGER, OBJECT_IDENTIFIER, OCTET_STRING, Reader, SEQUENCE, SET, UTF8_STRING,
    context, encode,
};
use super::pem;
use super::signing_key::SigningKey;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use data_encoding::HEXLOWER;
use rcgen::{
    BasicConstraints, CertificateParams, CustomExtension, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, SanType, date_time_ymd,
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::time::Duration;

/// Start of the certificates: 2024-01-01. They are valid for ten minutes.
pub const START: i64 = 1_704_067_200;
/// Time at which images are signed.
pub const SIGNED_AT: i64 = START + 300;
/// Subject and issuer of the identity that signs images.
pub const SUBJECT: &str = "builder@example.com";
pub const ISSUER_URL: &str = "https://issuer.example";

fn base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

fn sha256(bytes: &[u8]) -> Vec<u8> {
    Sha256::digest(bytes).to_vec()
}

/// An authority with a root and an intermediate certificate.
struct TestAuthority {
    root: Vec<u8>,
    intermediate: Vec<u8>,
    intermediate_key: SigningKey,
    issuer: CertificateParams,
}

impl TestAuthority {
    fn new() -> Self {
        let params = |name: &str| {
            let mut params = CertificateParams::default();
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params.distinguished_name = DistinguishedName::new();
            params.distinguished_name.push(DnType::CommonName, name);
            params
        };
        let (root_key, intermediate_key) = (SigningKey::generate(), SigningKey::generate());
        let (root, mut issuer) = (params("root"), params("intermediate"));
        // The usages of the issuer limit the usages of its certificates, as in Fulcio.
        issuer.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::CodeSigning,
            ExtendedKeyUsagePurpose::TimeStamping,
        ];
        let root_der = root.self_signed(&root_key.pair).unwrap().der().to_vec();
        let by_root = Issuer::from_params(&root, &root_key.pair);
        let intermediate = issuer.signed_by(&intermediate_key.pair, &by_root).unwrap();
        Self {
            root: root_der,
            intermediate: intermediate.der().to_vec(),
            intermediate_key,
            issuer,
        }
    }

    fn issue(&self, params: &CertificateParams, key: &SigningKey) -> Vec<u8> {
        let issuer = Issuer::from_params(&self.issuer, &self.intermediate_key.pair);
        params.signed_by(&key.pair, &issuer).unwrap().der().to_vec()
    }
}

/// Authorities and logs.
pub struct TestSigstore {
    fulcio: TestAuthority,
    rekor: SigningKey,
    certificate_log: SigningKey,
    timestamps: TestAuthority,
    timestamp_key: SigningKey,
    timestamp_certificate: Vec<u8>,
}

/// A key with the certificate of an identity.
pub struct TestSigner {
    pub key: SigningKey,
    /// Certificate in DER.
    pub certificate: Vec<u8>,
}

impl TestSigstore {
    pub fn new() -> Self {
        let (timestamps, timestamp_key) = (TestAuthority::new(), SigningKey::generate());
        let mut params = CertificateParams::default();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::TimeStamping];
        let timestamp_certificate = timestamps.issue(&params, &timestamp_key);
        Self {
            fulcio: TestAuthority::new(),
            rekor: SigningKey::generate(),
            certificate_log: SigningKey::generate(),
            timestamps,
            timestamp_key,
            timestamp_certificate,
        }
    }

    /// Returns the `trusted_root.json`.
    pub fn trust_root(&self) -> Value {
        let log = |key: &SigningKey| {
            json!({
                "baseUrl": "https://log.example",
                "hashAlgorithm": "SHA2_256",
                "publicKey": {
                    "rawBytes": base64(&key.public_der),
                    "keyDetails": "PKIX_ECDSA_P256_SHA_256",
                    "validFor": { "start": "2023-12-31T00:00:00Z" },
                },
                "logId": { "keyId": base64(&sha256(&key.public_der)) },
            })
        };
        let certificates = |list: &[&[u8]]| {
            let list = list.iter().map(|der| json!({ "rawBytes": base64(der) }));
            list.collect::<Value>()
        };
        let (fulcio, timestamps) = (&self.fulcio, &self.timestamps);
        let chain = [
            &self.timestamp_certificate[..],
            &timestamps.intermediate,
            &timestamps.root,
        ];
        json!({
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            "tlogs": [log(&self.rekor)],
            "ctlogs": [log(&self.certificate_log)],
            "certificateAuthorities": [{
                "uri": "https://fulcio.example",
                "certChain": {
                    "certificates": certificates(&[&fulcio.intermediate, &fulcio.root]),
                },
                "validFor": { "start": "2023-12-31T00:00:00Z" },
            }],
            "timestampAuthorities": [{
                "certChain": { "certificates": certificates(&chain) },
            }],
        })
    }

    /// Issues a certificate to an identity. `confirmed_by` is the certificate log.
    pub fn signer_confirmed_by(&self, subject: &str, confirmed_by: &SigningKey) -> TestSigner {
        let key = SigningKey::generate();
        let mut params = CertificateParams::default();
        params.not_before = date_time_ymd(2024, 1, 1);
        params.not_after = params.not_before + Duration::from_secs(600);
        params.serial_number = Some(77_u64.into());
        params.distinguished_name = DistinguishedName::new();
        params.subject_alt_names = vec![if subject.contains("://") {
            SanType::URI(subject.try_into().unwrap())
        } else {
            SanType::Rfc822Name(subject.try_into().unwrap())
        }];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::CodeSigning];
        let extension = |last: &[u64], content: Vec<u8>| {
            let identifier = [&[1, 3, 6, 1, 4, 1], last].concat();
            CustomExtension::from_oid_content(&identifier, content)
        };
        let issuer = encode(UTF8_STRING, ISSUER_URL.as_bytes());
        params.custom_extensions = vec![extension(&[57264, 1, 8], issuer)];
        let unconfirmed = self.fulcio.issue(&params, &key);
        let confirmation = self.confirmation(&unconfirmed, confirmed_by);
        (params.custom_extensions).push(extension(&[11129, 2, 4, 2], confirmation));
        let certificate = self.fulcio.issue(&params, &key);
        let has = |bytes: &[u8]| certificate.windows(bytes.len()).any(|w| w == bytes);
        assert!(has(ISSUER) && has(CONFIRMATIONS));
        TestSigner { key, certificate }
    }

    pub fn signer(&self, subject: &str) -> TestSigner {
        self.signer_confirmed_by(subject, &self.certificate_log)
    }

    /// Returns the extension by which a log confirms a certificate (RFC 6962, section 3.3).
    fn confirmation(&self, unconfirmed: &[u8], log: &SigningKey) -> Vec<u8> {
        let mut certificate = Reader::inside(unconfirmed, SEQUENCE).unwrap();
        let signed_part = certificate.element().unwrap().whole;
        let time = u64::try_from(START).unwrap() * 1000;
        let length = |bytes: &[u8]| u16::try_from(bytes.len()).unwrap().to_be_bytes();
        let mut message = [&[0, 0][..], &time.to_be_bytes(), &[0, 1]].concat();
        message.extend(sha256(&self.fulcio.intermediate_key.public_der));
        message.extend([&[0][..], &length(signed_part), signed_part, &[0, 0]].concat());
        let signature = log.sign(&message);
        let mut entry = [&[0][..], &sha256(&log.public_der), &time.to_be_bytes()].concat();
        // No extensions; SHA-256 and ECDSA.
        entry.extend([0, 0, 4, 3]);
        entry.extend([&length(&signature)[..], &signature].concat());
        let entry = [&length(&entry)[..], &entry].concat();
        encode(OCTET_STRING, &[&length(&entry)[..], &entry].concat())
    }

    /// Returns a log entry with a promise and an inclusion proof, as bundles contain it.
    pub fn log_entry(&self, body: &Value, time: i64) -> Value {
        let bytes = body.to_string().into_bytes();
        let id = sha256(&self.rekor.public_der);
        let promise = format!(
            r#"{{"body":"{}","integratedTime":{time},"logID":"{}","logIndex":7}}"#,
            base64(&bytes),
            HEXLOWER.encode(&id),
        );
        // The entry is the only one of its tree.
        let root = sha256(&[&[0][..], &bytes].concat());
        let note = format!("log.example\n1\n{}\n", base64(&root));
        let signature = [&id[..4], &self.rekor.sign(note.as_bytes())].concat();
        json!({
            "logIndex": "7",
            "logId": { "keyId": base64(&id) },
            "kindVersion": { "kind": body["kind"], "version": body["apiVersion"] },
            "integratedTime": time.to_string(),
            "inclusionPromise": {
                "signedEntryTimestamp": base64(&self.rekor.sign(promise.as_bytes())),
            },
            "inclusionProof": {
                "logIndex": "0",
                "rootHash": base64(&root),
                "treeSize": "1",
                "hashes": [],
                "checkpoint": {
                    "envelope": format!("{note}\n\u{2014} log.example {}\n", base64(&signature)),
                },
            },
            "canonicalizedBody": base64(&bytes),
        })
    }

    /// Returns a response of the authority for timestamps (RFC 3161).
    pub fn timestamp(&self, signature: &[u8]) -> Vec<u8> {
        let sequence = |parts: &[&[u8]]| encode(SEQUENCE, &parts.concat());
        let identifier = |bytes: &[u8]| encode(OBJECT_IDENTIFIER, bytes);
        let of_sha256 = sequence(&[&identifier(&[0x60, 0x86, 0x48, 1, 101, 3, 4, 2, 1])]);
        let pkcs9 = [0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 9];
        let info_type = identifier(&[&pkcs9[..], &[16, 1, 4]].concat());
        let number = encode(INTEGER, &[1]);
        let digest = encode(OCTET_STRING, &sha256(signature));
        let info = sequence(&[
            &number,
            &identifier(TIME_STAMPING),
            &sequence(&[&of_sha256, &digest]),
            &number,
            &encode(GENERALIZED_TIME, b"20240101000500Z"),
        ]);
        let attribute = |last: u8, value: &[u8]| {
            let kind = identifier(&[&pkcs9[..], &[last]].concat());
            sequence(&[&kind, &encode(SET, value)])
        };
        let info_digest = encode(OCTET_STRING, &sha256(&info));
        let attributes = [attribute(3, &info_type), attribute(4, &info_digest)].concat();
        let signed = self.timestamp_key.sign(&encode(SET, &attributes));
        let of_ecdsa = identifier(&[0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 2]);
        let signer = sequence(&[
            &number,
            &sequence(&[&sequence(&[]), &number]),
            &of_sha256,
            &encode(context(0), &attributes),
            &sequence(&[&of_ecdsa]),
            &encode(OCTET_STRING, &signed),
        ]);
        let content = encode(context(0), &encode(OCTET_STRING, &info));
        let data = sequence(&[
            &number,
            &encode(SET, &of_sha256),
            &sequence(&[&info_type, &content]),
            &encode(SET, &signer),
        ]);
        let signed_data = identifier(&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 7, 2]);
        sequence(&[
            &sequence(&[&encode(INTEGER, &[0])]),
            &sequence(&[&signed_data, &encode(context(0), &data)]),
        ])
    }

    /// Returns a bundle as cosign 3 writes it for an identity.
    pub fn bundle(&self, signer: &TestSigner, sha256: &str) -> Value {
        let verifier = pem::encode(&signer.certificate, pem::CERTIFICATE);
        let mut bundle = unlogged_bundle(&signer.key, sha256);
        let entry = self.log_entry(&entry_of_bundle(&bundle, &verifier), SIGNED_AT);
        bundle["verificationMaterial"] = json!({
            "certificate": { "rawBytes": base64(&signer.certificate) },
            "tlogEntries": [entry],
        });
        bundle
    }
}

/// Returns the statement that cosign signs for an image.
pub fn statement(sha256: &str) -> Value {
    json!({
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{ "digest": { "sha256": sha256 }, "annotations": {} }],
        "predicateType": "https://sigstore.dev/cosign/sign/v1",
        "predicate": {},
    })
}

/// Returns a bundle as cosign 3 writes it for a key without a log.
pub fn unlogged_bundle(key: &SigningKey, sha256: &str) -> Value {
    bundle_of(key, &statement(sha256))
}

/// Returns a bundle with another statement.
pub fn bundle_of(key: &SigningKey, statement: &Value) -> Value {
    let statement = statement.to_string().into_bytes();
    json!({
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": { "publicKey": { "hint": "" } },
        "dsseEnvelope": {
            "payloadType": "application/vnd.in-toto+json",
            "payload": base64(&statement),
            "signatures": [{ "sig": base64(&key.sign(&signed_message(&statement))) }],
        },
    })
}

/// Returns the body of the log entry of a bundle. `verifier` is a key or certificate in PEM.
pub fn entry_of_bundle(bundle: &Value, verifier: &str) -> Value {
    let envelope = &bundle["dsseEnvelope"];
    let payload = STANDARD
        .decode(envelope["payload"].as_str().unwrap())
        .unwrap();
    json!({
        "apiVersion": "0.0.1",
        "kind": "dsse",
        "spec": {
            "payloadHash": {
                "algorithm": "sha256", "value": HEXLOWER.encode(&sha256(&payload)),
            },
            "signatures": [{
                "signature": envelope["signatures"][0]["sig"],
                "verifier": base64(verifier.as_bytes()),
            }],
        },
    })
}

/// Returns the body of the log entry of a document. `verifier` is a key or certificate in PEM.
pub fn entry_of_document(document: &[u8], signature: &[u8], verifier: &str) -> Value {
    json!({
        "apiVersion": "0.0.1",
        "kind": "hashedrekord",
        "spec": {
            "data": {
                "hash": { "algorithm": "sha256", "value": HEXLOWER.encode(&sha256(document)) },
            },
            "signature": {
                "content": base64(signature),
                "publicKey": { "content": base64(verifier.as_bytes()) },
            },
        },
    })
}

/// Returns the body of the entry of a bundle in Rekor 2. `certificate` is in DER.
pub fn second_entry_of_bundle(bundle: &Value, certificate: &[u8]) -> Value {
    let envelope = &bundle["dsseEnvelope"];
    let payload = STANDARD
        .decode(envelope["payload"].as_str().unwrap())
        .unwrap();
    json!({
        "apiVersion": "0.0.2",
        "kind": "hashedrekord",
        "spec": { "hashedRekordV002": {
            "data": {
                "algorithm": "SHA2_256", "digest": base64(&sha256(&signed_message(&payload))),
            },
            "signature": {
                "content": envelope["signatures"][0]["sig"],
                "verifier": {
                    "keyDetails": "PKIX_ECDSA_P256_SHA_256",
                    "x509Certificate": { "rawBytes": base64(certificate) },
                },
            },
        } },
    })
}
