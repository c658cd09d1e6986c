use super::*;
use crate::builder::tests::home;
use crate::home::Home;
use crate::layer::tests::Tar;
use crate::manifest::tests::manifest;
use crate::skipped;
use std::path::Path;

macro_rules! root_or_skip {
    ($name:ident) => {
        if !nix::unistd::Uid::effective().is_root() {
            let test = concat!("derive::tests::", stringify!($name));
            return skipped(test, "needs root, to give files to others");
        }
    };
}

fn scratch() -> Manifest {
    Manifest {
        images: Vec::new(),
        ..manifest(&["a"])
    }
}

fn wanted<'a>(name: &'a str, base: &'a Manifest) -> Derived<'a> {
    Derived {
        name,
        base,
        defaults: base.defaults.clone(),
        startup: Startup::default(),
        origin: None,
        history: vec![Step {
            text: format!("RUN {name}"),
            seconds: 0.5,
            bytes: None,
        }],
        recipe_sha256: "r".repeat(64),
        limits: Limits::default(),
    }
}

fn derived(home: &Home, wanted: &Derived<'_>, layer: Tar) -> Result<Template, ImportError> {
    Templates::new(home).derive(wanted, &layer.end()[..], &mut |_| ())
}

fn count(path: &Path) -> usize {
    fs::read_dir(path).unwrap().count()
}

#[test]
fn a_derived_template_stands_on_the_images_of_its_base_and_adds_one() {
    root_or_skip!(a_derived_template_stands_on_the_images_of_its_base_and_adds_one);
    let (_dir, home) = home();
    let nothing = scratch();
    let base = derived(
        &home,
        &wanted("one", &nothing),
        Tar::default().file("a", b"1"),
    )
    .unwrap();
    let layer = Tar::default().file(".wh.a", b"").file("b", b"2");
    let on_it = derived(&home, &wanted("two:V1", &base.manifest), layer).unwrap();
    let m = &on_it.manifest;
    assert_eq!(
        (m.name.as_str(), m.tag.as_str(), m.images.len()),
        ("two", "V1", 2)
    );
    assert_eq!(m.images[0], base.manifest.images[0]);
    let said: Vec<&str> = m.history.iter().map(|s| s.text.as_str()).collect();
    assert_eq!(
        said,
        [
            "RUN one",
            "image of what changed",
            "RUN two:V1",
            "image of what changed"
        ]
    );
    // Image and stamp of each, once.
    assert_eq!(count(&home.images()), 4);
    // Nothing changed: no image more.
    let same = derived(&home, &wanted("same", &base.manifest), Tar::default()).unwrap();
    assert_eq!(same.manifest.images, base.manifest.images);
    assert_eq!(same.manifest.version(), base.manifest.version());
    // All below is deleted.
    let layer = Tar::default().file(".wh..wh..opq", b"").file("c", b"3");
    let alone = derived(&home, &wanted("alone", m), layer).unwrap();
    assert_eq!(alone.manifest.images.len(), 1);
}

#[test]
fn a_stack_that_no_sandbox_could_take_is_refused_in_words() {
    root_or_skip!(a_stack_that_no_sandbox_could_take_is_refused_in_words);
    let (_dir, home) = home();
    let mut base = scratch();
    for i in 0..MAX_IMAGES {
        let layer = Tar::default().file(&format!("f{i}"), b"x");
        base = derived(&home, &wanted("x", &base), layer).unwrap().manifest;
    }
    let layer = Tar::default().file("more", b"x");
    let refused = derived(&home, &wanted("x", &base), layer).unwrap_err();
    assert!(
        refused.to_string().contains("a stack of 7 images"),
        "{refused}"
    );
    assert_eq!(Templates::new(&home).get("x").unwrap().manifest, base);
}

#[test]
fn what_is_hostile_or_cut_short_leaves_nothing() {
    root_or_skip!(what_is_hostile_or_cut_short_leaves_nothing);
    let (_dir, home) = home();
    let nothing = scratch();
    let x = wanted("x", &nothing);
    let outside = Tar::default().file("../x", b"x");
    assert!(derived(&home, &x, outside).is_err());
    let whole = Tar::default().file("x", b"x").end();
    let cut = &whole[..1024];
    let refused = Templates::new(&home)
        .derive(&x, cut, &mut |_| ())
        .unwrap_err();
    assert!(matches!(refused, ImportError::Layer { .. }), "{refused}");
    let stock = wanted("base", &nothing);
    let refused = derived(&home, &stock, Tar::default()).unwrap_err();
    assert!(refused.to_string().contains("stock template"), "{refused}");
    let gone = manifest(&["a"]);
    let refused = derived(&home, &wanted("x", &gone), Tar::default()).unwrap_err();
    assert!(refused.to_string().contains("is missing"), "{refused}");
    for made in [home.templates(), home.images(), home.versions()] {
        assert_eq!(count(&made), 0, "{}", made.display());
    }
}

/// A snapshot as far as templates are concerned.
fn snapshot(home: &Home, id: &str, of: &Manifest) {
    let directory = home.snapshots().join(id);
    fs::create_dir_all(&directory).unwrap();
    let text = format!(r#"{{"template":"{}@{}"}}"#, of.reference(), of.version());
    fs::write(directory.join("manifest.json"), text).unwrap();
}

#[test]
fn what_templates_snapshots_and_open_files_need_stays_and_the_rest_goes() {
    root_or_skip!(what_templates_snapshots_and_open_files_need_stays_and_the_rest_goes);
    let (_dir, home) = home();
    let templates = Templates::new(&home);
    let nothing = scratch();
    let base = derived(
        &home,
        &wanted("base:x", &nothing),
        Tar::default().file("a", b"1"),
    );
    let base = base.unwrap().manifest;
    let make = |content: &str| {
        let layer = Tar::default().file("b", content.as_bytes());
        derived(&home, &wanted("x", &base), layer).unwrap()
    };
    let asleep = make("asleep").manifest;
    snapshot(&home, "s1", &asleep);
    let running = make("running");
    let tagged = make("tagged").manifest;
    templates.tag("x", "x:kept").unwrap();
    let unneeded = make("unneeded").manifest;
    let current = make("current").manifest;

    let opens = |m: &Manifest| templates.version(&format!("x@{}", m.version())).is_ok();
    assert!(opens(&asleep) && opens(&running.manifest) && opens(&tagged) && opens(&current));
    // It went when nothing named it any more.
    assert!(!opens(&unneeded));
    assert_eq!(templates.prune().unwrap(), crate::Pruned::default());
    templates.remove("x").unwrap();
    assert!(opens(&asleep) && opens(&running.manifest) && opens(&tagged) && !opens(&current));
    let version = running.manifest.version();
    drop(running);
    let pruned = templates.prune().unwrap();
    assert_eq!(pruned.versions, [format!("x@{version}")]);
    assert_eq!(pruned.images.len(), 1);
    assert!(pruned.bytes > 0);
    fs::write(home.snapshots().join("s1/manifest.json"), "{").unwrap();
    templates.remove("x:kept").unwrap();
    // What a damaged snapshot needs cannot be told.
    assert!(
        templates
            .prune()
            .unwrap_err()
            .to_string()
            .contains("snapshot s1")
    );
    assert!(opens(&tagged));
    fs::remove_dir_all(home.snapshots()).unwrap();
    assert_eq!(templates.prune().unwrap().versions.len(), 2);
    assert!(!opens(&tagged) && !opens(&asleep));
    templates.remove("base:x").unwrap();
    assert_eq!(count(&home.images()) + count(&home.versions()), 0);
}
