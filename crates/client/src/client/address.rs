//! Address and credentials of a control plane.

use anyhow::{Context, bail, ensure};
use hyper::Uri;
use hyper::header::HeaderValue;
use std::fmt;
use std::path::PathBuf;

/// Variable with the address of a control plane on another host.
const URL_VARIABLE: &str = "JIFFY_URL";
/// Variable with the key for it.
const KEY_VARIABLE: &str = "JIFFY_API_KEY";
/// Variable with a PEM file of further authorities whose certificates are good.
const CA_VARIABLE: &str = "JIFFY_CA";

/// The address of a control plane that is reached over a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Url {
    /// True if it speaks TLS.
    pub tls: bool,
    /// Name or address, IPv6 without brackets.
    pub host: String,
    /// TCP port.
    pub port: u16,
    /// Host and port as they were written.
    pub authority: String,
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        write!(f, "{scheme}://{}", self.authority)
    }
}

impl Url {
    fn parse(text: &str) -> anyhow::Result<Self> {
        const FORM: &str = "write it as http://HOST:PORT or https://HOST";
        let uri: Uri = text
            .parse()
            .with_context(|| format!("`{text}` is not an address of a daemon: {FORM}"))?;
        let tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => bail!("`{text}` is not an address of a daemon: {FORM}"),
        };
        let authority = uri.authority().context("no host")?;
        ensure!(
            !authority.as_str().contains('@'),
            "`{text}` has a name or password in it: the key belongs into {KEY_VARIABLE} or a file"
        );
        ensure!(
            matches!(uri.path(), "" | "/") && uri.query().is_none(),
            "`{text}` has a path: {FORM}"
        );
        let host = uri.host().unwrap_or_default();
        let host = host.trim_start_matches('[').trim_end_matches(']');
        ensure!(!host.is_empty(), "`{text}` names no host: {FORM}");
        Ok(Self {
            tls,
            host: host.to_owned(),
            port: uri.port_u16().unwrap_or(if tls { 443 } else { 80 }),
            authority: authority.as_str().to_owned(),
        })
    }
}

/// Control plane to use: another host's if an address is given here or in the environment.
#[derive(Debug, Clone, Default)]
pub struct ServerOptions {
    /// Address of a daemon, as in `https://jiffy.example`.
    pub url: Option<String>,
    /// File with the API key for it.
    pub key_file: Option<PathBuf>,
}

/// A control plane on another host.
#[derive(Debug, Clone)]
pub struct ServerAddress {
    /// Address.
    pub url: Url,
    /// The key to show.
    pub key: HeaderValue,
    /// Further authorities whose certificates are good.
    pub ca: Option<PathBuf>,
}

impl ServerAddress {
    /// The one that is asked for; none: this host's.
    pub fn find(options: &ServerOptions) -> anyhow::Result<Option<Self>> {
        let url = options.url.clone().or_else(|| variable(URL_VARIABLE));
        let Some(url) = url else { return Ok(None) };
        let url = Url::parse(&url)?;
        let key = key(options, &url)?;
        let ca = variable(CA_VARIABLE).map(PathBuf::from);
        Ok(Some(Self { url, key, ca }))
    }
}

/// A variable that is set to something.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|v| !v.is_empty())
}

/// The key from its file or the environment. Never from the command line, which every process can
/// read.
fn key(options: &ServerOptions, url: &Url) -> anyhow::Result<HeaderValue> {
    let (key, from) = match (&options.key_file, variable(KEY_VARIABLE)) {
        (Some(file), _) => {
            let text = std::fs::read_to_string(file);
            let failed = || format!("cannot read the API key in {}", file.display());
            (text.with_context(failed)?, file.display().to_string())
        }
        (None, Some(key)) => (key, KEY_VARIABLE.to_owned()),
        (None, None) => bail!(
            "{url} wants an API key: set {KEY_VARIABLE}, or name a file that holds it with \
             --key-file; `jiffy key create` on that host makes one"
        ),
    };
    let key = key.trim();
    let good = !key.is_empty() && key.bytes().all(|b| b.is_ascii_graphic());
    ensure!(
        good,
        "what {from} holds is not an API key: one looks like e2b_ and 40 hexadecimal digits"
    );
    let mut key = HeaderValue::from_str(key).context("the API key cannot be sent")?;
    key.set_sensitive(true);
    Ok(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed_or_refused_with_a_message() {
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
