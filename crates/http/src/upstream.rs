//! HTTP/1.1 connections that requests are passed on to: one request at a time, and bytes moved by
//! whoever waits for them.

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

/// Connection with at most one request on it. Dropped, it is closed at once.
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
    /// Connection of hyper's handshake. Errors of it surface in the requests on it.
    pub fn new<T>((sender, connection): (SendRequest<B>, Connection<T, B>)) -> Self
    where
        T: Read + Write + Unpin + Send + 'static,
    {
        let moving = connection.with_upgrades();
        let driver = ConnectionDriver::new(async move { drop(moving.await) });
        Self { sender, driver }
    }

    /// Sends a request and waits, without limit, for the head of the response. `whole`: all of the
    /// request is there, so that only whoever waits for the response need move bytes.
    pub async fn send(
        &mut self,
        request: Request<B>,
        whole: bool,
    ) -> Result<Response<Incoming>, TrySendError<Request<B>>> {
        let response = self.sender.try_send_request(request);
        if !whole {
            self.driver.spawn();
        }
        self.driver.drive(response).await
    }
}

impl<B> UpstreamConnection<B> {
    /// Reads of the response's body.
    pub fn poll_frame(
        &mut self,
        body: &mut Incoming,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<hyper::body::Bytes>, hyper::Error>>> {
        let mut body = Pin::new(body);
        self.driver
            .poll_with(context, |context| body.as_mut().poll_frame(context))
    }

    /// True if it can take a request at once, and the other side has not closed it, as far as that
    /// is known by now.
    pub fn is_ready(&mut self) -> bool {
        !self.driver.has_ended() && self.sender.is_ready()
    }

    /// True if the other side has closed it, as far as that is known by now.
    pub fn has_ended(&mut self) -> bool {
        self.driver.has_ended()
    }

    /// Waits until it can take a request; false if it never will.
    pub async fn ready(&mut self) -> bool {
        self.driver.drive(self.sender.ready()).await.is_ok()
    }
}
