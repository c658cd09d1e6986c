//! Java's stores of certificate authorities, in the format that every version of Java reads (JKS).
//! All numbers are big-endian.

use super::guest_path::beneath;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use sha1::{Digest, Sha1};
use std::collections::BTreeMap;
use std::path::Path;

/// Common paths of Java installations.
const PLACES: [&str; 6] = [
    "/usr/lib/jvm",
    "/usr/java",
    "/opt/java",
    "/opt/jdk",
    "/usr/bin/java",
    "/usr/local/bin/java",
];
/// Start of a keystore in Java's format JKS, and the version of the format.
const MAGIC: u32 = 0xfeed_feed;
const VERSION: u32 = 2;
/// Tag of an entry with a trusted certificate.
const TRUSTED: u32 = 2;
/// Type of a certificate.
const X509: &str = "X.509";
/// Well-known default password of Java, with which tools verify the checksum of a store.
const PASSWORD: &str = "changeit";
/// Salt of the checksum. The format prescribes this text.
const SALT: &[u8] = b"Mighty Aphrodite";
/// Maximum number of entries of a store that is read.
const MAX_ENTRIES: u32 = 4096;

/// Returns whether the file system on `root` contains a Java installation, in a common place or at
/// `JAVA_HOME` of `env`.
pub fn is_java_installed(root: &Path, env: &BTreeMap<String, String>) -> bool {
    let java_home = env.get("JAVA_HOME").map(Path::new);
    let mut places = PLACES.iter().map(Path::new).chain(java_home);
    places.any(|place| beneath(root, place).exists())
}

/// Certificates by name.
#[derive(Debug, PartialEq, Eq)]
pub struct Keystore(Vec<KeystoreEntry>);

/// Trusted certificate in a keystore.
#[derive(Debug, PartialEq, Eq)]
struct KeystoreEntry {
    /// Name of the entry.
    alias: Vec<u8>,
    /// Creation time in milliseconds since 1970.
    created_ms: u64,
    /// Certificate in binary form (DER).
    der: Vec<u8>,
}

impl Keystore {
    /// Parses all certificates of a text in PEM format. Invalid certificates are skipped.
    pub fn from_pem(text: &[u8]) -> Self {
        let text = String::from_utf8_lossy(text);
        let sections = text.split("-----BEGIN CERTIFICATE-----").skip(1);
        let bodies = sections.filter_map(|s| s.split_once("-----END CERTIFICATE-----"));
        let ders = bodies.filter_map(|(body, _)| {
            let plain: String = body.split_ascii_whitespace().collect();
            STANDARD.decode(plain).ok()
        });
        let entry = |(n, der)| KeystoreEntry {
            alias: format!("authority-{n}").into_bytes(),
            created_ms: 0,
            der,
        };
        Self(ders.enumerate().map(entry).collect())
    }

    /// Number of certificates.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether the store contains a certificate of `other`, under any name.
    pub fn contains(&self, other: &Self) -> bool {
        let mut entries = self.0.iter();
        entries.any(|entry| other.0.iter().any(|o| o.der == entry.der))
    }

    /// Removes certificates that `other` also contains, under any name.
    pub fn remove(&mut self, other: &Self) {
        self.0
            .retain(|entry| !other.0.iter().any(|o| o.der == entry.der));
    }

    /// Encodes the store as a file.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let count = u32::try_from(self.0.len()).unwrap_or(u32::MAX);
        for number in [MAGIC, VERSION, count] {
            bytes.extend(number.to_be_bytes());
        }
        for entry in &self.0 {
            bytes.extend(TRUSTED.to_be_bytes());
            put_text(&mut bytes, &entry.alias);
            bytes.extend(entry.created_ms.to_be_bytes());
            put_text(&mut bytes, X509.as_bytes());
            let length = u32::try_from(entry.der.len()).unwrap_or(u32::MAX);
            bytes.extend(length.to_be_bytes());
            bytes.extend(&entry.der);
        }
        let sum = checksum(&bytes);
        bytes.extend(sum);
        bytes
    }

    /// Decodes a store that contains only certificates. Returns `None` for other or damaged files.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (content, sum) = bytes.split_last_chunk::<20>()?;
        // Stores with another password have another checksum, and are not read.
        if checksum(content) != *sum {
            return None;
        }
        let mut rest = content;
        let header = [take_u32(&mut rest)?, take_u32(&mut rest)?];
        let count = take_u32(&mut rest)?;
        if header != [MAGIC, VERSION] || count > MAX_ENTRIES {
            return None;
        }
        let mut entries = Vec::new();
        for _ in 0..count {
            // Private keys have another tag.
            if take_u32(&mut rest)? != TRUSTED {
                return None;
            }
            let alias = take_text(&mut rest)?.to_vec();
            let created_ms = u64::from_be_bytes(take(&mut rest, 8)?.try_into().ok()?);
            if take_text(&mut rest)? != X509.as_bytes() {
                return None;
            }
            let length = usize::try_from(take_u32(&mut rest)?).ok()?;
            let der = take(&mut rest, length)?.to_vec();
            entries.push(KeystoreEntry {
                alias,
                created_ms,
                der,
            });
        }
        // Bytes after the last entry mean that the file has another format.
        rest.is_empty().then_some(Self(entries))
    }
}

/// Returns the checksum that follows the content of a store.
fn checksum(content: &[u8]) -> [u8; 20] {
    // The format hashes the password in UTF-16, then the salt and the content.
    let mut hash = Sha1::new();
    for unit in PASSWORD.encode_utf16() {
        hash.update(unit.to_be_bytes());
    }
    hash.update(SALT);
    hash.update(content);
    hash.finalize().into()
}

/// Appends the length of a text in two bytes, and the text.
fn put_text(bytes: &mut Vec<u8>, text: &[u8]) {
    let length = u16::try_from(text.len()).unwrap_or(u16::MAX);
    bytes.extend(length.to_be_bytes());
    bytes.extend(&text[..usize::from(length)]);
}

/// Removes the first `length` bytes of `rest`. `None` if it has fewer bytes.
fn take<'a>(rest: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (taken, after) = rest.split_at_checked(length)?;
    *rest = after;
    Some(taken)
}

/// Removes a number of four bytes.
fn take_u32(rest: &mut &[u8]) -> Option<u32> {
    Some(u32::from_be_bytes(take(rest, 4)?.try_into().ok()?))
}

/// Removes a text of [`put_text`].
fn take_text<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = u16::from_be_bytes(take(rest, 2)?.try_into().ok()?);
    take(rest, usize::from(length))
}
