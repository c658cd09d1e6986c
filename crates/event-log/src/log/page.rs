//! Pages of a log: the entries after or before an id that satisfy a filter.
//!
//! A log consists of several files with one JSON object per line. Entries are ordered by id, which
//! begins with the time.

use crate::id::EntryId;
use crate::log::{AppendLog, Dropped, LogError};
use crate::segment::{Segment, entries};
use memchr::memmem;
use serde::de::DeserializeOwned;
use std::ops::ControlFlow;
use std::sync::Arc;

/// Maximum number of bytes that are read for one page. A page of a rare kind of entry may therefore
/// be empty although the log continues.
const MAX_SCAN_BYTES: u64 = 32 << 20;

/// Order of a page.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Order {
    /// Oldest first.
    #[default]
    Ascending,
    /// Newest first.
    Descending,
}

/// Selection of the entries of a page by position.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PageQuery {
    /// Only later entries.
    pub after: Option<EntryId>,
    /// Only earlier entries.
    pub before: Option<EntryId>,
    /// Only entries from this time on, in microseconds since 1970.
    pub since_us: u64,
    /// Order of the entries.
    pub order: Order,
    /// Number of matching entries to skip.
    pub offset: usize,
    /// Maximum number of entries.
    pub limit: usize,
}

/// Entry of a log.
pub(crate) trait Entry: DeserializeOwned {
    /// Returns the time in microseconds since 1970.
    fn time_us(&self) -> u64;
}

/// Page of a log.
#[derive(Debug, Clone, PartialEq)]
pub struct Page<T> {
    /// Entries, with their ids.
    pub entries: Vec<(EntryId, T)>,
    /// Position of the last entry that was examined. The next page begins after it. `None` if no
    /// entry was examined.
    pub next: Option<EntryId>,
    /// True if the log continues.
    pub more: bool,
    /// Removed entries that may be missing. `None` if none are missing.
    pub dropped: Option<Dropped>,
}

impl PageQuery {
    /// Returns whether an entry is in the selected range.
    pub(crate) fn contains(&self, id: &EntryId) -> bool {
        self.after.as_ref().is_none_or(|after| id > after)
            && self.before.as_ref().is_none_or(|before| id < before)
            && id.time_us >= self.since_us
    }

    /// Returns whether removed entries may be missing from the page.
    pub(crate) fn misses(&self, dropped: &Dropped) -> bool {
        let after_us = self.after.as_ref().map_or(0, |after| after.time_us);
        after_us.max(self.since_us) < dropped.until_us
    }

    /// Returns whether a file may have entries in the selected range.
    fn may_be_in(&self, segment: &Segment) -> bool {
        let after_us = self.after.as_ref().map_or(0, |after| after.time_us);
        let before = self.before.as_ref();
        segment.last_us >= after_us.max(self.since_us)
            && before.is_none_or(|before| before.time_us >= segment.previous_us)
    }
}

/// Collects the entries of a page.
struct Collector<'a, T, F> {
    query: &'a PageQuery,
    matches: F,
    skipped: usize,
    page: Page<T>,
}

impl<T: Entry, F: Fn(&T) -> bool> Collector<'_, T, F> {
    /// Examines an entry. Breaks when the page is complete.
    fn add(
        &mut self,
        host: &Arc<str>,
        line: &[u8],
        texts: &[memmem::Finder<'_>],
    ) -> ControlFlow<()> {
        // Entries of other owners, which are the majority, are not parsed.
        let has_texts = texts.iter().all(|text| text.find(line).is_some());
        let Some(entry) = has_texts
            .then(|| serde_json::from_slice::<T>(line).ok())
            .flatten()
        else {
            return ControlFlow::Continue(());
        };
        let id = EntryId {
            time_us: entry.time_us(),
            host: host.clone(),
        };
        if !self.query.contains(&id) || !(self.matches)(&entry) {
            return ControlFlow::Continue(());
        }
        if self.skipped < self.query.offset {
            self.skipped += 1;
            return ControlFlow::Continue(());
        }
        if self.page.entries.len() >= self.query.limit {
            self.page.more = true;
            return ControlFlow::Break(());
        }
        self.page.next = Some(id.clone());
        self.page.entries.push((id, entry));
        ControlFlow::Continue(())
    }
}

impl AppendLog {
    /// Reads a page. `texts` are texts that all matching entries contain. Blocks.
    pub fn page<T: Entry>(
        &self,
        query: &PageQuery,
        texts: &[String],
        matches: impl Fn(&T) -> bool,
    ) -> Result<Page<T>, LogError> {
        let dropped = self.dropped().filter(|dropped| query.misses(dropped));
        let mut segments = self.segments();
        segments.retain(|segment| query.may_be_in(segment));
        if query.order == Order::Descending {
            segments.reverse();
        }
        let texts: Vec<_> = texts.iter().map(memmem::Finder::new).collect();
        let mut collector = Collector {
            query,
            matches,
            skipped: 0,
            page: Page {
                entries: Vec::new(),
                next: None,
                more: false,
                dropped,
            },
        };
        let mut scanned = 0;
        for segment in segments {
            if scanned > 0 && scanned + segment.bytes > MAX_SCAN_BYTES {
                collector.page.more = true;
                return Ok(collector.page);
            }
            let Some(content) = segment.read().map_err(|e| self.failed(e))? else {
                continue;
            };
            scanned += segment.bytes;
            let lines = entries(&content);
            let mut add = |line| collector.add(&segment.host, line, &texts);
            let end = match query.order {
                Order::Ascending => lines.into_iter().try_for_each(&mut add),
                Order::Descending => lines.rev().try_for_each(&mut add),
            };
            if end.is_break() {
                return Ok(collector.page);
            }
            // All entries of the file were examined.
            let time_us = match query.order {
                Order::Ascending => segment.last_us,
                Order::Descending => segment.previous_us + 1,
            };
            let examined = EntryId {
                time_us,
                host: segment.host.clone(),
            };
            let next = &mut collector.page.next;
            let is_further = next.as_ref().is_none_or(|next| match query.order {
                Order::Ascending => examined > *next,
                Order::Descending => examined < *next,
            });
            let is_in_range = match query.order {
                Order::Ascending => query.after.as_ref().is_none_or(|after| examined > *after),
                Order::Descending => query.before.as_ref().is_none_or(|b| examined < *b),
            };
            if is_further && is_in_range {
                *next = Some(examined);
            }
        }
        Ok(collector.page)
    }
}
