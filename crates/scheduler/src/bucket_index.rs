//! Hosts ordered by the free amount of one resource and grouped by the ratio of another resource to
//! it.
//!
//! A bucket covers amounts of the first resource that differ by at most 1/32. A host of the first
//! bucket with enough room is therefore within about 3 % of the best fit, which is the host with
//! the smallest sufficient amount. In a bucket, hosts are grouped by the ratio of their amounts, in
//! quarters of a power of two.
//!
//! A host whose ratio is far from the ratio of the sandboxes on it runs out of one resource while
//! the other is free. A sandbox that needs both resources therefore prefers hosts with its own
//! ratio ([`BucketIndex::aligned`]). An update moves a host between two groups, and a search reads
//! bitmaps, for any number of hosts.

/// Number of buckets for each power of two.
const PER_POWER: u32 = 32;
/// Buckets of all amounts of 32 bits: [`PER_POWER`] for the amounts below 32, and [`PER_POWER`] for
/// each of the 27 powers of two from 2^5 to 2^31. Each amount below 64 has its own bucket.
const BUCKETS: usize = (PER_POWER as usize) * 28;
/// Number of 64-bit words in the bitmap of the buckets.
const WORDS: usize = BUCKETS.div_ceil(64);
/// Groups of a bucket. Group [`EQUAL`] has hosts with equal amounts of both resources. The ratio of
/// each further group is larger by a quarter of a power of two.
const GROUPS: usize = 64;
/// Group of hosts with equal amounts.
const EQUAL: i32 = 31;
/// Level of the amount zero. It is below all others by more than the number of groups.
const ZERO_LEVEL: i32 = -64;
/// Number of levels of the other amounts.
const LEVELS: usize = 128;
/// 2^(1/4), 2^(2/4) and 2^(3/4), multiplied by 2^31.
const QUARTERS: [u32; 3] = [2_553_802_834, 3_037_000_500, 3_611_622_603];

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

/// Returns the largest amount of a bucket.
fn largest_of(bucket: usize) -> u32 {
    let bucket = bucket as u32;
    if bucket < PER_POWER {
        return bucket;
    }
    let (power, offset) = (bucket / PER_POWER + 4, bucket % PER_POWER);
    let end = (u64::from(PER_POWER + offset) + 1) << (power - 5);
    u32::try_from(end - 1).unwrap_or(u32::MAX)
}

/// Returns four times the binary logarithm of an amount, rounded down.
fn level_of(amount: u32) -> i32 {
    if amount == 0 {
        return ZERO_LEVEL;
    }
    let power = 31 - amount.leading_zeros();
    // The amount with its leading one at bit 31.
    let fraction = amount << (31 - power);
    let quarters = QUARTERS.iter().filter(|&&quarter| fraction >= quarter);
    4 * power as i32 + quarters.count() as i32
}

/// Returns the smallest amount of each level.
const fn smallest_of_levels() -> [u32; LEVELS] {
    let mut smallest = [0; LEVELS];
    let mut level = 0;
    while level < LEVELS {
        let power = (level / 4) as u32;
        let fraction: u64 = match level % 4 {
            0 => 1 << 31,
            quarter => QUARTERS[quarter - 1] as u64,
        };
        // Rounded up: a smaller amount has a lower level.
        let shift = 31 - power;
        smallest[level] = ((fraction + (1 << shift) - 1) >> shift) as u32;
        level += 1;
    }
    smallest
}

const SMALLEST: [u32; LEVELS] = smallest_of_levels();

/// Returns the group of amounts of the first and of the second resource.
fn group_of((first, second): (u32, u32)) -> i32 {
    let difference = level_of(second) - level_of(first);
    (difference + EQUAL).clamp(0, GROUPS as i32 - 1)
}

/// Returns the distance between the ratios of a host and of a sandbox, for the amounts of each.
/// Zero if the sandbox does not need both resources.
///
/// A lower ratio counts twice: the host then has less of the second resource than its first
/// resource needs, and the sandbox increases the difference.
pub fn distance(host: (u32, u32), needs: (u32, u32)) -> u32 {
    if needs.0 == 0 || needs.1 == 0 {
        return 0;
    }
    match group_of(host) - group_of(needs) {
        difference @ 0.. => difference.unsigned_abs(),
        difference => 2 * difference.unsigned_abs(),
    }
}

