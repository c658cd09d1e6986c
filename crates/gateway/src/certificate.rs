//! A certificate for those who have none: made by an authority of its own, whose key is thrown away at once, so that nobody who reads the
//! files can make another that its users would trust.

use crate::tls::TlsError;
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

/// How long one is good: the most that common clients accept.
const LIFE: Duration = Duration::from_secs(820 * 86_400);
/// How long before its end it is made anew.
const RENEWAL: Duration = Duration::from_secs(30 * 86_400);
/// How far clients' clocks may be behind.
const SLACK: Duration = Duration::from_secs(86_400);

/// Files of a generated certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paths {
    /// The certificate.
    pub certificate: PathBuf,
    /// Its private key, mode 0600.
    pub key: PathBuf,
    /// The authority that clients must trust.
    pub authority: PathBuf,
}

/// What was made, to know when to make it anew.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct About {
    names: Vec<String>,
    /// Seconds since the epoch.
    expires: u64,
}

/// Makes a certificate in `directory` unless there is one for these domains that is good for a while.
///
/// # Errors
/// [`TlsError`] if it cannot be made or kept.
pub fn ensure(directory: &Path, domains: &[String]) -> Result<Paths, TlsError> {
    let paths = Paths {
        certificate: directory.join("certificate.pem"),
        key: directory.join("key.pem"),
        authority: directory.join("authority.pem"),
    };
    let about_path = directory.join("about.json");
    let now = SystemTime::now();
    let names = names(domains);
    let there = [&paths.certificate, &paths.key, &paths.authority]
        .into_iter()
        .all(|path| path.is_file());
    let about: Option<About> = fs::read(&about_path)
        .ok()
        .and_then(|bytes| serde_json::from_slice(&bytes).ok());
    if there
        && let Some(about) = about
        && about.names == names
        && seconds(now + RENEWAL) < about.expires
    {
        return Ok(paths);
    }
    let made = make(&names, domains, now).map_err(|source| TlsError::Generate {
        names: names.join(", "),
        source,
    })?;
    let about = About {
        names,
        expires: seconds(now + LIFE),
    };
    let about = serde_json::to_vec(&about).unwrap_or_default();
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .map_err(|source| TlsError::Keep {
            path: directory.to_owned(),
            source,
        })?;
    // The description last and gone first: without it the rest is made anew.
    let _ = fs::remove_file(&about_path);
    for (path, bytes) in [
        (&paths.key, made.key.as_bytes()),
        (&paths.certificate, made.certificate.as_bytes()),
        (&paths.authority, made.authority.as_bytes()),
        (&about_path, &about[..]),
    ] {
        keep(path, bytes).map_err(|source| TlsError::Keep {
            path: path.clone(),
            source,
        })?;
    }
    Ok(paths)
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// A file appears whole or not at all, and was never readable by others.
fn keep(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let draft = path.with_extension("new");
    match fs::remove_file(&draft) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let mut file: File = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&draft)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&draft, path)
}

fn names(domains: &[String]) -> Vec<String> {
    let mut names = vec!["localhost".to_owned()];
    for domain in domains {
        names.push(domain.clone());
        // Clients refuse a wildcard right below a top-level name, and some then the whole certificate: `*.localhost` cannot be had.
        if domain.contains('.') {
            names.push(format!("*.{domain}"));
        }
    }
    names.push(Ipv4Addr::LOCALHOST.to_string());
    names.push(Ipv6Addr::LOCALHOST.to_string());
    names
}

struct Made {
    key: String,
    certificate: String,
    authority: String,
}

fn make(names: &[String], domains: &[String], now: SystemTime) -> Result<Made, rcgen::Error> {
    let authority_key = KeyPair::generate()?;
    let mut authority = params(Vec::new(), "Jiffy local authority", now)?;
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    // Whoever trusts it, trusts it for these names only.
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
    Ok(Made {
        key: key.serialize_pem(),
        certificate: certificate.pem(),
        authority: authority_certificate.pem(),
    })
}

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
    params.not_before = (now - SLACK).into();
    params.not_after = (now + LIFE).into();
    Ok(params)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn it_is_made_once_and_anew_for_other_names_or_when_damaged() {
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
        let about = About {
            names: names(&["other.example".to_owned()]),
            expires: seconds(SystemTime::now() + RENEWAL),
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
    fn nobody_else_can_read_the_key_and_the_authoritys_is_nowhere() {
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
