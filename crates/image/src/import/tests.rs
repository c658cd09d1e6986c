//! Import of images from directories, archives, and a real registry on the loopback interface.
//!
//! A file `.wh.NAME` of a layer (*whiteout*) deletes the file NAME of the layers below. The *diff
//! id* of a layer is the digest of its uncompressed archive.

use super::*;
use crate::build::tests::home;
use crate::layer::tests::Tar;
use crate::skipped;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tar::EntryType;

mod registry_on_loopback;

/// An image as an OCI layout in a directory.
struct Image {
    dir: tempfile::TempDir,
    layers: Vec<Vec<u8>>,
    config: Value,
}

impl Image {
    /// Creates an image with these layers and a common configuration.
    fn new(layers: Vec<Vec<u8>>) -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
            config: json!({
                "architecture": "amd64",
                "os": "linux",
                "config": { "Env": ["A=b"], "User": "7:8", "WorkingDir": "/srv", "Cmd": ["/bin/x", "y z"],
                    "ExposedPorts": { "80/tcp": {} } },
                "rootfs": { "type": "layers", "diff_ids": layers.iter()
                    .map(|l| format!("sha256:{}", sum_of(l))).collect::<Vec<_>>() }
            }),
            layers,
        }
    }

    /// Stores content under its digest. Returns its descriptor.
    fn blob(&self, content: &[u8], media_type: &str) -> Value {
        let blobs = self.dir.path().join("blobs/sha256");
        fs::create_dir_all(&blobs).unwrap();
        let sum = sum_of(content);
        fs::write(blobs.join(&sum), content).unwrap();
        json!({ "digest": format!("sha256:{sum}"), "size": content.len(), "mediaType": media_type })
    }

    /// Writes the layout and returns its directory. `index.json` refers to a second index, which
    /// refers to the manifest.
    fn write(&self) -> &Path {
        let kind = |k: &str| format!("application/vnd.oci.image.{k}");
        let config = self.blob(
            &serde_json::to_vec(&self.config).unwrap(),
            &kind("config.v1+json"),
        );
        let layers: Vec<Value> = (self.layers.iter())
            .map(|l| {
                self.blob(
                    &zstd::encode_all(&l[..], 1).unwrap(),
                    &kind("layer.v1.tar+zstd"),
                )
            })
            .collect();
        let manifest = json!({ "schemaVersion": 2, "mediaType": kind("manifest.v1+json"), "config": config, "layers": layers });
        let mut manifest = self.blob(
            &serde_json::to_vec(&manifest).unwrap(),
            &kind("manifest.v1+json"),
        );
        manifest["platform"] =
            json!({ "os": "linux", "architecture": self.config["architecture"] });
        let index = json!({ "schemaVersion": 2, "mediaType": kind("index.v1+json"), "manifests": [manifest] });
        let index = self.blob(&serde_json::to_vec(&index).unwrap(), &kind("index.v1+json"));
        let outer = json!({ "schemaVersion": 2, "manifests": [index] });
        let write = |name: &str, text: &str| fs::write(self.dir.path().join(name), text).unwrap();
        write("index.json", &outer.to_string());
        write("oci-layout", r#"{"imageLayoutVersion":"1.0.0"}"#);
        self.dir.path()
    }
}

/// Returns a lower layer, and a layer that deletes, replaces and adds files.
fn two_layers() -> Vec<Vec<u8>> {
    let lower = Tar::default()
        .directory("etc", 0o755)
        .file("etc/gone", b"lower-gone")
        .file("etc/stays", b"lower-stays")
        .file("etc/new", b"lower-new")
        .directory("d", 0o755)
        .file("d/hidden", b"lower-hidden");
    let upper = Tar::default()
        .directory("etc", 0o700)
        .file("etc/.wh.gone", b"")
        .file("etc/new", b"upper-new")
        .directory("d", 0o755)
        .file("d/.wh..wh..opq", b"")
        .link(EntryType::Symlink, "d/link", "/etc/stays");
    vec![lower.end(), upper.end()]
}

/// Returns the request to import an image as template `name`.
fn import_of(name: &str, source: ImportSource) -> Import {
    Import {
        name: name.to_owned(),
        visibility: None,
        source,
        vcpus: None,
        memory_mib: None,
        disk_mib: Some(256),
        start: ImportStart::Nothing,
        ready: None,
        limits: UnpackLimits::default(),
        disk: DiskBudget::default(),
        signatures: SignaturePolicy::default(),
    }
}

/// Imports an image.
fn imported(home: &Home, import: &Import) -> Result<Template, ImportError> {
    import.run(&Templates::new(home), &mut |_| ())
}

