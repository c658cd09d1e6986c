//! Task that sends queued deliveries to the servers of webhooks.
//!
//! A *delivery* is an event that must be sent to the URL of a webhook. Events of one sandbox are
//! sent in order.
//!
//! The *head* of a request or response is its first line and its headers, without the body.

use crate::WebhookError;
use crate::connect::Connect;
use crate::target::Target;
use crate::webhooks::Webhooks;
use crate::webhooks::deliveries::DueDelivery;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use bytes::Bytes;
use http_body_util::Full;
use hyper::Request;
use hyper::header::{CONTENT_TYPE, HOST, USER_AGENT};
use hyper_util::rt::TokioIo;
use jiffy_engine_api::now_ms;
use sha2::{Digest, Sha256};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// Maximum number of concurrent deliveries.
const MAX_CONCURRENT: usize = 32;
/// Maximum number of concurrent deliveries of one webhook.
const MAX_PER_WEBHOOK: usize = 4;
/// Timeout of a delivery, with its connection.
const DELIVERY_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of bytes of the head of a response.
const MAX_HEAD_BYTES: usize = 16 * 1024;
/// Delay after an error of the database.
const ERROR_DELAY: Duration = Duration::from_secs(5);
/// Maximum time until the database is read again.
const MAX_WAIT: Duration = Duration::from_secs(60);

impl Webhooks {
    /// Sends deliveries when they are due. Never returns.
    pub(crate) async fn send_all(&self, connect: Arc<dyn Connect>) {
        let mut tasks: JoinSet<DueDelivery> = JoinSet::new();
        // Sandboxes whose first delivery is being sent, by webhook.
        let mut active: HashSet<(String, String)> = HashSet::new();
        loop {
            let wait = match self.start_due(&mut tasks, &mut active, &connect).await {
                Ok(wait) => wait,
                Err(e) => {
                    tracing::error!(error = %e, "cannot read pending deliveries of webhooks");
                    ERROR_DELAY
                }
            };
            tokio::select! {
                () = self.0.queued.notified() => {}
                Some(done) = tasks.join_next(), if !tasks.is_empty() => match done {
                    Ok(due) => {
                        active.remove(&(due.webhook, due.sandbox));
                    }
                    // A task that panicked: its sandbox is unknown. All tasks end, and all pending
                    // deliveries are read again.
                    Err(_) => {
                        tasks.shutdown().await;
                        active.clear();
                    }
                },
                () = sleep(wait) => {}
            }
        }
    }

    /// Starts tasks for deliveries that are due. Returns the time until the next one.
    async fn start_due(
        &self,
        tasks: &mut JoinSet<DueDelivery>,
        active: &mut HashSet<(String, String)>,
        connect: &Arc<dyn Connect>,
    ) -> Result<Duration, WebhookError> {
        let (due, next_ms) = self
            .blocking(|webhooks| {
                // Twice the limit, because the result also has the deliveries that are being sent.
                let due = webhooks.due(2 * MAX_PER_WEBHOOK)?;
                Ok((due, webhooks.next_attempt()?))
            })
            .await?;
        for delivery in due {
            let key = (delivery.webhook.clone(), delivery.sandbox.clone());
            let of_webhook = active
                .iter()
                .filter(|(webhook, _)| *webhook == key.0)
                .count();
            if active.contains(&key)
                || of_webhook >= MAX_PER_WEBHOOK
                || tasks.len() >= MAX_CONCURRENT
            {
                continue;
            }
            active.insert(key);
            let (webhooks, connect) = (self.clone(), connect.clone());
            tasks.spawn(async move {
                if let Err(e) = webhooks.deliver(&delivery, &*connect).await {
                    tracing::error!(
                        webhook = delivery.webhook,
                        error = %e,
                        "cannot record the result of a delivery"
                    );
                    sleep(ERROR_DELAY).await;
                }
                delivery
            });
        }
        // A delivery that is being sent counts as due, so the next time may be in the past: wait
        // for at least a second. The end of a delivery wakes the caller earlier.
        let wait = next_ms.map_or(MAX_WAIT, |next| {
            Duration::from_millis(next.saturating_sub(now_ms()).max(1_000))
        });
        Ok(wait.min(MAX_WAIT))
    }

