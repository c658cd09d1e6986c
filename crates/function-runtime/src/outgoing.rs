//! Outgoing requests of components (wasi:http): HTTP/1.1, with a new connection for each request,
//! which the *broker*, a thread of the daemon, opens ([`crate::egress`]). Guests follow redirects
//! themselves, and each redirect is checked against the same list of hosts.
//!
//! The *head* of a request or response is its first line and its headers, without the body.

use crate::egress::Egress;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::client::conn::http1;
use hyper::http::uri::{Authority, Scheme};
use hyper::{Method, Uri};
use hyper_util::rt::TokioIo;
use jiffy_proto::function::EgressFailure;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::time::{Sleep, timeout};
use wasmtime_wasi_http::{Error, RequestOptions, WasiBody};

/// Maximum time for the head of a response, and between parts of its body. The guest may choose a
/// shorter time. The time limit of the incoming request applies in addition.
const MAX_WAIT: Duration = jiffy_proto::function::MAX_REQUEST_TIME;
/// Maximum length of a response's head in bytes.
const MAX_HEAD_BYTES: usize = 64 << 10;

type IoTask = Box<dyn Future<Output = Result<(), Error>> + Send>;
pub(crate) type SentRequest =
    Box<dyn Future<Output = Result<(hyper::Response<WasiBody>, IoTask), Error>> + Send>;

/// Outgoing requests of one incoming request.
pub(crate) struct OutgoingRequests {
    pub(crate) egress: Arc<Egress>,
    pub(crate) function: String,
    /// Number of further requests that the guest may send.
    pub(crate) left: u32,
}

impl OutgoingRequests {
    /// Sends a request.
    pub(crate) fn send(
        &mut self,
        request: hyper::Request<WasiBody>,
        options: Option<RequestOptions>,
    ) -> SentRequest {
        let Some(left) = self.left.checked_sub(1) else {
            return Box::new(async { Err(Error::ConnectionLimitReached) });
        };
        self.left = left;
        let (egress, function) = (self.egress.clone(), self.function.clone());
        Box::new(async move { exchange(&egress, &function, request, options).await })
    }
}

/// Converts a failure of the broker to an error of wasi:http.
fn failed(failure: EgressFailure) -> Error {
    match failure {
        EgressFailure::Denied => Error::HttpRequestDenied,
        EgressFailure::ProhibitedAddress => Error::DestinationIpProhibited,
        EgressFailure::NotFound => Error::DestinationNotFound,
        EgressFailure::Refused => Error::ConnectionRefused,
        EgressFailure::Timeout => Error::ConnectionTimeout,
        EgressFailure::TooMany => Error::ConnectionLimitReached,
        EgressFailure::Tls => Error::TlsProtocolError,
    }
}

/// Returns the host without brackets, the port, and whether TLS is used.
fn destination(uri: &Uri) -> Result<(String, u16, bool), Error> {
    let tls = match uri.scheme() {
        Some(scheme) if *scheme == Scheme::HTTP => false,
        Some(scheme) if *scheme == Scheme::HTTPS => true,
        _ => return Err(Error::HttpProtocolError),
    };
    let authority = uri.authority().ok_or(Error::HttpRequestUriInvalid)?;
    // HTTP does not permit names and passwords in a URI.
    if authority.as_str().contains('@') || authority.host().is_empty() {
        return Err(Error::HttpRequestUriInvalid);
    }
    let host = authority.host();
    let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
    let port = port(authority)?.unwrap_or(if tls { 443 } else { 80 });
    Ok((bare.unwrap_or(host).to_owned(), port, tls))
}

/// Returns the port of an authority without user information. `None` if the scheme's port applies.
fn port(authority: &Authority) -> Result<Option<u16>, Error> {
    let rest = authority.as_str().get(authority.host().len()..);
    let digits = rest.and_then(|rest| rest.strip_prefix(':'));
    let Some(digits) = digits.filter(|digits| !digits.is_empty()) else {
        return Ok(None);
    };
    // `Authority::port` is not used: it returns `None` for an invalid port, so that `:65536` would
    // select the scheme's port. The check of the digits rejects a sign, which `parse` accepts.
    let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
    let port = digits.parse().ok().filter(|_| is_number);
    port.map(Some).ok_or(Error::HttpRequestUriInvalid)
}

