//! Adds certificate authorities to the system's trust store, in the layouts of the distributions,
//! and removes them again.
//!
//! Each certificate is added in two places. The first place is the directory from which the
//! distribution's tool reads additions of an administrator, so that the certificate remains when
//! this tool rebuilds the store. The second place is the output of this tool, which works without
//! the tool.

use super::guest_path::beneath;
use super::java_keystore::Keystore;
use jiffy_proto::agent::Authority;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// Files with all authorities: Debian, Ubuntu, Alpine and Arch; Fedora and Red Hat; older versions
/// of Fedora and Red Hat; SUSE (two files); BSD's location, which Alpine also uses.
const BUNDLES: [&str; 6] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/var/lib/ca-certificates/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];
/// Each entry has a directory whose presence selects it, the directory for additions of an
/// administrator, and the file name extension of additions. The last entry always applies.
const ANCHORS: [(&str, &str, &str); 3] = [
    (
        "/etc/pki/ca-trust",
        "/etc/pki/ca-trust/source/anchors",
        "pem",
    ),
    ("/etc/pki/trust", "/etc/pki/trust/anchors", "pem"),
    ("/", "/usr/local/share/ca-certificates", "crt"),
];
/// Directory of certificates by the hash of their subject, for the look-ups of OpenSSL.
const HASHED: &str = "/etc/ssl/certs";
/// Java's store, which Debian's tool creates from all other certificates.
const DEBIAN_JAVA: &str = "/etc/ssl/certs/java/cacerts";
/// Prefix of the names of added files.
const NAME: &str = "jiffy-site-ca";
/// Maximum size of a file that is searched.
const MAX_FILE: u64 = 4 << 20;
/// Maximum number of authorities with one hash.
const MAX_EQUAL_HASHES: usize = 32;

/// Changes to the store.
#[derive(Debug, Default)]
pub struct StoreChanges {
    /// Files with one certificate each, as paths in the sandbox.
    anchors: Vec<PathBuf>,
    /// Symbolic links in [`HASHED`] that lead to these files.
    links: Vec<PathBuf>,
    /// Files that were extended or created, and the bytes that were written.
    written: Vec<(PathBuf, Vec<u8>)>,
    /// Stores and the certificates that each of them contained before. They must remain.
    contained: Vec<(PathBuf, String)>,
    /// Directories that were created, parents first.
    created_directories: Vec<PathBuf>,
}

impl StoreChanges {
    /// Returns the authorities that `store` did not contain before.
    fn new_in<'a>(&self, store: &Path, authorities: &[&'a Authority]) -> Vec<&'a Authority> {
        let is_new = |authority: &&&Authority| {
            let mut contained = self.contained.iter();
            !contained.any(|(path, pem)| path == store && *pem == authority.pem)
        };
        authorities.iter().filter(is_new).copied().collect()
    }
}

/// Adds authorities. Returns the first bundle, which then contains all authorities.
pub fn add(
    root: &Path,
    authorities: &[Authority],
    changes: &mut StoreChanges,
) -> io::Result<PathBuf> {
    let at = |path: &str| beneath(root, Path::new(path));
    let mut bundles = existing_bundles(root);
    if bundles.is_empty() {
        make_directory(root, Path::new(BUNDLES[0]).parent(), changes)?;
        File::create(at(BUNDLES[0]))?;
        bundles.push(PathBuf::from(BUNDLES[0]));
    }
    changes.contained = find_contained(root, &bundles, authorities);
    // True for each authority that some bundle lacked. An authority in all bundles belongs to the
    // template, and needs no anchor.
    let mut unknown = vec![false; authorities.len()];
    for bundle in &bundles {
        append(root, bundle, authorities, &mut unknown, changes)?;
    }
    let (_, anchors, extension) = ANCHORS
        .into_iter()
        .find(|(mark, _, _)| at(mark).is_dir())
        .unwrap_or(ANCHORS[2]);
    make_directory(root, Some(Path::new(anchors)), changes)?;
    let mut number = 0;
    for (authority, _) in authorities.iter().zip(&unknown).filter(|(_, new)| **new) {
        number += 1;
        let anchor = Path::new(anchors).join(format!("{NAME}-{number}.{extension}"));
        // Record the path before the write, so that `remove` also deletes an incomplete file.
        changes.anchors.push(anchor.clone());
        fs::write(beneath(root, &anchor), &authority.pem)?;
        if at(HASHED).is_dir() {
            let named = Path::new(HASHED).join(format!("{NAME}-{number}.pem"));
            link(root, &anchor, named.clone(), changes)?;
            // OpenSSL searches for `<hash>.0`, `<hash>.1` and so on. Lower numbers may be in use
            // for other authorities with the same hash.
            let hashed = |n| Path::new(HASHED).join(format!("{}.{n}", authority.subject_hash));
            let mut free = (0..MAX_EQUAL_HASHES).map(hashed);
            let free = free.find(|path| fs::symlink_metadata(beneath(root, path)).is_err());
            if let (Some(path), Some(name)) = (free, named.file_name()) {
                link(root, Path::new(name), path, changes)?;
            }
        }
    }
    Ok(bundles.swap_remove(0))
}

