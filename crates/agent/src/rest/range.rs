//! The header `Range: bytes=...` (RFC 9110, section 14). Only a single range is supported.

/// Part of a file to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ByteRange {
    /// The whole file.
    Whole,
    /// Offset and length in bytes.
    Part(u64, u64),
    /// The range is outside of the file.
    Unsatisfiable,
}

/// Parses the header for a file of `size` bytes. An unsupported header selects the whole file.
pub fn parse(header: Option<&str>, size: u64) -> ByteRange {
    let Some((first, last)) = header
        .and_then(|h| h.trim().strip_prefix("bytes="))
        .filter(|spec| !spec.contains(','))
        .and_then(|spec| spec.split_once('-'))
    else {
        return ByteRange::Whole;
    };
    match (first.trim().parse::<u64>(), last.trim().parse::<u64>()) {
        (Ok(first), _) if first >= size => ByteRange::Unsatisfiable,
        // Neither subtraction underflows: here `first < size` and `first <= last`.
        (Ok(first), Ok(last)) if last >= first => {
            ByteRange::Part(first, last.min(size - 1) - first + 1)
        }
        (Ok(first), Err(_)) if last.trim().is_empty() => ByteRange::Part(first, size - first),
        (Err(_), Ok(0)) if first.trim().is_empty() => ByteRange::Unsatisfiable,
        (Err(_), Ok(_)) if first.trim().is_empty() && size == 0 => ByteRange::Unsatisfiable,
        (Err(_), Ok(suffix)) if first.trim().is_empty() => {
            let length = suffix.min(size);
            ByteRange::Part(size - length, length)
        }
        _ => ByteRange::Whole,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_stay_inside_the_file() {
        assert_eq!(parse(None, 10), ByteRange::Whole);
        assert_eq!(parse(Some("bytes=2-4"), 10), ByteRange::Part(2, 3));
        assert_eq!(parse(Some("bytes=2-"), 10), ByteRange::Part(2, 8));
        assert_eq!(parse(Some("bytes=-3"), 10), ByteRange::Part(7, 3));
        assert_eq!(parse(Some("bytes=5-99"), 10), ByteRange::Part(5, 5));
        assert_eq!(parse(Some("bytes=10-"), 10), ByteRange::Unsatisfiable);
        assert_eq!(parse(Some("bytes=-5"), 0), ByteRange::Unsatisfiable);
        assert_eq!(parse(Some("bytes=1-2,4-5"), 10), ByteRange::Whole);
        assert_eq!(parse(Some("lines=1-2"), 10), ByteRange::Whole);
    }
}
