//! Tests of exported templates: import, trust in files, downloads and shared stores.
//!
//! A *stock template* is a template whose recipe is built into the program. Its name is reserved.
//! The *stamp* of an image records that the image was verified.

use super::*;
use crate::build::build_if_needed;
use crate::build::tests::{FakeRecipe, home};
use crate::home::Home;
use crate::template_model::Recipe;
use crate::verified::sum_of;
use std::fs;

/// Names and contents in an archive.
type Entries = Vec<(String, Vec<u8>)>;

/// Exports a template of a data directory. Returns the file.
fn exported(home: &Home, name: &str) -> Vec<u8> {
    let mut file = Vec::new();
    let templates = Templates::new(home);
    export_template(&templates, name, &mut file, &mut |_| ()).unwrap();
    file
}

/// Imports an exported template that no setting declares as trusted.
fn imported(home: &Home, file: &[u8], name: Option<&str>) -> Result<Template, ImportError> {
    imported_with(home, file, name, FileTrust::default())
}

/// Imports an exported template with this name and trust.
fn imported_with(
    home: &Home,
    file: &[u8],
    name: Option<&str>,
    trust: FileTrust,
) -> Result<Template, ImportError> {
    let import = FileImport {
        name: name.map(str::to_owned),
        trust,
        ..FileImport::default()
    };
    import.run(&Templates::new(home), file, &mut |_| ())
}

/// Unpacks an archive into entries that a test can change.
fn unpacked(file: &[u8]) -> Entries {
    let plain = zstd::decode_all(file).unwrap();
    let mut archive = Archive::new(&plain[..]);
    let entries = archive.entries().unwrap().map(|entry| {
        let mut entry = entry.unwrap();
        let name = entry.path().unwrap().display().to_string();
        let mut content = Vec::new();
        entry.read_to_end(&mut content).unwrap();
        (name, content)
    });
    entries.collect()
}

/// Returns a tar archive with these files.
fn packed(entries: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut archive = Builder::new(Vec::new());
    for (name, content) in entries {
        let mut header = Header::new_ustar();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        archive
            .append_data(&mut header, name, &content[..])
            .unwrap();
    }
    zstd::encode_all(&archive.into_inner().unwrap()[..], 1).unwrap()
}

#[test]
fn an_exported_template_is_equal_on_another_host() {
    let ((_a, source), (_b, target)) = (home(), home());
    let template = FakeRecipe::new("one").build(&source).unwrap();
    let file = exported(&source, "one");
    let imported_template = imported(&target, &file, None).unwrap();
    assert_eq!(
        imported_template.manifest.version(),
        template.manifest.version()
    );
    assert_eq!(
        imported_template.manifest.history,
        template.manifest.history
    );
    // An existing image is not read again, and the template may be renamed.
    let again = imported(&source, &file, Some("two:V1")).unwrap();
    assert_eq!(again.manifest.reference(), "two:V1");
    assert_eq!(again.manifest.version(), template.manifest.version());
    // The image and its stamp (`stamp_path`).
    assert_eq!(fs::read_dir(source.images()).unwrap().count(), 2);
}

#[test]
fn a_file_cannot_choose_the_owner_of_its_template() {
    let ((_a, source), (_b, target)) = (home(), home());
    FakeRecipe::new("one").build(&source).unwrap();
    let mut entries = unpacked(&exported(&source, "one"));
    let mut manifest: serde_json::Value = serde_json::from_slice(&entries[0].1).unwrap();
    let mut import = |field: &str, value: &str, name| {
        manifest[field] = value.into();
        entries[0].1 = serde_json::to_vec(&manifest).unwrap();
        imported(&target, &packed(&entries), name)
    };
    let template = import("owner", "abcdefghijkmnpqrstuv", None).unwrap();
    assert_eq!(template.manifest.reference(), "one");
    assert!(import("name", "abcdefghijkmnpqrstuv/one", None).is_err());
    let template = import("name", "one", Some("vutsrqpnmkjihgfedcba/two")).unwrap();
    assert_eq!(template.manifest.reference(), "vutsrqpnmkjihgfedcba/two");
}

