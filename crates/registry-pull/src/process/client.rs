//! Client of the OCI distribution protocol.

use super::challenge::Challenge;
use super::control::ParentSocket;
use super::url::{RequestUrl, UrlOrigin};
use crate::error::PullFault;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper::header::{
    ACCEPT, AUTHORIZATION, CONTENT_LENGTH, CONTENT_RANGE, HOST, HeaderMap, LOCATION, RANGE,
    USER_AGENT, WWW_AUTHENTICATE,
};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use serde::Deserialize;
use std::error::Error;
use std::rc::Rc;
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

const MANIFESTS: &str = "application/vnd.oci.image.manifest.v1+json, \
    application/vnd.oci.image.index.v1+json, \
    application/vnd.docker.distribution.manifest.v2+json, \
    application/vnd.docker.distribution.manifest.list.v2+json";
const AGENT: &str = concat!("jiffy/", env!("CARGO_PKG_VERSION"));
/// Maximum number of redirects per request.
const MAX_REDIRECTS: usize = 5;
/// Maximum length in bytes of a token server's response, and of an error response.
const MAX_TOKEN: usize = 64 << 10;
const MAX_ERROR: usize = 16 << 10;
/// Buffer size for the head of a response in bytes.
const MAX_HEAD: usize = 128 << 10;

type RequestSender = SendRequest<Empty<Bytes>>;

/// Client of one repository.
pub(super) struct RegistryClient {
    control: Rc<ParentSocket>,
    tls: TlsConnector,
    plain_http: Vec<String>,
    credentials: Option<(String, String)>,
    registry: UrlOrigin,
    repository: String,
    /// `Authorization` header for the registry.
    authorization: Option<String>,
    logged_in: bool,
    /// Last used connection, if it is still open.
    idle: Option<(UrlOrigin, RequestSender)>,
}

/// Error response of a registry.
#[derive(Deserialize)]
struct Errors {
    errors: Vec<ErrorEntry>,
}

#[derive(Deserialize)]
struct ErrorEntry {
    #[serde(default)]
    code: String,
    #[serde(default)]
    message: String,
}

#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
}

