//! Tests for layered templates with real guests. Files that an upper image deletes are hidden.
//! Sandboxes of an older version of a template continue to work after the template is replaced or
//! removed.
//!
//! A file `.wh.NAME` of a layer deletes the file NAME of the images below. A file `.wh..wh..opq`
//! hides all files of its directory in the images below.

use crate::support::test_home::TestHome;
use crate::support::wait_for;
use jiffy_image::{
    DerivedTemplate, DiskBudget, Template, TemplateManifest, Templates, UnpackLimits,
};
use jiffy_test_attributes::jiffy_test;
use tar::{Builder, EntryType, Header};

/// Returns a data directory to which the test can add templates, and its templates.
fn prepared() -> (TestHome, Templates) {
    let test_home = TestHome::with_templates();
    let templates = test_home.templates();
    (test_home, templates)
}

/// Creates a layer of files. A path that ends with `/` is a directory.
fn layer(entries: &[(&str, &str)]) -> Vec<u8> {
    let mut tar = Builder::new(Vec::new());
    for (path, content) in entries {
        let mut header = Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o755);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1_700_000_000);
        let directory = path.ends_with('/');
        header.set_entry_type(if directory {
            EntryType::Directory
        } else {
            EntryType::Regular
        });
        tar.append_data(&mut header, path, content.as_bytes())
            .unwrap();
    }
    tar.into_inner().unwrap()
}

/// Creates a template from the images of `base` and a layer of these files.
fn derived(
    templates: &Templates,
    name: &str,
    base: &TemplateManifest,
    entries: &[(&str, &str)],
) -> Template {
    let derived = DerivedTemplate {
        name,
        visibility: None,
        base,
        defaults: base.defaults.clone(),
        idle_timeout_s: None,
        network: Default::default(),
        startup: base.startup.clone(),
        origin: None,
        history: Vec::new(),
        recipe_sha256: String::new(),
        limits: UnpackLimits::default(),
        disk: DiskBudget::default(),
    };
    derived
        .build(templates, &layer(entries)[..], &mut |_| ())
        .unwrap()
}

#[jiffy_test]
fn deletions_and_replacements_of_upper_images_apply_in_the_guest() {
    let (test_home, templates) = prepared();
    let base = templates.get("base").unwrap();
    let lower = derived(
        &templates,
        "lower",
        &base.manifest,
        &[
            ("etc/", ""),
            ("etc/.wh.debian_version", ""),
            ("opt/", ""),
            ("opt/gone/", ""),
            ("opt/gone/inside", "lower"),
            ("opt/becomes-a-file/", ""),
            ("opt/becomes-a-file/inside", "lower"),
            ("opt/emptied/", ""),
            ("opt/emptied/inside", "lower"),
            ("opt/comes-back", "lower"),
            ("opt/stays", "lower"),
        ],
    );
    let middle = derived(
        &templates,
        "middle",
        &lower.manifest,
        &[
            ("opt/", ""),
            ("opt/.wh.gone", ""),
            ("opt/.wh.becomes-a-file", ""),
            ("opt/becomes-a-file", "middle"),
            ("opt/emptied/", ""),
            ("opt/emptied/.wh..wh..opq", ""),
            ("opt/emptied/mine", "middle"),
            ("opt/.wh.comes-back", ""),
        ],
    );
    let upper = derived(
        &templates,
        "upper",
        &middle.manifest,
        &[("opt/", ""), ("opt/comes-back", "upper")],
    );
    assert_eq!(upper.manifest.images.len(), 4);
    let look = "cd /opt; ls; cat becomes-a-file comes-back stays emptied/*; test -e /etc/debian_version || echo; test -e /etc/passwd && echo base";
    let seen = "becomes-a-file\ncomes-back\nemptied\nstays\nmiddleupperlowermiddle\nbase";
    let booted = test_home.ok(&["run", "--template", "upper", "--", "sh", "-c", look]);
    assert_eq!(booted, seen);
    let id = test_home.ok(&["create", "--template", "upper"]);
    assert_eq!(test_home.sh(&id, look), seen);
    // Changes of the sandbox are in a layer above.
    let script = "rm -r /opt/emptied; echo own >/opt/stays";
    test_home.ok(&["exec", "--user", "root", &id, "--", "sh", "-c", script]);
    test_home.ok(&["pause", &id]);
    test_home.ok(&["resume", &id]);
    assert_eq!(
        test_home.sh(&id, "ls /opt; cat /opt/stays"),
        "becomes-a-file\ncomes-back\nstays\nown"
    );
    // Other sandboxes are unchanged.
    let other = test_home.ok(&["create", "--template", "upper"]);
    assert_eq!(test_home.sh(&other, look), seen);
    let id = test_home.ok(&["create", "--template", "lower"]);
    assert_eq!(
        test_home.sh(&id, "cat /opt/gone/inside /opt/comes-back"),
        "lowerlower"
    );
}

