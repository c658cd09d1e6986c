//! Tests of derived templates: images, merging, hostile layers and garbage collection.
//!
//! A file `.wh.NAME` of a layer (*whiteout*) deletes the file NAME of the layers below. A file
//! `.wh..wh..opq` hides all files of its directory in the layers below (*opaque* directory).

use super::*;
use crate::build::tests::home;
use crate::home::Home;
use crate::layer::tests::Tar;
use crate::skipped;
use crate::template_model::manifest::tests::manifest;
use jiffy_archive::ArchiveEntryKind;
use std::collections::BTreeMap;
use std::path::Path;
use tar::EntryType;

macro_rules! root_or_skip {
    ($name:ident) => {
        if !nix::unistd::Uid::effective().is_root() {
            let test = concat!("derive::tests::", stringify!($name));
            return skipped(test, "needs root to change the owners of files");
        }
    };
}

/// Returns a base template without images.
fn scratch() -> TemplateManifest {
    TemplateManifest {
        images: Vec::new(),
        ..manifest(&["a"])
    }
}

/// Returns the specification of a template that is derived from `base`.
fn template_spec<'a>(name: &'a str, base: &'a TemplateManifest) -> DerivedTemplate<'a> {
    DerivedTemplate {
        name,
        visibility: None,
        base,
        defaults: base.defaults.clone(),
        idle_timeout_s: None,
        network: Default::default(),
        startup: Startup::default(),
        origin: None,
        history: vec![HistoryStep {
            text: format!("RUN {name}"),
            seconds: 0.5,
            bytes: None,
        }],
        recipe_sha256: "r".repeat(64),
        limits: UnpackLimits::default(),
        disk: DiskBudget::default(),
    }
}

/// Builds a derived template, whose changes are the archive `layer`.
fn derived(
    home: &Home,
    template_spec: &DerivedTemplate<'_>,
    layer: Tar,
) -> Result<Template, ImportError> {
    template_spec.build(&Templates::new(home), &layer.end()[..], &mut |_| ())
}

/// Returns the number of entries of a directory.
fn count(path: &Path) -> usize {
    fs::read_dir(path).unwrap().count()
}

#[test]
fn a_derived_template_shares_the_images_of_its_base_and_adds_one() {
    root_or_skip!(a_derived_template_shares_the_images_of_its_base_and_adds_one);
    let (_dir, home) = home();
    let nothing = scratch();
    let base = derived(
        &home,
        &template_spec("one", &nothing),
        Tar::default().file("a", b"1"),
    )
    .unwrap();
    let layer = Tar::default().file(".wh.a", b"").file("b", b"2");
    let derived_template = derived(&home, &template_spec("two:V1", &base.manifest), layer).unwrap();
    let m = &derived_template.manifest;
    assert_eq!(
        (m.name.as_str(), m.tag.as_str(), m.images.len()),
        ("two", "V1", 2)
    );
    assert_eq!(m.images[0], base.manifest.images[0]);
    let texts: Vec<&str> = m.history.iter().map(|s| s.text.as_str()).collect();
    assert_eq!(
        texts,
        [
            "RUN one",
            "image of the changes",
            "RUN two:V1",
            "image of the changes"
        ]
    );
    // Each of the two templates has added an image and a stamp.
    assert_eq!(count(&home.images()), 4);
    // Without changes, no further image is created.
    let same = derived(
        &home,
        &template_spec("same", &base.manifest),
        Tar::default(),
    )
    .unwrap();
    assert_eq!(same.manifest.images, base.manifest.images);
    assert_eq!(same.manifest.version(), base.manifest.version());
    // The network rules of the base apply unless the template has its own.
    let closed = TemplateNetwork {
        allow_internet_access: Some(false),
        ..TemplateNetwork::default()
    };
    let own = TemplateNetwork {
        allow_internet_access: Some(true),
        ..TemplateNetwork::default()
    };
    let mut restricted = base.manifest.clone();
    restricted.network = closed.clone();
    let mut spec = template_spec("rules", &restricted);
    let inherited = derived(&home, &spec, Tar::default()).unwrap();
    assert_eq!(inherited.manifest.network, closed);
    spec.network = own.clone();
    let replaced = derived(&home, &spec, Tar::default()).unwrap();
    assert_eq!(replaced.manifest.network, own);
    // An opaque root hides all images of the base.
    let layer = Tar::default().file(".wh..wh..opq", b"").file("c", b"3");
    let standalone = derived(&home, &template_spec("alone", m), layer).unwrap();
    assert_eq!(standalone.manifest.images.len(), 1);
}