/// Connects, sends the request and returns the response, with a task that drives the connection.
async fn exchange(
    egress: &Egress,
    function: &str,
    mut request: hyper::Request<WasiBody>,
    options: Option<RequestOptions>,
) -> Result<(hyper::Response<WasiBody>, IoTask), Error> {
    let (host, port, tls) = destination(request.uri())?;
    if *request.method() == Method::CONNECT {
        return Err(Error::HttpRequestMethodInvalid);
    }
    let wait = |wanted: Option<Duration>| wanted.unwrap_or(MAX_WAIT).min(MAX_WAIT);
    let (connect, first, between) = match options {
        Some(o) => (
            o.connect_timeout,
            o.first_byte_timeout,
            o.between_bytes_timeout,
        ),
        None => (None, None, None),
    };
    let connection = egress.connect(function, &host, port, tls);
    let connection = timeout(wait(connect), connection)
        .await
        .map_err(|_| Error::ConnectionTimeout)?
        .map_err(failed)?;
    let (mut sender, driver) = http1::Builder::new()
        .max_buf_size(MAX_HEAD_BYTES)
        .handshake(TokioIo::new(connection))
        .await?;
    let path = request
        .uri()
        .path_and_query()
        .map_or("/", |path| path.as_str());
    // The connection leads to one host: the request line contains only the path.
    *request.uri_mut() = path.parse().map_err(|_| Error::HttpRequestUriInvalid)?;
    // The driver reads and writes the connection, and must run while the response is awaited.
    let mut driver = tokio::spawn(driver);
    let response = tokio::select! {
        biased;
        // This comes first, because the driver also ends after a complete response.
        sent = timeout(wait(first), sender.send_request(request)) => {
            sent.map_err(|_| Error::ConnectionReadTimeout)?
        }
        ended = &mut driver => match ended {
            Ok(Err(error)) => return Err(error.into()),
            _ => return Err(Error::ConnectionTerminated),
        },
    };
    let body = |incoming| ResponseParts::new(incoming, wait(between)).boxed_unsync();
    // Dropping the connection must stop its driver.
    let driver = AbortOnDrop(driver);
    let io: IoTask = Box::new(async move {
        let mut driver = driver;
        match (&mut driver.0).await {
            Ok(ended) => ended.map_err(Error::from),
            Err(_) => Err(Error::ConnectionTerminated),
        }
    });
    Ok((response?.map(body), io))
}

/// Task that is stopped when this value is dropped.
struct AbortOnDrop(tokio::task::JoinHandle<hyper::Result<()>>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Response body with a timeout between its parts.
struct ResponseParts {
    incoming: Incoming,
    wait: Duration,
    timer: Pin<Box<Sleep>>,
}

impl ResponseParts {
    fn new(incoming: Incoming, wait: Duration) -> Self {
        let timer = Box::pin(tokio::time::sleep(wait));
        Self {
            incoming,
            wait,
            timer,
        }
    }
}

impl Body for ResponseParts {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        match Pin::new(&mut self.incoming).poll_frame(context) {
            Poll::Ready(frame) => {
                // Progress restarts the timeout.
                let next = tokio::time::Instant::now() + self.wait;
                self.timer.as_mut().reset(next);
                Poll::Ready(frame.map(|frame| frame.map_err(Error::from)))
            }
            Poll::Pending => {
                ready!(self.timer.as_mut().poll(context));
                Poll::Ready(Some(Err(Error::ConnectionReadTimeout)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_destination_is_a_host_a_port_and_a_scheme() {
        let found = |uri: &str| destination(&uri.parse().unwrap()).ok();
        let expected = |host: &str, port, tls| Some((host.to_owned(), port, tls));
        assert_eq!(found("http://a.test/"), expected("a.test", 80, false));
        assert_eq!(found("https://a.test:/"), expected("a.test", 443, true));
        assert_eq!(found("https://a.test:1/"), expected("a.test", 1, true));
        assert_eq!(found("http://[::1]:65535/"), expected("::1", 65_535, false));
        for bad in [
            "http://a.test:65536/",
            "http://a.test:99999999999/",
            "http://a.test:x/",
            "http://a.test:+1/",
            "http://u:p@a.test/",
            "ftp://a.test/",
            "/path",
        ] {
            assert_eq!(found(bad), None, "{bad}");
        }
    }
}
