//! Signatures of images in a registry on the loopback interface.

use super::registry_on_loopback::Loopback;
use super::*;
use crate::import::signature::tests::SigningKey;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

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

/// Pushes a signature of the image with this digest, as `cosign sign --key` does.
fn push(registry: &Loopback, digest: &str, document: &[u8], signature: &[u8]) {
    let image = Image::new(Vec::new());
    let kind = |k: &str| format!("application/vnd.oci.image.{k}");
    let config = image.blob(image.config.to_string().as_bytes(), &kind("config.v1+json"));
    let mut layer = image.blob(document, "application/vnd.dev.cosign.simplesigning.v1+json");
    layer["annotations"] =
        json!({ "dev.cosignproject.cosign/signature": STANDARD.encode(signature) });
    let manifest = json!({
        "schemaVersion": 2, "mediaType": kind("manifest.v1+json"), "config": config,
        "layers": [layer],
    });
    let manifest = image.blob(manifest.to_string().as_bytes(), &kind("manifest.v1+json"));
    let index = json!({ "schemaVersion": 2, "manifests": [manifest] });
    let write = |name: &str, text: &str| fs::write(image.dir.path().join(name), text).unwrap();
    write("index.json", &index.to_string());
    write("oci-layout", r#"{"imageLayoutVersion":"1.0.0"}"#);
    registry.push(image.dir.path(), &format!("two:sha256-{digest}.sig"));
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
        verify_keys: vec![VerifyKey::from_pem(&key.public_pem).unwrap()],
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
        verify_keys: vec![
            VerifyKey::from_pem(&SigningKey::generate().public_pem).unwrap(),
            VerifyKey::from_pem(&other.public_pem).unwrap(),
        ],
        ..import
    };
    imported(&home, &several).unwrap();
}