/// Returns the entries of `image` by path: the content of files or the target of links, followed by
/// the values of `user.` attributes.
fn contents(home: &Home, image: &ImageSum) -> BTreeMap<String, String> {
    let file = ImageStore::new(home).open(image).unwrap().file;
    let mut layer = Vec::new();
    crate::erofs::write_layer(&file, &mut layer).unwrap();
    let mut reader = jiffy_archive::ArchiveReader::new(&layer[..]);
    let mut found = BTreeMap::new();
    while let Some(entry) = reader.next_entry().unwrap() {
        let mut content = vec![0; usize::try_from(entry.size).unwrap()];
        // `read_content` may return less than requested.
        let mut filled = 0;
        while filled < content.len() {
            filled += reader.read_content(&mut content[filled..]).unwrap();
        }
        let mut text = String::from_utf8(content).unwrap();
        match entry.kind {
            ArchiveEntryKind::HardLink | ArchiveEntryKind::Symlink => {
                text = String::from_utf8(entry.link).unwrap()
            }
            _ => {}
        }
        for (name, value) in entry.xattrs {
            if name.starts_with(b"user.") {
                text += &format!(" {}", String::from_utf8(value).unwrap());
            }
        }
        found.insert(String::from_utf8(entry.path).unwrap(), text);
    }
    found
}

#[test]
fn images_above_the_maximum_number_are_merged_with_equal_content() {
    root_or_skip!(images_above_the_maximum_number_are_merged_with_equal_content);
    let (_dir, home) = home();
    let tar = Tar::default;
    let long = "n".repeat(200);
    let large = "0123456789".repeat(100_000);
    let lowest = tar().file("lowest", b"1").file("d/lowest", b"1");
    let layers = [
        tar()
            .file("kept", large.as_bytes())
            .file("goes", b"2")
            .file("becomes-directory", b"2")
            .file("tree/deep/goes", b"2")
            .file("replaced/goes", b"2")
            .file("emptied/goes", b"2")
            .file("both/first", b"2")
            .link(EntryType::Link, "linked", "kept"),
        tar()
            .file(".wh.goes", b"")
            .file(".wh.tree", b"")
            .file("both/second", b"3")
            .file("becomes-directory/in", b"3")
            .file(&format!("{}/leaf", &long[..90]), b"3"),
        // Both a deleted directory and an opaque directory may have new files below.
        tar()
            .file(".wh.lowest", b"")
            .file("tree/new", b"4")
            .file(".wh.replaced", b"")
            .file("replaced", b"4"),
        tar()
            .directory("emptied", 0o700)
            .file("emptied/.wh..wh..opq", b"")
            .file("emptied/mine", b"5"),
        tar()
            .link(EntryType::Symlink, "both/link", "../kept")
            .file("changed", b"5"),
    ];
    let mut base = derived(&home, &template_spec("x", &scratch()), lowest).unwrap();
    for layer in layers {
        base = derived(&home, &template_spec("x", &base.manifest), layer).unwrap();
    }
    assert_eq!(base.manifest.images.len(), MAX_IMAGES);
    let layer = tar()
        .file("changed", b"7")
        .file("both/.wh.first", b"")
        .file("d/.wh.lowest", b"");
    let merged = derived(&home, &template_spec("x", &base.manifest), layer).unwrap();
    let images = &merged.manifest.images;
    assert_eq!(images.len(), 2);
    assert_eq!(images[0], base.manifest.images[0]);
    let texts = &merged.manifest.history.last().unwrap().text;
    assert_eq!(texts, "image of the changes and of 5 images below");
    let leaf = format!("{}/leaf", &long[..90]);
    let expected = [
        (".wh.goes", ""),
        (".wh.lowest", ""),
        ("becomes-directory/", ""),
        ("becomes-directory/.wh..wh..opq", ""),
        ("becomes-directory/in", "3"),
        ("both/", ""),
        ("both/.wh.first", ""),
        ("both/link", "../kept"),
        ("both/second", "3"),
        ("changed", "7"),
        ("d/", ""),
        ("d/.wh.lowest", ""),
        ("emptied/", ""),
        ("emptied/.wh..wh..opq", ""),
        ("emptied/mine", "5"),
        ("kept", &large),
        ("linked", "kept"),
        ("replaced", "4"),
        ("tree/", ""),
        ("tree/.wh..wh..opq", ""),
        ("tree/new", "4"),
        (&leaf, "3"),
    ];
    let mut found = contents(&home, &images[1]);
    assert!(found.remove("./").is_some());
    assert!(found.remove(&format!("{}/", &long[..90])).is_some());
    let found: Vec<(&str, &str)> = (found.iter().map(|(k, v)| (k.as_str(), v.as_str()))).collect();
    for pair in &expected {
        assert!(found.contains(pair), "{} is missing", pair.0);
    }
    assert_eq!(
        found.len(),
        expected.len(),
        "{:?}",
        found.iter().map(|f| f.0).collect::<Vec<_>>()
    );
    // There is capacity for further images again, and the version before the merge still exists.
    let next = derived(
        &home,
        &template_spec("y", &merged.manifest),
        tar().file("more", b"8"),
    )
    .unwrap();
    assert_eq!(next.manifest.images.len(), 3);
    assert!(
        Templates::new(&home)
            .version(&format!("x@{}", base.manifest.version()))
            .is_ok()
    );
}

