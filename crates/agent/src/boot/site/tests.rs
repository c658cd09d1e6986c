//! Tests of certificate authorities and proxies in the root file systems of several
//! distributions. The *settings of a site* are the certificate authorities and the proxy of the
//! network in which the guests run.

use super::java_keystore::Keystore;
use super::*;
use jiffy_proto::agent::{Authority, ProxySettings};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::Command;
use tempfile::TempDir;

/// Certificate of a company's authority. OpenSSL names it by the hash of its subject, `fa831672`.
const COMPANY: &str = include_str!("../../../../sandbox-manager/src/site/company.pem");

/// Returns PEM text that stands for the certificate of a public authority. The encoded certificate
/// is invalid, but the tested code does not parse it.
fn public() -> String {
    COMPANY.replacen("MIIB8j", "MIIB8k", 1)
}

/// Returns settings with the authority of a company.
fn company() -> SiteSettings {
    SiteSettings {
        authorities: vec![Authority {
            pem: COMPANY.to_owned(),
            subject_hash: "fa831672".to_owned(),
        }],
        proxy: None,
    }
}

/// Returns settings with a proxy that needs a password.
fn proxied() -> SiteSettings {
    SiteSettings {
        authorities: Vec::new(),
        proxy: Some(ProxySettings {
            url: "http://me:word@proxy.corp:3128".to_owned(),
            no_proxy: ".corp, 10.0.0.0/8,db.corp".to_owned(),
        }),
    }
}

/// Creates a root with a directory for the agent and with files.
fn root(files: &[(&str, &str)]) -> TempDir {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir_all(home(root.path())).unwrap();
    for (path, text) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    root
}

/// Returns the content of a file below a root.
fn text(root: &TempDir, path: &str) -> String {
    fs::read_to_string(root.path().join(path)).unwrap()
}

/// Returns all files below a root with their contents.
fn all(root: &Path) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(root).unwrap().flatten() {
        let path = entry.path();
        let what = match fs::read_link(&path) {
            Ok(target) => format!("-> {}", target.display()),
            Err(_) if path.is_dir() => {
                found.extend(all(&path));
                "directory".to_owned()
            }
            Err(_) => fs::read_to_string(&path).unwrap(),
        };
        found.push((path, what));
    }
    found.sort();
    found
}

/// Returns the environment of a sandbox that has no variables.
fn none() -> BTreeMap<String, String> {
    BTreeMap::new()
}

const DEBIAN: &str = "etc/ssl/certs/ca-certificates.crt";

#[test]
fn debian_trusts_an_authority_by_bundle_hash_and_tool_until_it_is_removed() {
    let root = root(&[(DEBIAN, &public()), ("etc/apt/apt.conf.d/01x", "")]);
    let before = all(root.path());
    let mut site = InstalledSite::default();
    site.replace(root.path(), company(), &none()).unwrap();
    assert_eq!(text(&root, DEBIAN), public() + COMPANY);
    let anchor = "/usr/local/share/ca-certificates/jiffy-site-ca-1.crt";
    assert_eq!(text(&root, &anchor[1..]), COMPANY);
    let certs = root.path().join("etc/ssl/certs");
    let link = |name: &str| fs::read_link(certs.join(name)).unwrap();
    assert_eq!(link("jiffy-site-ca-1.pem"), Path::new(anchor));
    assert_eq!(link("fa831672.0"), Path::new("jiffy-site-ca-1.pem"));
    let variables = site.variables();
    let bundle = "/etc/ssl/certs/ca-certificates.crt";
    for name in [
        "SSL_CERT_FILE",
        "REQUESTS_CA_BUNDLE",
        "PIP_CERT",
        "GIT_SSL_CAINFO",
    ] {
        assert_eq!(variables[name], bundle, "{name}");
    }
    let node = "/run/jiffy/site/authorities.pem";
    assert_eq!(variables["NODE_EXTRA_CA_CERTS"], node);
    assert_eq!(text(&root, &node[1..]), COMPANY);
    assert!(!variables.contains_key("JAVA_TOOL_OPTIONS"));
    // Installing the same settings again changes nothing.
    let with = all(root.path());
    site.replace(root.path(), company(), &none()).unwrap();
    assert_eq!(all(root.path()), with);
    site.replace(root.path(), SiteSettings::default(), &none())
        .unwrap();
    assert_eq!(all(root.path()), before);
    assert!(site.variables().is_empty());
}

