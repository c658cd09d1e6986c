//! The system's trust store, in the layouts of the distributions.
//!
//! Each certificate is put into the directory from which the distribution's own tool takes an
//! administrator's additions, so that it stays when that tool rebuilds the store; and directly into
//! the tool's output, which works without the tool.

use super::guest_path::beneath;
use super::java_keystore::Keystore;
use jiffy_proto::agent::Authority;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// Files with all authorities: Debian, Ubuntu, Alpine, Arch; Fedora and Red Hat; their older
/// locations; SUSE; BSD's location, also Alpine's.
const BUNDLES: [&str; 6] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/var/lib/ca-certificates/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];
/// Directories for an administrator's additions, and the file whose presence selects a directory:
/// the last one is the fallback.
const ANCHORS: [(&str, &str, &str); 3] = [
    (
        "/etc/pki/ca-trust",
        "/etc/pki/ca-trust/source/anchors",
        "pem",
    ),
    ("/etc/pki/trust", "/etc/pki/trust/anchors", "pem"),
    ("/", "/usr/local/share/ca-certificates", "crt"),
];
/// Certificates by the hash of their subject, as OpenSSL looks for them.
const HASHED: &str = "/etc/ssl/certs";
/// Java's store as Debian's tool makes it of all others.
const DEBIAN_JAVA: &str = "/etc/ssl/certs/java/cacerts";
const NAME: &str = "jiffy-site-ca";
/// Longest file that is looked into.
const MAX_FILE: u64 = 4 << 20;
/// Most authorities of one subject.
const MAX_EQUAL_HASHES: usize = 32;

/// Changes made to the store.
#[derive(Debug, Default)]
pub struct StoreChanges {
    /// Certificates of their own, as the sandbox sees them.
    anchors: Vec<PathBuf>,
    /// Links to them.
    links: Vec<PathBuf>,
    /// Files that were extended or created, and the bytes written.
    written: Vec<(PathBuf, Vec<u8>)>,
    /// Directories that were made, the uppermost first.
    made: Vec<PathBuf>,
}

/// Adds authorities, and returns the file with all of them.
pub fn add(
    root: &Path,
    authorities: &[Authority],
    trace: &mut StoreChanges,
) -> io::Result<PathBuf> {
    let at = |path: &str| beneath(root, Path::new(path));
    let mut bundles = existing_bundles(root);
    if bundles.is_empty() {
        make_directory(root, Path::new(BUNDLES[0]).parent(), trace)?;
        File::create(at(BUNDLES[0]))?;
        bundles.push(PathBuf::from(BUNDLES[0]));
    }
    let mut unknown = vec![false; authorities.len()];
    for bundle in &bundles {
        append(root, bundle, authorities, &mut unknown, trace)?;
    }
    let (_, anchors, extension) = ANCHORS
        .into_iter()
        .find(|(mark, _, _)| at(mark).is_dir())
        .unwrap_or(ANCHORS[2]);
    make_directory(root, Some(Path::new(anchors)), trace)?;
    let mut number = 0;
    for (authority, _) in authorities.iter().zip(&unknown).filter(|(_, new)| **new) {
        number += 1;
        let anchor = Path::new(anchors).join(format!("{NAME}-{number}.{extension}"));
        trace.anchors.push(anchor.clone());
        fs::write(beneath(root, &anchor), &authority.pem)?;
        if at(HASHED).is_dir() {
            let named = Path::new(HASHED).join(format!("{NAME}-{number}.pem"));
            link(root, &anchor, named.clone(), trace)?;
            let hashed = |n| Path::new(HASHED).join(format!("{}.{n}", authority.subject_hash));
            let mut free = (0..MAX_EQUAL_HASHES).map(hashed);
            let free = free.find(|path| fs::symlink_metadata(beneath(root, path)).is_err());
            if let (Some(path), Some(name)) = (free, named.file_name()) {
                link(root, Path::new(name), path, trace)?;
            }
        }
    }
    Ok(bundles.swap_remove(0))
}

/// The bundles that are there, each once.
fn existing_bundles(root: &Path) -> Vec<PathBuf> {
    let mut seen = Vec::new();
    let mut found = Vec::new();
    for bundle in BUNDLES {
        let Ok(file) = fs::canonicalize(beneath(root, Path::new(bundle))) else {
            continue;
        };
        if file.is_file() && !seen.contains(&file) {
            seen.push(file);
            found.push(PathBuf::from(bundle));
        }
    }
    found
}

/// Appends the authorities that a bundle lacks.
fn append(
    root: &Path,
    bundle: &Path,
    authorities: &[Authority],
    unknown: &mut [bool],
    trace: &mut StoreChanges,
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
    if !before.is_empty() && !before.ends_with(b"\n") {
        block.insert(0, b'\n');
    }
    let mut file = File::options().append(true).open(&path)?;
    let written = file.write_all(&block);
    if written.is_err() {
        // Half a certificate would spoil the rest for some readers.
        let _ = file.set_len(before.len() as u64);
    }
    trace.written.push((bundle.to_owned(), block));
    written
}

