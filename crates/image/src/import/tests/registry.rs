//! Import of images from a registry on the loopback interface.

use super::registry_on_loopback::{Loopback, from_mirrors, from_registry};
use super::*;
use crate::import::RegistryAccess;
use jiffy_registry_pull::{Credentials, RegistryLogin};

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
fn images_come_from_mirrors_and_from_their_registry_if_the_mirrors_fail() {
    root_or_skip!(images_come_from_mirrors_and_from_their_registry_if_the_mirrors_fail);
    let test =
        "import::tests::images_come_from_mirrors_and_from_their_registry_if_the_mirrors_fail";
    let start = || Loopback::start(test, None);
    let (Some(origin), Some(mirror)) = (start(), start()) else {
        return;
    };
    let image = Image::new(two_layers());
    push(&image, &mirror, "two:1");
    // A registry and a mirror that do not answer, because their ports are closed.
    let missing = "127.0.0.1:1";
    let mirrors = ["127.0.0.1:2", mirror.host()];
    let source = from_mirrors(missing, "two:1", &mirrors);
    let (_dir, home) = home();
    let template = imported(&home, &import_of("x", source)).unwrap();
    assert!(holds(&template, b"upper-new"));
    let origin_of = template.manifest.origin.clone().unwrap();
    assert_eq!(origin_of.from, format!("{missing}/two:1"));
    // The mirror receives no credentials: images that need them come from their registry.
    let mut source = from_mirrors(missing, "two:1", &mirrors);
    if let ImportSource::Registry { access, .. } = &mut source {
        *access = RegistryAccess::Login(RegistryLogin::Password(Credentials {
            user: "u".to_owned(),
            password: "p".to_owned(),
        }));
    }
    let message = refused(&home, &import_of("x", source));
    assert!(message.contains("cannot reach 127.0.0.1:1"), "{message}");
    // The mirror lacks the image.
    push(&image, &origin, "other:1");
    let source = from_mirrors(origin.host(), "other:1", &[mirror.host()]);
    imported(&home, &import_of("y", source)).unwrap();
    assert!(mirror.log().contains("/v2/other/manifests/1"));
    // The mirror lacks one layer of an image.
    let noise = Image::new(vec![Tar::default().file("noise", b"0123456789").end()]);
    for registry in [&origin, &mirror] {
        push(&noise, registry, "noise:1");
    }
    let packed = zstd::encode_all(&noise.layers[0][..], 1).unwrap();
    fs::remove_file(mirror.blob(&sum_of(&packed))).unwrap();
    let source = from_mirrors(origin.host(), "noise:1", &[mirror.host()]);
    let template = imported(&home, &import_of("z", source)).unwrap();
    assert!(holds(&template, b"0123456789"));
    assert!(origin.log().contains(&sum_of(&packed)));
    // No server has the image: the error is the error of its registry.
    let source = from_mirrors(origin.host(), "none:1", &[mirror.host()]);
    assert!(refused(&home, &import_of("x", source)).contains("does not exist"));
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
