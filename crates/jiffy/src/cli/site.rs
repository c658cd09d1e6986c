//! Options for certificate authorities and proxies in sandboxes.
//!
//! The *site* is the network in which the sandboxes run. Its settings are certificate authorities
//! and a proxy.

use anyhow::{Context, bail};
use clap::{Args, Parser};
use jiffy_api_types::MAX_AUTHORITIES_BYTES;
use jiffy_proto::agent::{Authority, ProxySettings, SiteSettings};
use jiffy_sandbox_manager::{MAX_HOST_AUTHORITIES_BYTES, authorities, proxy};
use std::path::{Path, PathBuf};

/// Value of `--proxy` that disables the proxy of the host.
const NO_PROXY: &str = "none";

/// Site options of commands that create a sandbox.
#[derive(Debug, Clone, Default, Args)]
pub struct SiteArgs {
    /// Additional certificate authorities (PEM) for programs in the sandbox. Can be repeated
    #[arg(long = "ca", value_name = "FILE")]
    pub ca: Vec<PathBuf>,
    /// Proxy for programs in the sandbox, http://[USER:PASSWORD@]HOST[:PORT]. `none`: no proxy,
    /// even if the host has one
    #[arg(long, value_name = "URL")]
    pub proxy: Option<String>,
    /// Comma-separated hosts that are accessed without the proxy: names, .domains, addresses
    #[arg(long, value_name = "LIST", requires = "proxy")]
    pub no_proxy: Option<String>,
}

/// Site options of `jiffy serve`, which apply to all its sandboxes.
#[derive(Debug, Clone, Default, Args)]
pub struct GuestSiteArgs {
    /// Additional certificate authorities (PEM) for programs in all sandboxes and in template
    /// builds. Can be repeated
    #[arg(
        long,
        env = "JIFFY_GUEST_CA",
        value_name = "FILE",
        value_delimiter = ','
    )]
    pub guest_ca: Vec<PathBuf>,
    /// Proxy for programs in all sandboxes, http://[USER:PASSWORD@]HOST[:PORT]
    #[arg(
        long,
        env = "JIFFY_GUEST_PROXY",
        value_name = "URL",
        // The help must not show the value, which may contain a password.
        hide_env_values = true
    )]
    pub guest_proxy: Option<String>,
    /// Comma-separated hosts that are accessed without the proxy: names, .domains, addresses
    #[arg(long, env = "JIFFY_GUEST_NO_PROXY", value_name = "LIST")]
    pub guest_no_proxy: Option<String>,
}

/// Parser of the host's settings in the environment variables of `jiffy serve`.
#[derive(Debug, Parser)]
struct FromEnvironment {
    #[command(flatten)]
    site: GuestSiteArgs,
}

impl SiteArgs {
    /// Returns the settings. Reads the files of the certificate authorities.
    pub fn read(&self) -> anyhow::Result<SiteSettings> {
        // An empty URL disables the proxy of the host.
        let url = self.proxy.as_deref().map(|url| match url {
            NO_PROXY => "",
            url => url,
        });
        Ok(SiteSettings {
            authorities: files("--ca", &self.ca, MAX_AUTHORITIES_BYTES)?,
            proxy: proxy_settings("--proxy", url, self.no_proxy.as_deref())?,
        })
    }

    /// Returns the settings merged with those in the environment of this host, for commands without
    /// a daemon.
    pub fn read_with_host(&self) -> anyhow::Result<SiteSettings> {
        // Without arguments, all values come from the environment.
        let host = FromEnvironment::try_parse_from(["jiffy"])?.site.read()?;
        Ok(jiffy_sandbox_manager::joined(&host, &self.read()?))
    }
}

impl GuestSiteArgs {
    /// Returns the settings. Reads the files of the certificate authorities.
    pub fn read(&self) -> anyhow::Result<SiteSettings> {
        let (url, hosts) = (self.guest_proxy.as_deref(), self.guest_no_proxy.as_deref());
        if url.is_none() && hosts.is_some() {
            bail!("--guest-no-proxy needs a proxy: add --guest-proxy");
        }
        Ok(SiteSettings {
            authorities: files("--guest-ca", &self.guest_ca, MAX_HOST_AUTHORITIES_BYTES)?,
            proxy: proxy_settings("--guest-proxy", url, hosts)?,
        })
    }
}

/// Checks the proxy options. `option` is the name of the option in error messages.
fn proxy_settings(
    option: &str,
    url: Option<&str>,
    hosts: Option<&str>,
) -> anyhow::Result<Option<ProxySettings>> {
    let settings = url.map(|url| proxy(url, hosts.unwrap_or_default()));
    settings.transpose().with_context(|| option.to_owned())
}

/// Reads certificate authorities from files of at most `max_bytes` in total, without duplicates.
fn files(option: &str, paths: &[PathBuf], max_bytes: usize) -> anyhow::Result<Vec<Authority>> {
    let mut all: Vec<Authority> = Vec::new();
    let mut free_bytes = max_bytes;
    for path in paths {
        let of_file = || format!("cannot read {option} {}", path.display());
        let text = text(path, free_bytes).with_context(of_file)?;
        free_bytes = free_bytes.saturating_sub(text.len());
        let authorities = authorities(&text, max_bytes).with_context(of_file)?;
        // Several files may contain the same authority.
        let new = authorities.into_iter().filter(|a| !all.contains(a));
        all.extend(new.collect::<Vec<_>>());
    }
    Ok(all)
}

/// Reads a file of at most `max_bytes`.
fn text(path: &Path, max_bytes: usize) -> anyhow::Result<String> {
    use std::io::Read;
    let mut text = Vec::new();
    // One byte more than the maximum, so that a larger file is noticed.
    let limit = u64::try_from(max_bytes)
        .unwrap_or(u64::MAX)
        .saturating_add(1);
    std::fs::File::open(path)?
        .take(limit)
        .read_to_end(&mut text)?;
    if text.len() > max_bytes {
        bail!("the certificates exceed the limit of {max_bytes} bytes");
    }
    // Text outside PEM blocks may have any encoding.
    Ok(String::from_utf8_lossy(&text).into_owned())
}
