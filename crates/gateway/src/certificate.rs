//! Generated TLS certificates. Each certificate is issued by a new authority, whose key is never
//! stored. A reader of the files can therefore not create other certificates that clients trust.

use crate::tls_error::TlsError;
use rcgen::{
    BasicConstraints, CertificateParams, CidrSubnet, DnType, ExtendedKeyUsagePurpose,
    GeneralSubtree, IsCa, Issuer, KeyPair, KeyUsagePurpose, NameConstraints,
};
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Validity of a certificate. Common clients reject server certificates that are valid for more
/// than 825 days.
const LIFETIME: Duration = Duration::from_secs(820 * 86_400);
/// Time before expiry at which a certificate is renewed.
const RENEWAL_MARGIN: Duration = Duration::from_secs(30 * 86_400);
/// Tolerated lag of clients' clocks.
const CLOCK_SKEW: Duration = Duration::from_secs(86_400);

/// Files of a generated certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificatePaths {
    /// The certificate.
    pub certificate: PathBuf,
    /// Its private key, mode 0600.
    pub key: PathBuf,
    /// Certificate of the authority that clients must trust.
    pub authority: PathBuf,
}

/// Content of `about.json`: names and expiry of the stored certificate, which determine when it is
/// renewed.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct CertificateInfo {
    names: Vec<String>,
    /// Seconds since 1970.
    expires: u64,
}

/// Generates a certificate in `directory`. Does nothing if a certificate for these domains exists
/// and is valid for at least 30 more days.
///
/// # Errors
/// [`TlsError`] if it cannot be generated or stored.
pub fn ensure(directory: &Path, domains: &[String]) -> Result<CertificatePaths, TlsError> {
    let paths = CertificatePaths {
        certificate: directory.join("certificate.pem"),
        key: directory.join("key.pem"),
        authority: directory.join("authority.pem"),
    };
    let about_path = directory.join("about.json");
    let now = SystemTime::now();
    let names = names(domains);
    let exist = [&paths.certificate, &paths.key, &paths.authority]
        .into_iter()
        .all(|path| path.is_file());
    // An unreadable or damaged `about.json` counts as missing: a new certificate is generated.
    let about: Option<CertificateInfo> = fs::read(&about_path)
        .ok()
        .and_then(|bytes| serde_json::from_slice(&bytes).ok());
    if exist
        && let Some(about) = about
        && about.names == names
        && seconds(now + RENEWAL_MARGIN) < about.expires
    {
        return Ok(paths);
    }
    let generated = generate(&names, domains, now).map_err(|source| TlsError::Generate {
        names: names.join(", "),
        source,
    })?;
    let about = CertificateInfo {
        names,
        expires: seconds(now + LIFETIME),
    };
    // Serialising strings and numbers cannot fail.
    let about = serde_json::to_vec(&about).unwrap_or_default();
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .map_err(|source| TlsError::Store {
            path: directory.to_owned(),
            source,
        })?;
    // Remove `about.json` first and write it last. If this process is interrupted in between, the
    // next call finds no `about.json` and generates all files again.
    let _ = fs::remove_file(&about_path);
    for (path, bytes) in [
        (&paths.key, generated.key.as_bytes()),
        (&paths.certificate, generated.certificate.as_bytes()),
        (&paths.authority, generated.authority.as_bytes()),
        (&about_path, &about[..]),
    ] {
        write_file(path, bytes).map_err(|source| TlsError::Store {
            path: path.clone(),
            source,
        })?;
    }
    Ok(paths)
}

/// Returns the seconds since 1970.
fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// Writes a file atomically with mode 0600.
fn write_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let draft = path.with_extension("new");
    // A draft may remain from an interrupted call.
    match fs::remove_file(&draft) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let mut file: File = OpenOptions::new()
        .write(true)
        // Fail on a symbolic link instead of following it.
        .create_new(true)
        .mode(0o600)
        .open(&draft)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    // The file is complete on storage before it becomes visible.
    fs::rename(&draft, path)
}

/// Returns the names of a certificate for these domains.
fn names(domains: &[String]) -> Vec<String> {
    let mut names = vec!["localhost".to_owned()];
    for domain in domains {
        names.push(domain.clone());
        // Clients reject a wildcard directly below a top-level domain, and some reject the whole
        // certificate. Therefore `*.localhost` is not included.
        if domain.contains('.') {
            names.push(format!("*.{domain}"));
            // Host names of functions are `LABEL.fn.DOMAIN`. `*.DOMAIN` does not match them,
            // because a wildcard stands for a single label.
            names.push(format!("*.fn.{domain}"));
        }
    }
    names.push(Ipv4Addr::LOCALHOST.to_string());
    names.push(Ipv6Addr::LOCALHOST.to_string());
    names
}

