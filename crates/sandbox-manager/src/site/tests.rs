//! Tests of the settings of a site: certificate authorities and proxies. A *site* is the network in
//! which the guests are.

use super::*;
use jiffy_api_types::MAX_AUTHORITIES_BYTES;
use std::io::Write as _;
use std::process::{Command, Stdio};

/// Output of `openssl req -x509`, and of `openssl x509 -hash` for it.
const COMPANY: &str = include_str!("company.pem");
const COMPANY_HASH: &str = "fa831672";

#[test]
fn certificates_are_deduplicated_and_encoded_again() {
    let text = format!("a comment\n{COMPANY}\r\n{COMPANY}");
    let certificates = authorities(&text, MAX_AUTHORITIES_BYTES).unwrap();
    assert_eq!(certificates.len(), 1);
    assert_eq!(certificates[0].pem, COMPANY);
    assert_eq!(certificates[0].subject_hash, COMPANY_HASH);
}

#[test]
fn subject_hashes_equal_those_of_openssl() {
    let bundle = std::fs::read_to_string("/etc/ssl/certs/ca-certificates.crt");
    let Ok(bundle) = bundle else {
        return;
    };
    let certificates = authorities(&bundle, MAX_HOST_AUTHORITIES_BYTES).unwrap();
    // The bundle contains all kinds of strings. To save time, the test checks every seventh
    // certificate.
    for authority in certificates.iter().step_by(7) {
        let openssl = Command::new("openssl")
            .args(["x509", "-noout", "-hash"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let Ok(mut openssl) = openssl else {
            return;
        };
        let mut input = openssl.stdin.take().unwrap();
        input.write_all(authority.pem.as_bytes()).unwrap();
        drop(input);
        let output = openssl.wait_with_output().unwrap().stdout;
        let output = String::from_utf8(output).unwrap();
        assert_eq!(output.trim(), authority.subject_hash, "{}", authority.pem);
    }
}

#[test]
fn invalid_certificates_are_rejected_with_a_reason() {
    let error = |text: &str| authorities(text, MAX_AUTHORITIES_BYTES).unwrap_err();
    assert_eq!(error(""), SiteError::Empty);
    assert_eq!(error("hello"), SiteError::Empty);
    let key = "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n";
    assert_eq!(error(&format!("{COMPANY}{key}")), SiteError::PrivateKey);
    let request = COMPANY.replace("CERTIFICATE", "CERTIFICATE REQUEST");
    assert!(matches!(error(&request), SiteError::Label { entry: 1, .. }));
    let broken = COMPANY.replacen('M', "N", 3);
    assert!(matches!(error(&broken), SiteError::Certificate { .. }));
    let cut = &COMPANY[..COMPANY.len() / 2];
    assert!(matches!(error(cut), SiteError::Certificate { .. }));
    let long = "x".repeat(MAX_AUTHORITIES_BYTES + 1);
    assert!(matches!(error(&long), SiteError::TooLong { .. }));
}

#[test]
fn proxy_urls_and_no_proxy_lists_are_validated() {
    for good in [
        "http://proxy:3128",
        "http://proxy.corp.example:3128/",
        "https://user:p%40ss@10.0.0.1:8080",
        "http://[fd00::1]:3128",
        "http://proxy",
        "",
    ] {
        proxy(good, "").unwrap_or_else(|e| panic!("{good}: {e}"));
    }
    for bad in [
        "proxy:3128",
        "socks5://proxy:1080",
        "http://",
        "http://:3128",
        "http://proxy:0",
        "http://proxy:port",
        "http://proxy:3128/path",
        "http://pro xy:3128",
        "http://proxy:3128\";Dir::Bin \"x",
        "http://[fd00::1:3128",
    ] {
        assert!(proxy(bad, "").is_err(), "{bad}");
    }
    let hosts = "localhost, .corp.example,10.0.0.0/8,[fd00::1],*.example";
    assert_eq!(proxy("http://p", hosts).unwrap().no_proxy, hosts);
    for bad in ["a;b", "a b", "\"", "ä", "a,b\nc"] {
        assert!(proxy("http://p", bad).is_err(), "{bad}");
    }
    let long = "a,".repeat(MAX_NO_PROXY);
    assert!(proxy("http://p", &long).is_err());
}

#[test]
fn passwords_of_proxies_are_not_in_messages() {
    let settings = proxy("http://me:secret@proxy:3128", "").unwrap();
    assert!(!format!("{settings:?}").contains("secret"));
    assert_eq!(settings.public_url(), "http://proxy:3128");
    let refusal = proxy("ftp://me:secret@proxy:3128", "").unwrap_err();
    assert!(!refusal.to_string().contains("secret"), "{refusal}");
}

#[test]
fn a_sandbox_inherits_authorities_and_overrides_the_proxy() {
    let company = authorities(COMPANY, MAX_AUTHORITIES_BYTES).unwrap();
    let host = SiteSettings {
        authorities: company.clone(),
        proxy: Some(proxy("http://host:1", "").unwrap()),
    };
    assert_eq!(joined(&host, &SiteSettings::default()), host);
    let own = SiteSettings {
        authorities: company.clone(),
        proxy: Some(proxy("http://own:1", "").unwrap()),
    };
    let both = joined(&host, &own);
    assert_eq!(both.authorities, company);
    assert_eq!(both.proxy, own.proxy);
    let none = SiteSettings {
        authorities: Vec::new(),
        proxy: Some(proxy("", "").unwrap()),
    };
    assert_eq!(joined(&host, &none).proxy, None);
}