#[test]
fn authorities_that_the_distributions_tool_copied_are_removed_too() {
    let root = root(&[(DEBIAN, &public())]);
    let mut site = InstalledSite::default();
    site.replace(root.path(), company(), &none()).unwrap();
    // State after a run of `update-ca-certificates`: sorted again, with its own links.
    fs::write(root.path().join(DEBIAN), format!("{COMPANY}{}", public())).unwrap();
    symlink(
        "jiffy-site-ca-1.pem",
        root.path().join("etc/ssl/certs/fa831672.1"),
    )
    .unwrap();
    let java = root.path().join("etc/ssl/certs/java/cacerts");
    fs::create_dir(java.parent().unwrap()).unwrap();
    let both = Keystore::from_pem(format!("{COMPANY}{}", public()).as_bytes());
    fs::write(&java, both.encode()).unwrap();
    site.withdraw(root.path());
    assert_eq!(text(&root, DEBIAN), public());
    let certs = fs::read_dir(root.path().join("etc/ssl/certs")).unwrap();
    // Only the bundle and the directory `java` remain.
    assert_eq!(certs.count(), 2);
    let remaining = Keystore::decode(&fs::read(&java).unwrap()).unwrap();
    assert_eq!(remaining.len(), 1);
}

#[test]
fn an_authority_of_the_sandbox_itself_is_not_removed() {
    let own = "usr/local/share/ca-certificates/company/root.crt";
    let root = root(&[(DEBIAN, &public()), (own, COMPANY)]);
    let mut site = InstalledSite::default();
    site.replace(root.path(), company(), &none()).unwrap();
    // The distribution's tool would write the same content, since the administrator's own file
    // contains the authority as well.
    fs::write(root.path().join(DEBIAN), public() + COMPANY).unwrap();
    site.withdraw(root.path());
    assert_eq!(text(&root, DEBIAN), public() + COMPANY);
    assert_eq!(text(&root, own), COMPANY);
    // A certificate that the store already contains is not added.
    let before = all(root.path());
    site.replace(root.path(), company(), &none()).unwrap();
    assert_eq!(text(&root, DEBIAN), public() + COMPANY);
    site.withdraw(root.path());
    assert_eq!(all(root.path()), before);
}

#[test]
fn an_authority_that_only_stores_of_the_template_contain_is_not_removed() {
    let second = "etc/ssl/ca-bundle.pem";
    let root = root(&[(DEBIAN, &(public() + COMPANY)), (second, &public())]);
    let java = root.path().join("etc/ssl/certs/java/cacerts");
    fs::create_dir(java.parent().unwrap()).unwrap();
    let both = Keystore::from_pem(format!("{COMPANY}{}", public()).as_bytes());
    fs::write(&java, both.encode()).unwrap();
    let mut site = InstalledSite::default();
    site.replace(root.path(), company(), &none()).unwrap();
    assert_eq!(text(&root, second), public() + COMPANY);
    site.withdraw(root.path());
    assert_eq!(text(&root, DEBIAN), public() + COMPANY);
    assert_eq!(text(&root, second), public());
    assert_eq!(fs::read(&java).unwrap(), both.encode());
}

#[test]
fn red_hat_alpine_and_images_without_a_store_trust_it_too() {
    let bundle = "etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem";
    let fedora = root(&[
        (bundle, &public()),
        ("etc/pki/ca-trust/source/anchors/x", ""),
        ("etc/pki/tls/certs/x", ""),
    ]);
    let link = fedora.path().join("etc/pki/tls/certs/ca-bundle.crt");
    symlink("../../ca-trust/extracted/pem/tls-ca-bundle.pem", link).unwrap();
    let alpine = root(&[(DEBIAN, public().trim_end())]);
    symlink(
        "certs/ca-certificates.crt",
        alpine.path().join("etc/ssl/cert.pem"),
    )
    .unwrap();
    let minimal = root(&[]);
    for (root, bundle, expected) in [
        (&fedora, bundle, public() + COMPANY),
        (&alpine, DEBIAN, public() + COMPANY),
        (&minimal, DEBIAN, COMPANY.to_owned()),
    ] {
        let before = all(root.path());
        let mut site = InstalledSite::default();
        site.replace(root.path(), company(), &none()).unwrap();
        assert_eq!(text(root, bundle), expected);
        assert_eq!(site.variables()["SSL_CERT_FILE"], format!("/{bundle}"));
        site.withdraw(root.path());
        assert_eq!(all(root.path()), before);
    }
    let mut site = InstalledSite::default();
    site.replace(fedora.path(), company(), &none()).unwrap();
    let anchor = "etc/pki/ca-trust/source/anchors/jiffy-site-ca-1.pem";
    assert_eq!(text(&fedora, anchor), COMPANY);
}

