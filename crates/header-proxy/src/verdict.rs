//! Responses that the proxy itself sends to the guest, for example if a request is rejected. They
//! contain no value of a header.

use crate::exchange::ProxyBody;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Response, StatusCode};

/// Reason why the proxy does not forward a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Rejection {
    /// The request is invalid or ambiguous.
    Invalid(&'static str),
    /// The host of the request is not the host of the connection.
    Misdirected,
    /// The rules do not permit the request in this form.
    Forbidden(&'static str),
    /// A header cannot be added.
    Headers(String),
    /// The server cannot be used.
    Server(String),
}

impl Rejection {
    /// Returns the HTTP status of the rejection.
    fn status(&self) -> StatusCode {
        match self {
            Self::Invalid(_) => StatusCode::BAD_REQUEST,
            Self::Misdirected => StatusCode::MISDIRECTED_REQUEST,
            Self::Forbidden(_) => StatusCode::FORBIDDEN,
            Self::Headers(_) | Self::Server(_) => StatusCode::BAD_GATEWAY,
        }
    }

    /// Returns the message of the rejection.
    fn text(&self) -> String {
        match self {
            Self::Invalid(why) | Self::Forbidden(why) => (*why).to_owned(),
            Self::Misdirected => {
                "the host of the request differs from the host of the connection".to_owned()
            }
            Self::Headers(why) | Self::Server(why) => why.clone(),
        }
    }

    /// Returns the response.
    pub fn response(&self) -> Response<ProxyBody> {
        let text = format!("jiffy: {}\n", self.text());
        let body = Full::new(Bytes::from(text));
        let mut response = Response::new(body.map_err(|never| match never {}).boxed_unsync());
        *response.status_mut() = self.status();
        let plain = HeaderValue::from_static("text/plain; charset=utf-8");
        response.headers_mut().insert(CONTENT_TYPE, plain);
        response
    }
}