#[jiffy_test]
fn sandboxes_of_an_older_template_version_survive_its_replacement_and_removal() {
    let (test_home, templates) = prepared();
    let base = templates.get("base").unwrap();
    let make = |content: &str| {
        let entries = [("opt/", ""), ("opt/version", content)];
        derived(&templates, "app", &base.manifest, &entries)
    };
    let says = |id: &str| test_home.sh(id, "cat /opt/version /tmp/state 2>/dev/null; true");
    let first = make("one").manifest.version();
    let id = test_home.ok(&["create", "--template", "app"]);
    test_home.sh(&id, "echo +kept >/tmp/state");
    let snapshot = test_home.ok(&["snapshot", &id]);
    test_home.sh(&id, "echo +later >/tmp/state");
    let runs = test_home.ok(&["create", "--template", "app"]);
    test_home.ok(&["pause", &id]);

    let second = make("two").manifest.version();
    assert_ne!(first, second);
    let new = test_home.ok(&["create", "--template", "app"]);
    assert_eq!(says(&new), "two");
    let all_of_it = |id: &str| {
        test_home.ok(&["resume", id]);
        assert_eq!(says(id), "one+later");
        let child = test_home.ok(&["fork", id]);
        assert_eq!(says(child.lines().next_back().unwrap()), "one+later");
        test_home.ok(&["rollback", id, &snapshot]);
        assert_eq!(says(id), "one+kept");
        let created = test_home.ok(&["create", "--from", &snapshot]);
        assert_eq!(says(&created), "one+kept");
        test_home.sh(id, "echo +later >/tmp/state");
        test_home.ok(&["pause", id]);
    };
    all_of_it(&id);
    // A running sandbox keeps its version across pause and resume.
    test_home.ok(&["pause", &runs]);
    test_home.ok(&["resume", &runs]);
    assert_eq!(says(&runs), "one");

    test_home.ok(&["template", "rm", "app"]);
    templates.prune().unwrap();
    let refused = test_home.call(&["create", "--template", "app"]);
    assert_ne!(refused.code, Some(0), "{refused:?}");
    all_of_it(&id);
    // All operations also work after a restart of the daemon.
    test_home.kill_daemon();
    all_of_it(&id);
    let opens = |version: &str| templates.version(&format!("app@{version}")).is_ok();
    // Sandboxes still use both versions.
    assert!(opens(&first) && opens(&second));
}

#[jiffy_test]
fn a_template_is_exported_tagged_listed_and_removed() {
    let (test_home, templates) = prepared();
    let (other, _) = prepared();
    let base = templates.get("base").unwrap();
    let entries = [("opt/", ""), ("opt/version", "one")];
    let app = derived(&templates, "app", &base.manifest, &entries);
    test_home.ok(&["template", "tag", "app", "app:v1"]);
    let entries = [("opt/", ""), ("opt/version", "two")];
    derived(&templates, "app", &base.manifest, &entries);

    let listed = test_home.json(&["template", "ls"]);
    let listed = listed.as_array().unwrap();
    let tagged = listed.iter().find(|t| t["tag"] == "v1").unwrap();
    assert_eq!(tagged["name"], "app");
    assert_eq!(tagged["version"], app.manifest.version());
    assert_eq!(tagged["images"].as_array().unwrap().len(), 2);
    assert_eq!(tagged["own"], app.manifest.images[1].size);
    let shown = test_home.ok(&["template", "inspect", "app:v1"]);
    assert!(shown.contains("shared with app, base"), "{shown}");
    let shown = test_home.ok(&["template", "history", "app:v1"]);
    assert!(shown.contains("image of the changes"), "{shown}");
    let id = test_home.ok(&["create", "--template", "app:v1"]);
    assert_eq!(test_home.sh(&id, "cat /opt/version"), "one");
    let id = test_home.ok(&["create", "--template", "app"]);
    assert_eq!(test_home.sh(&id, "cat /opt/version"), "two");

    let file = other.dir.path().join("app.tar.zst");
    let file = file.to_str().unwrap();
    test_home.ok(&["template", "export", "app:v1", file]);
    let created = other.json(&["template", "import", file, "--name", "came"]);
    assert_eq!(created["images"], tagged["images"]);
    let id = other.ok(&["create", "--template", "came"]);
    assert_eq!(other.sh(&id, "cat /opt/version"), "one");

    let own = other.dir.path().join(format!(
        "images/sha256-{}.erofs",
        app.manifest.images[1].sha256
    ));
    other.ok(&["template", "rm", "came"]);
    other.json(&["template", "prune"]);
    // The sandbox is running.
    assert!(own.exists());
    other.ok(&["rm", &id]);
    other.ok(&["serve", "--stop", "--kill-sandboxes"]);
    // The next daemon removes the snapshot of a removed template.
    other.ok(&["ls"]);
    wait_for("the image to be removed", || {
        other.json(&["template", "prune"]);
        (!own.exists()).then_some(())
    });
}

