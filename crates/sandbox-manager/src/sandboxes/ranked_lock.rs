//! Mutexes with a rank. A thread that holds one may lock only mutexes of a higher rank, so threads
//! cannot deadlock. Debug assertions check this.

use parking_lot::{Mutex, MutexGuard};
use std::ops::{Deref, DerefMut};

/// Rank of a mutex: its place in the order in which a thread may lock several.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum LockRank {
    /// Changes of the snapshot catalog.
    CatalogChanges,
    /// Index of the snapshot catalog.
    CatalogIndex,
    /// Pinned snapshots.
    CatalogPins,
    /// Registered sandboxes.
    Entries,
}

/// Mutex with a rank.
#[derive(Debug)]
pub(super) struct RankedMutex<T> {
    rank: LockRank,
    mutex: Mutex<T>,
}

/// Guard of a [`RankedMutex`].
pub(super) struct RankedGuard<'a, T> {
    guard: MutexGuard<'a, T>,
    _held: Held,
}

impl<T> RankedMutex<T> {
    pub const fn new(rank: LockRank, value: T) -> Self {
        Self {
            rank,
            mutex: Mutex::new(value),
        }
    }

    /// Locks the mutex.
    ///
    /// # Panics
    /// With debug assertions, if the thread holds a lock of the same or a higher rank.
    pub fn lock(&self) -> RankedGuard<'_, T> {
        // The rank is checked before the lock is taken, so that a violation panics instead of
        // deadlocking.
        let held = Held::new(self.rank);
        RankedGuard {
            guard: self.mutex.lock(),
            _held: held,
        }
    }
}

impl<T> Deref for RankedGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for RankedGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

#[cfg(debug_assertions)]
use checked::Held;
#[cfg(not(debug_assertions))]
use unchecked::Held;

#[cfg(debug_assertions)]
mod checked {
    use super::LockRank;
    use std::cell::RefCell;

    // Ranks of the locks that this thread holds. Guards may be dropped in any order.
    thread_local! {
        static HELD: RefCell<Vec<LockRank>> = const { RefCell::new(Vec::new()) };
    }

    /// Entry in the list of the locks that this thread holds.
    pub(super) struct Held(LockRank);

    impl Held {
        pub fn new(rank: LockRank) -> Self {
            HELD.with_borrow_mut(|held| {
                let highest = held.iter().max();
                assert!(
                    highest.is_none_or(|highest| *highest < rank),
                    "lock order: {rank:?} is locked while the thread holds {highest:?}"
                );
                held.push(rank);
            });
            Self(rank)
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            HELD.with_borrow_mut(|held| {
                let last = held.iter().rposition(|rank| *rank == self.0);
                last.map(|at| held.swap_remove(at))
            });
        }
    }
}

#[cfg(not(debug_assertions))]
mod unchecked {
    use super::LockRank;

    /// Stands for an entry in the list, which exists with debug assertions only.
    pub(super) struct Held;

    impl Held {
        pub fn new(_rank: LockRank) -> Self {
            Self
        }
    }
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::*;

    #[test]
    fn locking_a_lower_rank_panics() {
        let index = RankedMutex::new(LockRank::CatalogIndex, 1);
        let entries = RankedMutex::new(LockRank::Entries, 2);
        {
            let low = index.lock();
            let high = entries.lock();
            assert_eq!((*low, *high), (1, 2));
        }
        drop(index.lock());
        let result = std::thread::scope(|threads| {
            let thread = threads.spawn(|| {
                let _high = entries.lock();
                let _low = index.lock();
            });
            thread.join()
        });
        assert!(result.is_err());
    }
}
