//! [`ConsoleFollower`]: finds the new lines in successive reads of a console.

/// Lines of a console that were read before.
///
/// The API returns the last lines of a console. The lines themselves are compared, because a daemon
/// that was restarted assigns other times to them.
#[derive(Debug)]
pub struct ConsoleFollower {
    /// Lines of the last read with lines, oldest first.
    lines: Vec<String>,
    /// True if the last line was not returned yet: the guest may not have completed it.
    has_pending: bool,
    /// True if the last read may have missed lines.
    has_gap: bool,
}

/// First lines of a read that are the last lines of the previous read.
#[derive(Debug, Clone, Copy)]
struct Known {
    /// Number of lines.
    count: usize,
    /// True if the guest has extended the last line of the previous read. The extended line is the
    /// first line after the known lines.
    is_extended: bool,
}

impl ConsoleFollower {
    /// Creates a follower for which all lines of the first read are known, except for the last
    /// `count` lines.
    pub fn new(first: &[String], count: usize) -> Self {
        let known = first.len().saturating_sub(count);
        Self {
            lines: first[..known].to_vec(),
            has_pending: false,
            has_gap: false,
        }
    }

    /// Returns the new lines of a read of at most `max` lines. The last line is returned when
    /// another line follows, or when the next read has the same line.
    pub fn read(&mut self, now: Vec<String>, max: usize) -> Vec<String> {
        self.has_gap = false;
        // A paused sandbox has no console.
        if now.is_empty() {
            return self.finish();
        }
        let known = known_lines(&self.lines, &now);
        let mut new = Vec::new();
        let count = known.map_or(0, |known| known.count);
        let start = match known {
            // The console of another start of the guest, or more new lines than a read returns.
            None => {
                self.has_gap = !self.lines.is_empty() && now.len() >= max;
                new.extend(self.finish());
                0
            }
            // The pending line is the last known line.
            Some(known) if self.has_pending && !known.is_extended => count.saturating_sub(1),
            Some(_) => count,
        };
        let is_settled = count == now.len();
        let end = now.len() - usize::from(!is_settled);
        new.extend_from_slice(&now[start..end]);
        self.has_pending = !is_settled;
        self.lines = now;
        new
    }

    /// Returns the pending line at the end of the console.
    pub fn finish(&mut self) -> Vec<String> {
        let pending = self.lines.last().filter(|_| self.has_pending);
        let pending = pending.cloned();
        self.has_pending = false;
        pending.into_iter().collect()
    }

    /// Returns whether the next read may return the last line of this read.
    pub fn has_pending(&self) -> bool {
        self.has_pending
    }

    /// Returns whether lines before the last read may be missing.
    pub fn has_gap(&self) -> bool {
        self.has_gap
    }
}

/// Returns the first lines of `now` that are the last lines of `before`. `None` if no line is.
///
/// The first line of `now` may be the rest of a line that was partly overwritten. The last line of
/// `before` may have been incomplete.
fn known_lines(before: &[String], now: &[String]) -> Option<Known> {
    let mut best: Option<Known> = None;
    for (incomplete, overwritten) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
        let (Some(end), Some(rest)) =
            (before.len().checked_sub(incomplete), now.get(overwritten..))
        else {
            continue;
        };
        let length = overlap(&before[..end], rest);
        let count = length + overwritten;
        let is_extended = incomplete == 1;
        // An incomplete line may be the only line.
        let is_found = length > 0 || (is_extended && end == 0 && overwritten == 0);
        let is_extension = || {
            now.get(count)
                .is_some_and(|line| line.starts_with(&before[end]))
        };
        let is_rest = || {
            let line = end.checked_sub(length + 1).map(|index| &before[index]);
            line.is_some_and(|line| line.ends_with(&now[0]))
        };
        if is_found
            && best.is_none_or(|best| count > best.count)
            && (!is_extended || is_extension())
            && (overwritten == 0 || is_rest())
        {
            best = Some(Known { count, is_extended });
        }
    }
    best
}