    /// Sends a delivery and records the result.
    async fn deliver(&self, due: &DueDelivery, connect: &dyn Connect) -> Result<(), WebhookError> {
        let webhook = due.webhook.clone();
        let destination = self.blocking(move |webhooks| webhooks.destination(&webhook));
        let sent = match destination.await? {
            Some(destination) => {
                let request = request(due, &destination.url, &destination.secret);
                let sending = async { send(request?, connect).await };
                let sent = timeout(DELIVERY_TIMEOUT, sending).await;
                sent.unwrap_or_else(|_| {
                    Err(format!("no response in {} s", DELIVERY_TIMEOUT.as_secs()))
                })
            }
            None => Err("the webhook was removed, or its secret cannot be decrypted".to_owned()),
        };
        let due = due.clone();
        self.blocking(move |webhooks| match sent {
            Ok(()) => webhooks.on_success(due.id),
            Err(e) => webhooks.on_failure(&due, &e),
        })
        .await
    }

    /// Runs a function that waits for the disk.
    pub(crate) async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> Result<T, WebhookError> + Send + 'static,
    ) -> Result<T, WebhookError> {
        let webhooks = self.clone();
        match tokio::task::spawn_blocking(move || work(&webhooks)).await {
            Ok(done) => done,
            // The runtime ends: the caller is cancelled.
            Err(_) => std::future::pending().await,
        }
    }
}

/// Returns the signature of a body, as E2B computes it.
fn signature(secret: &[u8], body: &str) -> String {
    let digest = Sha256::new().chain_update(secret).chain_update(body);
    STANDARD_NO_PAD.encode(digest.finalize())
}

/// Returns the request of a delivery, with a signature of its body.
fn request(
    due: &DueDelivery,
    url: &str,
    secret: &[u8],
) -> Result<(Target, Request<Full<Bytes>>), String> {
    let target = Target::parse(url).map_err(|e| e.to_string())?;
    let request = Request::post(&target.path)
        .header(HOST, &target.authority)
        .header(CONTENT_TYPE, "application/json")
        .header(USER_AGENT, concat!("jiffy/", env!("CARGO_PKG_VERSION")))
        .header("e2b-webhook-id", &due.webhook)
        .header("e2b-delivery-id", format!("{}-{}", due.id, due.attempts))
        .header("e2b-signature-version", "v1")
        .header("e2b-signature", signature(secret, &due.body))
        .body(Full::new(Bytes::from(due.body.clone())));
    Ok((target, request.map_err(|e| e.to_string())?))
}

/// Sends a request. Only a status 2xx is a success: redirects are not followed, because they could
/// lead to another server than the owner has named.
async fn send(
    (target, request): (Target, Request<Full<Bytes>>),
    connect: &dyn Connect,
) -> Result<(), String> {
    let stream = connect.connect(&target.host, target.port, target.is_tls);
    let stream = TokioIo::new(stream.await?);
    let mut builder = hyper::client::conn::http1::Builder::new();
    let handshake = builder
        .max_buf_size(MAX_HEAD_BYTES)
        .handshake::<_, Full<Bytes>>(stream);
    let (mut sender, connection) = handshake.await.map_err(|e| e.to_string())?;
    // The connection ends with the response: its body is not read.
    let mut response = std::pin::pin!(sender.send_request(request));
    let response = tokio::select! {
        response = &mut response => response,
        ended = connection => match ended {
            // The server may have closed the connection directly after its response.
            Ok(()) => response.await,
            Err(e) => Err(e),
        },
    };
    let status = response.map_err(|e| e.to_string())?.status();
    if status.is_success() {
        Ok(())
    } else {
        Err(format!("the server answered {}", status.as_u16()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_are_those_of_e2b() {
        // printf 'secret{"a":1}' | openssl dgst -sha256 -binary | base64
        let expected = SIGNATURE.trim_end_matches('=');
        assert_eq!(signature(b"secret", "{\"a\":1}"), expected);
    }

    const SIGNATURE: &str = "N7005LKS7534v+cOP1BSYTkklJDDwllM8gF1unZl4B0=";
}
