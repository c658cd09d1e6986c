//! [`ConsoleServer`]: the listener of the web console. The console itself is the crate
//! `jiffy-console`.

use crate::metrics::NoSandboxes;
use crate::tls;
use crate::{ConsoleOptions, ServeOptions};
use anyhow::{Context, bail};
use axum::Router;
use jiffy_api::App;
use jiffy_client::VERSION;
use jiffy_console::{Console, SessionStore, Settings};
use jiffy_gateway::{Gateway, GatewayConfig, Tls};
use jiffy_image::Home;
use std::io::Write;
use std::net::SocketAddr;
use tokio::net::TcpListener;

/// Maximum number of concurrent connections of browsers.
const MAX_CONNECTIONS: usize = 2_000;

/// Bound address of the console.
pub struct ConsoleListener {
    listener: TcpListener,
    tls: Option<Tls>,
    url: String,
}

/// The console with its listener.
pub struct ConsoleServer {
    listener: TcpListener,
    tls: Option<Tls>,
    gateway: Gateway<NoSandboxes, Router>,
}

impl ConsoleServer {
    /// Binds to the address of the console and prints its URL. `tls` is the TLS configuration of
    /// the API's listener, if there is one. Returns `None` if the console is optional and cannot
    /// listen on the address.
    pub async fn bind(
        console: ConsoleOptions,
        options: &ServeOptions,
        home: &Home,
        tls: Option<Tls>,
    ) -> anyhow::Result<Option<ConsoleListener>> {
        let tls = match tls {
            Some(tls) => Some(tls),
            None => tls::tls(&options.tls, &options.domains, home)?,
        };
        let address = console.address;
        check_address(address, tls.is_some(), console.published)?;
        let listener = match TcpListener::bind(address).await {
            Err(e) if console.optional => {
                tracing::warn!(%address, error = %e, "started without the web console");
                return Ok(None);
            }
            listener => listener.with_context(|| {
                format!("cannot listen on {address}: choose another address with --console")
            })?,
        };
        let url = url(listener.local_addr()?, tls.is_some(), &options.domains);
        println!("console on {url}");
        // The parent process may wait for this line.
        std::io::stdout().flush()?;
        Ok(Some(ConsoleListener { listener, tls, url }))
    }

    /// Serves browsers until `shutdown` completes.
    pub async fn serve(self, shutdown: impl Future<Output = ()>) {
        jiffy_gateway::serve(self.listener, self.tls, self.gateway, shutdown).await;
    }
}

impl ConsoleListener {
    /// Creates the console. Returns the server and the console's routes for the API's listeners.
    pub fn open(
        self,
        app: &App,
        api: Router,
        home: &Home,
        options: &ServeOptions,
    ) -> anyhow::Result<(ConsoleServer, Router)> {
        let domains = options.domains.iter();
        let names = domains.flat_map(|domain| [domain.clone(), format!("console.{domain}")]);
        let settings = Settings {
            url: self.url,
            tls: self.tls.is_some(),
            names: names.chain(options.allowed_hosts.iter().cloned()).collect(),
            version: VERSION,
        };
        let mut config = GatewayConfig {
            allowed_hosts: settings.names.clone(),
            ..GatewayConfig::default()
        };
        config.limits.connections = MAX_CONNECTIONS;
        let console = Console::new(app.clone(), api, SessionStore::open(home.path())?, settings);
        // The gateway provides timeouts and limits, but serves no sandbox here.
        let gateway = Gateway::new(config, NoSandboxes, console.router(), None);
        let server = ConsoleServer {
            listener: self.listener,
            tls: self.tls,
            gateway,
        };
        Ok((server, console.owner_router()))
    }
}

/// Rejects addresses that browsers would reach over plain HTTP from other hosts. On such addresses
/// a browser sends no `Sec-Fetch-Site`, and the session could be read in transit. `tls` states
/// whether the console uses TLS, which permits any address. `published` permits any address, too:
/// see [`crate::ConsoleOptions`].
fn check_address(address: SocketAddr, tls: bool, published: bool) -> anyhow::Result<()> {
    if tls || published || address.ip().is_loopback() {
        return Ok(());
    }
    bail!(
        "cannot serve the console on {address} without TLS: use --tls or --tls-cert, \
         choose a loopback address, or use --console-published in a container whose port is \
         published on a loopback address"
    )
}

/// Returns the URL of the console for browsers. `tls` states whether the console uses TLS.
fn url(address: SocketAddr, tls: bool, domains: &[String]) -> String {
    let port = address.port();
    match (tls, domains.first()) {
        // The certificate names the domain.
        (true, Some(domain)) if !address.ip().is_loopback() => format!("https://{domain}:{port}"),
        (true, _) => format!("https://{address}"),
        (false, _) if address.ip().is_loopback() => format!("http://{address}"),
        // The port is published on loopback of the host.
        (false, _) => format!("http://127.0.0.1:{port}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_tls_the_console_listens_on_loopback_unless_its_port_is_published() {
        let everywhere = "0.0.0.0:3001".parse().unwrap();
        let error = check_address(everywhere, false, false).unwrap_err();
        assert!(error.to_string().contains("--tls"), "{error}");
        assert!(check_address(everywhere, true, false).is_ok());
        assert!(check_address(everywhere, false, true).is_ok());
        for local in ["127.0.0.1:3001", "[::1]:3001"] {
            assert!(check_address(local.parse().unwrap(), false, false).is_ok());
        }
        assert_eq!(url(everywhere, false, &[]), "http://127.0.0.1:3001");
        let domain = ["example.com".to_owned()];
        assert_eq!(url(everywhere, true, &domain), "https://example.com:3001");
    }
}
