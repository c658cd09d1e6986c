//! Client of the OCI distribution protocol (manifests, blobs, tokens) over HTTP/1.1.

mod cloud_login;

use super::challenge::Challenge;
use super::control::ParentSocket;
use super::responses::{encoded, fault_of, header, read_body, with_sources};
use super::url::{RequestUrl, UrlOrigin};
use crate::error::PullFault;
use crate::login::{Credentials, RegistryLogin};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper::header::{
    ACCEPT, CONTENT_LENGTH, CONTENT_RANGE, HOST, HeaderMap, LOCATION, USER_AGENT, WWW_AUTHENTICATE,
};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use serde::Deserialize;
use std::error::Error;
use std::rc::Rc;
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// Accepted formats of manifests: images and indexes of OCI and Docker.
const MANIFESTS: &str = "application/vnd.oci.image.manifest.v1+json, \
    application/vnd.oci.image.index.v1+json, \
    application/vnd.docker.distribution.manifest.v2+json, \
    application/vnd.docker.distribution.manifest.list.v2+json";
const AGENT: &str = concat!("jiffy/", env!("CARGO_PKG_VERSION"));
/// Maximum number of redirects per request.
const MAX_REDIRECTS: usize = 5;
/// Maximum length of a token server's response in bytes.
const MAX_TOKEN: usize = 64 << 10;
/// Buffer size for the head of a response in bytes.
const MAX_HEAD: usize = 128 << 10;

type RequestSender = SendRequest<Full<Bytes>>;

/// Client of one repository.
pub(super) struct RegistryClient {
    control: Rc<ParentSocket>,
    tls: TlsConnector,
    plain_http: Vec<String>,
    login: Option<RegistryLogin>,
    /// User and password, once they were obtained by `login`.
    credentials: Option<Credentials>,
    registry: UrlOrigin,
    repository: String,
    /// `Authorization` header for the registry.
    authorization: Option<String>,
    /// True once the client has tried to authenticate with its credentials.
    login_attempted: bool,
    /// Last used connection, if it is still open.
    idle: Option<(UrlOrigin, RequestSender)>,
}

/// Response of a token server. Older servers use `access_token`.
#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
}

