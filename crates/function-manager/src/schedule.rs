//! Schedules of functions in cron notation: determines when the next call is due, and counts
//! skipped calls.

use crate::function_error::FunctionError;
use cronexpr::{Crontab, FallbackTimezoneOption, MakeTimestamp, ParseOptions};
use jiff::{SignedDuration, Timestamp};

/// Maximum length of an expression in bytes.
const MAX_EXPRESSION_BYTES: usize = 256;
/// Maximum delay of a call. A later call is skipped, because the host was suspended or overloaded.
const MAX_LATENESS: SignedDuration = SignedDuration::from_secs(30);

/// Schedule of a function.
#[derive(Debug)]
pub(crate) struct Schedule {
    expression: String,
    crontab: Crontab,
    /// Time of the next call. `None` if the schedule does not match any longer.
    next: Option<Timestamp>,
    is_running: bool,
    status: ScheduleStatus,
}

/// Calls of a schedule since the daemon started.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ScheduleStatus {
    /// Time of the next call in milliseconds since 1970. `None` if there is no next call.
    pub next_ms: Option<i64>,
    /// Time of the last call in milliseconds since 1970.
    pub last_ms: Option<i64>,
    /// HTTP status of the last call. `None` if the function returned no response.
    pub last_status: Option<u16>,
    /// Number of calls that were skipped because they were too late. Calls that became due while
    /// the host was suspended count once.
    pub missed: u64,
    /// Number of calls that were skipped because the previous call was still running.
    pub skipped: u64,
}

fn invalid(expression: &str, reason: impl std::fmt::Display) -> FunctionError {
    let expression = expression.escape_debug();
    FunctionError::Setting(format!(
        "`{expression}` is not a valid schedule (`minute hour day month weekday`): {reason}"
    ))
}

fn next_after(crontab: &Crontab, now: Timestamp) -> Option<Timestamp> {
    let next = crontab.find_next(MakeTimestamp(now)).ok()?;
    Some(next.timestamp())
}

impl Schedule {
    /// Parses an expression. The time zone defaults to UTC.
    pub(crate) fn parse(expression: &str, now: Timestamp) -> Result<Self, FunctionError> {
        if expression.len() > MAX_EXPRESSION_BYTES {
            let reason = format!("it is longer than {MAX_EXPRESSION_BYTES} bytes");
            return Err(invalid("...", reason));
        }
        let mut options = ParseOptions::default();
        options.fallback_timezone_option = FallbackTimezoneOption::UTC;
        let crontab = cronexpr::parse_crontab_with(expression, options)
            .map_err(|e| invalid(expression, e))?;
        let never = || invalid(expression, "the schedule never matches");
        // A valid expression may denote a date that does not exist, such as 31 February.
        let next = next_after(&crontab, now).ok_or_else(never)?;
        Ok(Self {
            expression: expression.to_owned(),
            crontab,
            next: Some(next),
            is_running: false,
            status: ScheduleStatus::default(),
        })
    }

    pub(crate) fn expression(&self) -> &str {
        &self.expression
    }

    pub(crate) fn status(&self) -> ScheduleStatus {
        ScheduleStatus {
            next_ms: self.next.map(Timestamp::as_millisecond),
            ..self.status.clone()
        }
    }

    /// Returns whether to make a call now. If true, the caller must call [`Self::record_end`]
    /// afterwards.
    pub(crate) fn start_if_due(&mut self, now: Timestamp) -> bool {
        let Some(due) = self.next.filter(|due| *due <= now) else {
            return false;
        };
        // The next time is computed first, so that a skipped call is not retried.
        self.next = next_after(&self.crontab, now);
        if now.duration_since(due) > MAX_LATENESS {
            self.status.missed += 1;
            return false;
        }
        if self.is_running {
            self.status.skipped += 1;
            return false;
        }
        self.is_running = true;
        self.status.last_ms = Some(now.as_millisecond());
        true
    }

    /// Records the end of a call.
    pub(crate) fn record_end(&mut self, status: Option<u16>) {
        self.is_running = false;
        self.status.last_status = status;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    #[test]
    fn a_due_call_starts_once_unless_it_is_late_or_the_previous_call_runs() {
        let mut schedule = Schedule::parse("*/5 * * * *", at("2026-01-01T00:01:00Z")).unwrap();
        assert!(!schedule.start_if_due(at("2026-01-01T00:04:59Z")));
        assert!(schedule.start_if_due(at("2026-01-01T00:05:00.2Z")));
        assert!(!schedule.start_if_due(at("2026-01-01T00:05:01Z")));
        assert!(
            !schedule.start_if_due(at("2026-01-01T00:10:00Z")),
            "it runs"
        );
        schedule.record_end(Some(200));
        // The host was suspended for an hour: the call is too late, and is skipped.
        assert!(!schedule.start_if_due(at("2026-01-01T01:12:00Z")));
        assert!(schedule.start_if_due(at("2026-01-01T01:15:00Z")));
        schedule.record_end(None);
        let status = schedule.status();
        assert_eq!(
            (status.skipped, status.missed, status.last_status),
            (1, 1, None)
        );
        let next = at("2026-01-01T01:20:00Z").as_millisecond();
        assert_eq!(status.next_ms, Some(next));
    }

    #[test]
    fn invalid_and_never_matching_expressions_are_rejected() {
        let now = at("2026-01-01T00:00:00Z");
        for bad in [
            "",
            "x",
            "* * * *",
            "61 * * * *",
            "0 0 31 2 *",
            &"* ".repeat(300),
        ] {
            let result = Schedule::parse(bad, now);
            assert!(matches!(result, Err(FunctionError::Setting(_))), "{bad}");
        }
        let zoned = Schedule::parse("0 9 * * MON Europe/Berlin", now).unwrap();
        let next = at("2026-01-05T08:00:00Z").as_millisecond();
        assert_eq!(zoned.status().next_ms, Some(next));
    }
}
