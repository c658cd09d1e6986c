//! Interface to the service that answers requests that address no sandbox: the REST API.

use crate::body::{Body, BoxError};
use crate::request_body::ClientRequestBody;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::{Request, Response};
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use tower_service::Service;

/// Service that answers requests that address no sandbox. Every `tower` service of requests
/// implements this trait, such as an `axum` router.
pub trait ControlPlane: Clone + Send + 'static {
    /// Answers a request.
    fn answer(
        &mut self,
        request: Request<ClientRequestBody>,
    ) -> impl Future<Output = Response<Body>> + Send;
}

impl<T, B> ControlPlane for T
where
    T: Service<Request<ClientRequestBody>, Response = Response<B>, Error = Infallible>
        + Clone
        + Send
        + 'static,
    T::Future: Send,
    B: hyper::body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    async fn answer(&mut self, request: Request<ClientRequestBody>) -> Response<Body> {
        let Ok(()) = poll_fn(|cx| self.poll_ready(cx)).await;
        let Ok(answer) = self.call(request).await;
        answer.map(|body| body.map_err(Into::into).boxed_unsync())
    }
}