impl RegistryClient {
    pub fn new(
        control: Rc<ParentSocket>,
        roots: RootCertStore,
        plain_http: Vec<String>,
        credentials: Option<(String, String)>,
    ) -> Result<Self, PullFault> {
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
            credentials,
            registry: UrlOrigin {
                tls: true,
                host: String::new(),
                port: 443,
            },
            repository: String::new(),
            authorization: None,
            logged_in: false,
            idle: None,
        })
    }

    /// Configures a repository of `registry` (`host` or `host:port`).
    pub fn of(mut self, registry: &str, repository: &str) -> Result<Self, PullFault> {
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
    pub async fn manifest(&mut self, reference: &str, most: u64) -> Result<(), PullFault> {
        let target = format!("/v2/{}/manifests/{reference}", self.repository);
        let answer = self.request(&Method::GET, target, None).await?;
        self.forward_body(answer, 0, 0, most).await
    }

    /// Streams a blob from `offset` to the parent.
    pub async fn blob(&mut self, digest: &str, offset: u64, most: u64) -> Result<(), PullFault> {
        let target = format!("/v2/{}/blobs/{digest}", self.repository);
        self.file(&target, offset, most).await
    }

    /// Streams the file at a path and query from `offset` to the parent.
    pub async fn file(&mut self, target: &str, offset: u64, most: u64) -> Result<(), PullFault> {
        let range = (offset > 0).then(|| format!("bytes={offset}-"));
        let answer = self.request(&Method::GET, target.to_owned(), range).await?;
        let skip = match answer.status() {
            StatusCode::PARTIAL_CONTENT => {
                let range = header(answer.headers(), CONTENT_RANGE).unwrap_or_default();
                if !range.starts_with(&format!("bytes {offset}-")) {
                    let text = "the response has another range than requested";
                    return Err(PullFault::Broken(text.to_owned()));
                }
                0
            }
            // The server does not support ranges and sends the blob from its beginning.
            _ => offset,
        };
        self.forward_body(answer, skip, offset, most).await
    }

    /// Returns true if the registry has a blob of this size.
    pub async fn has(&mut self, digest: &str, size: u64) -> Result<bool, PullFault> {
        let target = format!("/v2/{}/blobs/{digest}", self.repository);
        match self.request(&Method::HEAD, target, None).await {
            Ok(answer) => {
                let length = header(answer.headers(), CONTENT_LENGTH);
                Ok(length.and_then(|l| l.parse().ok()) == Some(size))
            }
            Err(PullFault::NotFound | PullFault::Unauthorized) => Ok(false),
            Err(fault) => Err(fault),
        }
    }

    /// Streams the body of a response to the parent, without its first `skip` bytes.
    async fn forward_body(
        &mut self,
        answer: Response<Incoming>,
        mut skip: u64,
        offset: u64,
        most: u64,
    ) -> Result<(), PullFault> {
        let mut remaining = most.saturating_sub(offset);
        let mut body = answer.into_body();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|e| PullFault::Broken(chain(&e)))?;
            let Ok(bytes) = frame.into_data() else {
                continue;
            };
            let skipped = usize::try_from(skip).unwrap_or(usize::MAX).min(bytes.len());
            skip -= skipped as u64;
            let bytes = bytes.get(skipped..).unwrap_or_default();
            remaining = remaining
                .checked_sub(bytes.len() as u64)
                .ok_or(PullFault::TooLong(most))?;
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
            let own = url.origin == self.registry;
            // Never send credentials to the target of a redirect.
            let authorization = self.authorization.clone().filter(|_| own);
            let answer = self
                .send(method, &url, range.as_deref(), authorization)
                .await?;
            let status = answer.status();
            if status.is_success() {
                return Ok(answer);
            }
            if status == StatusCode::UNAUTHORIZED && own && !challenged {
                challenged = true;
                self.authenticate(answer.headers()).await?;
                continue;
            }
            let location = header(answer.headers(), LOCATION);
            if status.is_redirection()
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
            return Err(refusal(answer).await);
        }
    }

    /// Authenticates before the first request if there are credentials, because some registries
    /// report private images as missing otherwise.
    async fn log_in(&mut self) -> Result<(), PullFault> {
        if self.logged_in || self.credentials.is_none() {
            return Ok(());
        }
        self.logged_in = true;
        let url = RequestUrl {
            origin: self.registry.clone(),
            target: "/v2/".to_owned(),
        };
        let answer = self.send(&Method::GET, &url, None, None).await?;
        match answer.status() {
            StatusCode::UNAUTHORIZED => self.authenticate(answer.headers()).await,
            _ => Ok(()),
        }
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

    /// Answers a challenge with the credentials or with a token of the token server.
    async fn authenticate(&mut self, headers: &HeaderMap) -> Result<(), PullFault> {
        self.authorization = None;
        let challenges = headers.get_all(WWW_AUTHENTICATE).iter();
        let mut challenges = challenges.filter_map(|h| Challenge::parse(h.to_str().ok()?));
        let basic = self.credentials.as_ref().map(|(user, password)| {
            let both = STANDARD.encode(format!("{user}:{password}"));
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
        self.check_transport(&self.registry, &url.origin)?;
        let scope = scope.unwrap_or_else(|| format!("repository:{}:pull", self.repository));
        for (name, value) in [("service", service), ("scope", Some(scope))] {
            if let Some(value) = value {
                let separator = if url.target.contains('?') { '&' } else { '?' };
                url.target += &format!("{separator}{name}={}", encoded(&value));
            }
        }
        let answer = self.send(&Method::GET, &url, None, basic).await?;
        match answer.status() {
            status if status.is_success() => {}
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                return Err(PullFault::Unauthorized);
            }
            _ => return Err(refusal(answer).await),
        }
        let body = bounded(answer, MAX_TOKEN).await?;
        let token: Option<Token> = serde_json::from_slice(&body).ok();
        let token = token.and_then(|t| t.token.or(t.access_token));
        let token = token
            .filter(|t| !t.is_empty() && t.bytes().all(|b| b.is_ascii_graphic()))
            .ok_or_else(|| {
                PullFault::Refused("the token of the registry is malformed".to_owned())
            })?;
        self.authorization = Some(format!("Bearer {token}"));
        Ok(())
    }

    /// Sends one request and returns the response with any status.
    async fn send(
        &mut self,
        method: &Method,
        url: &RequestUrl,
        range: Option<&str>,
        authorization: Option<String>,
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
            if let Some(range) = range {
                request = request.header(RANGE, range);
            }
            if let Some(value) = &authorization {
                request = request.header(AUTHORIZATION, value);
            }
            let request = request.body(Empty::<Bytes>::new());
            request.map_err(|e| PullFault::Refused(PullFault::text(&e.to_string())))
        };
        let idle = self.idle.take().filter(|(at, _)| *at == url.origin);
        if let Some((origin, mut sender)) = idle
            && sender.ready().await.is_ok()
            && let Ok(answer) = sender.send_request(request()?).await
        {
            self.idle = Some((origin, sender));
            return Ok(answer);
        }
        // The server may have closed the idle connection: use a new one.
        let mut sender = self.connect(&url.origin).await?;
        let answer = sender
            .send_request(request()?)
            .await
            .map_err(|e| PullFault::Unreachable(PullFault::text(&chain(&e))))?;
        self.idle = Some((url.origin.clone(), sender));
        Ok(answer)
    }

    async fn connect(&self, origin: &UrlOrigin) -> Result<RequestSender, PullFault> {
        let failed = |e: &dyn Error| PullFault::Unreachable(PullFault::text(&chain(e)));
        // IPv6 addresses are in brackets.
        let host = origin.host.trim_matches(['[', ']']);
        let stream = self.control.connect(host, origin.port)?;
        let stream = TcpStream::from_std(stream).map_err(|e| failed(&e))?;
        let mut builder = Builder::new();
        builder.max_buf_size(MAX_HEAD);
        if !origin.tls {
            let opened = builder.handshake(TokioIo::new(stream)).await;
            let (sender, connection) = opened.map_err(|e| failed(&e))?;
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

/// Returns the value of a header as text.
fn header(headers: &HeaderMap, name: hyper::header::HeaderName) -> Option<String> {
    let value = headers.get(name)?.to_str().ok()?;
    Some(value.to_owned())
}

async fn bounded(answer: Response<Incoming>, limit: usize) -> Result<Vec<u8>, PullFault> {
    let mut bytes = Vec::new();
    let mut body = answer.into_body();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|e| PullFault::Broken(PullFault::text(&chain(&e))))?;
        if let Ok(data) = frame.into_data() {
            bytes.extend_from_slice(&data);
        }
        if bytes.len() > limit {
            return Err(PullFault::TooLong(limit as u64));
        }
    }
    Ok(bytes)
}

/// Converts an error response.
async fn refusal(answer: Response<Incoming>) -> PullFault {
    let status = answer.status();
    match status {
        StatusCode::NOT_FOUND => return PullFault::NotFound,
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => return PullFault::Unauthorized,
        StatusCode::TOO_MANY_REQUESTS => return PullFault::RateLimit,
        _ => {}
    }
    let body = bounded(answer, MAX_ERROR).await.unwrap_or_default();
    let errors: Option<Errors> = serde_json::from_slice(&body).ok();
    let first = errors.and_then(|e| e.errors.into_iter().next());
    let text = match first {
        Some(entry) if entry.message.is_empty() => entry.code,
        Some(entry) => entry.message,
        None => status.canonical_reason().unwrap_or_default().to_owned(),
    };
    PullFault::Status(status.as_u16(), PullFault::text(&text))
}

/// Percent-encodes a query value (RFC 3986 2.3).
fn encoded(text: &str) -> String {
    const ESCAPED: AsciiSet = NON_ALPHANUMERIC
        .remove(b'-')
        .remove(b'.')
        .remove(b'_')
        .remove(b'~')
        .remove(b':')
        .remove(b'/')
        .remove(b',');
    utf8_percent_encode(text, &ESCAPED).to_string()
}

/// Returns the message of an error with its causes.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let more = cause.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        source = cause.source();
    }
    text
}
