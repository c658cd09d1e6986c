//! Environment variables that lead programs to authorities and proxy.

use jiffy_proto::agent::ProxySettings;
use std::collections::BTreeMap;
use std::path::Path;

/// Programs that read one file with all authorities: OpenSSL (and Python's `ssl`, Go, Ruby), curl,
/// Python's requests, pip, git.
const BUNDLE_VARIABLES: [&str; 5] = [
    "SSL_CERT_FILE",
    "CURL_CA_BUNDLE",
    "REQUESTS_CA_BUNDLE",
    "PIP_CERT",
    "GIT_SSL_CAINFO",
];
/// File of authorities that Node.js adds to its own.
const NODE_VARIABLE: &str = "NODE_EXTRA_CA_CERTS";
/// Java's options, taken by every Java that starts.
const JAVA_VARIABLE: &str = "JAVA_TOOL_OPTIONS";
const PROXIES: [&str; 2] = ["http_proxy", "https_proxy"];
const NO_PROXY: &str = "no_proxy";
/// Reached without a proxy, always.
const NO_PROXY_DEFAULT: &str = "localhost,127.0.0.1,::1";

/// Sources of the variables.
pub struct VariableSources<'a> {
    /// File with all authorities; none: no authorities were given.
    pub bundle: Option<&'a Path>,
    /// File with those that were given.
    pub authorities: &'a Path,
    /// Java's file with all authorities.
    pub java_store: Option<&'a Path>,
    pub has_java: bool,
    pub proxy: Option<&'a ProxySettings>,
}

/// Variables for processes that have none of their own.
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

/// Java reads no variables but its own.
fn java_options(facts: &VariableSources<'_>) -> Vec<String> {
    let mut options = Vec::new();
    if let Some(store) = facts.java_store {
        options.push(format!("-Djavax.net.ssl.trustStore={}", store.display()));
        options.push("-Djavax.net.ssl.trustStoreType=JKS".to_owned());
    }
    let Some(proxy) = facts.proxy.filter(|_| facts.has_java) else {
        return options;
    };
    let url = proxy.public_url();
    let (scheme, host) = url.split_once("://").unwrap_or(("http", &url));
    let usual = if scheme == "https" { "443" } else { "80" };
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !port.ends_with(']') => (name, port),
        _ => (host, usual),
    };
    for scheme in ["http", "https"] {
        options.push(format!("-D{scheme}.proxyHost={name}"));
        options.push(format!("-D{scheme}.proxyPort={port}"));
    }
    // A pattern of Java's begins a domain with a star; networks are unknown to it.
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

/// Hosts that are reached without the proxy, with commas between them.
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

/// Program that apt asks for the proxy of a URL. A variable of the command that runs apt counts for
/// more, also an empty one: then it says nothing, and apt looks at the variable itself.
pub fn apt_program(proxy: &ProxySettings) -> String {
    let url = proxy.url.replace('\'', r"'\''");
    let mut text = "#!/bin/sh\ncase \"$1\" in\n".to_owned();
    for (scheme, name) in ["http", "https"].into_iter().zip(PROXIES) {
        text += &format!("{scheme}:*) [ -z \"${{{name}+set}}\" ] || exit 0 ;;\n");
    }
    text + &format!("esac\necho '{url}'\n")
}

/// Configuration of apt, which asks `program` for the proxy.
pub fn apt(proxy: &ProxySettings, program: &Path) -> String {
    let mut text = String::new();
    for scheme in ["http", "https"] {
        let program = program.display();
        text += &format!("Acquire::{scheme}::Proxy-Auto-Detect \"{program}\";\n");
        // Names alone: apt knows neither domains nor networks here.
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

/// Returns true if an environment has proxies of its own.
pub fn names_proxy(env: &BTreeMap<String, String>) -> bool {
    let mut names = PROXIES.iter();
    names.any(|name| env.contains_key(*name) || env.contains_key(&name.to_ascii_uppercase()))
}

/// Adds the variables that `env` lacks. A proxy that is set in one case of letters is not added in
/// the other: programs would disagree on the one in force.
pub fn add_missing(env: &mut BTreeMap<String, String>, variables: &BTreeMap<String, String>) {
    let twin = |name: &str| {
        if name.bytes().any(|b| b.is_ascii_lowercase()) {
            name.to_ascii_uppercase()
        } else {
            name.to_ascii_lowercase()
        }
    };
    let missing = variables.iter();
    let missing: Vec<_> = missing
        .filter(|(name, _)| !env.contains_key(*name) && !env.contains_key(&twin(name)))
        .collect();
    env.extend(missing.into_iter().map(|(k, v)| (k.clone(), v.clone())));
}