#[test]
fn an_invalid_image_is_refused_and_its_links_are_never_followed() {
    root_or_skip!(an_invalid_image_is_refused_and_its_links_are_never_followed);
    let (_dir, home) = home();
    let layer = Tar::default()
        .file("d/file", &[7; 5000])
        .file("d/other", b"x")
        .link(EntryType::Symlink, "d/link", "somewhere")
        .file(".wh.gone", b"");
    let template = derived(&home, &template_spec("x", &scratch()), layer).unwrap();
    let mut image = Vec::new();
    let mut file = &ImageStore::new(&home)
        .open(&template.manifest.images[0])
        .unwrap()
        .file;
    std::io::Read::read_to_end(&mut file, &mut image).unwrap();
    // xorshift64 with a fixed seed, so that a failure can be reproduced.
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |bound: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        usize::try_from(seed % bound as u64).unwrap()
    };
    let limits = UnpackLimits {
        bytes: 1 << 20,
        entries: 1000,
        ..UnpackLimits::default()
    };
    let scratch_dir = tempfile::tempdir().unwrap();
    let path = scratch_dir.path().join("image");
    let mut refused = 0;
    for round in 0..300 {
        let mut bytes = image.clone();
        for _ in 0..=random(6) {
            // The superblock is at byte 1024. The metadata follows in the first blocks.
            let at = 1024 + random(bytes.len().min(8192) - 1024);
            bytes[at] = u8::try_from(random(256)).unwrap();
        }
        bytes.truncate(bytes.len() - random(2) * random(4096));
        fs::write(&path, &bytes).unwrap();
        let into = scratch_dir.path().join(round.to_string());
        fs::create_dir(&into).unwrap();
        let file = fs::File::open(&path).unwrap();
        refused += usize::from(unpack_image(&file, &into, limits).is_err());
        fs::remove_dir_all(&into).unwrap();
    }
    // At least some of the changes must be detected. Others only change file contents.
    assert!(refused > 0);
}