/// Generated files in PEM format.
struct GeneratedPem {
    key: String,
    certificate: String,
    authority: String,
}

/// Generates an authority and a certificate for `names` that it signs. The private key of the
/// authority is discarded.
fn generate(
    names: &[String],
    domains: &[String],
    now: SystemTime,
) -> Result<GeneratedPem, rcgen::Error> {
    // The key of the authority is dropped at the end of this function.
    let authority_key = KeyPair::generate()?;
    let mut authority = params(Vec::new(), "Jiffy local authority", now)?;
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    // The authority is constrained to these names, so that trusting it does not affect other sites.
    let mut permitted = vec![
        GeneralSubtree::DnsName("localhost".to_owned()),
        GeneralSubtree::IpAddress(CidrSubnet::from_addr_prefix(
            IpAddr::V4(Ipv4Addr::LOCALHOST),
            32,
        )),
        GeneralSubtree::IpAddress(CidrSubnet::from_addr_prefix(
            IpAddr::V6(Ipv6Addr::LOCALHOST),
            128,
        )),
    ];
    permitted.extend(domains.iter().cloned().map(GeneralSubtree::DnsName));
    authority.name_constraints = Some(NameConstraints {
        permitted_subtrees: permitted,
        excluded_subtrees: Vec::new(),
    });
    let authority_certificate = authority.self_signed(&authority_key)?;
    let issuer = Issuer::new(authority, authority_key);

    let key = KeyPair::generate()?;
    let mut leaf = params(names.to_vec(), "Jiffy gateway", now)?;
    leaf.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    leaf.use_authority_key_identifier_extension = true;
    let certificate = leaf.signed_by(&key, &issuer)?;
    Ok(GeneratedPem {
        key: key.serialize_pem(),
        certificate: certificate.pem(),
        authority: authority_certificate.pem(),
    })
}

/// Returns the parameters that authority and certificate share.
fn params(
    names: Vec<String>,
    title: &str,
    now: SystemTime,
) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    params
        .distinguished_name
        .push(DnType::CommonName, title.to_owned());
    // A client whose clock is slow must accept the certificate, too.
    params.not_before = (now - CLOCK_SKEW).into();
    params.not_after = (now + LIFETIME).into();
    Ok(params)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_certificate_is_renewed_for_other_names_or_when_damaged() {
        let home = tempfile::tempdir().unwrap();
        let directory = home.path().join("tls");
        let ensured = |domains: &[&str]| {
            let domains: Vec<String> = domains.iter().map(ToString::to_string).collect();
            fs::read_to_string(ensure(&directory, &domains).unwrap().certificate).unwrap()
        };
        let first = ensured(&["jiffy.example"]);
        assert_eq!(ensured(&["jiffy.example"]), first);
        let second = ensured(&["other.example"]);
        assert_ne!(second, first);
        fs::write(directory.join("about.json"), "{").unwrap();
        let third = ensured(&["other.example"]);
        assert_ne!(third, second);
        fs::remove_file(directory.join("key.pem")).unwrap();
        assert_ne!(ensured(&["other.example"]), third);
        let about = CertificateInfo {
            names: names(&["other.example".to_owned()]),
            expires: seconds(SystemTime::now() + RENEWAL_MARGIN),
        };
        let fourth = ensured(&["other.example"]);
        fs::write(
            directory.join("about.json"),
            serde_json::to_vec(&about).unwrap(),
        )
        .unwrap();
        assert_ne!(ensured(&["other.example"]), fourth, "it is about to expire");
    }

    #[test]
    fn the_key_is_private_and_the_authoritys_key_is_not_stored() {
        let home = tempfile::tempdir().unwrap();
        let directory = home.path().join("tls");
        let paths = ensure(&directory, &[]).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&paths.key), 0o600);
        assert_eq!(mode(&directory), 0o700);
        let keys = fs::read_dir(&directory)
            .unwrap()
            .filter(|file| {
                let path = file.as_ref().unwrap().path();
                fs::read_to_string(path).unwrap().contains("PRIVATE KEY")
            })
            .count();
        assert_eq!(keys, 1);
    }
}