/// Runs an import that must fail. Returns the messages of the error and of all its causes, since
/// the reason is often in the last cause.
fn refused(home: &Home, import: &Import) -> String {
    let error = imported(home, import).unwrap_err();
    let mut cause: &dyn std::error::Error = &error;
    let mut text = error.to_string();
    while let Some(next) = cause.source() {
        text = format!("{text}: {next}");
        cause = next;
    }
    text
}

/// Returns whether an uncompressed image contains these bytes.
fn holds(template: &Template, bytes: &[u8]) -> bool {
    let image = fs::read(&template.images[0].path).unwrap();
    image.windows(bytes.len()).any(|w| w == bytes)
}

/// Returns the number of directory entries, including unfinished files.
fn count(path: &Path) -> usize {
    fs::read_dir(path).unwrap().count()
}

macro_rules! root_or_skip {
    ($name:ident) => {
        if !nix::unistd::Uid::effective().is_root() {
            let test = concat!("import::tests::", stringify!($name));
            return skipped(test, "needs root to merge layers");
        }
    };
}

mod registry;
mod signatures;

#[test]
fn layers_are_merged_and_upper_ones_have_priority() {
    root_or_skip!(layers_are_merged_and_upper_ones_have_priority);
    let (_dir, home) = home();
    let image = Image::new(two_layers());
    let import = import_of("two", ImportSource::Directory(image.write().to_owned()));
    let template = imported(&home, &import).unwrap();
    assert!(holds(&template, b"lower-stays") && holds(&template, b"upper-new"));
    for hidden in ["lower-gone", "lower-new", "lower-hidden"] {
        assert!(
            !holds(&template, hidden.as_bytes()),
            "{hidden} shows through"
        );
    }
    let m = &template.manifest;
    assert_eq!(
        (m.defaults.user.as_str(), m.defaults.workdir.as_str()),
        ("7:8", "/srv")
    );
    assert_eq!(
        (m.defaults.disk_mib, m.defaults.env["A"].as_str()),
        (256, "b")
    );
    assert!(
        m.startup.is_empty(),
        "a command is started without a request"
    );
    let origin = m.origin.as_ref().unwrap();
    assert_eq!(
        (origin.layers.len(), origin.exposed_ports[0].as_str()),
        (2, "80/tcp")
    );
    // The second import does no work and has an equal result.
    let second = imported(&home, &import).unwrap();
    assert_eq!(second.manifest, template.manifest);
}

#[test]
fn layers_are_shared_and_removed_with_their_last_template() {
    root_or_skip!(layers_are_shared_and_removed_with_their_last_template);
    let (_dir, home) = home();
    let mut layers = two_layers();
    let one = Image::new(layers.clone());
    layers.push(Tar::default().file("more", b"more").end());
    // The lowest layer is repeated on top: overlayfs rejects a directory that is listed twice.
    layers.push(layers[0].clone());
    let other = Image::new(layers);
    imported(
        &home,
        &import_of("one", ImportSource::Directory(one.write().to_owned())),
    )
    .unwrap();
    assert_eq!(count(&home.layers()), 2);
    let template = imported(
        &home,
        &import_of("other", ImportSource::Directory(other.write().to_owned())),
    );
    assert!(
        holds(&template.unwrap(), b"lower-gone"),
        "the uppermost layer does not win"
    );
    assert_eq!(count(&home.layers()), 3);
    Templates::new(&home).remove("one").unwrap();
    assert_eq!(count(&home.layers()), 3);
    Templates::new(&home).remove("other").unwrap();
    assert_eq!(count(&home.layers()), 0);
}