#[test]
fn a_proxy_is_in_variables_of_both_cases_and_apt_unless_the_sandbox_has_its_own() {
    let root = root(&[("etc/apt/apt.conf.d/01x", "")]);
    let apt = "etc/apt/apt.conf.d/90jiffy-site";
    let mut site = InstalledSite::default();
    site.replace(root.path(), proxied(), &none()).unwrap();
    let url = "http://me:word@proxy.corp:3128";
    for name in ["http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"] {
        assert_eq!(site.variables()[name], url, "{name}");
    }
    let hosts = "localhost,127.0.0.1,::1,.corp,10.0.0.0/8,db.corp";
    assert_eq!(site.variables()["no_proxy"], hosts);
    let output = text(&root, apt);
    let program = "etc/apt/jiffy-site-proxy";
    let expected = format!("Acquire::https::Proxy-Auto-Detect \"/{program}\";\n");
    assert!(output.contains(&expected), "{output}");
    let answers = |target: &str, variable: Option<(&str, &str)>| {
        // The shell executes the program. When another test forks, its child has this new file open
        // for writing, and the kernel does not execute such a file (ETXTBSY).
        let mut command = Command::new("/bin/sh");
        command.arg(root.path().join(program));
        command.env_clear().envs(variable).arg(target);
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    };
    let script = std::fs::metadata(root.path().join(program)).unwrap();
    assert_eq!(script.permissions().mode() & 0o111, 0o111);
    assert!(text(&root, program).starts_with("#!/bin/sh\n"));
    for target in ["http://deb.example", "https://deb.example"] {
        assert_eq!(answers(target, None), format!("{url}\n"));
    }
    // A variable of the command takes precedence, even if it is empty.
    for own in ["http://own:1", ""] {
        assert_eq!(answers("http://deb.example", Some(("http_proxy", own))), "");
        assert_eq!(
            answers("https://deb.example", Some(("https_proxy", own))),
            ""
        );
    }
    assert!(output.contains("Acquire::http::Proxy::db.corp \"DIRECT\";\n"));
    // apt's settings name single hosts only: networks and whole domains are omitted.
    assert!(!output.contains("10.0.0.0") && !output.contains("::.corp"));

    let mut env = BTreeMap::from([("HTTP_PROXY".to_owned(), "http://own:1".to_owned())]);
    site.replace(root.path(), proxied(), &env).unwrap();
    assert!(!root.path().join(apt).exists() && !root.path().join(program).exists());
    add_missing(&mut env, site.variables());
    assert_eq!(env["HTTP_PROXY"], "http://own:1");
    assert!(!env.contains_key("http_proxy"));
    assert_eq!(env["https_proxy"], url);
    site.replace(root.path(), proxied(), &none()).unwrap();
    // The settings change also if the user has removed the files.
    fs::remove_file(root.path().join(apt)).unwrap();
    site.replace(root.path(), proxied(), &env).unwrap();
    assert!(!root.path().join(program).exists());
    site.replace(root.path(), proxied(), &none()).unwrap();
    assert!(root.path().join(apt).exists());
    site.withdraw(root.path());
    assert!(!root.path().join(apt).exists() && !root.path().join(program).exists());
}

#[test]
fn java_uses_a_store_of_all_authorities_and_proxy_options() {
    let root = root(&[(DEBIAN, &public()), ("usr/lib/jvm/java/bin/java", "")]);
    let both = SiteSettings {
        proxy: proxied().proxy,
        ..company()
    };
    let mut site = InstalledSite::default();
    site.replace(root.path(), both, &none()).unwrap();
    let options = &site.variables()["JAVA_TOOL_OPTIONS"];
    let store = "/run/jiffy/site/cacerts.jks";
    assert!(options.starts_with(&format!("-Djavax.net.ssl.trustStore={store} ")));
    assert!(options.contains("-Dhttps.proxyHost=proxy.corp -Dhttps.proxyPort=3128"));
    assert!(options.ends_with("nonProxyHosts=localhost|127.0.0.1|::1|*.corp|db.corp"));
    let bytes = fs::read(root.path().join(&store[1..])).unwrap();
    assert_eq!(Keystore::decode(&bytes).unwrap().len(), 2);
    // A store begins with a magic number and ends with a SHA-1 digest of 20 bytes. The second call
    // lacks the digest and the byte before it.
    assert_eq!(Keystore::decode(&bytes[1..]), None);
    assert_eq!(Keystore::decode(&bytes[..bytes.len() - 21]), None);
}

#[test]
fn a_java_keystore_is_readable_by_java() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("store");
    fs::write(&path, Keystore::from_pem(COMPANY.as_bytes()).encode()).unwrap();
    let keytool = Command::new("keytool")
        .args(["-list", "-storepass", "changeit", "-keystore"])
        .arg(&path)
        .output();
    let Ok(output) = keytool else {
        eprintln!("keytool is not installed");
        return;
    };
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.contains("authority-0") && text.contains("trustedCertEntry"),
        "{text}"
    );
}