#[jiffy_test]
fn eight_stacked_builds_keep_the_changes_of_each() {
    let (test_home, _) = prepared();
    let context = test_home.dir.path().join("context");
    std::fs::create_dir(&context).unwrap();
    let steps = [
        "mkdir -p /srv/tree/deep /srv/emptied && echo 1 | tee /srv/one /srv/tree/deep/file /srv/emptied/file /srv/changes",
        "echo 2 > /srv/two && rm -r /srv/tree && rm /etc/debian_version",
        "mkdir /srv/tree && echo 3 > /srv/tree/new",
        "rm -r /srv/emptied && mkdir /srv/emptied && rm /srv/one && mkdir /srv/one && echo 4 > /srv/one/in",
        "mv /usr/share/common-licenses /srv/moved && mv /srv/moved /srv/kept && echo 5 > /srv/changes && ln /srv/two /srv/linked && ln -s two /srv/soft",
        "rm -r /srv/one && echo 6 > /srv/one && rm -r /usr/share/doc",
        "mkdir /usr/share/doc && echo 7 > /usr/share/doc/only",
        "echo 8 >> /srv/changes && rm /srv/tree/new && mv /srv/kept /srv/licences && echo own > /srv/licences/own",
    ];
    for (n, step) in steps.iter().enumerate() {
        let from = if n == 0 {
            "base".to_owned()
        } else {
            format!("high-{n}")
        };
        let text = format!("FROM {from}\nUSER root\nRUN {step}\n");
        std::fs::write(context.join("Dockerfile"), text).unwrap();
        let name = format!("high-{}", n + 1);
        test_home.ok(&[
            "template",
            "build",
            context.to_str().unwrap(),
            "--name",
            &name,
        ]);
    }
    let images = |name: &str| {
        let details = test_home.json(&["template", "inspect", name]);
        details["images"].as_array().unwrap().len()
    };
    // A template has at most six images. At this maximum, a build merges all but the lowest. Each
    // later build adds one image.
    assert_eq!(images("high-5"), 6);
    assert_eq!(images("high-6"), 2);
    assert_eq!(images("high-8"), 4);
    let look = "cd /srv; ls -A . emptied tree; cat changes linked one soft two; readlink soft; stat -c %h two; \
        ls /usr/share/doc; test -e /etc/debian_version || echo gone; test -e /etc/passwd && echo base; \
        cat /srv/licences/own; test -s /srv/licences/GPL-3 && echo kept; \
        test -e /usr/share/common-licenses || echo moved";
    let seen = "changes\nemptied\nlicences\nlinked\none\nsoft\ntree\ntwo\n\nemptied:\n\ntree:\n\
        5\n8\n2\n6\n2\n2\ntwo\n2\nonly\ngone\nbase\nown\nkept\nmoved";
    let booted = test_home.ok(&["run", "--template", "high-8", "--", "sh", "-c", look]);
    assert_eq!(booted.trim_start_matches(".:\n"), seen);
    let id = test_home.ok(&["create", "--template", "high-8"]);
    assert_eq!(test_home.sh(&id, look).trim_start_matches(".:\n"), seen);
    let id = test_home.ok(&["create", "--template", "high-5"]);
    assert_eq!(test_home.sh(&id, "cat /srv/one/in /srv/changes"), "4\n5");
}
