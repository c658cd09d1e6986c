//! HTTP/1.1 connections to guests for forwarding requests, with one request at a time. The task
//! that waits for a response usually also performs the connection's I/O, which avoids waking a
//! second task.
//!
//! The *head* of a request or response is its first line and its headers, without the body.

mod connection_driver;
mod own_waker;

use crate::BoxError;
use connection_driver::ConnectionDriver;
use hyper::body::{Body, Frame, Incoming};
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{Connection, SendRequest};
use hyper::rt::{Read, Write};
use hyper::{Request, Response};
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

/// Connection for one request at a time. Dropping this value closes the connection immediately.
pub struct UpstreamConnection<B> {
    sender: SendRequest<B>,
    driver: ConnectionDriver,
}

impl<B> fmt::Debug for UpstreamConnection<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("UpstreamConnection");
        shown.field("driver", &self.driver).finish_non_exhaustive()
    }
}

impl<B> UpstreamConnection<B>
where
    B: Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
{
    /// Creates a connection from the result of hyper's handshake. Errors of the connection are
    /// reported by the requests on it.
    pub fn new<T>((sender, connection): (SendRequest<B>, Connection<T, B>)) -> Self
    where
        T: Read + Write + Unpin + Send + 'static,
    {
        let io = connection.with_upgrades();
        // The error is dropped here, because the request in flight fails with it, too.
        let driver = ConnectionDriver::new(async move { drop(io.await) });
        Self { sender, driver }
    }

    /// Sends a request and waits, without timeout, for the head of the response. `is_body_complete`
    /// may be true only if the request has no body to send. The task that waits for the response
    /// can then perform the I/O alone.
    pub async fn send(
        &mut self,
        request: Request<B>,
        is_body_complete: bool,
    ) -> Result<Response<Incoming>, TrySendError<Request<B>>> {
        // On failure, the request is returned with the error, so that the caller can repeat it.
        let response = self.sender.try_send_request(request);
        // The body must be sent even while the caller does not poll for the response.
        if !is_body_complete {
            self.driver.spawn();
        }
        self.driver.drive(response).await
    }
}

impl<B> UpstreamConnection<B> {
    /// Polls for a frame of the response's body.
    pub fn poll_frame(
        &mut self,
        body: &mut Incoming,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<hyper::body::Bytes>, hyper::Error>>> {
        let mut body = Pin::new(body);
        self.driver
            .poll_with(context, |context| body.as_mut().poll_frame(context))
    }

    /// Returns true if the connection can take a request immediately, and is not known to be
    /// closed.
    pub fn is_ready(&mut self) -> bool {
        !self.driver.has_ended() && self.sender.is_ready()
    }

    /// Returns true if the peer is known to have closed the connection.
    pub fn has_ended(&mut self) -> bool {
        self.driver.has_ended()
    }

    /// Waits until the connection can take a request. Returns false if it never will.
    pub async fn ready(&mut self) -> bool {
        self.driver.drive(self.sender.ready()).await.is_ok()
    }
}