/// Returns the groups in the order of their distance from the group `own`.
fn groups_from(own: i32) -> impl Iterator<Item = usize> {
    let last = GROUPS as i32 - 1;
    (0..=2 * last).flat_map(move |distance| {
        let above = Some(own + distance).filter(|group| *group <= last);
        let is_below = distance > 0 && distance % 2 == 0;
        let below = Some(own - distance / 2).filter(|group| is_below && *group >= 0);
        [above, below]
            .into_iter()
            .flatten()
            .map(|group| group as usize)
    })
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
    /// Bit for each bucket that has a host of the group, for each group.
    group_buckets: Vec<[u64; WORDS]>,
    /// Bit for each group that has a host.
    non_empty_groups: u64,
}

impl BucketIndex {
    /// Creates an empty index.
    pub fn new() -> Self {
        Self {
            buckets: (0..BUCKETS).map(|_| None).collect(),
            non_empty: [0; WORDS],
            group_buckets: vec![[0; WORDS]; GROUPS],
            non_empty_groups: 0,
        }
    }

    /// Adds a host that is not in the index, and sets its entry in `slots`. `amounts` are the free
    /// amounts of the first and of the second resource.
    pub fn insert(&mut self, host: u32, amounts: (u32, u32), slots: &mut [Slot]) {
        let (number, group) = (bucket_of(amounts.0), group_of(amounts) as usize);
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
        self.group_buckets[group][number / 64] |= 1 << (number % 64);
        self.non_empty_groups |= 1 << group;
    }

    /// Removes a host that is in the index.
    pub fn remove(&mut self, host: u32, slots: &mut [Slot]) {
        let Slot {
            bucket: number,
            group,
            position,
        } = slots[host as usize];
        let (number, group) = (number as usize, group as usize);
        let Some(bucket) = &mut self.buckets[number] else {
            return;
        };
        let hosts = &mut bucket.groups[group];
        hosts.swap_remove(position as usize);
        // The last host of the group has taken the place of the removed host.
        if let Some(&moved) = hosts.get(position as usize) {
            slots[moved as usize].position = position;
        }
        if hosts.is_empty() {
            bucket.non_empty &= !(1 << group);
            let buckets = &mut self.group_buckets[group];
            buckets[number / 64] &= !(1 << (number % 64));
            if buckets.iter().all(|&word| word == 0) {
                self.non_empty_groups &= !(1 << group);
            }
        }
        if bucket.non_empty == 0 {
            self.non_empty[number / 64] &= !(1 << (number % 64));
        }
    }

    /// Changes the amounts of a host that is in the index.
    pub fn update(&mut self, host: u32, amounts: (u32, u32), slots: &mut [Slot]) {
        let slot = slots[host as usize];
        let place = (bucket_of(amounts.0) as u32, group_of(amounts) as u32);
        if place != (slot.bucket, slot.group) {
            self.remove(host, slots);
            self.insert(host, amounts, slots);
        }
    }

    /// Returns hosts with `amounts` or more, the hosts with the nearest ratio first ([`distance`]),
    /// and of these the hosts with the smallest amounts of the first resource. Returns only hosts
    /// whose ratio ensures that they have enough of the second resource. Hosts of the first bucket
    /// may have up to 1/32 less of the first resource, so the caller must check the amounts.
    /// Returns no hosts if an amount is zero.
    pub fn aligned(&self, amounts: (u32, u32)) -> impl Iterator<Item = u32> + '_ {
        let is_aligned = amounts.0 > 0 && amounts.1 > 0;
        let groups = is_aligned.then(|| groups_from(group_of(amounts)));
        groups.into_iter().flatten().flat_map(move |group| {
            // Group 0 also has hosts with lower ratios.
            let has_hosts = self.non_empty_groups & (1 << group) != 0;
            let first = (group > 0 && has_hosts).then(|| {
                // The level from which on hosts of the group have a higher level of the second
                // resource than `amounts`.
                let level = level_of(amounts.1) + 1 - (group as i32 - EQUAL);
                let level = usize::try_from(level).unwrap_or(0);
                let smallest = SMALLEST.get(level).copied().unwrap_or(u32::MAX);
                bucket_of(amounts.0.max(smallest))
            });
            first
                .into_iter()
                .flat_map(move |first| set_bits(&self.group_buckets[group], first))
                .filter_map(|number| self.buckets[number].as_ref())
                .flat_map(move |bucket| bucket.groups[group].iter().copied())
        })
    }

    /// Returns the hosts that may have `amounts` or more, the bucket with the smallest amounts of
    /// the first resource first. Hosts of the first bucket may have up to 1/32 less of the first
    /// resource. Hosts may have about a third less of the second resource. The caller must check
    /// the amounts.
    pub fn from(&self, amounts: (u32, u32)) -> impl Iterator<Item = u32> + '_ {
        let level = level_of(amounts.1);
        set_bits(&self.non_empty, bucket_of(amounts.0))
            .filter_map(|number| self.buckets[number].as_ref().map(|bucket| (number, bucket)))
            .flat_map(move |(number, bucket)| {
                // Hosts of lower groups have a lower level of the second resource. The last group
                // also has hosts with higher ratios.
                let lowest = level - level_of(largest_of(number)) + EQUAL;
                let lowest = lowest.clamp(0, GROUPS as i32 - 1);
                Bits(bucket.non_empty & (u64::MAX << lowest))
                    .flat_map(|group| bucket.groups[group].iter().copied())
            })
    }
}

