//! Certificate authorities and proxies of the networks that sandboxes are in.

use anyhow::{Context, bail};
use clap::{Args, Parser};
use jiffy_api_types::MAX_AUTHORITIES_BYTES;
use jiffy_proto::agent::{Authority, ProxySettings, SiteSettings};
use jiffy_sandbox_manager::{MAX_HOST_AUTHORITIES_BYTES, authorities, proxy};
use std::path::{Path, PathBuf};

/// Says that there is to be no proxy, whatever the host has.
const NO_PROXY: &str = "none";

/// Options of commands that make a sandbox.
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

/// Options of `jiffy serve`.
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
        hide_env_values = true
    )]
    pub guest_proxy: Option<String>,
    /// Comma-separated hosts that are accessed without the proxy: names, .domains, addresses
    #[arg(long, env = "JIFFY_GUEST_NO_PROXY", value_name = "LIST")]
    pub guest_no_proxy: Option<String>,
}

/// The host's settings alone, as the environment has them.
#[derive(Debug, Parser)]
struct FromEnvironment {
    #[command(flatten)]
    site: GuestSiteArgs,
}

impl SiteArgs {
    /// Their settings, with the files read.
    pub fn read(&self) -> anyhow::Result<SiteSettings> {
        let url = self.proxy.as_deref().map(|url| match url {
            NO_PROXY => "",
            url => url,
        });
        Ok(SiteSettings {
            authorities: files("--ca", &self.ca, MAX_AUTHORITIES_BYTES)?,
            proxy: proxy_settings("--proxy", url, self.no_proxy.as_deref())?,
        })
    }

    /// The same with what the host's environment says, where no daemon does.
    pub fn read_with_host(&self) -> anyhow::Result<SiteSettings> {
        let host = FromEnvironment::try_parse_from(["jiffy"])?.site.read()?;
        Ok(jiffy_sandbox_manager::joined(&host, &self.read()?))
    }
}

impl GuestSiteArgs {
    /// Their settings, with the files read.
    pub fn read(&self) -> anyhow::Result<SiteSettings> {
        let (url, hosts) = (self.guest_proxy.as_deref(), self.guest_no_proxy.as_deref());
        if url.is_none() && hosts.is_some() {
            bail!(
                "--guest-no-proxy says what is reached without a proxy: name it with --guest-proxy"
            );
        }
        Ok(SiteSettings {
            authorities: files("--guest-ca", &self.guest_ca, MAX_HOST_AUTHORITIES_BYTES)?,
            proxy: proxy_settings("--guest-proxy", url, hosts)?,
        })
    }
}

fn proxy_settings(
    option: &str,
    url: Option<&str>,
    hosts: Option<&str>,
) -> anyhow::Result<Option<ProxySettings>> {
    let read = url.map(|url| proxy(url, hosts.unwrap_or_default()));
    read.transpose().with_context(|| option.to_owned())
}

fn files(option: &str, paths: &[PathBuf], most: usize) -> anyhow::Result<Vec<Authority>> {
    let mut all: Vec<Authority> = Vec::new();
    let mut left = most;
    for path in paths {
        let of_file = || format!("{option} {}", path.display());
        let text = text(path, left).with_context(of_file)?;
        left = left.saturating_sub(text.len());
        let found = authorities(&text, most).with_context(of_file)?;
        let new = found.into_iter().filter(|a| !all.contains(a));
        all.extend(new.collect::<Vec<_>>());
    }
    Ok(all)
}

fn text(path: &Path, most: usize) -> anyhow::Result<String> {
    use std::io::Read;
    let mut text = Vec::new();
    let limit = u64::try_from(most).unwrap_or(u64::MAX).saturating_add(1);
    std::fs::File::open(path)?
        .take(limit)
        .read_to_end(&mut text)?;
    if text.len() > most {
        bail!("more than the {most} bytes of certificates that are allowed");
    }
    // Text outside of PEM blocks may be in any encoding.
    Ok(String::from_utf8_lossy(&text).into_owned())
}
