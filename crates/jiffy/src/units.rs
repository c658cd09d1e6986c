//! Parsers of sizes, durations and domains in command-line arguments, such as `4GB` and `90s`.

use std::time::Duration;

/// Maximum size of an argument in MiB.
const MAX_MIB: f64 = 1e9;

/// Parses a size into MiB in the notations of Docker and Kubernetes: `4GiB`, `4Gi`, `4g`, `1.5GB`,
/// `4096MiB`, `4096M`, or a number of MiB. All units are powers of 1024.
pub fn mebibytes(text: &str) -> Result<u64, String> {
    let (number, unit) = split(text.trim());
    let factor: f64 = match unit.to_ascii_lowercase().as_str() {
        "k" | "ki" | "kb" | "kib" => 1.0 / 1024.0,
        "" | "m" | "mi" | "mb" | "mib" => 1.0,
        "g" | "gi" | "gb" | "gib" => 1024.0,
        "t" | "ti" | "tb" | "tib" => 1024.0 * 1024.0,
        _ => {
            return Err(format!(
                "`{text}`: the unit must be KiB, MiB, GiB or TiB, for example 512MiB, 512Mi or 512m"
            ));
        }
    };
    let number: f64 = number
        .parse()
        .map_err(|_| format!("`{text}` is not a size: use for example 512MiB or 1.5GiB"))?;
    let mib = number * factor;
    if !(1.0..=MAX_MIB).contains(&mib) {
        return Err(format!(
            "`{text}` is out of range: use at least 1MiB and at most {MAX_MIB}MiB"
        ));
    }
    // The range was checked above. Fractions of a MiB are dropped.
    Ok(mib as u64)
}

/// Parses a size into MiB. 0 means no limit.
pub fn mebibytes_or_zero(text: &str) -> Result<u64, String> {
    match text.trim() {
        "0" => Ok(0),
        text => mebibytes(text),
    }
}

/// Parses a memory size into MiB.
pub fn memory_mib(text: &str) -> Result<u32, String> {
    u32::try_from(mebibytes(text)?).map_err(|_| format!("`{text}` is out of range"))
}

/// Parses a factor greater than 0 and at most 1,000.
pub fn factor(text: &str) -> Result<f64, String> {
    let factor = text.parse().ok();
    factor.filter(|f| *f > 0.0 && *f <= 1000.0).ok_or_else(|| {
        format!("`{text}` is not a factor: use a number up to 1000, for example 4 or 1.5")
    })
}

/// Parses an idle timeout into seconds, rounded up. 0 means none.
pub fn idle_timeout(text: &str) -> Result<u64, String> {
    let seconds = duration_or_zero(text)?.as_millis().div_ceil(1000);
    u64::try_from(seconds).map_err(|_| format!("`{text}` is out of range"))
}

/// Timeout of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timeout {
    /// No limit.
    Unlimited,
    /// Time from now, in seconds.
    Seconds(i64),
}

impl Timeout {
    /// Returns the timeout as the API expects it.
    pub fn seconds(self) -> i64 {
        match self {
            Self::Unlimited => -1,
            Self::Seconds(seconds) => seconds,
        }
    }
}

/// Parses a timeout: a duration, rounded up to seconds, or `none`.
pub fn timeout(text: &str) -> Result<Timeout, String> {
    if text == "none" {
        return Ok(Timeout::Unlimited);
    }
    let seconds = duration(text)?.as_millis().div_ceil(1000);
    let seconds = i64::try_from(seconds).map_err(|_| format!("`{text}` is out of range"))?;
    Ok(Timeout::Seconds(seconds))
}

