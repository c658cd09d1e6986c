//! Service of one VMM.

use super::link::VmmLink;
use super::parts::{OpenParts, PartSlot};
use crate::Selection;
use crate::host::RemoteError;
use crate::host::fetch_grants::{FetchGrant, LayerOrigin};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use jiffy_proto::fetch::{FetchAnswer, FetchOutcome, FetchRequest, MAX_OPEN_REQUESTS};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

/// Chunks that are fetched for one VMM at once; a guest has fewer threads that wait.
const MAX_FETCHES: usize = 32;
/// Time for which an answer may wait for the VMM to read those before it.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Time after which the fetch of whole layers is tried again, at first and at last.
const FIRST_RETRY: Duration = Duration::from_millis(500);
const LAST_RETRY: Duration = Duration::from_secs(30);

/// End of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServiceEnd {
    /// The VMM closed it.
    Closed,
    /// The VMM's layers are whole, and it was told so.
    Complete,
}

/// A layer of the grant.
struct Granted {
    origin: LayerOrigin,
    slot: Arc<PartSlot>,
}

/// Service of one VMM.
pub struct VmmService {
    parts: Arc<OpenParts>,
    layers: BTreeMap<u32, Granted>,
    prefetch: bool,
    fetches: Semaphore,
}

impl VmmService {
    /// The service that `grant` allows.
    pub fn new(parts: &Arc<OpenParts>, grant: FetchGrant) -> Self {
        let layers = grant.layers.into_iter().map(|layer| {
            let granted = Granted {
                slot: parts.slot(&layer.origin),
                origin: layer.origin,
            };
            (layer.number, granted)
        });
        Self {
            layers: layers.collect(),
            parts: parts.clone(),
            prefetch: grant.prefetch,
            fetches: Semaphore::new(MAX_FETCHES),
        }
    }

    /// Answers the VMM's requests until the connection ends.
    pub async fn serve(&self, link: &VmmLink) -> io::Result<ServiceEnd> {
        let mut open = FuturesUnordered::new();
        let mut whole = std::pin::pin!(self.fetch_all());
        let mut opening = std::pin::pin!(self.open_all());
        let (mut opened, mut complete) = (false, false);
        loop {
            tokio::select! {
                () = &mut opening, if !opened => opened = true,
                answer = open.next(), if !open.is_empty() => {
                    if let Some(answer) = answer {
                        answer_in_time(link, &answer).await?;
                    }
                }
                // A VMM that asks for more than it may is not read from.
                request = link.request(), if open.len() < MAX_OPEN_REQUESTS => {
                    match request? {
                        Some(request) => open.push(self.answer(request)),
                        None => return Ok(ServiceEnd::Closed),
                    }
                }
                () = &mut whole, if self.prefetch && !complete => {
                    complete = true;
                    for &layer in self.layers.keys() {
                        let request = FetchRequest { layer, chunk: 0 };
                        let outcome = FetchOutcome::Complete;
                        answer_in_time(link, &FetchAnswer { request, outcome }).await?;
                    }
                }
            }
            if complete && open.is_empty() {
                return Ok(ServiceEnd::Complete);
            }
        }
    }

    async fn answer(&self, request: FetchRequest) -> FetchAnswer {
        let outcome = match self.fetch(request).await {
            Ok(()) => FetchOutcome::Present,
            Err(e) => {
                tracing::debug!(?request, "a chunk was not fetched: {e}");
                FetchOutcome::Failed(e.to_string())
            }
        };
        FetchAnswer { request, outcome }
    }

    async fn fetch(&self, request: FetchRequest) -> Result<(), RemoteError> {
        let layer = self.layers.get(&request.layer);
        let layer = layer.ok_or(RemoteError::NotGranted)?;
        let _turn = self.fetches.acquire().await;
        let part = self.parts.open(&layer.slot, &layer.origin).await?;
        // A chunk that is not stored is a hole of the file, as is one beyond the file's end.
        let shared = &self.parts.remote().shared;
        shared.fetch_chunk(part, request.chunk).await?;
        Ok(())
    }

    /// Opens all layers, so that the first request need not wait for it.
    async fn open_all(&self) {
        for layer in self.layers.values() {
            if let Err(e) = self.parts.open(&layer.slot, &layer.origin).await {
                tracing::warn!("a layer that a guest needs cannot be opened for now: {e}");
            }
        }
    }

    /// Fetches all layers whole, however long it takes, the uppermost first.
    async fn fetch_all(&self) {
        for layer in self.layers.values().rev() {
            let mut wait = FIRST_RETRY;
            while let Err(e) = self.fetch_layer(layer).await {
                tracing::warn!("a layer is fetched again in {wait:?}: {e}");
                tokio::time::sleep(wait).await;
                wait = LAST_RETRY.min(wait * 2);
            }
        }
    }

    async fn fetch_layer(&self, layer: &Granted) -> Result<(), RemoteError> {
        let part = self.parts.open(&layer.slot, &layer.origin).await?;
        let shared = &self.parts.remote().shared;
        shared.fill(part, Selection::All).await?;
        Ok(())
    }
}

async fn answer_in_time(link: &VmmLink, answer: &FetchAnswer) -> io::Result<()> {
    let sent = tokio::time::timeout(ANSWER_TIMEOUT, link.answer(answer)).await;
    sent.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}