#[test]
fn a_file_without_a_template_is_rejected_without_its_content() {
    let (_guard, target) = home();
    let archive = packed(&[("other".to_owned(), b"content".to_vec())]);
    let text = "content ".repeat(200).into_bytes();
    let binary = vec![0xff; 4096];
    let packed_text = zstd::encode_all(&text[..], 0).unwrap();
    for file in [
        &archive[..],
        &text[..],
        &text[..8],
        &binary[..],
        &packed_text[..],
        b"".as_slice(),
    ] {
        let error = imported(&target, file, None).unwrap_err();
        assert!(matches!(error, ImportError::NotExported), "{error:?}");
        assert_eq!(error.to_string(), "the file is not an exported template");
    }
}

#[test]
fn an_invalid_export_is_refused_and_leaves_nothing() {
    let ((_a, source), (_b, target)) = (home(), home());
    let size = FakeRecipe::new("one")
        .build(&source)
        .unwrap()
        .manifest
        .size();
    let file = exported(&source, "one");
    let refused = |change: &dyn Fn(&mut Entries)| {
        let mut entries = unpacked(&file);
        change(&mut entries);
        let error = imported(&target, &packed(&entries), None).unwrap_err();
        format!("{error}: {:?}", std::error::Error::source(&error))
    };
    let replace = |entries: &mut Entries, from: &str, to: &str| {
        let text = String::from_utf8(entries[0].1.clone()).unwrap();
        assert!(text.contains(from), "{text}");
        entries[0].1 = text.replace(from, to).into_bytes();
    };
    // Each change is detected by another check.
    assert!(refused(&|e| e[1].1[10] ^= 1).contains("does not match its digest"));
    assert!(refused(&|e| e[1].1[1024] ^= 1).contains("is not an EROFS image"));
    assert!(refused(&|e| e[1].1.push(0)).contains("is missing"));
    assert!(refused(&|e| e[1].0 = "x/x".to_owned()).contains("is missing"));
    assert!(refused(&|e| drop(e.pop())).contains("is missing"));
    assert!(refused(&|e| e.reverse()).contains("not an exported template"));
    assert!(refused(&|e| e[0].1 = vec![b' '; 2 << 20]).contains("too large"));
    assert!(refused(&|e| replace(e, "\"one\"", "\"base\"")).contains("another recipe"));
    assert!(refused(&|e| replace(e, "\"one\"", "\"../one\"")).contains("not a template name"));
    assert!(refused(&|e| replace(e, "\"disk_mib\": 64", "\"disk_mib\": 0")).contains("isk"));
    let size = format!("\"size\": {size}");
    let huge = format!("\"size\": {}", u64::MAX >> 1);
    assert!(refused(&|e| replace(e, &size, &huge)).contains("its images have"));
    // A file that is cut anywhere is rejected, also shortly before its end.
    for cut in [0, 10, file.len() / 2, file.len() - 8] {
        assert!(imported(&target, &file[..cut], None).is_err(), "{cut}");
    }
    // No rejected import may leave files.
    for directory in [target.templates(), target.images(), target.versions()] {
        assert_eq!(
            fs::read_dir(&directory).unwrap().count(),
            0,
            "{}",
            directory.display()
        );
    }
}

/// Imports a template from one data directory into another through files as in a shared store.
fn fetched(from: &TemplateFiles, to: &Home, manifest: &[u8]) -> Result<bool, ImportError> {
    let open = |name: &str| {
        let mut images = from.images();
        let image = images.find(|(image, _)| image == name);
        image.unwrap().1.try_clone()
    };
    let limit = UnpackLimits::default().bytes;
    let templates = Templates::new(to);
    let fetched = TemplateFiles::import(&templates, manifest, None, limit, open, &mut |_| ());
    fetched.map(|(_, published)| published)
}