/// Parses a duration: `60s`, `500ms`, `5m`, `2h`, `1d`, or a number of seconds. It must not be 0.
pub fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = split(text);
    let factor = match unit {
        "" | "s" => 1.0,
        "ms" => 0.001,
        "m" => 60.0,
        "h" => 3600.0,
        "d" => 86_400.0,
        _ => {
            return Err(format!(
                "`{text}`: the unit must be ms, s, m, h or d, for example 60s"
            ));
        }
    };
    number
        .parse::<f64>()
        .ok()
        // Fails if the result is negative or out of range.
        .and_then(|n| Duration::try_from_secs_f64(n * factor).ok())
        .filter(|d| !d.is_zero())
        .ok_or_else(|| format!("`{text}` is not a duration: use for example 60s or 5m"))
}

/// Parses a duration, which may be 0.
pub fn duration_or_zero(text: &str) -> Result<Duration, String> {
    match text.trim() {
        "0" | "0s" => Ok(Duration::ZERO),
        text => duration(text),
    }
}

/// Splits a text into a number and a unit. A sign is not part of the number, and is rejected.
fn split(text: &str) -> (&str, &str) {
    let at = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(at);
    (number, unit.trim())
}

/// Formats microseconds as milliseconds with two decimals.
pub fn millis(us: u64) -> String {
    format!("{:.2}", us as f64 / 1000.0)
}

/// Parses a domain name without a port. Names of hosts are compared without case, so it is returned
/// in lower-case letters.
pub fn domain(text: &str) -> Result<String, String> {
    const MAX_DOMAIN: usize = 253;
    const MAX_LABEL: usize = 63;
    let is_label = |label: &str| {
        (1..=MAX_LABEL).contains(&label.len())
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'))
    };
    if text.len() > MAX_DOMAIN || !text.split('.').all(is_label) {
        return Err(format!(
            "`{text}` is not a domain name: use a name such as sandboxes.example, without a port"
        ));
    }
    Ok(text.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_notations_of_sizes_are_parsed() {
        for (text, mib) in [
            ("512MiB", 512),
            ("512", 512),
            ("1GiB", 1024),
            ("1.5G", 1536),
            ("2 TiB", 2 << 20),
            ("4Gi", 4096),
            ("4gi", 4096),
            ("4g", 4096),
            ("4GB", 4096),
            ("4GiB", 4096),
            ("4096MiB", 4096),
            ("4096Mi", 4096),
            ("4096M", 4096),
            ("4096m", 4096),
            ("524288k", 512),
            ("524288Ki", 512),
            (" 4Gi ", 4096),
        ] {
            assert_eq!(mebibytes(text), Ok(mib), "{text}");
        }
        for text in [
            "",
            "x",
            "5 parsecs",
            "-1",
            "0",
            "1e400",
            "999999TiB",
            "4Gig",
            "1k",
        ] {
            assert!(mebibytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn common_notations_of_durations_are_parsed() {
        for (text, ms) in [
            ("60s", 60_000),
            ("5", 5_000),
            ("250ms", 250),
            ("2m", 120_000),
            ("1.5h", 5_400_000),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        assert_eq!(timeout("1.5s").map(Timeout::seconds), Ok(2));
        assert_eq!(timeout("none").map(Timeout::seconds), Ok(-1));
        assert!(timeout("0").is_err());
        for text in ["", "soon", "0", "0s", "5y", "1e999s"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_domain_consists_of_labels_and_has_no_port() {
        for text in [
            "localhost",
            "sandboxes.example",
            "a_b.c-d.7",
            "10-0-0-1.Example.ORG",
        ] {
            assert_eq!(domain(text), Ok(text.to_ascii_lowercase()));
        }
        let long = format!("{}.example", "a".repeat(64));
        // 255 bytes. Without the first two bytes, the name has the maximum length.
        let many = "a.".repeat(127) + "a";
        assert_eq!(domain(&many[2..]), Ok(many[2..].to_owned()));
        for text in [
            "",
            "a b",
            "a..b",
            ".a",
            "a.",
            "a:3000",
            "-a.b",
            "a-.b",
            "https://a",
            "*.a",
            "\u{e4}.b",
            &long,
            &many,
        ] {
            assert!(domain(text).is_err(), "{text}");
        }
    }
}
