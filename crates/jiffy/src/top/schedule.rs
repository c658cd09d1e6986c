//! Times of reads of sandboxes. The cost is bounded: a pause that is proportional to its duration
//! follows each read. Events name the sandboxes that have changed. Only these sandboxes are read
//! again, or the whole list if they are many.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Maximum number of changed sandboxes that are read singly. Above it, the whole list is read.
const MAX_SINGLE_READS: usize = 16;
/// Minimum pause between two reads.
const MIN_PAUSE: Duration = Duration::from_millis(250);
/// Pause after a read of the list as a multiple of its duration: less than 2 % of a processor.
const LIST_PAUSE_FACTOR: u32 = 50;
/// Pause after a read of single sandboxes, whose duration is mostly the latency of the server.
const SINGLE_PAUSE_FACTOR: u32 = 2;
/// Maximum pause after a read.
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// Interval of reads of the whole list, which correct missed events.
const LIST_INTERVAL: Duration = Duration::from_secs(30);

/// Next read.
#[derive(Debug, PartialEq, Eq)]
pub enum Read {
    /// Read the list of all sandboxes.
    List,
    /// Read the sandboxes with these ids.
    Sandboxes(Vec<String>),
}

/// Sandboxes that have changed, and the time of the next read.
#[derive(Debug)]
pub struct Schedule {
    changed: BTreeSet<String>,
    /// True if all sandboxes must be listed again.
    needs_list: bool,
    /// Start of the read in flight, and the factor of the pause after it.
    started: Option<(Instant, u32)>,
    /// Earliest time of the next read.
    next_read: Instant,
    /// Time of the next read of the whole list.
    next_list: Instant,
}

impl Schedule {
    /// Creates a schedule that begins with the list.
    pub fn new(now: Instant) -> Self {
        Self {
            changed: BTreeSet::new(),
            needs_list: true,
            started: None,
            next_read: now,
            next_list: now + LIST_INTERVAL,
        }
    }

    /// Requests a read of sandboxes.
    pub fn add(&mut self, ids: impl IntoIterator<Item = String>) {
        if self.needs_list {
            return;
        }
        self.changed.extend(ids);
        if self.changed.len() > MAX_SINGLE_READS {
            self.request_list();
        }
    }

    /// Requests a read of the list.
    pub fn request_list(&mut self) {
        self.needs_list = true;
        self.changed.clear();
    }

    /// Returns the time of the next read. `None` while a read is in flight.
    pub fn next_time(&self) -> Option<Instant> {
        if self.started.is_some() {
            None
        } else if self.needs_list || !self.changed.is_empty() {
            Some(self.next_read)
        } else {
            Some(self.next_list.max(self.next_read))
        }
    }

    /// Starts the next read, if its time has come.
    pub fn start(&mut self, now: Instant) -> Option<Read> {
        if self.next_time().is_none_or(|time| time > now) {
            return None;
        }
        if now >= self.next_list {
            self.request_list();
        }
        if self.needs_list {
            self.started = Some((now, LIST_PAUSE_FACTOR));
            self.needs_list = false;
            self.next_list = now + LIST_INTERVAL;
            return Some(Read::List);
        }
        self.started = Some((now, SINGLE_PAUSE_FACTOR));
        let changed = std::mem::take(&mut self.changed);
        Some(Read::Sandboxes(changed.into_iter().collect()))
    }

    /// Ends the read in flight.
    pub fn finish(&mut self, now: Instant) {
        let (started, factor) = self.started.take().unwrap_or((now, 0));
        let duration = now.saturating_duration_since(started);
        self.next_read = now + duration.saturating_mul(factor).clamp(MIN_PAUSE, MAX_PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(count: usize) -> Vec<String> {
        (0..count).map(|n| format!("{n:04}")).collect()
    }

    /// Returns a schedule whose first list was read at `now`.
    fn listed(now: Instant) -> Schedule {
        let mut schedule = Schedule::new(now);
        assert_eq!(schedule.start(now), Some(Read::List));
        schedule.finish(now);
        schedule
    }

    #[test]
    fn changed_sandboxes_are_read_together_after_a_pause() {
        let now = Instant::now();
        let mut schedule = listed(now);
        schedule.add(ids(2));
        assert_eq!(schedule.start(now), None);
        let later = now + MIN_PAUSE;
        assert_eq!(schedule.next_time(), Some(later));
        assert_eq!(schedule.start(later), Some(Read::Sandboxes(ids(2))));
        // Changes during a read are read after it.
        schedule.add(ids(1));
        assert_eq!(schedule.start(later + MAX_PAUSE), None);
        schedule.finish(later);
        assert_eq!(
            schedule.start(later + MIN_PAUSE),
            Some(Read::Sandboxes(ids(1)))
        );
    }

    #[test]
    fn many_changes_cause_one_read_of_the_list() {
        let now = Instant::now();
        let mut schedule = listed(now);
        for _ in 0..1000 {
            schedule.add(ids(MAX_SINGLE_READS + 1));
        }
        assert!(schedule.changed.is_empty());
        let later = now + MIN_PAUSE;
        assert_eq!(schedule.start(later), Some(Read::List));
        schedule.finish(later);
        assert_eq!(schedule.next_time(), Some(later + LIST_INTERVAL));
    }

    #[test]
    fn slow_reads_are_rare() {
        let now = Instant::now();
        let mut schedule = listed(now);
        schedule.request_list();
        let start = now + MIN_PAUSE;
        assert_eq!(schedule.start(start), Some(Read::List));
        let end = start + Duration::from_millis(500);
        schedule.finish(end);
        schedule.request_list();
        // 50 times the duration of the read.
        assert_eq!(schedule.next_time(), Some(end + Duration::from_secs(25)));
    }
}
