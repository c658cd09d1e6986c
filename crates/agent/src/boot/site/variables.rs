//! Environment variables that make programs of the sandbox use the certificate authorities and the
//! proxy of the site, the network in which the sandbox runs.

use jiffy_proto::agent::ProxySettings;
use std::collections::BTreeMap;
use std::path::Path;

/// Variables of programs that read one file with all authorities: OpenSSL (and Python's `ssl`, Go,
/// Ruby), curl, Python's requests, pip, git.
const BUNDLE_VARIABLES: [&str; 5] = [
    "SSL_CERT_FILE",
    "CURL_CA_BUNDLE",
    "REQUESTS_CA_BUNDLE",
    "PIP_CERT",
    "GIT_SSL_CAINFO",
];
/// Variable with a file of authorities that Node.js adds to its built-in authorities.
const NODE_VARIABLE: &str = "NODE_EXTRA_CA_CERTS";
/// Variable with options that every Java process reads.
const JAVA_VARIABLE: &str = "JAVA_TOOL_OPTIONS";
/// Variables with the proxies for HTTP and HTTPS.
const PROXIES: [&str; 2] = ["http_proxy", "https_proxy"];
/// Variable with the hosts that programs access without the proxy.
const NO_PROXY: &str = "no_proxy";
/// Hosts that are always reached without a proxy.
const NO_PROXY_DEFAULT: &str = "localhost,127.0.0.1,::1";

/// Values from which the variables are derived.
pub struct VariableSources<'a> {
    /// File with all authorities. `None` if the site has no authorities.
    pub bundle: Option<&'a Path>,
    /// File with only the authorities of the site.
    pub authorities: &'a Path,
    /// Java's store with all authorities.
    pub java_store: Option<&'a Path>,
    /// True if the guest has Java, which has its own trust store.
    pub has_java: bool,
    /// Proxy of the site.
    pub proxy: Option<&'a ProxySettings>,
}

/// Returns the variables for processes. A variable that a process already has takes precedence.
pub fn of(facts: &VariableSources<'_>) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    let mut set = |name: &str, value: &str| all.insert(name.to_owned(), value.to_owned());
    if let Some(bundle) = facts.bundle {
        for name in BUNDLE_VARIABLES {
            set(name, &bundle.to_string_lossy());
        }
        set(NODE_VARIABLE, &facts.authorities.to_string_lossy());
    }
    if let Some(proxy) = facts.proxy {
        for name in PROXIES {
            set(name, &proxy.url);
            // Programs read either spelling.
            set(&name.to_ascii_uppercase(), &proxy.url);
        }
        let none = without_proxy(proxy);
        set(NO_PROXY, &none);
        set(&NO_PROXY.to_ascii_uppercase(), &none);
    }
    let java = java_options(facts);
    if !java.is_empty() {
        set(JAVA_VARIABLE, &java.join(" "));
    }
    all
}

/// Returns Java's options for the proxy and the store. Java reads only its own variable.
fn java_options(facts: &VariableSources<'_>) -> Vec<String> {
    let mut options = Vec::new();
    if let Some(store) = facts.java_store {
        options.push(format!("-Djavax.net.ssl.trustStore={}", store.display()));
        options.push("-Djavax.net.ssl.trustStoreType=JKS".to_owned());
    }
    let Some(proxy) = facts.proxy.filter(|_| facts.has_java) else {
        return options;
    };
    // Java has no options for the user and the password of a proxy.
    let url = proxy.public_url();
    let (scheme, host) = url.split_once("://").unwrap_or(("http", &url));
    let default_port = if scheme == "https" { "443" } else { "80" };
    let (name, port) = match host.rsplit_once(':') {
        // The last colon may be part of an IPv6 address in brackets, without a port.
        Some((name, port)) if !port.ends_with(']') => (name, port),
        _ => (host, default_port),
    };
    for scheme in ["http", "https"] {
        options.push(format!("-D{scheme}.proxyHost={name}"));
        options.push(format!("-D{scheme}.proxyPort={port}"));
    }
    // In Java's patterns, a star stands for the beginning of a domain name. Networks are not
    // supported.
    let hosts = without_proxy(proxy);
    let hosts: Vec<String> = hosts
        .split(',')
        .filter(|host| !host.contains('/'))
        .map(|host| match host.strip_prefix('.') {
            Some(domain) => format!("*.{domain}"),
            None => host.to_owned(),
        })
        .collect();
    options.push(format!("-Dhttp.nonProxyHosts={}", hosts.join("|")));
    options
}

/// Returns the comma-separated hosts that are reached without the proxy.
pub fn without_proxy(proxy: &ProxySettings) -> String {
    let own = proxy.no_proxy.split(',').map(str::trim);
    let own =
        own.filter(|host| !host.is_empty() && !NO_PROXY_DEFAULT.split(',').any(|l| l == *host));
    NO_PROXY_DEFAULT
        .split(',')
        .chain(own)
        .collect::<Vec<_>>()
        .join(",")
}

/// Returns the program that apt runs to determine the proxy of a URL. A variable in the environment
/// of the apt command takes precedence, even if it is empty. In this case the program prints
/// nothing, and apt uses the variable.
pub fn apt_program(proxy: &ProxySettings) -> String {
    // The URL is inside single quotes in the script.
    let url = proxy.url.replace('\'', r"'\''");
    let mut text = "#!/bin/sh\ncase \"$1\" in\n".to_owned();
    for (scheme, name) in ["http", "https"].into_iter().zip(PROXIES) {
        text += &format!("{scheme}:*) [ -z \"${{{name}+set}}\" ] || exit 0 ;;\n");
    }
    text + &format!("esac\necho '{url}'\n")
}

/// Returns the configuration of apt. apt runs `program` to determine the proxy.
pub fn apt(proxy: &ProxySettings, program: &Path) -> String {
    let mut text = String::new();
    for scheme in ["http", "https"] {
        let program = program.display();
        text += &format!("Acquire::{scheme}::Proxy-Auto-Detect \"{program}\";\n");
        // Only host names are listed, since apt supports neither domains nor networks here.
        let names = without_proxy(proxy);
        let is_name = |name: &&str| {
            let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-');
            !name.starts_with('.') && name.bytes().all(plain)
        };
        for name in names.split(',').filter(is_name) {
            text += &format!("Acquire::{scheme}::Proxy::{name} \"DIRECT\";\n");
        }
    }
    text
}

/// Returns whether an environment contains a proxy.
pub fn names_proxy(env: &BTreeMap<String, String>) -> bool {
    let mut names = PROXIES.iter();
    names.any(|name| env.contains_key(*name) || env.contains_key(&name.to_ascii_uppercase()))
}

/// Adds the variables that `env` does not contain. If a proxy variable is set in lower or upper
/// case, the other spelling is not added, because programs would use different proxies.
pub fn add_missing(env: &mut BTreeMap<String, String>, variables: &BTreeMap<String, String>) {
    let other_spelling = |name: &str| {
        if name.bytes().any(|b| b.is_ascii_lowercase()) {
            name.to_ascii_uppercase()
        } else {
            name.to_ascii_lowercase()
        }
    };
    let missing = variables.iter();
    let missing: Vec<_> = missing
        .filter(|(name, _)| !env.contains_key(*name) && !env.contains_key(&other_spelling(name)))
        .collect();
    env.extend(missing.into_iter().map(|(k, v)| (k.clone(), v.clone())));
}