#[test]
fn the_kind_of_an_archive_is_detected_by_its_content() {
    root_or_skip!(the_kind_of_an_archive_is_detected_by_its_content);
    let (dir, home) = home();
    let image = Image::new(two_layers());
    let path = dir.path().join("archive");
    let archived = |name: &str| {
        imported(&home, &import_of(name, ImportSource::Archive(path.clone()))).unwrap()
    };
    // An OCI layout.
    let tar = Command::new("tar")
        .arg("-czf")
        .arg(&path)
        .arg("-C")
        .arg(image.write())
        .arg(".")
        .status();
    assert!(tar.unwrap().success());
    assert_eq!(archived("layout").manifest.defaults.user, "7:8");
    // The older format of `docker save`, with a symbolic link in place of a layer.
    let lower = format!("{}/layer.tar", "a".repeat(64));
    let saved =
        json!([{ "Config": "config.json", "RepoTags": ["x:1"], "Layers": [lower, "b/layer.tar"] }]);
    let saved = Tar::default()
        .file("real.tar", &image.layers[0])
        .link(EntryType::Symlink, &lower, "../real.tar")
        .file("b/layer.tar", &image.layers[1])
        .file("config.json", image.config.to_string().as_bytes())
        .file("manifest.json", saved.to_string().as_bytes());
    fs::write(&path, saved.end()).unwrap();
    let template = archived("saved");
    assert!(holds(&template, b"upper-new") && !holds(&template, b"lower-new"));
    assert_eq!(template.manifest.defaults.user, "7:8");
    // Plain files.
    fs::write(&path, zstd::encode_all(&image.layers[0][..], 1).unwrap()).unwrap();
    let template = archived("files");
    assert!(holds(&template, b"lower-new"));
    let d = &template.manifest.defaults;
    assert_eq!((d.user.as_str(), d.workdir.as_str()), ("root", "/"));
    assert_eq!(count(&home.layers()), 2, "the layer was not shared");
    // Only the end mark shows that plain files are complete. A layer of an image has a diff id
    // instead.
    let cut = image.layers[0].len() - 1024;
    fs::write(&path, &image.layers[0][..cut]).unwrap();
    let message = refused(
        &home,
        &import_of("cut", ImportSource::Archive(path.clone())),
    );
    assert!(message.contains("it is truncated"), "{message}");
    let bare = Image::new(vec![image.layers[0][..cut].to_vec()]);
    imported(
        &home,
        &import_of("bare", ImportSource::Directory(bare.write().to_owned())),
    )
    .unwrap();
}

#[test]
fn a_link_in_an_archive_leads_to_no_file_of_this_host() {
    root_or_skip!(a_link_in_an_archive_leads_to_no_file_of_this_host);
    let (dir, home) = home();
    let secret = dir.path().join("secret.tar");
    fs::write(&secret, Tar::default().file("x", b"secret").end()).unwrap();
    let saved = json!([{ "Config": "config.json", "Layers": ["layer.tar"] }]);
    let config = Image::new(vec![fs::read(&secret).unwrap()])
        .config
        .to_string();
    let saved = Tar::default()
        .link(EntryType::Symlink, "layer.tar", secret.to_str().unwrap())
        .file("config.json", config.as_bytes())
        .file("manifest.json", saved.to_string().as_bytes());
    let path = dir.path().join("archive");
    fs::write(&path, saved.end()).unwrap();
    assert!(imported(&home, &import_of("x", ImportSource::Archive(path))).is_err());
    assert_eq!(count(&home.templates()), 0, "the import left files behind");
    assert_eq!(count(&home.layers()), 0);
}

#[test]
fn a_directory_of_files_is_imported_again_every_time() {
    root_or_skip!(a_directory_of_files_is_imported_again_every_time);
    let (dir, home) = home();
    let root = dir.path().join("root");
    fs::create_dir_all(root.join("bin")).unwrap();
    fs::write(root.join("bin/x"), "first-content").unwrap();
    let import = import_of("x", ImportSource::Directory(root.clone()));
    assert!(holds(&imported(&home, &import).unwrap(), b"first-content"));
    fs::write(root.join("bin/x"), "other-content").unwrap();
    assert!(holds(&imported(&home, &import).unwrap(), b"other-content"));
}

#[test]
fn the_images_command_is_started_only_on_request_and_without_a_shell() {
    root_or_skip!(the_images_command_is_started_only_on_request_and_without_a_shell);
    let (_dir, home) = home();
    let image = Image::new(two_layers());
    let import = Import {
        start: ImportStart::Image,
        ..import_of("x", ImportSource::Directory(image.write().to_owned()))
    };
    let start = imported(&home, &import)
        .unwrap()
        .manifest
        .startup
        .start
        .unwrap();
    assert_eq!(
        (start.command.as_str(), start.args),
        ("/bin/x", Some(vec!["y z".to_owned()]))
    );
}