/// Returns the numbers of the bits that are set, from `first` on.
fn set_bits(words: &[u64; WORDS], first: usize) -> impl Iterator<Item = usize> + '_ {
    (first / 64..WORDS).flat_map(move |word| {
        let mask = if word == first / 64 {
            u64::MAX << (first % 64)
        } else {
            u64::MAX
        };
        Bits(words[word] & mask).map(move |bit| word * 64 + bit)
    })
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
            if bucket > last {
                assert_eq!(largest_of(last), amount - 1);
            }
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
        assert_eq!(largest_of(BUCKETS - 1), u32::MAX);
    }

    #[test]
    fn levels_are_quarters_of_powers_of_two() {
        assert_eq!([0, 1, 2, 4, 1000].map(level_of), [ZERO_LEVEL, 0, 4, 8, 39]);
        assert_eq!(level_of(u32::MAX), LEVELS as i32 - 1);
        for (level, &smallest) in SMALLEST.iter().enumerate() {
            // Small amounts have gaps: no amount has the level 1.
            assert!(level_of(smallest) >= level as i32, "{level}");
            assert!(level_of(smallest - 1) < level as i32, "{level}");
        }
        assert_eq!(group_of((1000, 1000)), EQUAL);
        assert_eq!(group_of((1000, 2000)), EQUAL + 4);
        assert_eq!([(0, 5), (5, 0)].map(group_of), [63, 0]);
        assert_eq!(distance((1000, 4000), (1, 2)), 4);
        assert_eq!(distance((1000, 1000), (1, 2)), 8);
        assert_eq!(distance((1000, 1000), (0, 2)), 0);
        let order: Vec<_> = groups_from(62).take(5).collect();
        assert_eq!(order, [62, 63, 61, 60, 59]);
        let all: std::collections::BTreeSet<_> = groups_from(9).collect();
        assert_eq!(all.len(), GROUPS);
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
        // The lowest group has all lower ratios, so host 2 is not skipped.
        assert_eq!(index.from((200, 60)).collect::<Vec<_>>(), [3, 2]);
        index.update(2, (150, 50), &mut slots);
        index.remove(0, &mut slots);
        assert_eq!(index.from((0, 0)).collect::<Vec<_>>(), [1, 2, 4, 3]);
        assert_eq!(index.from((5000, 0)).count(), 0);
    }

    #[test]
    fn hosts_with_the_ratio_of_a_sandbox_are_listed_first() {
        let mut index = BucketIndex::new();
        let mut slots = vec![Slot::default(); 5];
        let hosts = [
            // Twice, equal, half, and four times the ratio of the sandbox.
            (0, (4000, 16_000)),
            (1, (9000, 18_000)),
            (2, (8000, 8000)),
            (3, (1000, 8000)),
            // The ratio of the sandbox, but tighter than host 1.
            (4, (5000, 10_000)),
        ];
        for (host, amounts) in hosts {
            index.insert(host, amounts, &mut slots);
        }
        let listed = |index: &BucketIndex, amounts| index.aligned(amounts).collect::<Vec<_>>();
        assert_eq!(listed(&index, (500, 1000)), [4, 1, 0, 3, 2]);
        // Hosts 0 and 3 lack the first resource, and host 2 lacks the second one.
        assert_eq!(listed(&index, (4500, 9000)), [4, 1]);
        index.remove(4, &mut slots);
        assert_eq!(listed(&index, (500, 1000)), [1, 0, 3, 2]);
        assert!(listed(&index, (0, 1000)).is_empty());
        assert!(listed(&index, (500, 0)).is_empty());
    }
}
