//! Warm pools that follow the demand of a fleet: the coordinator of the fleet counts which
//! templates are requested, and sends each host the number of guests to have ready.
//!
//! The *fingerprint* of a template and size is a hash of everything that determines their guests. A
//! *bucket* of the pool has the waiting guests with one fingerprint. Its *target* is the number of
//! guests that should wait.

use super::{Pool, WarmPool};
use crate::sandboxes::Sandboxes;
use jiffy_engine_api::SandboxSize;
use std::collections::HashMap;

/// Maximum part in percent of the free memory of the host that demanded guests may occupy.
const MAX_MEMORY_PERCENT: u64 = 10;

/// Demand for guests of a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolDemand {
    /// Template.
    pub template: String,
    /// Size of the guests.
    pub size: SandboxSize,
    /// Number of guests.
    pub guests: usize,
}

/// Demanded number of guests by the fingerprint of a template and size.
#[derive(Debug, Default)]
pub(super) struct Demand(HashMap<String, (String, usize)>);

impl Demand {
    pub fn of(&self, fingerprint: &str) -> usize {
        self.0.get(fingerprint).map_or(0, |(_, guests)| *guests)
    }

    /// Returns the largest demand among the sizes of the template.
    pub fn of_template(&self, template: &str) -> usize {
        let mut guests = 0;
        for (name, demanded) in self.0.values() {
            if name == template {
                guests = guests.max(*demanded);
            }
        }
        guests
    }
}

impl Pool {
    /// Replaces the demand, and stops surplus guests. Returns fingerprint, template and snapshot of
    /// the buckets, to refill them.
    fn set_demand(&self, demand: Demand) -> Vec<(String, String, String)> {
        // Surplus guests are stopped after the lock is released, since stopping takes time.
        let mut surplus = Vec::new();
        let mut buckets = self.buckets.lock();
        *self.demand.lock() = demand;
        for (fingerprint, bucket) in buckets.iter_mut() {
            let target = self.target(fingerprint, &bucket.template);
            let retained = bucket.waiting.len().min(target);
            surplus.extend(bucket.waiting.drain(retained..));
        }
        let all = buckets.iter().map(|(fingerprint, bucket)| {
            let (template, snapshot) = (bucket.template.clone(), bucket.snapshot.clone());
            (fingerprint.clone(), template, snapshot)
        });
        let all = all.collect();
        drop(buckets);
        all
    }

    /// Returns the memory of the waiting guests in MiB.
    fn memory_mib(&self) -> u64 {
        let buckets = self.buckets.lock();
        let waiting = buckets.values().flat_map(|bucket| &bucket.waiting);
        waiting
            .map(|(_, reservation)| reservation.memory_mib())
            .sum()
    }
}

impl WarmPool<'_> {
    /// Changes the pools to a demand, most important first, within a part of the host's free
    /// memory. The guests are restored in the background, and surplus guests are stopped. A
    /// template without a snapshot is booted once. Pools whose size was set are not changed, and
    /// no pool is changed if the host has no pools by default.
    pub async fn follow(self, demand: &[PoolDemand]) {
        // The host has no pools by default.
        if self.0.pool.default_target == 0 {
            return;
        }
        let free = self.0.admission.free().memory_mib;
        let mut budget = free.map_or(u64::MAX, |free| {
            (free.saturating_add(self.0.pool.memory_mib())) / 100 * MAX_MEMORY_PERCENT
        });
        let this = Sandboxes(self.0.clone());
        let engine = self.0.engines.default_engine();
        let (mut accepted, mut fingerprints) = (Vec::new(), HashMap::new());
        for pool in demand {
            let memory = u64::from(pool.size.memory_mib).max(1);
            let affordable = usize::try_from(budget / memory).unwrap_or(usize::MAX);
            let guests = pool.guests.min(affordable);
            if guests == 0 {
                continue;
            }
            let key = this.templates();
            match key.snapshot_key(engine, &pool.template, pool.size).await {
                Ok(fingerprint) => {
                    budget -= memory.saturating_mul(guests as u64);
                    fingerprints.insert(fingerprint, (pool.template.clone(), guests));
                    accepted.push(pool);
                }
                // The template was removed meanwhile.
                Err(error) => {
                    tracing::debug!(template = pool.template, %error, "cannot create the warm pool of a template")
                }
            }
        }
        for (fingerprint, template, snapshot) in self.0.pool.set_demand(Demand(fingerprints)) {
            self.refill(&fingerprint, &template, &snapshot);
        }
        for pool in accepted {
            let Ok(_operation) = self.0.operations.begin() else {
                return;
            };
            let cached = this.templates().cache(&pool.template, pool.size).await;
            if let Err(error) = cached {
                tracing::warn!(template = pool.template, %error, "cannot fill the warm pool");
            }
        }
    }
}