impl RegistryClient {
    /// Creates a client without a connection. `roots` are the trusted authorities.
    pub fn new(
        control: Rc<ParentSocket>,
        roots: RootCertStore,
        plain_http: Vec<String>,
        login: Option<RegistryLogin>,
    ) -> Result<Self, PullFault> {
        // The cryptography provider is explicit, because another crate may install another default.
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|e| PullFault::Unreachable(e.to_string()))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self {
            control,
            tls: TlsConnector::from(Arc::new(config)),
            plain_http,
            login,
            credentials: None,
            // Placeholder: `of` sets registry and repository.
            registry: UrlOrigin {
                tls: true,
                host: String::new(),
                port: 443,
            },
            repository: String::new(),
            authorization: None,
            login_attempted: false,
            idle: None,
        })
    }

    /// Configures a repository of `registry` (`host` or `host:port`).
    pub fn of(mut self, registry: &str, repository: &str) -> Result<Self, PullFault> {
        // `is_among` needs the port, which `parse` fills in.
        let plain = RequestUrl::parse(&format!("http://{registry}/"))?.origin;
        self.registry = if plain.is_among(&self.plain_http) {
            plain
        } else {
            RequestUrl::parse(&format!("https://{registry}/"))?.origin
        };
        self.repository = repository.to_owned();
        Ok(self)
    }

    /// Streams a manifest to the parent.
    pub async fn manifest(&mut self, reference: &str, max_bytes: u64) -> Result<(), PullFault> {
        let target = format!("/v2/{}/manifests/{reference}", self.repository);
        let response = self.request(&Method::GET, target, None).await?;
        self.forward_body(response, 0, 0, max_bytes).await
    }

    /// Streams a blob from `offset` to the parent.
    pub async fn blob(
        &mut self,
        digest: &str,
        offset: u64,
        max_bytes: u64,
    ) -> Result<(), PullFault> {
        let target = format!("/v2/{}/blobs/{digest}", self.repository);
        self.file(&target, offset, max_bytes).await
    }

    /// Streams the file at a path and query from `offset` to the parent.
    pub async fn file(
        &mut self,
        target: &str,
        offset: u64,
        max_bytes: u64,
    ) -> Result<(), PullFault> {
        // A first attempt requests the whole file, since some servers reject ranges.
        let range = (offset > 0).then(|| format!("bytes={offset}-"));
        let response = self.request(&Method::GET, target.to_owned(), range).await?;
        let skip = match response.status() {
            StatusCode::PARTIAL_CONTENT => {
                let range = header(response.headers(), CONTENT_RANGE).unwrap_or_default();
                // The data would otherwise be appended at the wrong offset.
                if !range.starts_with(&format!("bytes {offset}-")) {
                    let text = "the response has another range than requested";
                    return Err(PullFault::Broken(text.to_owned()));
                }
                0
            }
            // The server does not support ranges and sends the file from its beginning.
            _ => offset,
        };
        self.forward_body(response, skip, offset, max_bytes).await
    }

    /// Returns true if the registry has a blob of this size.
    pub async fn has(&mut self, digest: &str, size: u64) -> Result<bool, PullFault> {
        let target = format!("/v2/{}/blobs/{digest}", self.repository);
        match self.request(&Method::HEAD, target, None).await {
            Ok(response) => {
                // A blob of another size is another blob.
                let length = header(response.headers(), CONTENT_LENGTH);
                Ok(length.and_then(|l| l.parse().ok()) == Some(size))
            }
            // Some registries hide blobs from callers that may not read them.
            Err(PullFault::NotFound | PullFault::Unauthorized) => Ok(false),
            Err(fault) => Err(fault),
        }
    }

    /// Streams the body of a response to the parent, without its first `skip` bytes. `max_bytes`
    /// limits `offset` and the streamed bytes together.
    async fn forward_body(
        &mut self,
        response: Response<Incoming>,
        mut skip: u64,
        offset: u64,
        max_bytes: u64,
    ) -> Result<(), PullFault> {
        let mut remaining = max_bytes.saturating_sub(offset);
        let mut body = response.into_body();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|e| PullFault::Broken(with_sources(&e)))?;
            // Trailers are not needed.
            let Ok(bytes) = frame.into_data() else {
                continue;
            };
            let skipped = usize::try_from(skip).unwrap_or(usize::MAX).min(bytes.len());
            skip -= skipped as u64;
            let bytes = bytes.get(skipped..).unwrap_or_default();
            // A registry may send more than it announced.
            remaining = remaining
                .checked_sub(bytes.len() as u64)
                .ok_or(PullFault::TooLong(max_bytes))?;
            let sent = self.control.data(bytes);
            sent.map_err(|e| PullFault::Broken(e.to_string()))?;
        }
        Ok(())
    }

    /// Sends a request to the registry, following redirects and challenges. Fails unless the
    /// response is a success.
    async fn request(
        &mut self,
        method: &Method,
        target: String,
        range: Option<String>,
    ) -> Result<Response<Incoming>, PullFault> {
        self.log_in().await?;
        let origin = self.registry.clone();
        let mut url = RequestUrl { origin, target };
        let (mut redirects, mut challenged) = (0, false);
        loop {
            // A redirect can lead to another host, usually a content delivery network.
            let own = url.origin == self.registry;
            // Never send credentials to the target of a redirect.
            let authorization = self.authorization.clone().filter(|_| own);
            let range = range.iter().map(|range| ("range", range.clone()));
            let authorization = authorization.map(|value| ("authorization", value));
            let headers: Vec<_> = range.chain(authorization).collect();
            let response = self.send(method, &url, &headers, Bytes::new()).await?;
            let status = response.status();
            if status.is_success() {
                return Ok(response);
            }
            // Only one attempt: otherwise, wrong credentials would cause endless challenges.
            if status == StatusCode::UNAUTHORIZED && own && !challenged {
                challenged = true;
                self.authenticate(response.headers()).await?;
                continue;
            }
            let location = header(response.headers(), LOCATION);
            if status.is_redirection()
                // Without a request condition, this status is an error.
                && status != StatusCode::NOT_MODIFIED
                && let Some(location) = location
            {
                redirects += 1;
                if redirects > MAX_REDIRECTS {
                    let text = format!("the registry redirects more than {MAX_REDIRECTS} times");
                    return Err(PullFault::Refused(text));
                }
                let next = url.join(&location)?;
                self.check_transport(&url.origin, &next.origin)?;
                url = next;
                continue;
            }
            return Err(fault_of(response).await);
        }
    }

    /// Authenticates before the first request if there are credentials, because some registries
    /// report private images as missing otherwise.
    async fn log_in(&mut self) -> Result<(), PullFault> {
        let Some(login) = self.login.clone().filter(|_| !self.login_attempted) else {
            return Ok(());
        };
        // Set the flag before the request, so that a failure is not repeated for each request.
        self.login_attempted = true;
        self.credentials = Some(self.password(&login).await?);
        let url = RequestUrl {
            origin: self.registry.clone(),
            target: "/v2/".to_owned(),
        };
        // The response contains the challenge, even if public images need no credentials.
        let response = self.send(&Method::GET, &url, &[], Bytes::new()).await?;
        match response.status() {
            StatusCode::UNAUTHORIZED => self.authenticate(response.headers()).await,
            _ => Ok(()),
        }
    }

    /// Returns whether a host may be contacted without TLS.
    pub(super) fn permits_plain_http(&self, origin: &UrlOrigin) -> bool {
        origin.is_among(&self.plain_http)
    }

    /// Permits plain HTTP only to listed hosts, and never after TLS.
    fn check_transport(&self, from: &UrlOrigin, to: &UrlOrigin) -> Result<(), PullFault> {
        if to.tls || (!from.tls && to.is_among(&self.plain_http)) {
            Ok(())
        } else {
            Err(PullFault::Refused(format!(
                "the registry refers to {} without TLS",
                to.authority()
            )))
        }
    }

    /// Obtains authorization as a challenge demands: from the credentials, or as a token of the
    /// token server.
    async fn authenticate(&mut self, headers: &HeaderMap) -> Result<(), PullFault> {
        // The token may have expired.
        self.authorization = None;
        let challenges = headers.get_all(WWW_AUTHENTICATE).iter();
        let mut challenges = challenges.filter_map(|h| Challenge::parse(h.to_str().ok()?));
        let basic = self.credentials.as_ref().map(|known| {
            let both = STANDARD.encode(format!("{}:{}", known.user, known.password));
            format!("Basic {both}")
        });
        let (realm, service, scope) = match challenges.next() {
            Some(Challenge::Bearer {
                realm,
                service,
                scope,
            }) => (realm, service, scope),
            Some(Challenge::Basic) => {
                self.authorization = Some(basic.ok_or(PullFault::Unauthorized)?);
                return Ok(());
            }
            None => return Err(PullFault::Unauthorized),
        };
        let mut url = RequestUrl::parse(&realm)?;
        // The credentials are sent to the token server, so its connection must be protected as
        // well.
        self.check_transport(&self.registry, &url.origin)?;
        let scope = scope.unwrap_or_else(|| format!("repository:{}:pull", self.repository));
        for (name, value) in [("service", service), ("scope", Some(scope))] {
            if let Some(value) = value {
                let separator = if url.target.contains('?') { '&' } else { '?' };
                url.target += &format!("{separator}{name}={}", encoded(&value));
            }
        }
        let headers: Vec<_> = basic
            .map(|value| ("authorization", value))
            .into_iter()
            .collect();
        let response = self
            .send(&Method::GET, &url, &headers, Bytes::new())
            .await?;
        match response.status() {
            status if status.is_success() => {}
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                return Err(PullFault::Unauthorized);
            }
            _ => return Err(fault_of(response).await),
        }
        let body = read_body(response, MAX_TOKEN).await?;
        let token: Option<Token> = serde_json::from_slice(&body).ok();
        let token = token.and_then(|t| t.token.or(t.access_token));
        let token = token
            // The token becomes part of a header, so it must not contain spaces or line breaks.
            .filter(|t| !t.is_empty() && t.bytes().all(|b| b.is_ascii_graphic()))
            .ok_or_else(|| {
                PullFault::Refused("the token of the registry is malformed".to_owned())
            })?;
        self.authorization = Some(format!("Bearer {token}"));
        Ok(())
    }

    /// Sends one request and returns the response with any status.
    pub(super) async fn send(
        &mut self,
        method: &Method,
        url: &RequestUrl,
        headers: &[(&'static str, String)],
        body: Bytes,
    ) -> Result<Response<Incoming>, PullFault> {
        let request = || {
            let mut request = Request::builder()
                .method(method)
                .uri(&url.target)
                .header(HOST, url.origin.authority())
                .header(USER_AGENT, AGENT);
            if url.target.contains("/manifests/") {
                request = request.header(ACCEPT, MANIFESTS);
            }
            for (name, value) in headers {
                request = request.header(*name, value);
            }
            let request = request.body(Full::new(body.clone()));
            request.map_err(|e| PullFault::Refused(PullFault::text(&e.to_string())))
        };
        // A connection is reused only for the same scheme, host and port.
        let idle = self.idle.take().filter(|(at, _)| *at == url.origin);
        if let Some((origin, mut sender)) = idle
            && sender.ready().await.is_ok()
            && let Ok(response) = sender.send_request(request()?).await
        {
            self.idle = Some((origin, sender));
            return Ok(response);
        }
        // The server may have closed the idle connection: use a new one.
        let mut sender = self.connect(&url.origin).await?;
        let response = sender
            .send_request(request()?)
            .await
            .map_err(|e| PullFault::Unreachable(PullFault::text(&with_sources(&e))))?;
        self.idle = Some((url.origin.clone(), sender));
        Ok(response)
    }

    /// Opens a connection with HTTP/1.1, and TLS if the origin requires it.
    async fn connect(&self, origin: &UrlOrigin) -> Result<RequestSender, PullFault> {
        let failed = |e: &dyn Error| PullFault::Unreachable(PullFault::text(&with_sources(e)));
        // IPv6 addresses are in brackets.
        let host = origin.host.trim_matches(['[', ']']);
        let stream = self.control.connect(host, origin.port)?;
        let stream = TcpStream::from_std(stream).map_err(|e| failed(&e))?;
        let mut builder = Builder::new();
        builder.max_buf_size(MAX_HEAD);
        if !origin.tls {
            let opened = builder.handshake(TokioIo::new(stream)).await;
            let (sender, connection) = opened.map_err(|e| failed(&e))?;
            // Ignore the task: it ends with the connection.
            tokio::spawn(connection);
            return Ok(sender);
        }
        let name = ServerName::try_from(host.to_owned()).map_err(|e| failed(&e))?;
        let stream = self
            .tls
            .connect(name, stream)
            .await
            .map_err(|e| failed(&e))?;
        let opened = builder.handshake(TokioIo::new(stream)).await;
        let (sender, connection) = opened.map_err(|e| failed(&e))?;
        tokio::spawn(connection);
        Ok(sender)
    }
}
