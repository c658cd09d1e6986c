//! Signatures of images in a registry on the loopback interface.

use super::registry_on_loopback::{Loopback, from_registry};
use super::*;
use crate::import::registry::RegistryImage;
use crate::import::signature::signing_key::SigningKey;
use crate::import::signature::test_sigstore::{ISSUER_URL, SUBJECT, TestSigstore, unlogged_bundle};
use crate::import::signature::tests::documents::document_annotations;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiffy_engine_api::SignerIdentity;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;

/// Media type of bundles.
const BUNDLE: &str = "application/vnd.dev.sigstore.bundle.v0.3+json";

/// Returns the signed document of cosign for an image.
fn document(digest: &str) -> Vec<u8> {
    let document = json!({
        "critical": {
            "identity": { "docker-reference": "registry.example/two" },
            "image": { "docker-manifest-digest": format!("sha256:{digest}") },
            "type": "cosign container image signature",
        },
        "optional": null,
    });
    document.to_string().into_bytes()
}

/// Pushes a manifest with one layer, or an index that refers to this manifest, with a tag.
fn push_layer(
    registry: &Loopback,
    tag: &str,
    (layer, media_type, annotations): (&[u8], &str, Value),
    is_in_index: bool,
) {
    let image = Image::new(Vec::new());
    let kind = |k: &str| format!("application/vnd.oci.image.{k}");
    let config = image.blob(image.config.to_string().as_bytes(), &kind("config.v1+json"));
    let mut layer = image.blob(layer, media_type);
    layer["annotations"] = annotations;
    let manifest = json!({
        "schemaVersion": 2, "mediaType": kind("manifest.v1+json"), "config": config,
        "layers": [layer],
    });
    let mut pushed = image.blob(manifest.to_string().as_bytes(), &kind("manifest.v1+json"));
    if is_in_index {
        // skopeo needs a platform, and rejects the type of the manifest.
        pushed["platform"] = json!({ "os": "linux", "architecture": "amd64" });
        let index = json!({
            "schemaVersion": 2, "mediaType": kind("index.v1+json"), "manifests": [pushed],
        });
        pushed = image.blob(index.to_string().as_bytes(), &kind("index.v1+json"));
    }
    let index = json!({ "schemaVersion": 2, "manifests": [pushed] });
    let write = |name: &str, text: &str| fs::write(image.dir.path().join(name), text).unwrap();
    write("index.json", &index.to_string());
    write("oci-layout", r#"{"imageLayoutVersion":"1.0.0"}"#);
    registry.push(image.dir.path(), &format!("two:{tag}"));
}

/// Pushes a document with these annotations, as cosign 2 does.
fn push_document(registry: &Loopback, digest: &str, document: &[u8], annotations: Value) {
    let media_type = "application/vnd.dev.cosign.simplesigning.v1+json";
    let layer = (document, media_type, annotations);
    push_layer(registry, &format!("sha256-{digest}.sig"), layer, false);
}

/// Pushes a signature of the image with this digest, as `cosign sign --key` does.
fn push(registry: &Loopback, digest: &str, document: &[u8], signature: &[u8]) {
    let signature = STANDARD.encode(signature);
    let annotations = json!({ "dev.cosignproject.cosign/signature": signature });
    push_document(registry, digest, document, annotations);
}

/// Pushes a bundle for the image with this digest, as cosign 3 does to registries without the call
/// for referrers.
fn push_bundle(registry: &Loopback, digest: &str, bundle: &Value) {
    let bundle = bundle.to_string();
    let layer = (bundle.as_bytes(), BUNDLE, json!({}));
    push_layer(registry, &format!("sha256-{digest}"), layer, true);
}

/// Returns the policy that requires a signature of one of these keys.
fn policy_of(keys: &[&SigningKey]) -> SignaturePolicy {
    let keys: Vec<String> = keys.iter().map(|key| key.public_pem.clone()).collect();
    SignaturePolicy::new(&keys, &[], None).unwrap()
}

#[test]
fn an_image_without_a_signature_of_the_key_is_refused_even_if_it_was_imported_before() {
    root_or_skip!(
        an_image_without_a_signature_of_the_key_is_refused_even_if_it_was_imported_before
    );
    let test = "import::tests::signatures::an_image_without_a_signature_of_the_key_is_refused_even_if_it_was_imported_before";
    let Some(registry) = Loopback::start(test, None) else {
        return;
    };
    let (_dir, home) = home();
    registry.push(Image::new(two_layers()).write(), "two:1");
    let (key, other) = (SigningKey::generate(), SigningKey::generate());
    let import = Import {
        signatures: policy_of(&[&key]),
        ..import_of("x", registry.source("two:1"))
    };
    let unverified = import_of("x", registry.source("two:1"));
    let template = imported(&home, &unverified).unwrap();
    let message = refused(&home, &import);
    assert!(message.contains("has no signature"), "{message}");

    let index = registry.digest("two:1");
    let manifest = template.manifest.origin.clone().unwrap();
    let manifest = manifest.manifest_sha256.unwrap();
    assert_ne!(index, manifest);
    let (of_index, of_manifest) = (document(&index), document(&manifest));
    for (document, signature) in [
        (&of_index, other.sign(&of_index)),
        // The signature of another image.
        (&of_manifest, key.sign(&of_manifest)),
        (&of_index, key.sign(&of_manifest)),
        (&of_index, Vec::new()),
    ] {
        push(&registry, &index, document, &signature);
        let message = refused(&home, &import);
        assert!(message.contains("no valid signature"), "{message}");
    }
    // The signature of the index, or of the manifest for this platform.
    push(&registry, &index, &of_index, &key.sign(&of_index));
    let signed = imported(&home, &import).unwrap();
    assert_eq!(signed.images[0].sha256, template.images[0].sha256);
    push(&registry, &index, &of_index, &other.sign(&of_index));
    assert!(refused(&home, &import).contains("no valid signature"));
    push(&registry, &manifest, &of_manifest, &key.sign(&of_manifest));
    imported(&home, &import).unwrap();
    // A signature of any of several keys suffices.
    let several = Import {
        signatures: policy_of(&[&SigningKey::generate(), &other]),
        ..import
    };
    imported(&home, &several).unwrap();
}

#[test]
fn bundles_and_signatures_of_identities_are_found_in_the_registry() {
    root_or_skip!(bundles_and_signatures_of_identities_are_found_in_the_registry);
    let test =
        "import::tests::signatures::bundles_and_signatures_of_identities_are_found_in_the_registry";
    let Some(registry) = Loopback::start(test, None) else {
        return;
    };
    let (_dir, home) = home();
    registry.push(Image::new(two_layers()).write(), "two:1");
    let index = registry.digest("two:1");
    let (key, sigstore) = (SigningKey::generate(), TestSigstore::new());
    let import = |signatures: SignaturePolicy| Import {
        signatures,
        ..import_of("x", registry.source("two:1"))
    };
    let by_key = import(policy_of(&[&key]));
    let root = sigstore.trust_root().to_string();
    let identity = SignerIdentity {
        subject: SUBJECT.to_owned(),
        issuer: ISSUER_URL.to_owned(),
    };
    let by_identity = import(SignaturePolicy::new(&[], &[identity], Some(&root)).unwrap());

    // A document of cosign 2.
    let (signer, document) = (sigstore.signer(SUBJECT), document(&index));
    let annotations = document_annotations(&sigstore, &signer, &document);
    push_document(&registry, &index, &document, annotations);
    imported(&home, &by_identity).unwrap();
    let other = sigstore.signer("other@example.com");
    let annotations = document_annotations(&sigstore, &other, &document);
    push_document(&registry, &index, &document, annotations);
    let message = refused(&home, &by_identity);
    assert!(message.contains("it is of other@example.com"), "{message}");

    // Bundles of cosign 3.
    push_bundle(&registry, &index, &unlogged_bundle(&key, &index));
    imported(&home, &by_key).unwrap();
    let message = refused(&home, &by_identity);
    assert!(message.contains("none of its 2 signatures"), "{message}");
    push_bundle(&registry, &index, &sigstore.bundle(&signer, &index));
    imported(&home, &by_identity).unwrap();
    assert!(refused(&home, &by_key).contains("another key"));
    for bad in [
        sigstore.bundle(&other, &index),
        sigstore.bundle(&signer, &"0".repeat(64)),
        json!({ "content": "x".repeat(200 << 10) }),
        json!([]),
    ] {
        push_bundle(&registry, &index, &bad);
        let message = refused(&home, &by_identity);
        assert!(message.contains("no valid signature"), "{message}");
    }
}

#[test]
fn manifests_that_refer_to_an_image_are_listed_by_the_call_of_the_registry() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let host = listener.local_addr().unwrap().to_string();
    let sha256 = "1".repeat(64);
    let call = format!("GET /v2/two/referrers/sha256:{sha256} HTTP/1.1");
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let lines = BufReader::new(stream.try_clone().unwrap()).lines();
        let head: Vec<String> = lines
            .map_while(Result::ok)
            .take_while(|l| !l.is_empty())
            .collect();
        let body = json!({ "schemaVersion": 2, "manifests": [
            { "digest": "sha256:a", "size": 3, "artifactType": BUNDLE },
        ] });
        let (body, length) = (body.to_string(), body.to_string().len());
        let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{body}");
        stream.write_all(answer.as_bytes()).unwrap();
        head
    });
    let ImportSource::Registry {
        access,
        pull,
        reference,
    } = from_registry(&host, "two:1")
    else {
        unreachable!("the source is a registry");
    };
    let mut image = RegistryImage::new(&reference, &access, &pull).unwrap();
    let found = image.referrers(&sha256).unwrap();
    let [manifest] = &found[..] else {
        panic!("{found:?}");
    };
    assert_eq!(manifest.artifact_type.as_deref(), Some(BUNDLE));
    assert_eq!(server.join().unwrap()[0], call);
}