/// Returns the bundles that exist, without duplicates.
fn existing_bundles(root: &Path) -> Vec<PathBuf> {
    let mut seen = Vec::new();
    let mut found = Vec::new();
    for bundle in BUNDLES {
        let Ok(file) = fs::canonicalize(beneath(root, Path::new(bundle))) else {
            continue;
        };
        // Some distributions link these paths to each other.
        if file.is_file() && !seen.contains(&file) {
            seen.push(file);
            found.push(PathBuf::from(bundle));
        }
    }
    found
}

/// Returns the stores that contain an authority already, with its text.
fn find_contained(
    root: &Path,
    bundles: &[PathBuf],
    authorities: &[Authority],
) -> Vec<(PathBuf, String)> {
    let java = read_java(root);
    let mut found = Vec::new();
    for authority in authorities {
        let contains = |bundle: &&PathBuf| {
            read(&beneath(root, bundle))
                .is_ok_and(|text| remove_certificates(&text, &[authority]).len() < text.len())
        };
        let bundles = bundles.iter().filter(contains).cloned();
        found.extend(bundles.map(|bundle| (bundle, authority.pem.clone())));
        let certificate = Keystore::from_pem(authority.pem.as_bytes());
        if java
            .as_ref()
            .is_some_and(|java| java.contains(&certificate))
        {
            found.push((DEBIAN_JAVA.into(), authority.pem.clone()));
        }
    }
    found
}

/// Appends the authorities that a bundle does not contain.
fn append(
    root: &Path,
    bundle: &Path,
    authorities: &[Authority],
    unknown: &mut [bool],
    changes: &mut StoreChanges,
) -> io::Result<()> {
    let path = beneath(root, bundle);
    let before = read(&path)?;
    let mut block = Vec::new();
    for (authority, unknown) in authorities.iter().zip(unknown) {
        if !contains(&before, authority.pem.trim_end().as_bytes()) {
            *unknown = true;
            block.extend_from_slice(authority.pem.as_bytes());
        }
    }
    if block.is_empty() {
        return Ok(());
    }
    // A PEM block must begin at the start of a line.
    if !before.is_empty() && !before.ends_with(b"\n") {
        block.insert(0, b'\n');
    }
    let mut file = File::options().append(true).open(&path)?;
    let written = file.write_all(&block);
    if written.is_err() {
        // An incomplete certificate would make some programs reject the rest of the file.
        let _ = file.set_len(before.len() as u64);
    }
    changes.written.push((bundle.to_owned(), block));
    written
}

/// Removes authorities, also from files that a tool of the distribution built meanwhile. An
/// authority in an anchor file of the sandbox itself is not removed. A file that cannot be removed
/// is ignored.
pub fn remove(root: &Path, authorities: &[Authority], changes: StoreChanges) {
    for path in changes.links.iter().chain(&changes.anchors) {
        let _ = fs::remove_file(beneath(root, path));
    }
    // Authorities that the sandbox's administrator has also added must remain. The anchors that
    // `add` created are already removed, so that only files of the administrator are found here.
    let is_addition = |authority: &&Authority| {
        let anchors = ANCHORS.iter();
        let mut anchors = anchors.map(|(_, directory, _)| beneath(root, Path::new(directory)));
        anchors.any(|directory| directory_contains(&directory, authority))
    };
    let (kept, removed): (Vec<_>, Vec<_>) = authorities.iter().partition(is_addition);
    for bundle in existing_bundles(root) {
        let path = beneath(root, &bundle);
        let Ok(text) = read(&path) else {
            continue;
        };
        let block = changes
            .written
            .iter()
            .find(|(written, _)| *written == bundle);
        let rest = match block.filter(|_| kept.is_empty()) {
            Some((_, block)) if text.ends_with(block) => text[..text.len() - block.len()].to_vec(),
            // A tool has rebuilt the bundle, so the block may be in another place or form.
            _ => remove_certificates(&text, &changes.new_in(&bundle, &removed)),
        };
        // The bundle contains nothing else, so `add` created it.
        if rest.is_empty() && block.is_some() {
            let _ = fs::remove_file(&path);
        } else if rest != text {
            let _ = fs::write(&path, rest);
        }
    }
    remove_dangling_links(root);
    remove_from_java(root, &changes.new_in(Path::new(DEBIAN_JAVA), &removed));
    // Remove children before their parents.
    for directory in changes.created_directories.iter().rev() {
        // Ignore the error: a directory with other files is not removed.
        let _ = fs::remove_dir(beneath(root, directory));
    }
}

