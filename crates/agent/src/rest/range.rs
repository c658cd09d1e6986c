//! `Range: bytes=...` (RFC 9110, section 14), one range only.

/// What to send of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Range {
    /// All.
    Whole,
    /// From the first offset, this many bytes.
    Part(u64, u64),
    /// Nothing that the client asked for exists.
    Unsatisfiable,
}

/// Reads the header for a file of `size` bytes. What we do not understand means the whole file.
pub fn parse(header: Option<&str>, size: u64) -> Range {
    let Some((first, last)) = header
        .and_then(|h| h.trim().strip_prefix("bytes="))
        .filter(|spec| !spec.contains(','))
        .and_then(|spec| spec.split_once('-'))
    else {
        return Range::Whole;
    };
    match (first.trim().parse::<u64>(), last.trim().parse::<u64>()) {
        (Ok(first), _) if first >= size => Range::Unsatisfiable,
        (Ok(first), Ok(last)) if last >= first => {
            Range::Part(first, last.min(size - 1) - first + 1)
        }
        (Ok(first), Err(_)) if last.trim().is_empty() => Range::Part(first, size - first),
        (Err(_), Ok(0)) if first.trim().is_empty() => Range::Unsatisfiable,
        (Err(_), Ok(_)) if first.trim().is_empty() && size == 0 => Range::Unsatisfiable,
        (Err(_), Ok(suffix)) if first.trim().is_empty() => {
            let length = suffix.min(size);
            Range::Part(size - length, length)
        }
        _ => Range::Whole,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_stay_inside_the_file() {
        assert_eq!(parse(None, 10), Range::Whole);
        assert_eq!(parse(Some("bytes=2-4"), 10), Range::Part(2, 3));
        assert_eq!(parse(Some("bytes=2-"), 10), Range::Part(2, 8));
        assert_eq!(parse(Some("bytes=-3"), 10), Range::Part(7, 3));
        assert_eq!(parse(Some("bytes=5-99"), 10), Range::Part(5, 5));
        assert_eq!(parse(Some("bytes=10-"), 10), Range::Unsatisfiable);
        assert_eq!(parse(Some("bytes=-5"), 0), Range::Unsatisfiable);
        assert_eq!(parse(Some("bytes=1-2,4-5"), 10), Range::Whole);
        assert_eq!(parse(Some("lines=1-2"), 10), Range::Whole);
    }
}
