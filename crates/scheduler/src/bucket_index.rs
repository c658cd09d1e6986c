//! Hosts ordered by the free amount of one resource and grouped by the free amount of another.
//!
//! A bucket covers amounts of the first resource that differ by at most 1/32. A host of the first
//! bucket with enough room is therefore within about 3 % of the best fit, which is the host with
//! the smallest sufficient amount. In a bucket, hosts are grouped by the power of two of the second
//! resource. A search skips hosts without enough of the second resource, of which a full fleet has
//! many. An update moves a host between two groups, and a search reads bitmaps, for any number of
//! hosts.

/// Number of buckets for each power of two.
const PER_POWER: u32 = 32;
/// Buckets of all amounts of 32 bits: [`PER_POWER`] for the amounts below 32, and [`PER_POWER`] for
/// each of the 27 powers of two from 2^5 to 2^31. Each amount below 64 has its own bucket.
const BUCKETS: usize = (PER_POWER as usize) * 28;
/// Number of 64-bit words in the bitmap of the buckets.
const WORDS: usize = BUCKETS.div_ceil(64);
/// Groups of a bucket: zero, and each power of two of 32 bits.
const GROUPS: usize = 33;

/// Returns the bucket of an amount. Larger amounts are in the same or in a later bucket.
fn bucket_of(amount: u32) -> usize {
    if amount < PER_POWER {
        return amount as usize;
    }
    let power = 31 - amount.leading_zeros();
    // The 5 bits after the leading one select the bucket within the power of two. The buckets of
    // 2^5 start at number 32.
    let offset = (amount >> (power - 5)) & (PER_POWER - 1);
    ((power - 4) * PER_POWER + offset) as usize
}

/// Returns the group of an amount of the second resource.
fn group_of(amount: u32) -> usize {
    32 - amount.leading_zeros() as usize
}

/// Place of a host in an index.
#[derive(Debug, Clone, Copy, Default)]
pub struct Slot {
    /// Number of the bucket.
    bucket: u32,
    /// Number of the group in the bucket.
    group: u32,
    /// Index of the host in the list of its group.
    position: u32,
}

/// Hosts with nearly equal amounts of the first resource.
#[derive(Debug)]
struct Bucket {
    /// Numbers of the hosts of each group.
    groups: [Vec<u32>; GROUPS],
    /// Bit for each group that has a host.
    non_empty: u64,
}

/// Index of hosts. The caller numbers the hosts, and passes the slice of their slots, indexed by
/// these numbers, to all changes.
#[derive(Debug)]
pub struct BucketIndex {
    /// Entries are `None` for buckets that never had a host.
    buckets: Vec<Option<Box<Bucket>>>,
    /// Bit for each bucket that has a host.
    non_empty: [u64; WORDS],
}

impl BucketIndex {
    /// Creates an empty index.
    pub fn new() -> Self {
        Self {
            buckets: (0..BUCKETS).map(|_| None).collect(),
            non_empty: [0; WORDS],
        }
    }

    /// Adds a host that is not in the index, and sets its entry in `slots`. `amounts` are the free
    /// amounts of the first and of the second resource.
    pub fn insert(&mut self, host: u32, amounts: (u32, u32), slots: &mut [Slot]) {
        let (number, group) = (bucket_of(amounts.0), group_of(amounts.1));
        let bucket = self.buckets[number].get_or_insert_with(|| {
            Box::new(Bucket {
                groups: std::array::from_fn(|_| Vec::new()),
                non_empty: 0,
            })
        });
        let hosts = &mut bucket.groups[group];
        slots[host as usize] = Slot {
            bucket: number as u32,
            group: group as u32,
            position: hosts.len() as u32,
        };
        hosts.push(host);
        bucket.non_empty |= 1 << group;
        self.non_empty[number / 64] |= 1 << (number % 64);
    }