/// Removes symbolic links that a tool created to the removed certificates.
fn remove_dangling_links(root: &Path) {
    let directory = beneath(root, Path::new(HASHED));
    for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
        let target = fs::read_link(entry.path()).unwrap_or_default();
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with(NAME) {
            // Ignore the error: a link to a missing file is harmless.
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Removes authorities from the store that Debian creates for Java.
fn remove_from_java(root: &Path, authorities: &[&Authority]) {
    let Some(mut store) = read_java(root) else {
        return;
    };
    let before = store.len();
    for authority in authorities {
        store.remove(&Keystore::from_pem(authority.pem.as_bytes()));
    }
    if store.len() != before {
        // Ignore the error: a store that cannot be written is left as it is.
        let _ = fs::write(beneath(root, Path::new(DEBIAN_JAVA)), store.encode());
    }
}

/// Reads the store that Debian creates for Java. `None` if it is missing or not readable.
fn read_java(root: &Path) -> Option<Keystore> {
    let bytes = read(&beneath(root, Path::new(DEBIAN_JAVA))).ok()?;
    Keystore::decode(&bytes)
}

/// Returns whether a file below `directory` contains this certificate.
fn directory_contains(directory: &Path, authority: &Authority) -> bool {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut paths = entries.map(|entry| entry.path());
    paths.any(|path| {
        if path.is_dir() {
            // Symbolic links to directories could form cycles.
            !path.is_symlink() && directory_contains(&path, authority)
        } else {
            read(&path)
                .is_ok_and(|text| remove_certificates(&text, &[authority]).len() < text.len())
        }
    })
}

/// Returns a text in PEM format without certain certificates.
fn remove_certificates(text: &[u8], authorities: &[&Authority]) -> Vec<u8> {
    // Tools may wrap the lines of a certificate in another way.
    let without_whitespace = |pem: &[u8]| -> Vec<u8> {
        let plain = pem.iter().filter(|b| !b.is_ascii_whitespace());
        plain.copied().collect()
    };
    let unwanted: Vec<Vec<u8>> = authorities
        .iter()
        .map(|a| without_whitespace(a.pem.as_bytes()))
        .collect();
    let mut rest = Vec::with_capacity(text.len());
    let mut certificate: Option<Vec<u8>> = None;
    for line in text.split_inclusive(|b| *b == b'\n') {
        if line.starts_with(b"-----BEGIN ") {
            rest.extend(certificate.take().unwrap_or_default());
            certificate = Some(line.to_vec());
        } else if let Some(mut whole) = certificate.take() {
            whole.extend_from_slice(line);
            if !line.starts_with(b"-----END ") {
                certificate = Some(whole);
            } else if !unwanted.contains(&without_whitespace(&whole)) {
                rest.extend(whole);
            }
        } else {
            rest.extend_from_slice(line);
        }
    }
    rest.extend(certificate.unwrap_or_default());
    rest
}

/// Reads a file. Fails if it is larger than [`MAX_FILE`].
fn read(path: &Path) -> io::Result<Vec<u8>> {
    match fs::metadata(path)?.len() {
        0..=MAX_FILE => fs::read(path),
        _ => Err(io::ErrorKind::FileTooLarge.into()),
    }
}

/// Returns whether `part`, which must not be empty, occurs in `text`.
fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

/// Creates a symbolic link at `at` and records it for a later removal.
fn link(root: &Path, target: &Path, at: PathBuf, changes: &mut StoreChanges) -> io::Result<()> {
    let path = beneath(root, &at);
    // A file of a failed attempt may exist.
    let _ = fs::remove_file(&path);
    symlink(target, path)?;
    changes.links.push(at);
    Ok(())
}

/// Creates a directory and its parents, and records the created ones for a later removal.
fn make_directory(root: &Path, path: Option<&Path>, changes: &mut StoreChanges) -> io::Result<()> {
    let path = path.unwrap_or(Path::new("/"));
    let mut above: Vec<&Path> = path.ancestors().collect();
    // Create parents before their children.
    above.reverse();
    for directory in above {
        match fs::create_dir(beneath(root, directory)) {
            Ok(()) => changes.created_directories.push(directory.to_owned()),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(_) if beneath(root, directory).is_dir() => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
