//! Conversion of times to and from RFC 3339.

/// Converts days since 1970-01-01 to year, month and day in the Gregorian calendar.
fn civil(days: i64) -> (i64, i64, i64) {
    // With years that begin in March, a leap day is the last day of its year. An era of 400 years
    // has 146,097 days, and 0000-03-01 is 719,468 days before 1970-01-01.
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    // Without its leap days, each year has 365 days. A leap day ends each period of 4 years, except
    // a period of 100 years that does not end an era.
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    // Months are counted from March. Any five months from March or from August have 153 days.
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

/// The inverse of [`civil`].
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let year_of_era = year.rem_euclid(400);
    let month = if month > 2 { month - 3 } else { month + 9 };
    let day_of_year = (153 * month + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    year.div_euclid(400) * 146_097 + day_of_era - 719_468
}

/// Formats seconds since 1970 as RFC 3339 in UTC with a resolution of seconds.
pub fn format_seconds(seconds: i64) -> String {
    let (year, month, day) = civil(seconds.div_euclid(86_400));
    let of_day = seconds.rem_euclid(86_400);
    let (hour, minute, second) = (of_day / 3_600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Formats a time since 1970 as RFC 3339 in UTC with a resolution of nanoseconds.
pub fn format_time(seconds: i64, nanoseconds: i64) -> String {
    let text = format_seconds(seconds);
    format!("{}.{nanoseconds:09}Z", text.trim_end_matches('Z'))
}

/// Parses an RFC 3339 time. Returns nanoseconds since 1970. The ranges of the numbers and most
/// separators are not checked.
pub fn parse_time(text: &str) -> Option<u64> {
    // Positions in `2026-11-30T13:45:00`. The year has four digits, so no intermediate value
    // overflows.
    let number = |range: std::ops::Range<usize>| text.get(range)?.parse::<i64>().ok();
    let (date, time) = (
        days(number(0..4)?, number(5..7)?, number(8..10)?),
        number(11..13)? * 3_600 + number(14..16)? * 60 + number(17..19)?,
    );
    let rest = text.get(19..)?;
    let digits = rest
        .strip_prefix('.')
        .map_or(0, |r| r.bytes().take_while(u8::is_ascii_digit).count());
    let nanoseconds = match digits {
        0 => 0,
        // The fraction is padded or truncated to nine digits.
        n => format!("{:0<9.9}", rest.get(1..=n)?).parse().ok()?,
    };
    let zone = &rest[if digits > 0 { digits + 1 } else { 0 }..];
    let offset = match zone {
        "Z" | "z" => 0,
        _ => {
            let sign = match zone.get(..1)? {
                "+" => 1,
                "-" => -1,
                _ => return None,
            };
            // Positions in `+01:00`.
            let hours: i64 = zone.get(1..3)?.parse().ok()?;
            let minutes: i64 = zone.get(4..6)?.parse().ok()?;
            sign * (hours * 3_600 + minutes * 60)
        }
    };
    let seconds = u64::try_from(date * 86_400 + time - offset).ok()?;
    seconds.checked_mul(1_000_000_000)?.checked_add(nanoseconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_rfc_3339_both_ways() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000000000Z"),
            (951_782_400, "2000-02-29T00:00:00.000000000Z"),
            (4_107_542_399, "2100-02-28T23:59:59.000000000Z"),
        ] {
            assert_eq!(format_time(seconds, 0), text);
            assert_eq!(parse_time(text), Some(seconds as u64 * 1_000_000_000));
        }
        assert_eq!(format_time(-1, 5), "1969-12-31T23:59:59.000000005Z");
        assert_eq!(parse_time("1970-01-01T02:00:00.5+02:00"), Some(500_000_000));
        assert_eq!(parse_time("yesterday"), None);
    }

    #[test]
    fn a_time_is_formatted_in_utc() {
        assert_eq!(format_seconds(0), "1970-01-01T00:00:00Z");
        assert_eq!(format_seconds(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(format_seconds(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(format_seconds(4_102_444_800), "2100-01-01T00:00:00Z");
    }
}
