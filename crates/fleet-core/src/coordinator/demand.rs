//! Demand for templates on each host, from which the sizes of warm pools follow. A *warm pool*
//! contains started guests of one template, which future creates use.
//!
//! Each placement counts for the selected host, and for the host that would be selected next. If
//! the selected host has no more room, the following creates find guests on the other one. The
//! counts decay with a time constant of one minute. A count is therefore the number of creates per
//! minute.

use crate::ids::{MemberId, Millis};
use crate::message::{MAX_POOLS, PoolDemand};
use jiffy_scheduler::TemplateId;
use std::collections::BTreeMap;

/// Count of one placement. Counts are integers, so that all hosts compute the same values.
const ONE: u64 = 1_000;
/// Interval at which counts decay.
const DECAY_INTERVAL_MS: u64 = 1_000;
/// Number of intervals after which a count has decayed to 1/e.
const TIME_CONSTANT: u64 = 60;
/// Smaller counts are removed. A single create therefore counts for about four minutes.
const MIN_COUNT: u64 = 20;
/// Maximum time in seconds until a used guest of a pool is replaced, while creates arrive
/// continuously. Includes the restore of the new guest.
const REFILL_S: u64 = 4;
/// A pool covers the demand of this number of refills.
const REFILLS: u64 = 2;
/// Maximum number of guests in the pool of a template on a host.
const MAX_POOL: u64 = 64;
/// Maximum number of counts. Placements of further templates are not counted.
const MAX_COUNTS: usize = 65_536;

/// Decaying number of placements for each host and template.
#[derive(Debug)]
pub(super) struct Demand {
    counts: BTreeMap<(MemberId, TemplateId), u64>,
    next_decay: Millis,
}

impl Demand {
    pub fn new(now: Millis) -> Self {
        Self {
            counts: BTreeMap::new(),
            next_decay: now.plus(DECAY_INTERVAL_MS),
        }
    }

    /// Counts a placement.
    pub fn add(&mut self, member: MemberId, template: TemplateId) {
        let is_full = self.counts.len() >= MAX_COUNTS;
        match self.counts.get_mut(&(member, template)) {
            Some(count) => *count = count.saturating_add(ONE),
            None if is_full => {}
            None => {
                self.counts.insert((member, template), ONE);
            }
        }
    }

    /// Reduces the counts by the time that has passed.
    pub fn decay(&mut self, now: Millis) {
        while self.next_decay <= now {
            // All counts have decayed, for example after a long pause of this process.
            if self.counts.is_empty() {
                self.next_decay = now.plus(DECAY_INTERVAL_MS);
                return;
            }
            self.next_decay = self.next_decay.plus(DECAY_INTERVAL_MS);
            self.counts.retain(|_, count| {
                *count -= count.div_ceil(TIME_CONSTANT);
                *count >= MIN_COUNT
            });
        }
    }

    /// Removes the counts of a host.
    pub fn remove(&mut self, member: MemberId) {
        self.counts.retain(|(counted, _), _| *counted != member);
    }

    /// Returns the sizes of the pools of a host, the largest first.
    pub fn pools(&self, member: MemberId) -> Vec<PoolDemand> {
        let first = (member, TemplateId(0));
        let counts = self.counts.range(first..=(member, TemplateId(u64::MAX)));
        let mut pools: Vec<_> = counts
            .map(|(&(_, template), &count)| {
                let guests = count.saturating_mul(REFILL_S * REFILLS);
                let guests = guests.div_ceil(ONE * TIME_CONSTANT).min(MAX_POOL);
                PoolDemand {
                    template: template.0,
                    guests: u32::try_from(guests).unwrap_or(u32::MAX),
                }
            })
            .collect();
        pools.sort_by_key(|pool| (std::cmp::Reverse(pool.guests), pool.template));
        pools.truncate(MAX_POOLS);
        pools
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: MemberId = MemberId(1);
    const TEMPLATE: TemplateId = TemplateId(7);

    fn guests(demand: &Demand) -> u32 {
        demand.pools(HOST).first().map_or(0, |pool| pool.guests)
    }

    #[test]
    fn a_pool_covers_two_refills_at_the_rate_of_the_last_minute() {
        let mut demand = Demand::new(Millis(0));
        // Two creates per second for five minutes.
        for second in 1..=300 {
            demand.add(HOST, TEMPLATE);
            demand.add(HOST, TEMPLATE);
            demand.decay(Millis(second * 1_000));
        }
        // Two per second for 8 s.
        assert_eq!(guests(&demand), 16);
        // One minute without creates reduces the demand to 16 / e. After five minutes, less than
        // one guest remains, which is rounded up. After ten, the count is below the minimum.
        demand.decay(Millis(360_000));
        assert_eq!(guests(&demand), 6);
        demand.decay(Millis(600_000));
        assert_eq!(guests(&demand), 1);
        demand.decay(Millis(900_000));
        assert_eq!(demand.pools(HOST), []);
    }

    #[test]
    fn pools_of_a_host_are_bounded_and_sorted_by_demand() {
        let mut demand = Demand::new(Millis(0));
        demand.add(HOST, TemplateId(1));
        for _ in 0..10_000 {
            demand.add(HOST, TEMPLATE);
        }
        demand.add(MemberId(2), TEMPLATE);
        let pools = demand.pools(HOST);
        let sizes: Vec<_> = pools.iter().map(|p| (p.template, p.guests)).collect();
        assert_eq!(sizes, [(7, 64), (1, 1)]);
        for template in 0..2 * MAX_POOLS as u64 {
            demand.add(HOST, TemplateId(template));
        }
        assert_eq!(demand.pools(HOST).len(), MAX_POOLS);
        demand.remove(HOST);
        assert_eq!(demand.pools(HOST), []);
        assert_eq!(demand.pools(MemberId(2)).len(), 1);
    }
}
