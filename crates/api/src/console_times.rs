//! Assigns times to the lines of sandboxes' consoles, for clients that follow a console.
//!
//! A console is a stream of bytes without times. Clients that follow a console need increasing
//! times, because they request the lines after the last line that they have. Therefore a line has
//! the time at which this daemon first read it. Lines that are read together differ by one
//! millisecond each. The first read assigns times from the last change of the sandbox's state.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Maximum number of sandboxes whose lines are remembered. The lines of the sandbox that was read
/// least recently are removed first.
const MAX_SANDBOXES: usize = 256;

/// Lines of a console that were read, oldest first.
#[derive(Debug, Default)]
struct ReadLines {
    /// Hash and time in milliseconds of each line.
    lines: Vec<(u64, u64)>,
    /// Time of the newest line that was ever read. 0 if no line was read yet.
    newest_ms: u64,
    /// Number of this console's last read, in a sequence over the reads of all consoles. The
    /// console with the lowest number is removed first.
    read_at: u64,
}

/// Times of the consoles that clients read.
#[derive(Debug, Default)]
pub(crate) struct ConsoleTimes(Mutex<HashMap<String, ReadLines>>);

impl ConsoleTimes {
    /// Returns a time in milliseconds since 1970 for each of `lines`, the last lines of the console
    /// of `sandbox`. Times increase strictly, and later calls return the same time for a line.
    /// `changed_ms` is the time of the last change of the sandbox's state.
    pub fn of(&self, sandbox: &str, lines: &[&str], changed_ms: u64, now_ms: u64) -> Vec<u64> {
        let mut sandboxes = self.0.lock();
        // The number cannot overflow: it increases once per request.
        let turn = sandboxes.values().map(|s| s.read_at).max().unwrap_or(0) + 1;
        if !sandboxes.contains_key(sandbox) && sandboxes.len() >= MAX_SANDBOXES {
            let oldest = sandboxes.iter().min_by_key(|(_, s)| s.read_at);
            if let Some(id) = oldest.map(|(id, _)| id.clone()) {
                sandboxes.remove(&id);
            }
        }
        let read = sandboxes.entry(sandbox.to_owned()).or_default();
        let hashes: Vec<u64> = lines.iter().map(|line| hash(line)).collect();
        // Only hashes are stored, so that consoles do not occupy memory. A collision only gives a
        // line an earlier time.
        let known = known_lines(&read.lines, &hashes);
        let mut times: Vec<u64> = known.iter().map(|(_, at)| *at).collect();
        let count = (lines.len() - times.len()) as u64;
        let first = match read.newest_ms {
            // At the first read, the lines are assumed to be as old as the last change of state.
            0 => changed_ms,
            // The new lines get the last `count` milliseconds, but are always newer than the known
            // lines.
            newest => newest.saturating_add(1).max(now_ms.saturating_sub(count)),
        };
        times.extend((0..count).map(|n| first.saturating_add(n)));
        read.lines = hashes.into_iter().zip(times.iter().copied()).collect();
        // The newest time never decreases, even if the console was cleared.
        read.newest_ms = times.last().copied().unwrap_or(0).max(read.newest_ms);
        read.read_at = turn;
        times
    }
}

fn hash(line: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    line.hash(&mut hasher);
    hasher.finish()
}

/// Returns the lines of `before` that are the first lines of `now`: the longest suffix of `before`
/// that is a prefix of `now`. The first line of `now` may be the rest of a line that was partly
/// overwritten. The last line of `before` may have been incomplete.
fn known_lines<'a>(before: &'a [(u64, u64)], now: &[u64]) -> &'a [(u64, u64)] {
    let mut known: &[(u64, u64)] = &[];
    // Try all four combinations of ignoring these two lines. An ignored first line of `now` counts
    // as the line before the overlap.
    for (incomplete, overwritten) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
        let end = before.len().saturating_sub(incomplete);
        let length = overlap(&before[..end], now.get(overwritten..).unwrap_or_default());
        let start = end.checked_sub(length + overwritten);
        if let Some(start) = start
            && length > 0
            && length + overwritten > known.len()
        {
            known = &before[start..end];
        }
    }
    known
}

/// Returns the length of the longest suffix of `before` that is a prefix of `now`.
fn overlap(before: &[(u64, u64)], now: &[u64]) -> usize {
    // The prefix function of Knuth, Morris and Pratt needs linear time, even if a guest writes the
    // same line repeatedly.
    let mut borders = vec![0; now.len()];
    let mut length = 0;
    for at in 1..now.len() {
        while length > 0 && now[at] != now[length] {
            length = borders[length - 1];
        }
        length += usize::from(now[at] == now[length]);
        borders[at] = length;
    }
    length = 0;
    for (line, _) in before {
        while length > 0 && now.get(length) != Some(line) {
            length = borders[length - 1];
        }
        length += usize::from(now.get(length) == Some(line));
    }
    length
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_lines_are_stable_and_increase() {
        let times = ConsoleTimes::default();
        let first = times.of("s", &["a", "b", "b"], 1_000, 5_000);
        assert_eq!(first, [1_000, 1_001, 1_002]);
        assert_eq!(times.of("s", &["a", "b", "b"], 1_000, 6_000), first);
        // The oldest line was overwritten, and two are new.
        let later = times.of("s", &["b", "b", "c", "d"], 1_000, 7_000);
        assert_eq!(later, [1_001, 1_002, 6_998, 6_999]);
        // A part of the oldest line was overwritten, and the newest line was completed.
        let completed = times.of("s", &["ird", "c", "de", "e"], 1_000, 8_000);
        assert_eq!(completed, [1_002, 6_998, 7_998, 7_999]);
        // A restored guest has a new console.
        assert_eq!(times.of("s", &["f"], 8_500, 9_001), [9_000]);
        assert_eq!(times.of("s", &[], 8_500, 9_000), [] as [u64; 0]);
        assert_eq!(times.of("s", &["f"], 8_500, 6_000), [9_001], "never back");
        assert_eq!(times.of("t", &["e"], 9, 10), [9]);
    }

    #[test]
    fn a_bounded_number_of_consoles_is_remembered() {
        let times = ConsoleTimes::default();
        for n in 0..MAX_SANDBOXES + 5 {
            times.of(&format!("s{n}"), &["x"], 1, 2);
        }
        let all = times.0.lock();
        assert_eq!(all.len(), MAX_SANDBOXES);
        assert!(!all.contains_key("s0") && all.contains_key("s5"));
    }
}