#[test]
fn a_template_of_a_store_is_equal_on_another_host() {
    let ((_a, source), (_b, target)) = (home(), home());
    let version = FakeRecipe::new("one")
        .build(&source)
        .unwrap()
        .manifest
        .version();
    let files = TemplateFiles::open(&Templates::new(&source), "one").unwrap();
    assert!(fetched(&files, &target, &files.manifest).unwrap());
    let imported_template = Templates::new(&target).get("one").unwrap();
    assert_eq!(imported_template.manifest.version(), version);
    // A host that has the images requests none of them.
    let unexpected = |name: &str| Err(io::Error::other(format!("{name} was requested")));
    let again = TemplateFiles::import(
        &Templates::new(&target),
        &files.manifest,
        None,
        UnpackLimits::default().bytes,
        unexpected,
        &mut |_| (),
    );
    again.unwrap();
    let damaged = String::from_utf8(files.manifest.clone()).unwrap();
    let sum = &files.template.manifest.images[0].sha256;
    let damaged = damaged.replace(sum, &"0".repeat(64));
    let (_c, third) = home();
    // Returns the valid image under the name with the wrong digest.
    let open_valid = |name: &str| {
        let file = files.images().next().unwrap().1.try_clone();
        assert!(name.contains("0000"), "{name}");
        file
    };
    let limit = UnpackLimits::default().bytes;
    let templates = Templates::new(&third);
    let refused = TemplateFiles::import(
        &templates,
        damaged.as_bytes(),
        None,
        limit,
        open_valid,
        &mut |_| (),
    );
    assert!(matches!(refused, Err(ImportError::Digest { .. })));
    assert_eq!(fs::read_dir(third.templates()).unwrap().count(), 0);
}

#[test]
fn a_stock_template_of_another_recipe_does_not_replace_the_local_one() {
    let ((_a, source), (_b, target)) = (home(), home());
    FakeRecipe::new("one").build(&source).unwrap();
    let files = TemplateFiles::open(&Templates::new(&source), "one").unwrap();
    let stock = String::from_utf8(files.manifest.clone()).unwrap();
    let stock = stock.replace("\"one\"", "\"base\"");
    let published = fetched(&files, &target, stock.as_bytes()).unwrap();
    assert!(!published);
    assert_eq!(fs::read_dir(target.templates()).unwrap().count(), 0);
    let version = files.template.manifest.version();
    let stored = Templates::new(&target).find_version(&format!("base@{version}"));
    assert_eq!(stored.unwrap().images, files.template.manifest.images);
}

/// Returns an export of a template that claims to be the stock template `base` of this version.
fn stock_file() -> Vec<u8> {
    let (_dir, source) = home();
    let built = FakeRecipe::new("one").build(&source).unwrap();
    let mut entries = unpacked(&exported(&source, "one"));
    let text = String::from_utf8(entries[0].1.clone()).unwrap();
    let text = text.replace("\"one\"", "\"base\"").replace(
        &built.manifest.recipe_sha256,
        Recipe::built_in("base").unwrap().hash(),
    );
    entries[0].1 = text.into_bytes();
    packed(&entries)
}

#[test]
fn a_file_becomes_a_stock_template_only_with_a_known_digest_and_the_own_recipe() {
    let (_dir, target) = home();
    let file = stock_file();
    let digest = sum_of(&file);
    let with = |trust: FileTrust| imported_with(&target, &file, None, trust);
    let named = |text: &str| FileTrust {
        sha256: Some(text.to_owned()),
        ..FileTrust::default()
    };
    assert!(matches!(
        with(FileTrust::default()),
        Err(ImportError::UnknownFile { digest: found, .. }) if found == digest
    ));
    assert!(matches!(
        with(named(&"0".repeat(64))),
        Err(ImportError::Digest { .. })
    ));
    assert!(matches!(with(named("abc")), Err(ImportError::Choice(_))));
    assert_eq!(fs::read_dir(target.templates()).unwrap().count(), 0);
    // No template refers to the images. They are removed by this import, or by a later import if a
    // process that another test starts at this moment holds a copy of the lock.
    let templates = Templates::new(&target);
    let are_removed = (0..1000).any(|_| {
        templates.prune_if_idle();
        std::thread::sleep(std::time::Duration::from_millis(1));
        fs::read_dir(target.images()).unwrap().count() == 0
    });
    assert!(are_removed);
    // Data after the end of the archive is part of the file's digest.
    let longer = [&file[..], b"x"].concat();
    assert!(imported_with(&target, &longer, None, named(&digest)).is_err());

    let known = KnownDigests::parse(&format!("{digest}  base.tpl\n"));
    let listed = FileTrust {
        known,
        must_be_known: true,
        ..FileTrust::default()
    };
    for trust in [listed, named(&digest.to_uppercase())] {
        let template = with(trust).unwrap();
        assert_eq!(template.manifest.visibility, Visibility::Public);
        // A later request does not build the template again.
        let recipe = Recipe::built_in("base").unwrap();
        let templates = Templates::new(&target);
        let found = build_if_needed(&templates, &recipe, &mut |_| ()).unwrap();
        assert_eq!(found.manifest.version(), template.manifest.version());
        // Existing images are not unpacked again, but are part of the digest all the same.
        with(named(&digest)).unwrap();
        templates.remove("base").unwrap();
    }
}