#[test]
fn a_hostile_or_truncated_layer_leaves_nothing() {
    root_or_skip!(a_hostile_or_truncated_layer_leaves_nothing);
    let (_dir, home) = home();
    let nothing = scratch();
    let x = template_spec("x", &nothing);
    let outside = Tar::default().file("../x", b"x");
    assert!(derived(&home, &x, outside).is_err());
    let whole = Tar::default().file("x", b"x").end();
    // Header and content have 512 bytes each, so only the end mark is missing.
    let cut = &whole[..1024];
    let refused = x
        .build(&Templates::new(&home), cut, &mut |_| ())
        .unwrap_err();
    assert!(matches!(refused, ImportError::Layer { .. }), "{refused}");
    let stock = template_spec("base", &nothing);
    let refused = derived(&home, &stock, Tar::default()).unwrap_err();
    assert!(refused.to_string().contains("stock template"), "{refused}");
    let missing = manifest(&["a"]);
    let refused = derived(&home, &template_spec("x", &missing), Tar::default()).unwrap_err();
    assert!(refused.to_string().contains("is missing"), "{refused}");
    // No failed build may leave files.
    for directory in [home.templates(), home.images(), home.versions()] {
        assert_eq!(count(&directory), 0, "{}", directory.display());
    }
}

/// Creates the parts of a snapshot that concern templates.
fn snapshot(home: &Home, id: &str, of: &TemplateManifest) {
    let directory = home.snapshots()[0].join(id);
    // Only the reference to the template matters to the garbage collector.
    fs::create_dir_all(&directory).unwrap();
    let text = format!(r#"{{"template":"{}@{}"}}"#, of.reference(), of.version());
    fs::write(directory.join("manifest.json"), text).unwrap();
}

#[test]
fn gc_retains_only_images_of_templates_snapshots_and_open_files() {
    root_or_skip!(gc_retains_only_images_of_templates_snapshots_and_open_files);
    let (_dir, home) = home();
    let templates = Templates::new(&home);
    let nothing = scratch();
    let base = derived(
        &home,
        &template_spec("base:x", &nothing),
        Tar::default().file("a", b"1"),
    );
    let base = base.unwrap().manifest;
    let make = |content: &str| {
        let layer = Tar::default().file("b", content.as_bytes());
        derived(&home, &template_spec("x", &base), layer).unwrap()
    };
    let paused = make("paused").manifest;
    snapshot(&home, "s1", &paused);
    // An open template stands for a running sandbox.
    let running = make("running");
    let tagged = make("tagged").manifest;
    templates.tag("x", "x:kept", Visibility::Private).unwrap();
    let unneeded = make("unneeded").manifest;
    let current = make("current").manifest;

    // `version` fails if an image of the version was removed.
    let opens = |m: &TemplateManifest| templates.version(&format!("x@{}", m.version())).is_ok();
    assert!(opens(&paused) && opens(&running.manifest) && opens(&tagged) && opens(&current));
    // The image was removed together with its last reference.
    assert!(!opens(&unneeded));
    assert_eq!(templates.prune().unwrap(), crate::PrunedImages::default());
    templates.remove("x").unwrap();
    assert!(opens(&paused) && opens(&running.manifest) && opens(&tagged) && !opens(&current));
    let version = running.manifest.version();
    drop(running);
    let preview = templates.preview_prune(&[]).unwrap();
    assert!(templates.version(&format!("x@{version}")).is_ok());
    let with_tagged = templates.preview_prune(&["x:kept".to_owned()]).unwrap();
    assert_eq!(with_tagged.images.len(), 2);
    let pruned = templates.prune().unwrap();
    assert_eq!(pruned, preview);
    assert_eq!(pruned.versions, [format!("x@{version}")]);
    assert_eq!(pruned.images.len(), 1);
    assert!(pruned.bytes > 0);
    // The manifest of the snapshot cannot be parsed.
    fs::write(home.snapshots()[0].join("s1/manifest.json"), "{").unwrap();
    templates.remove("x:kept").unwrap();
    // A damaged snapshot may refer to any image.
    assert!(
        templates
            .prune()
            .unwrap_err()
            .to_string()
            .contains("snapshot s1")
    );
    assert!(opens(&tagged));
    fs::remove_dir_all(&home.snapshots()[0]).unwrap();
    assert_eq!(templates.prune().unwrap().versions.len(), 2);
    assert!(!opens(&tagged) && !opens(&paused));
    templates.remove("base:x").unwrap();
    assert_eq!(count(&home.images()) + count(&home.versions()), 0);
}