#[test]
fn an_invalid_import_is_refused_with_its_reason() {
    root_or_skip!(an_invalid_import_is_refused_with_its_reason);
    let (dir, home) = home();
    let from = |image: &Image| import_of("x", ImportSource::Directory(image.write().to_owned()));
    let mut arm = Image::new(two_layers());
    arm.config["architecture"] = json!("arm64");
    assert!(refused(&home, &from(&arm)).contains("linux/arm64"));
    let mut fewer = Image::new(two_layers());
    fewer.layers.pop();
    assert!(refused(&home, &from(&fewer)).contains("lists 2 diff ids, but has 1 layers"));
    let mut other = Image::new(two_layers());
    other.layers[1] = Tar::default().file("evil", b"").end();
    let message = refused(&home, &from(&other));
    assert!(message.contains("its content has sha256"), "{message}");
    // A configuration that was changed without its digest.
    let changed = Image::new(two_layers());
    for blob in fs::read_dir(changed.write().join("blobs/sha256")).unwrap() {
        let path = blob.unwrap().path();
        let text = fs::read_to_string(&path).unwrap_or_default();
        if text.contains("diff_ids") {
            fs::write(&path, text.replace("7:8", "0:0")).unwrap();
        }
    }
    let changed = import_of("x", ImportSource::Directory(changed.dir.path().to_owned()));
    assert!(refused(&home, &changed).contains("does not match its digest"));
    for (import, expected) in [
        (
            import_of("base", ImportSource::Directory("/".into())),
            "stock template",
        ),
        (
            import_of("a b", ImportSource::Directory("/".into())),
            "not a template name",
        ),
        (
            import_of("x", ImportSource::Archive(dir.path().join("none"))),
            "cannot import",
        ),
        (
            Import {
                memory_mib: Some(0),
                ..from(&other)
            },
            "emory",
        ),
        (
            Import {
                start: ImportStart::Command(" ".into()),
                ..from(&other)
            },
            "empty",
        ),
    ] {
        // The reason of each rejection must be part of the message.
        let message = refused(&home, &import);
        assert!(message.contains(expected), "{expected}: {message}");
    }
    assert_eq!(count(&home.templates()), 0);
}

#[test]
fn an_import_over_budget_creates_no_template_and_removes_its_files() {
    root_or_skip!(an_import_over_budget_creates_no_template_and_removes_its_files);
    let (_dir, home) = home();
    let image = Image::new(two_layers());
    image.write();
    let budget = |max_bytes: u64| {
        DiskBudget::new(move |bytes| {
            if bytes <= max_bytes {
                Ok(())
            } else {
                Err(format!("{bytes} bytes of {max_bytes}"))
            }
        })
    };
    let mut import = import_of("x", ImportSource::Directory(image.dir.path().to_owned()));
    import.disk = budget(100);
    let message = refused(&home, &import);
    assert!(message.ends_with("bytes of 100"), "{message}");
    assert_eq!(count(&home.templates()), 0);
    let leftovers = || {
        let emptied = [home.images(), home.layers()];
        let leftovers = emptied.iter().flat_map(|dir| fs::read_dir(dir).unwrap());
        leftovers
            .flatten()
            .map(|entry| entry.path())
            .collect::<Vec<_>>()
    };
    // A program that another test starts may hold the lock of the images until its exec. In this
    // case the next import removes the unused images.
    for _ in 0..20 {
        if !leftovers().is_empty() {
            refused(&home, &import);
        }
    }
    assert_eq!(leftovers(), Vec::<PathBuf>::new());
    import.disk = budget(1 << 30);
    imported(&home, &import).unwrap();
}

#[test]
fn an_import_over_budget_is_rejected_before_its_files_are_written() {
    root_or_skip!(an_import_over_budget_is_rejected_before_its_files_are_written);
    let (_dir, home) = home();
    let file = vec![0; 9 << 20];
    let layer = (0..4).fold(Tar::default(), |tar, n| {
        tar.file(&format!("file-{n}"), &file)
    });
    let image = Image::new(vec![layer.end()]);
    image.write();
    let max_bytes: u64 = 20 << 20;
    let (layers, seen) = (home.layers(), Arc::new(AtomicU64::new(0)));
    let mut import = import_of("x", ImportSource::Directory(image.dir.path().to_owned()));
    let on_disk = seen.clone();
    import.disk = DiskBudget::new(move |bytes| {
        if bytes <= max_bytes {
            Ok(())
        } else {
            // The bytes on disk at the moment of the rejection.
            on_disk.store(bytes_below(&layers), Ordering::Relaxed);
            Err(format!("more than {max_bytes} bytes"))
        }
    });
    let message = refused(&home, &import);
    assert_eq!(message, format!("more than {max_bytes} bytes"));
    let seen = seen.load(Ordering::Relaxed);
    assert!((1..=max_bytes).contains(&seen), "{seen} bytes on disk");
    assert_eq!(bytes_below(&home.layers()), 0);
    assert_eq!(count(&home.images()), 0);
}

/// Bytes of all files below a directory.
fn bytes_below(path: &Path) -> u64 {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let bytes = entries.map(|entry| match entry.metadata() {
        Ok(data) if data.is_dir() => bytes_below(&entry.path()),
        Ok(data) => data.len(),
        Err(_) => 0,
    });
    bytes.sum()
}