#[test]
fn another_recipe_or_an_unknown_file_replaces_a_stock_template_only_by_force() {
    let ((_a, source), (_b, target)) = (home(), home());
    FakeRecipe::new("one").build(&source).unwrap();
    let file = exported(&source, "one");
    let named = FileTrust {
        sha256: Some(sum_of(&file)),
        ..FileTrust::default()
    };
    let refused = imported_with(&target, &file, Some("base"), named);
    assert!(matches!(refused, Err(ImportError::OtherRecipe { .. })));
    let force = FileTrust {
        force: true,
        ..FileTrust::default()
    };
    let forced = imported_with(&target, &file, Some("base"), force.clone()).unwrap();
    assert_eq!(forced.manifest.reference(), "base");
    // A downloaded file needs a digest under any name.
    let downloaded = FileTrust {
        must_be_known: true,
        ..force
    };
    let refused = imported_with(&target, &file, None, downloaded);
    assert!(matches!(refused, Err(ImportError::UnknownDownload { .. })));
}

/// Serves `file` to one client. The first response is truncated.
fn serve(file: Vec<u8>) -> (String, std::thread::JoinHandle<Vec<String>>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    // The first connection is closed in the middle of the file, and the second one serves the rest.
    let serving = std::thread::spawn(move || {
        let mut requests = Vec::new();
        for part in [&file[..file.len() / 2], &file[file.len() / 2..]] {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = Vec::new();
            let mut byte = [0];
            while !request.ends_with(b"\r\n\r\n") {
                stream.read_exact(&mut byte).unwrap();
                request.push(byte[0]);
            }
            let is_first = requests.is_empty();
            let head = if is_first {
                format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", file.len())
            } else {
                format!(
                    "HTTP/1.1 206 Partial Content\r\ncontent-range: bytes {}-{}/{}\r\n\
                     content-length: {}\r\n\r\n",
                    file.len() - part.len(),
                    file.len() - 1,
                    file.len(),
                    part.len()
                )
            };
            stream.write_all(head.as_bytes()).unwrap();
            stream.write_all(part).unwrap();
            requests.push(String::from_utf8(request).unwrap());
        }
        requests
    });
    (address, serving)
}

#[test]
fn an_interrupted_download_is_resumed_and_complete() {
    let ((_a, source), (_b, target)) = (home(), home());
    FakeRecipe::new("one").build(&source).unwrap();
    let file = exported(&source, "one");
    let (address, serving) = serve(file.clone());
    let registries = jiffy_registry_pull::Registries {
        plain_http: vec![address.clone()],
        program: jiffy_registry_pull::PullerProgram::Thread,
        ..jiffy_registry_pull::Registries::default()
    };
    let templates = Templates::new(&target);
    let url = format!("http://{address}/files/one.tpl?x=1");
    let downloaded = download::download_from(&templates, &url, registries, &mut |_| ());
    let import = FileImport {
        trust: FileTrust {
            sha256: Some(sum_of(&file)),
            must_be_known: true,
            ..FileTrust::default()
        },
        ..FileImport::default()
    };
    let imported = import.run(&templates, downloaded.unwrap(), &mut |_| ());
    assert_eq!(imported.unwrap().manifest.reference(), "one");
    let requests = serving.join().unwrap();
    assert!(requests[0].starts_with("GET /files/one.tpl?x=1 "));
    let range = format!("range: bytes={}-", file.len() / 2);
    assert!(
        requests[1].to_ascii_lowercase().contains(&range),
        "{requests:?}"
    );
    // This URL uses plain HTTP, which only tests may allow.
    let plain = download_template(
        &templates,
        &url,
        jiffy_registry_pull::PullerProgram::Thread,
        &mut |_| (),
    );
    assert!(matches!(plain, Err(ImportError::Choice(_))), "https only");
}
