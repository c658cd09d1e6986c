//! Shared state of a network, and the work of making and removing its slots.

use crate::NetError;
use crate::claim::RangeClaims;
use crate::connections::{self, ConnectionRecorder};
use crate::conntrack::ConntrackWatcher;
use crate::host;
use crate::host_addresses::AddressFollower;
use crate::namespace;
use crate::policy::HostReachability;
use crate::slot::{self, NicKind, Slot, SlotConfig};
use crate::slot_numbers::SlotNumbers;
use crate::upstream::Upstreams;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::thread;

/// Request to the thread that makes and removes slots.
pub(crate) enum SlotRequest {
    /// Make slots in advance.
    Fill,
    /// Remove a slot, after its record is complete.
    Destroy(u32, Option<Arc<ConnectionRecorder>>),
}

/// State that the clones of a network, and its leases, share.
pub(crate) struct NetworkState {
    pub config: SlotConfig,
    pub claim: PathBuf,
    pub reach: HostReachability,
    pub wanted: usize,
    pub nic: NicKind,
    pub ready: Mutex<VecDeque<Slot>>,
    pub numbers: Mutex<SlotNumbers>,
    /// Requests to the thread that makes and removes slots; none: the network is closed.
    pub requests: Mutex<Option<Sender<SlotRequest>>>,
    pub upstreams: Arc<Upstreams>,
    /// ConntrackLimits the sandboxes' share of the host's table of connections.
    pub watcher: Mutex<Option<ConntrackWatcher>>,
    /// Keeps the host's own addresses from sandboxes if the host is beyond a router.
    pub follower: Mutex<Option<AddressFollower>>,
    pub worker: Mutex<Option<thread::JoinHandle<()>>>,
}

/// Runs blocking work, such as programs and changes of namespaces.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, NetError> + Send + 'static,
) -> Result<T, NetError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(e) => Err(NetError::Unable(e.to_string())),
    }
}

impl NetworkState {
    pub fn request(&self, request: SlotRequest) {
        let left = match &*self.requests.lock() {
            Some(requests) => requests.send(request).err().map(|unsent| unsent.0),
            None => Some(request),
        };
        // A guest may outlive the open network for a moment.
        if let Some(SlotRequest::Destroy(number, record)) = left {
            // Errors are ignored: remains do no harm.
            let _ = namespace::outside(|| {
                self.destroy(&[(number, record)], false);
                self.tear_down_if_unused();
                Ok(())
            });
        }
    }

    pub fn make(&self, nic: NicKind) -> Result<Slot, NetError> {
        let number = self.number()?;
        slot::make(&self.config, number, nic).inspect_err(|_| self.numbers.lock().give_back(number))
    }

    /// Returns a free number: remains of a crash are removed, and numbers whose remains cannot be
    /// removed are skipped.
    fn number(&self) -> Result<u32, NetError> {
        loop {
            let number = {
                let mut numbers = self.numbers.lock();
                let most = numbers.most();
                numbers.take().ok_or(NetError::Full(most))?
            };
            match slot::clear(&self.config, number) {
                Ok(()) => return Ok(number),
                Err(what) => {
                    tracing::warn!("network slot {number} is left out: {what} cannot be removed");
                    self.numbers.lock().block(number);
                }
            }
        }
    }

    fn destroy(&self, gone: &[(u32, Option<Arc<ConnectionRecorder>>)], unused: bool) {
        if gone.is_empty() {
            return;
        }
        gone.iter()
            .filter_map(|(_, record)| record.as_ref())
            .for_each(|record| record.close());
        let numbers: Vec<u32> = gone.iter().map(|(number, _)| *number).collect();
        slot::destroy(&self.config, &numbers);
        // Unused slots have no connections; each removal costs a walk through the table.
        let used: Vec<u32> = match unused {
            true => Vec::new(),
            false => numbers.clone(),
        };
        if let Err(e) = connections::delete(&self.config.addresses(&used)) {
            tracing::warn!("connections of sandboxes that are gone stay in the host's table: {e}");
        }
        let mut own = self.numbers.lock();
        numbers.iter().for_each(|&number| own.give_back(number));
    }

    /// Makes and removes slots, one after the other, until the network is closed and all requests
    /// are done.
    pub fn work(&self, inbox: &Receiver<SlotRequest>) {
        while let Ok(first) = inbox.recv() {
            let mut gone = Vec::new();
            for request in std::iter::once(first).chain(inbox.try_iter()) {
                match request {
                    SlotRequest::Fill => {}
                    SlotRequest::Destroy(number, record) => gone.push((number, record)),
                }
            }
            self.destroy(&gone, false);
            self.fill();
        }
        let unused: Vec<_> = self.ready.lock().drain(..).collect();
        let unused: Vec<_> = unused.iter().map(|slot| (slot.number, None)).collect();
        self.destroy(&unused, true);
        self.tear_down_if_unused();
    }

    fn fill(&self) {
        while self.requests.lock().is_some() && self.ready.lock().len() < self.wanted {
            match self.make(self.nic) {
                Ok(slot) => self.ready.lock().push_back(slot),
                // The caller that needs a slot gets the error.
                Err(NetError::Full(_)) => return,
                Err(e) => {
                    tracing::warn!("a network slot could not be made in advance: {e}");
                    return;
                }
            }
        }
    }

    pub fn tear_down_if_unused(&self) {
        if self.numbers.lock().in_use() > 0 {
            return;
        }
        match RangeClaims::lock() {
            Ok(claims) => host::tear_down(&claims, &self.config.tag),
            Err(e) => tracing::warn!(
                "the network of {} could not be removed: {e}",
                self.claim.display()
            ),
        }
    }
}