/// Removes authorities again, also from what a tool of the distribution built meanwhile, unless the
/// sandbox has them of its own, too. Files that cannot be removed stay.
pub fn remove(root: &Path, authorities: &[Authority], trace: StoreChanges) {
    for path in trace.links.iter().chain(&trace.anchors) {
        let _ = fs::remove_file(beneath(root, path));
    }
    let owned = |authority: &&Authority| {
        let anchors = ANCHORS.iter();
        let mut anchors = anchors.map(|(_, directory, _)| beneath(root, Path::new(directory)));
        anchors.any(|directory| directory_contains(&directory, authority))
    };
    let (owned, foreign): (Vec<_>, Vec<_>) = authorities.iter().partition(owned);
    for bundle in existing_bundles(root) {
        let path = beneath(root, &bundle);
        let Ok(text) = read(&path) else {
            continue;
        };
        let block = trace.written.iter().find(|(written, _)| *written == bundle);
        let rest = match block.filter(|_| owned.is_empty()) {
            Some((_, block)) if text.ends_with(block) => text[..text.len() - block.len()].to_vec(),
            _ => remove_certificates(&text, &foreign),
        };
        if rest.is_empty() && block.is_some() {
            let _ = fs::remove_file(&path);
        } else if rest != text {
            let _ = fs::write(&path, rest);
        }
    }
    remove_dangling_links(root);
    remove_from_java(root, &foreign);
    for directory in trace.made.iter().rev() {
        // One that something else is in stays.
        let _ = fs::remove_dir(beneath(root, directory));
    }
}

/// Removes links that a tool made to certificates that were removed.
fn remove_dangling_links(root: &Path) {
    let directory = beneath(root, Path::new(HASHED));
    for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
        let target = fs::read_link(entry.path()).unwrap_or_default();
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with(NAME) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Removes them from the store that Debian makes for Java.
fn remove_from_java(root: &Path, authorities: &[&Authority]) {
    let path = beneath(root, Path::new(DEBIAN_JAVA));
    let Some(mut store) = read(&path).ok().and_then(|bytes| Keystore::decode(&bytes)) else {
        return;
    };
    let before = store.len();
    for authority in authorities {
        store.remove(&Keystore::from_pem(authority.pem.as_bytes()));
    }
    if store.len() != before {
        let _ = fs::write(&path, store.encode());
    }
}

/// Returns true if a file beneath `directory` is this certificate.
fn directory_contains(directory: &Path, authority: &Authority) -> bool {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut paths = entries.map(|entry| entry.path());
    paths.any(|path| match path.is_dir() {
        // Links to directories lead round in circles.
        true if path.is_symlink() => false,
        true => directory_contains(&path, authority),
        false => read(&path)
            .is_ok_and(|text| remove_certificates(&text, &[authority]).len() < text.len()),
    })
}

/// PEM text without certain certificates.
fn remove_certificates(text: &[u8], authorities: &[&Authority]) -> Vec<u8> {
    let bare = |pem: &[u8]| -> Vec<u8> {
        let plain = pem.iter().filter(|b| !b.is_ascii_whitespace());
        plain.copied().collect()
    };
    let unwanted: Vec<Vec<u8>> = authorities.iter().map(|a| bare(a.pem.as_bytes())).collect();
    let mut rest = Vec::with_capacity(text.len());
    let mut certificate: Option<Vec<u8>> = None;
    for line in text.split_inclusive(|b| *b == b'\n') {
        if line.starts_with(b"-----BEGIN ") {
            rest.extend(certificate.take().unwrap_or_default());
            certificate = Some(line.to_vec());
        } else if let Some(mut whole) = certificate.take() {
            whole.extend_from_slice(line);
            match line.starts_with(b"-----END ") {
                true if unwanted.contains(&bare(&whole)) => {}
                true => rest.extend(whole),
                false => certificate = Some(whole),
            }
        } else {
            rest.extend_from_slice(line);
        }
    }
    rest.extend(certificate.unwrap_or_default());
    rest
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    match fs::metadata(path)?.len() {
        0..=MAX_FILE => fs::read(path),
        _ => Err(io::ErrorKind::FileTooLarge.into()),
    }
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

fn link(root: &Path, target: &Path, at: PathBuf, trace: &mut StoreChanges) -> io::Result<()> {
    let path = beneath(root, &at);
    // One of an earlier try.
    let _ = fs::remove_file(&path);
    symlink(target, path)?;
    trace.links.push(at);
    Ok(())
}

fn make_directory(root: &Path, path: Option<&Path>, trace: &mut StoreChanges) -> io::Result<()> {
    let path = path.unwrap_or(Path::new("/"));
    let mut above: Vec<&Path> = path.ancestors().collect();
    above.reverse();
    for directory in above {
        match fs::create_dir(beneath(root, directory)) {
            Ok(()) => trace.made.push(directory.to_owned()),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(_) if beneath(root, directory).is_dir() => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
