//! Ranges of a file that one owner has locked. The server of a volume grants locks. The agent
//! requests the locks of its guest again after the connection to the server was lost.

/// Bit of the flags of a lock request by which the agent requests a lock that its guest held
/// before. Not a part of the FUSE protocol.
pub const RECLAIM: u32 = 1 << 31;
/// Value of the last field of the INIT request of a mount whose agent requests its locks again
/// after a lost connection. Only for such mounts, the locks of a guest also exclude other
/// sandboxes. Not a part of the FUSE protocol.
pub const LOCKS_MARK: u32 = 0x6c6f_636b;

/// Kind of a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockKind {
    /// Permits other shared locks.
    Shared,
    /// Permits no other lock.
    Exclusive,
}

/// Locked range of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LockRange {
    /// First byte.
    pub start: u64,
    /// Last byte.
    pub end: u64,
    /// Kind of the lock.
    pub kind: LockKind,
}

/// Locked ranges of one owner, sorted and without overlaps.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LockRanges(Vec<LockRange>);

impl LockRange {
    /// Returns whether the ranges overlap and their kinds exclude each other.
    pub fn conflicts_with(&self, other: &Self) -> bool {
        let is_apart = self.end < other.start || other.end < self.start;
        !is_apart && (self.kind == LockKind::Exclusive || other.kind == LockKind::Exclusive)
    }
}

impl LockRanges {
    /// Returns the ranges in the order of their positions.
    pub fn iter(&self) -> impl Iterator<Item = &LockRange> {
        self.0.iter()
    }

    /// Returns the number of ranges.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether no range is locked.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Locks the bytes from `start` to `end`, or unlocks them if `kind` is `None`. Replaces earlier
    /// locks of these bytes, as in fcntl(2).
    pub fn set(&mut self, start: u64, end: u64, kind: Option<LockKind>) {
        let mut ranges: Vec<LockRange> = Vec::with_capacity(self.0.len() + 2);
        for range in &self.0 {
            if range.end < start || range.start > end {
                ranges.push(*range);
                continue;
            }
            if range.start < start {
                ranges.push(LockRange {
                    end: start - 1,
                    ..*range
                });
            }
            if range.end > end {
                ranges.push(LockRange {
                    start: end + 1,
                    ..*range
                });
            }
        }
        ranges.extend(kind.map(|kind| LockRange { start, end, kind }));
        ranges.sort_unstable_by_key(|range| range.start);
        self.0.clear();
        for range in ranges {
            match self.0.last_mut() {
                // Adjacent ranges of one kind are one range.
                Some(last)
                    if last.kind == range.kind && last.end.checked_add(1) == Some(range.start) =>
                {
                    last.end = range.end;
                }
                _ => self.0.push(range),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [Option<LockKind>; 3] = [None, Some(LockKind::Shared), Some(LockKind::Exclusive)];

    #[test]
    fn ranges_agree_with_a_kind_for_each_byte() {
        // Linear congruential generator with a fixed seed, so that a failure can be reproduced.
        let mut random = 7_u64;
        let mut next = |limit: u64| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (random >> 33) % limit
        };
        let (mut ranges, mut bytes) = (LockRanges::default(), [None; 32]);
        for _ in 0..20_000 {
            let (start, length) = (next(32), 1 + next(8));
            let end = (start + length - 1).min(31);
            let kind = KINDS[next(3) as usize];
            ranges.set(start, end, kind);
            bytes[start as usize..=end as usize].fill(kind);
            let mut found = [None; 32];
            for range in ranges.iter() {
                for at in range.start..=range.end {
                    assert_eq!(found[at as usize], None);
                    found[at as usize] = Some(range.kind);
                }
            }
            assert_eq!(found, bytes);
            // No two ranges could be one.
            for pair in ranges.0.windows(2) {
                assert!(pair[0].end + 1 < pair[1].start || pair[0].kind != pair[1].kind);
            }
        }
        ranges.set(0, u64::MAX, Some(LockKind::Shared));
        assert_eq!(ranges.len(), 1);
        ranges.set(0, u64::MAX, None);
        assert!(ranges.is_empty());
    }
}
