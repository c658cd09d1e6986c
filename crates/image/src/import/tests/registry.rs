//! Import of images from a registry on the loopback interface.

use super::registry_on_loopback::{Loopback, from_registry};
use super::*;

/// Pushes an image to a registry.
fn push(image: &Image, registry: &Loopback, name: &str) {
    registry.push(image.write(), name);
}

#[test]
fn an_image_of_a_registry_is_imported_completely_or_not_at_all() {
    root_or_skip!(an_image_of_a_registry_is_imported_completely_or_not_at_all);
    let test = "import::tests::an_image_of_a_registry_is_imported_completely_or_not_at_all";
    let Some(registry) = Loopback::start(test, None) else {
        return;
    };
    let (_dir, home) = home();
    let image = Image::new(two_layers());
    push(&image, &registry, "two:1");
    let import = |name: &str| import_of("x", registry.source(name));
    let template = imported(&home, &import("two:1")).unwrap();
    assert!(holds(&template, b"upper-new") && !holds(&template, b"lower-new"));
    let origin = template.manifest.origin.clone().unwrap();
    assert!(origin.from.ends_with("/two:1"), "{}", origin.from);
    let manifest = origin.manifest_sha256.unwrap();
    assert_eq!(
        count(&home.blobs()),
        0,
        "a blob was retained after its layer was unpacked"
    );
    let by_digest = imported(&home, &import(&format!("two@sha256:{manifest}"))).unwrap();
    assert_eq!(by_digest.images[0].sha256, template.images[0].sha256);

    assert!(refused(&home, &import("two:2")).contains("does not exist"));
    assert!(refused(&home, &import("none:1")).contains("does not exist"));
    let mut arm = Image::new(two_layers());
    arm.config["architecture"] = json!("arm64");
    push(&arm, &registry, "arm:1");
    assert!(refused(&home, &import("arm:1")).contains("linux/arm64"));
    // The earlier template still exists.
    assert_eq!(
        Templates::new(&home).get("x").unwrap().images[0].sha256,
        template.images[0].sha256
    );
}

#[test]
fn a_tampered_or_truncated_layer_is_refused_and_an_interrupted_one_resumed() {
    root_or_skip!(a_tampered_or_truncated_layer_is_refused_and_an_interrupted_one_resumed);
    let test =
        "import::tests::a_tampered_or_truncated_layer_is_refused_and_an_interrupted_one_resumed";
    let Some(registry) = Loopback::start(test, None) else {
        return;
    };
    let (_dir, home) = home();
    let noise: Vec<u8> = (0..200_000_u32)
        .flat_map(|i| sum_of(&i.to_le_bytes()).into_bytes())
        .take(1 << 20)
        .collect();
    let image = Image::new(vec![Tar::default().file("noise", &noise).end()]);
    push(&image, &registry, "noise:1");
    let import = import_of("x", registry.source("noise:1"));
    let packed = zstd::encode_all(&image.layers[0][..], 1).unwrap();
    let blob = registry.blob(&sum_of(&packed));
    assert_eq!(fs::read(&blob).unwrap(), packed);

    let mut tampered = packed.clone();
    tampered[packed.len() / 2] ^= 1;
    fs::write(&blob, &tampered).unwrap();
    let message = refused(&home, &import);
    assert!(message.contains("does not match its digest"), "{message}");
    // A truncated blob: the download is shorter than the descriptor states.
    fs::write(&blob, &packed[..packed.len() / 2]).unwrap();
    let message = refused(&home, &import);
    assert!(
        message.contains("run again to get the rest") || message.contains("its digest"),
        "{message}"
    );

    // After an interrupted download, the first third is not requested again.
    fs::write(&blob, &packed).unwrap();
    let part = home.blobs().join(format!("sha256-{}", sum_of(&packed)));
    fs::write(&part, &packed[..packed.len() / 3]).unwrap();
    assert!(holds(&imported(&home, &import).unwrap(), &noise[..4096]));
    // The format of the log depends on the version of the registry.
    assert!(
        registry.log().contains("status=206") || registry.log().contains(" 206 "),
        "no range was requested"
    );
}

#[test]
fn a_registry_gets_credentials_or_is_named_in_the_error() {
    root_or_skip!(a_registry_gets_credentials_or_is_named_in_the_error);
    let test = "import::tests::a_registry_gets_credentials_or_is_named_in_the_error";
    let Some(registry) = Loopback::start(test, Some(("jiffy", "secret"))) else {
        return;
    };
    let (_dir, home) = home();
    push(&Image::new(two_layers()), &registry, "two:1");
    let import = import_of("x", registry.source("two:1"));
    let message = refused(&home, &import);
    assert!(message.contains("needs credentials"), "{message}");
}

#[test]
fn an_unreachable_registry_is_named_in_the_error() {
    root_or_skip!(an_unreachable_registry_is_named_in_the_error);
    let (_dir, home) = home();
    // A port that is very likely closed, since it was free a moment ago.
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let host = format!("127.0.0.1:{port}");
    let source = from_registry(&host, "x");
    let message = refused(&home, &import_of("x", source));
    assert!(
        message.contains(&format!("cannot reach {host}")),
        "{message}"
    );
    let mut source = from_registry(&host, "x");
    if let ImportSource::Registry { reference, .. } = &mut source {
        *reference = "A b".to_owned();
    }
    assert!(refused(&home, &import_of("x", source)).contains("not an image reference"));
}