    /// Removes a host that is in the index.
    pub fn remove(&mut self, host: u32, slots: &mut [Slot]) {
        let Slot {
            bucket: number,
            group,
            position,
        } = slots[host as usize];
        let number = number as usize;
        let Some(bucket) = &mut self.buckets[number] else {
            return;
        };
        let hosts = &mut bucket.groups[group as usize];
        hosts.swap_remove(position as usize);
        // The last host of the group has taken the place of the removed host.
        if let Some(&moved) = hosts.get(position as usize) {
            slots[moved as usize].position = position;
        }
        if hosts.is_empty() {
            bucket.non_empty &= !(1 << group);
        }
        if bucket.non_empty == 0 {
            self.non_empty[number / 64] &= !(1 << (number % 64));
        }
    }

    /// Changes the amounts of a host that is in the index.
    pub fn update(&mut self, host: u32, amounts: (u32, u32), slots: &mut [Slot]) {
        let slot = slots[host as usize];
        let place = (bucket_of(amounts.0) as u32, group_of(amounts.1) as u32);
        if place != (slot.bucket, slot.group) {
            self.remove(host, slots);
            self.insert(host, amounts, slots);
        }
    }

    /// Returns the hosts that may have `amounts` or more, the bucket with the smallest amounts of
    /// the first resource first. Hosts of the first bucket may have up to 1/32 less of the first
    /// resource. Hosts of the first group may have up to half less of the second resource. The
    /// caller must check the amounts.
    pub fn from(&self, amounts: (u32, u32)) -> impl Iterator<Item = u32> + '_ {
        let (first, groups) = (bucket_of(amounts.0), u64::MAX << group_of(amounts.1));
        (first / 64..WORDS)
            .flat_map(move |word| {
                let mask = if word == first / 64 {
                    u64::MAX << (first % 64)
                } else {
                    u64::MAX
                };
                Bits(self.non_empty[word] & mask).map(move |bit| word * 64 + bit)
            })
            .filter_map(|number| self.buckets[number].as_ref())
            .flat_map(move |bucket| {
                Bits(bucket.non_empty & groups)
                    .flat_map(|group| bucket.groups[group].iter().copied())
            })
    }
}

/// Positions of the bits that are set.
struct Bits(u64);

impl Iterator for Bits {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        if self.0 == 0 {
            return None;
        }
        let bit = self.0.trailing_zeros();
        self.0 &= self.0 - 1;
        Some(bit as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_ordered_and_narrow() {
        let mut last = 0;
        for amount in 0..100_000 {
            let bucket = bucket_of(amount);
            assert!(bucket == last || bucket == last + 1, "amount {amount}");
            last = bucket;
        }
        for amount in [64_u32, 1000, 65_536, 1 << 30, u32::MAX] {
            assert!(bucket_of(amount) < BUCKETS, "amount {amount}");
            // A number that is smaller by more than 1/32 is in an earlier bucket.
            assert!(
                bucket_of(amount - amount / 32 - 1) < bucket_of(amount),
                "amount {amount}"
            );
        }
        assert_eq!(
            [0, 1, 2, 3, u32::MAX].map(group_of),
            [0, 1, 2, 2, GROUPS - 1]
        );
    }

    #[test]
    fn hosts_are_listed_from_the_tightest_on_without_those_that_lack_the_second_resource() {
        let mut index = BucketIndex::new();
        let mut slots = vec![Slot::default(); 5];
        let hosts = [
            (0, (4096, 50)),
            (1, (100, 50)),
            (2, (70_000, 50)),
            (3, (4096, 64)),
            (4, (300, 7)),
        ];
        for (host, amounts) in hosts {
            index.insert(host, amounts, &mut slots);
        }
        assert_eq!(index.from((200, 40)).collect::<Vec<_>>(), [0, 3, 2]);
        // Host 3 has 64 of the second resource, which is in the same group as 70.
        assert_eq!(index.from((200, 70)).collect::<Vec<_>>(), [3]);
        index.update(2, (150, 50), &mut slots);
        index.remove(0, &mut slots);
        assert_eq!(index.from((0, 0)).collect::<Vec<_>>(), [1, 2, 4, 3]);
        assert_eq!(index.from((5000, 0)).count(), 0);
    }
}
