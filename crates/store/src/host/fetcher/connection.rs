//! Connection of the fetcher to one VMM: receives requests for chunks, fetches the chunks from the
//! store, and answers. The fetcher is a process that downloads missing memory for restored guests.
//! A grant lists the layers that one VMM may read. The VMM may be hostile.
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors. In the shared store, a snapshot consists of *parts*, one for each of its
//! layers and other files. A *chunk* is 64 KiB of memory or of a disk.

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

/// Maximum number of concurrent fetches per VMM: several for each of a guest's at most 8 vCPUs.
/// Further requests wait.
const MAX_FETCHES: usize = 32;
/// Maximum time for sending an answer while the VMM does not read earlier ones.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// First pause between attempts at fetching whole layers. Each failure doubles the pause.
const FIRST_RETRY: Duration = Duration::from_millis(500);
/// Maximum pause between these attempts.
const LAST_RETRY: Duration = Duration::from_secs(30);

/// Reason for the end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServiceEnd {
    /// The VMM closed the connection.
    Closed,
    /// The VMM's layers are complete, and the VMM was notified.
    Complete,
}

/// Layer of the grant, with the slot for its opened part. All VMMs that read the same layer share
/// the slot.
struct Granted {
    origin: LayerOrigin,
    slot: Arc<PartSlot>,
}

/// Service for one VMM.
pub struct VmmService {
    parts: Arc<OpenParts>,
    /// Layers that the grant permits, by number.
    layers: BTreeMap<u32, Granted>,
    /// True if chunks are fetched before the guest accesses them.
    prefetch: bool,
    fetches: Semaphore,
}

impl VmmService {
    /// Creates the service that `grant` permits.
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
                // Do not read from a VMM that has the maximum number of open requests.
                request = link.request(), if open.len() < MAX_OPEN_REQUESTS => {
                    match request? {
                        Some(request) => open.push(self.answer(request)),
                        None => return Ok(ServiceEnd::Closed),
                    }
                }
                () = &mut whole, if self.prefetch && !complete => {
                    complete = true;
                    // The chunk number is a placeholder: the answer concerns the whole layer.
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

    /// Fetches a chunk, and returns the answer to the VMM.
    async fn answer(&self, request: FetchRequest) -> FetchAnswer {
        let outcome = match self.fetch(request).await {
            Ok(()) => FetchOutcome::Present,
            Err(e) => {
                tracing::debug!(?request, error = %e, "cannot fetch a chunk");
                FetchOutcome::Failed(e.to_string())
            }
        };
        FetchAnswer { request, outcome }
    }

    /// Fetches a chunk into the cache of this host. The VMM reads the chunk from the cached file,
    /// so the answer contains no data.
    async fn fetch(&self, request: FetchRequest) -> Result<(), RemoteError> {
        let layer = self
            .layers
            .get(&request.layer)
            .ok_or(RemoteError::NotGranted)?;
        // The call cannot fail: the semaphore is never closed.
        let _permit = self.fetches.acquire().await;
        let part = self.parts.open(&layer.slot, &layer.origin).await?;
        // Ignore whether the part stores the chunk. A chunk that is not stored is a hole of the
        // file and needs no fetch, and neither does a chunk beyond the end of the file.
        let shared = &self.parts.remote().shared;
        shared.fetch_chunk(part, request.chunk).await?;
        Ok(())
    }

    /// Opens all layers in advance, so that the first request does not wait for it.
    async fn open_all(&self) {
        let opening = self.layers.values().map(async |layer| {
            if let Err(e) = self.parts.open(&layer.slot, &layer.origin).await {
                tracing::warn!(error = %e, "cannot open a layer of a guest: retried on its first request");
            }
        });
        futures_util::future::join_all(opening).await;
    }

    /// Fetches all layers completely, newest layer (highest number) first. Retries without limit.
    async fn fetch_all(&self) {
        for layer in self.layers.values().rev() {
            let mut wait = FIRST_RETRY;
            while let Err(e) = self.fetch_layer(layer).await {
                tracing::warn!(error = %e, retry_in = ?wait, "cannot fetch a layer");
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