/// Returns the length of the longest end of `before` that is the start of `now`.
fn overlap(before: &[String], now: &[String]) -> usize {
    let max = before.len().min(now.len());
    let mut lengths = (1..=max).rev();
    let longest = lengths.find(|&length| before[before.len() - length..] == now[..length]);
    longest.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Maximum number of lines of a read in these tests.
    const MAX: usize = 5;

    fn lines(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    /// Returns the lines that are returned for each of these reads.
    fn follow(count: usize, reads: &[&str]) -> Vec<String> {
        let first = lines(reads.first().unwrap());
        let mut follower = ConsoleFollower::new(&first, count);
        let new = reads.iter().map(|text| follower.read(lines(text), MAX));
        new.map(|lines| lines.join(" ")).collect()
    }

    #[test]
    fn each_line_is_returned_once() {
        assert_eq!(follow(9, &["a b", "a b", "a b"]), ["a", "b", ""]);
        assert_eq!(follow(9, &["a", "a b c", "a b c d e"]), ["", "a b", "c d"]);
        // Equal lines.
        assert_eq!(follow(9, &["t t", "t t t", "t t t"]), ["t", "t", "t"]);
        // The oldest lines are no longer in the read.
        assert_eq!(
            follow(9, &["a b c d e", "c d e f g", "f g h", "f g h"]),
            ["a b c d", "e f", "g", "h"]
        );
        // The first line of a read is the rest of a line.
        assert_eq!(follow(9, &["one b", "ne b c", "ne b c"]), ["one", "b", "c"]);
    }

    #[test]
    fn the_first_read_returns_only_the_requested_lines() {
        assert_eq!(follow(1, &["a b c", "a b c"]), ["", "c"]);
        assert_eq!(follow(2, &["a b c", "a b c d", "a b c d"]), ["b", "c", "d"]);
        assert_eq!(follow(0, &["a b c", "a b c d e"]), ["", "d"]);
        assert_eq!(follow(0, &["", "a b", "a b"]), ["", "a", "b"]);
    }

    #[test]
    fn a_line_is_returned_when_it_is_complete() {
        assert_eq!(
            follow(9, &["a lo", "a login", "a login"]),
            ["a", "", "login"]
        );
        assert_eq!(follow(9, &["lo", "login x", "login x"]), ["", "login", "x"]);
        // The line is extended after it was returned.
        assert_eq!(
            follow(9, &["a lo", "a lo", "a login", "a login"]),
            ["a", "lo", "", "login"]
        );
        let mut follower = ConsoleFollower::new(&[], 0);
        assert_eq!(follower.read(lines("a b"), MAX), ["a"]);
        assert!(follower.has_pending());
        assert_eq!(follower.finish(), ["b"]);
        assert_eq!(follower.finish(), [] as [String; 0]);
    }

    #[test]
    fn the_console_of_another_start_is_returned_completely() {
        assert_eq!(follow(9, &["a b", "x y", "x y"]), ["a", "b x", "y"]);
        // While the sandbox is paused, it has no console.
        assert_eq!(follow(9, &["a b", "", "x", "x"]), ["a", "b", "", "x"]);
        assert_eq!(
            follow(9, &["a b", "", "a b c", "a b c"]),
            ["a", "b", "", "c"]
        );
    }

    #[test]
    fn more_new_lines_than_a_read_returns_are_a_gap() {
        let mut follower = ConsoleFollower::new(&[], 0);
        assert_eq!(follower.read(lines("a b c d e"), MAX), lines("a b c d"));
        assert!(!follower.has_gap());
        assert_eq!(follower.read(lines("v w x y z"), MAX), lines("e v w x y"));
        assert!(follower.has_gap());
        assert_eq!(follower.read(lines("v w x y z"), MAX), ["z"]);
        assert!(!follower.has_gap());
    }
}
