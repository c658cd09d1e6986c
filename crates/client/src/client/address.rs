//! Address and credentials of a daemon on another host.

use anyhow::{Context, bail, ensure};
use hyper::Uri;
use hyper::header::HeaderValue;
use std::fmt;
use std::path::PathBuf;

/// Environment variable with the URL of a daemon on another host.
const URL_VARIABLE: &str = "JIFFY_URL";
/// Environment variable with the API key for this daemon.
const KEY_VARIABLE: &str = "JIFFY_API_KEY";
/// Environment variable with a PEM file of additional certificate authorities.
const CA_VARIABLE: &str = "JIFFY_CA";

/// URL of a daemon on another host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Url {
    /// True if the daemon uses TLS.
    pub tls: bool,
    /// Host name or IP address. An IPv6 address has no brackets.
    pub host: String,
    /// TCP port.
    pub port: u16,
    /// Host and port as in the URL.
    pub authority: String,
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        write!(f, "{scheme}://{}", self.authority)
    }
}

impl Url {
    /// Parses the URL of a daemon: scheme, host and port only.
    fn parse(text: &str) -> anyhow::Result<Self> {
        // Part of the messages below.
        const FORM: &str = "use http://HOST:PORT or https://HOST";
        let uri: Uri = text
            .parse()
            .with_context(|| format!("`{text}` is not the URL of a daemon: {FORM}"))?;
        let tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => bail!("`{text}` is not the URL of a daemon: {FORM}"),
        };
        let authority = uri.authority().context("no host")?;
        ensure!(
            !authority.as_str().contains('@'),
            "`{text}` contains a user name or password: set the API key in {KEY_VARIABLE} or a file"
        );
        ensure!(
            matches!(uri.path(), "" | "/") && uri.query().is_none(),
            "`{text}` has a path: {FORM}"
        );
        let host = uri.host().unwrap_or_default();
        // Resolvers expect IPv6 addresses without brackets.
        let host = host.trim_start_matches('[').trim_end_matches(']');
        ensure!(!host.is_empty(), "`{text}` has no host: {FORM}");
        Ok(Self {
            tls,
            host: host.to_owned(),
            // Default ports of the schemes.
            port: uri.port_u16().unwrap_or(if tls { 443 } else { 80 }),
            authority: authority.as_str().to_owned(),
        })
    }
}

/// Options that select a daemon. Defaults to the environment variables, and otherwise to the daemon
/// of this host.
#[derive(Debug, Clone, Default)]
pub struct ServerOptions {
    /// URL of a daemon, for example `https://jiffy.example`.
    pub url: Option<String>,
    /// File with the API key for this daemon.
    pub key_file: Option<PathBuf>,
}

/// Daemon on another host.
#[derive(Debug, Clone)]
pub struct ServerAddress {
    /// URL of the daemon.
    pub url: Url,
    /// API key.
    pub key: HeaderValue,
    /// File with additional certificate authorities.
    pub ca: Option<PathBuf>,
}

impl ServerAddress {
    /// Returns the daemon that `options` or the environment specify. `None` for the daemon of this
    /// host.
    pub fn find(options: &ServerOptions) -> anyhow::Result<Option<Self>> {
        let url = options.url.clone().or_else(|| variable(URL_VARIABLE));
        // The key and the authorities are only meaningful together with a URL.
        let Some(url) = url else { return Ok(None) };
        let url = Url::parse(&url)?;
        let key = key(options, &url)?;
        let ca = variable(CA_VARIABLE).map(PathBuf::from);
        Ok(Some(Self { url, key, ca }))
    }
}

/// Returns the value of an environment variable. `None` if it is not set or empty.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|v| !v.is_empty())
}

/// Returns the API key from its file or the environment. The command line is not supported, because
/// all processes can read it.
fn key(options: &ServerOptions, url: &Url) -> anyhow::Result<HeaderValue> {
    let (key, from) = match (&options.key_file, variable(KEY_VARIABLE)) {
        // The option takes precedence over the environment.
        (Some(file), _) => {
            let text = std::fs::read_to_string(file);
            let context = || format!("cannot read the API key in {}", file.display());
            (text.with_context(context)?, file.display().to_string())
        }
        (None, Some(key)) => (key, KEY_VARIABLE.to_owned()),
        (None, None) => bail!(
            "{url} requires an API key: set {KEY_VARIABLE}, or specify a file with the key with \
             --key-file; create a key with `jiffy key create` on the host of the daemon"
        ),
    };
    // Files usually end with a line feed.
    let key = key.trim();
    let is_valid = !key.is_empty() && key.bytes().all(|b| b.is_ascii_graphic());
    ensure!(
        is_valid,
        "the content of {from} is not an API key: keys consist of e2b_ and 40 hexadecimal digits"
    );
    let mut key = HeaderValue::from_str(key).context("the API key is not a valid header value")?;
    // Debug output of the headers must not contain the key.
    key.set_sensitive(true);
    Ok(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_urls_of_daemons_are_accepted() {
        let url = |text| Url::parse(text).unwrap();
        let plain = url("http://127.0.0.1:3000");
        assert_eq!(
            (plain.tls, plain.host.as_str(), plain.port),
            (false, "127.0.0.1", 3000)
        );
        let secure = url("https://jiffy.example/");
        assert_eq!((secure.tls, secure.port), (true, 443));
        assert_eq!(secure.to_string(), "https://jiffy.example");
        assert_eq!(url("http://[::1]:80").host, "::1");
        for bad in [
            "",
            "127.0.0.1:3000",
            "ftp://x",
            "http://",
            "http://x/api",
            "http://x/?a=b",
            "http://me:secret@x",
            "/run/jiffy.sock",
        ] {
            assert!(Url::parse(bad).is_err(), "{bad}");
        }
    }
}
