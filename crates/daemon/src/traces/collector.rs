//! HTTP client of the trace collector.

use anyhow::{Context, ensure};
use async_trait::async_trait;
use http_body_util::{BodyExt, Full, Limited};
use hyper::Uri;
use hyper::header::{HOST, HeaderValue};
use hyper_util::rt::TokioIo;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use tokio::net::TcpStream;

/// Port of OTLP over HTTP.
const DEFAULT_PORT: u16 = 4318;
/// Maximum size of a response in bytes.
const MAX_RESPONSE_BYTES: usize = 64 << 10;

/// Client that opens a connection for each request, because there is at most one request per
/// second.
#[derive(Debug)]
pub struct CollectorClient {
    host: String,
    port: u16,
}

impl CollectorClient {
    /// Returns the client of the collector at `url`.
    pub fn new(url: &str) -> anyhow::Result<Self> {
        let uri: Uri = url
            .parse()
            .with_context(|| format!("`{url}` is not a URL"))?;
        ensure!(
            uri.scheme_str() == Some("http"),
            "cannot export traces to `{url}`: the URL must begin with http://; run a collector on \
             this host to export over TLS"
        );
        let host = uri
            .host()
            .filter(|host| !host.is_empty())
            .with_context(|| format!("`{url}` has no host"))?;
        Ok(Self {
            // An IPv6 address has brackets in a URL, but not in a socket address.
            host: host.trim_matches(['[', ']']).to_owned(),
            port: uri.port_u16().unwrap_or(DEFAULT_PORT),
        })
    }
}

#[async_trait]
impl HttpClient for CollectorClient {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let stream = TcpStream::connect((self.host.as_str(), self.port)).await?;
        let io = TokioIo::new(stream);
        let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await?;
        let (mut parts, body) = request.into_parts();
        if let Some(authority) = parts.uri.authority() {
            parts
                .headers
                .insert(HOST, HeaderValue::from_str(authority.as_str())?);
        }
        // A request to a server has only the path in its first line.
        let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
        parts.uri = path.parse()?;
        let exchange = async {
            let response = sender.send_request(Request::from_parts(parts, Full::new(body)));
            let (parts, body) = response.await?.into_parts();
            let body = Limited::new(body, MAX_RESPONSE_BYTES)
                .collect()
                .await?
                .to_bytes();
            Ok(Response::from_parts(parts, body))
        };
        let mut exchange = std::pin::pin!(exchange);
        tokio::select! {
            response = &mut exchange => response,
            // The connection must be polled for the exchange to make progress. If the connection
            // ends first, the exchange completes or fails without it.
            _ = connection => exchange.await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_collectors_are_http() {
        let client = CollectorClient::new("http://[::1]/base").unwrap();
        assert_eq!((client.host.as_str(), client.port), ("::1", DEFAULT_PORT));
        let client = CollectorClient::new("http://collector:80").unwrap();
        assert_eq!((client.host.as_str(), client.port), ("collector", 80));
        for bad in ["https://collector", "collector:4318", "http://", ""] {
            assert!(CollectorClient::new(bad).is_err(), "{bad}");
        }
    }
}
