//! Hash table with linear probing and rows of 24 bytes.
//!
//! A row describes one sandbox. Its key is the hash of the sandbox id, as two words of 64 bits:
//! `high` and `low`. Its value, [`Meta`], contains host, state and revision. A *place* is an
//! element of the table's array, and contains a row or is empty. The *home* of a row is the place
//! at which the search for its key starts.

use super::RowState;

/// Number of places that a table has at first.
const MIN_CAPACITY: usize = 8;
/// Part of occupied places, in percent, beyond which a new row first makes the table grow.
const MAX_LOAD_PERCENT: usize = 88;

/// Revision (48 bits), host (13), mark (1) and state (2) of a row. Zero in an empty place.
///
/// The mark serves full lists. A full list contains all rows of one host. Its start clears the
/// marks of the host's rows, and each row that the list contains is stored with a mark. At the end
/// of the list, the host's rows without a mark are removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Meta(u64);

impl Meta {
    /// Returns the value of a row, with the mark set.
    pub(super) fn new(state: RowState, host: u16, revision: u64) -> Self {
        let state = match state {
            RowState::Running => 1,
            RowState::Paused => 2,
            RowState::Stored => 3,
        };
        Self(revision << 16 | u64::from(host) << 3 | 4 | state)
    }

    pub(super) fn revision(self) -> u64 {
        self.0 >> 16
    }

    pub(super) fn host(self) -> u16 {
        (self.0 >> 3) as u16 & 0x1fff
    }

    pub(super) fn mark(self) -> bool {
        self.0 & 4 != 0
    }

    /// Returns the value with the mark set if `mark` is true, or cleared.
    pub(super) fn with_mark(self, mark: bool) -> Self {
        Self(self.0 & !4 | u64::from(mark) << 2)
    }

    /// Returns the state. `None` in an empty place.
    pub(super) fn state(self) -> Option<RowState> {
        match self.0 & 3 {
            1 => Some(RowState::Running),
            2 => Some(RowState::Paused),
            3 => Some(RowState::Stored),
            _ => None,
        }
    }

    fn is_empty(self) -> bool {
        self.0 & 3 == 0
    }
}

/// Row of a sandbox, or an empty place.
#[derive(Debug, Clone, Copy, Default)]
struct Place {
    /// First half of the hash.
    high: u64,
    /// Second half of the hash.
    low: u64,
    meta: Meta,
}

/// Rows of all sandboxes whose hashes have the same 8 highest bits. The directory has a table for
/// each value of these bits.
#[derive(Debug, Default)]
pub(super) struct Table {
    places: Vec<Place>,
    len: usize,
}

impl Table {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.places.capacity() * size_of::<Place>()
    }

    pub(super) fn get(&self, high: u64, low: u64) -> Option<Meta> {
        let place = self.places.get(self.position(high, low)?)?;
        (!place.meta.is_empty()).then_some(place.meta)
    }

    /// Adds or replaces a row.
    pub(super) fn put(&mut self, high: u64, low: u64, meta: Meta) {
        let is_new = self.get(high, low).is_none();
        if is_new && (self.len + 1) * 100 > self.places.len() * MAX_LOAD_PERCENT {
            self.grow();
        }
        if let Some(position) = self.position(high, low) {
            self.places[position] = Place { high, low, meta };
            self.len += usize::from(is_new);
        }
    }

    /// Removes a row, and moves later rows of the same run of occupied places forward.
    pub(super) fn remove(&mut self, high: u64, low: u64) {
        let Some(mut gap) = self.position(high, low) else {
            return;
        };
        if self.places[gap].meta.is_empty() {
            return;
        }
        self.len -= 1;
        let capacity = self.places.len();
        let mut next = gap;
        loop {
            next = (next + 1) % capacity;
            let place = self.places[next];
            if place.meta.is_empty() {
                break;
            }
            // The row may move to the gap unless its home is after the gap.
            let home = self.home(place.high);
            if (next + capacity - home) % capacity >= (next + capacity - gap) % capacity {
                self.places[gap] = place;
                gap = next;
            }
        }
        self.places[gap] = Place::default();
    }

    /// Clears the marks of a host's rows.
    pub(super) fn clear_marks(&mut self, host: u16) {
        let places = self.places.iter_mut();
        for place in places.filter(|place| !place.meta.is_empty() && place.meta.host() == host) {
            place.meta = place.meta.with_mark(false);
        }
    }

    /// Removes rows for which `retain` returns false. Returns their number.
    pub(super) fn retain(&mut self, retain: impl Fn(Meta) -> bool) -> u64 {
        let removed: Vec<_> = self
            .iter()
            .filter(|&(_, _, meta)| !retain(meta))
            .map(|(high, low, _)| (high, low))
            .collect();
        for &(high, low) in &removed {
            self.remove(high, low);
        }
        removed.len() as u64
    }

    /// Returns the two halves of each hash, with the data of its row.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, u64, Meta)> {
        self.places
            .iter()
            .filter(|place| !place.meta.is_empty())
            .map(|place| (place.high, place.low, place.meta))
    }

    /// Returns the first place for a hash. The 8 highest bits have selected the table, so only the
    /// following bits are used.
    fn home(&self, high: u64) -> usize {
        ((u128::from(high << 8) * self.places.len() as u128) >> 64) as usize
    }

    /// Returns the place of a row, or the empty place for it. `None` if the table has no places.
    fn position(&self, high: u64, low: u64) -> Option<usize> {
        if self.places.is_empty() {
            return None;
        }
        let mut position = self.home(high);
        // Ends at the latest at an empty place: `put` makes the table grow before it is full.
        loop {
            let place = &self.places[position];
            if place.meta.is_empty() || place.high == high && place.low == low {
                return Some(position);
            }
            position += 1;
            if position == self.places.len() {
                position = 0;
            }
        }
    }

    /// Grows by an eighth.
    fn grow(&mut self) {
        let capacity = (self.places.len() + self.places.len() / 8).max(MIN_CAPACITY);
        let mut places = Vec::new();
        places.reserve_exact(capacity);
        places.resize(capacity, Place::default());
        let former = std::mem::replace(&mut self.places, places);
        for place in former.into_iter().filter(|place| !place.meta.is_empty()) {
            if let Some(position) = self.position(place.high, place.low) {
                self.places[position] = place;
            }
        }
    }
}
