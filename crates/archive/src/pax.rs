//! Extended headers of tar archives (POSIX.1-2017, pax), and the maps of sparse files in the three
//! pax formats of GNU tar (0.0, 0.1, 1.0).
//!
//! A *sparse file* has holes, which read as zeros and occupy no disk space. The *map* of a sparse
//! file lists its ranges with content.

use crate::entry::ContentRange;

/// Content of an extended header, which applies to the next entry.
#[derive(Debug, Default)]
pub(crate) struct Pax {
    pub path: Option<Vec<u8>>,
    pub link: Option<Vec<u8>>,
    pub size: Option<u64>,
    pub uid: Option<u64>,
    pub gid: Option<u64>,
    /// Seconds and nanoseconds.
    pub mtime: Option<(i64, u32)>,
    /// Name and value.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// Size of a sparse file including holes.
    pub real_size: Option<u64>,
    /// Map of a sparse file in the header (formats 0.0 and 0.1).
    pub runs: Option<Vec<ContentRange>>,
    /// True if the map is at the beginning of the data (format 1.0).
    pub map_in_data: bool,
    /// Offset whose length has not been read yet (format 0.0).
    offset: Option<u64>,
}

type PaxResult<T> = Result<T, &'static str>;

impl Pax {
    /// Parses the content of an extended header.
    pub(crate) fn read(&mut self, mut text: &[u8]) -> PaxResult<()> {
        // `GNU.sparse.name` takes precedence over `path`, independently of the order of the
        // records.
        let mut sparse_name = None;
        // Some writers pad the header with zeros.
        while !text.is_empty() && text[0] != 0 {
            let (record, rest) = record(text).ok_or("the length of a record is invalid")?;
            text = rest;
            let equals = record.iter().position(|b| *b == b'=');
            let (key, value) = record.split_at(equals.ok_or("a record has no value")?);
            let value = &value[1..];
            match key {
                b"GNU.sparse.name" => sparse_name = Some(value.to_vec()),
                _ => self.take(key, value)?,
            }
        }
        if sparse_name.is_some() {
            self.path = sparse_name;
        }
        Ok(())
    }

    /// Stores one record of an extended header. Unknown keys are ignored.
    fn take(&mut self, key: &[u8], value: &[u8]) -> PaxResult<()> {
        match key {
            b"path" => self.path = Some(value.to_vec()),
            b"linkpath" => self.link = Some(value.to_vec()),
            b"size" => self.size = Some(number(value)?),
            b"uid" => self.uid = Some(number(value)?),
            b"gid" => self.gid = Some(number(value)?),
            b"mtime" => self.mtime = Some(time(value)?),
            b"GNU.sparse.realsize" | b"GNU.sparse.size" => self.real_size = Some(number(value)?),
            b"GNU.sparse.major" => self.map_in_data = number(value)? == 1,
            b"GNU.sparse.map" => self.runs = Some(map(value)?),
            b"GNU.sparse.offset" => self.offset = Some(number(value)?),
            b"GNU.sparse.numbytes" => {
                let offset = (self.offset.take())
                    .ok_or("its map of holes has a length without an offset")?;
                let length = number(value)?;
                let run = ContentRange { offset, length };
                self.runs.get_or_insert_default().push(run);
            }
            // An extended attribute. Other keys, such as a comment, are ignored.
            _ => {
                if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                    self.xattrs.push((name.to_vec(), value.to_vec()));
                }
            }
        }
        Ok(())
    }
}

/// Splits off the first record `<length> <key>=<value>\n`.
fn record(text: &[u8]) -> Option<(&[u8], &[u8])> {
    // A valid length is at most `text.len()`, so it has at most 19 digits, and a space follows.
    let space = text.iter().take(20).position(|b| *b == b' ')?;
    let length = usize::try_from(number(&text[..space]).ok()?).ok()?;
    let record = text.get(space + 1..length)?;
    Some((record.strip_suffix(b"\n")?, &text[length..]))
}

/// Parses a decimal number.
pub(crate) fn number(digits: &[u8]) -> PaxResult<u64> {
    let digits = std::str::from_utf8(digits).ok();
    // `parse` would also accept a plus sign.
    let plain = digits.filter(|d| d.bytes().all(|b| b.is_ascii_digit()));
    (plain.and_then(|d| d.parse().ok())).ok_or("a number in a header is malformed")
}

/// Parses a time such as `-12.5`. Returns seconds, rounded down, and nanoseconds.
fn time(text: &[u8]) -> PaxResult<(i64, u32)> {
    let bad = "a time in a header is malformed";
    let text = std::str::from_utf8(text).map_err(|_| bad)?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().map_err(|_| bad)?;
    // Fewer than nine digits are completed with zeros, and further digits are dropped.
    let digits: String = (fraction.chars().chain("000000000".chars()))
        .take(9)
        .collect();
    let ns: u32 = digits.parse().map_err(|_| bad)?;
    Ok(match ns {
        // The seconds are rounded down, so that the nanoseconds are positive.
        1.. if whole.starts_with('-') => (
            seconds.checked_sub(1).ok_or(bad)?,
            1_000_000_000_u32.saturating_sub(ns),
        ),
        _ => (seconds, ns.min(999_999_999)),
    })
}

/// Parses a map in format 0.1: `offset,length,offset,length`.
fn map(text: &[u8]) -> PaxResult<Vec<ContentRange>> {
    if text.is_empty() {
        return Ok(Vec::new());
    }
    let numbers = text
        .split(|b| *b == b',')
        .map(number)
        .collect::<Result<Vec<_>, _>>()?;
    let (pairs, rest) = numbers.as_chunks();
    if !rest.is_empty() {
        return Err("its map of holes has an offset without a length");
    }
    Ok(runs(pairs))
}

/// Converts offsets and lengths to ranges.
pub(crate) fn runs(pairs: &[[u64; 2]]) -> Vec<ContentRange> {
    let run = |[offset, length]: &[u64; 2]| ContentRange {
        offset: *offset,
        length: *length,
    };
    pairs.iter().map(run).collect()
}

/// Appends `<length> <key>=<value>\n`. The length includes its own digits.
pub(crate) fn append(to: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    // The length's own digits may increase its number of digits. The second step is exact.
    let mut length = rest + digits(rest);
    length = rest + digits(length);
    to.extend_from_slice(length.to_string().as_bytes());
    to.push(b' ');
    to.extend_from_slice(key);
    to.push(b'=');
    to.extend_from_slice(value);
    to.push(b'\n');
}

fn digits(number: usize) -> usize {
    number.to_string().len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extended_headers_survive_a_round_trip() {
        // Lengths at which the number of digits of the record's length changes.
        for length in [0, 1, 80, 90, 91, 92, 93, 980, 989, 990, 991, 992, 5000] {
            let mut text = Vec::new();
            append(&mut text, b"path", &vec![0xff; length]);
            append(&mut text, b"mtime", b"-1.5");
            append(&mut text, b"SCHILY.xattr.user.x", b"y\n=1");
            let mut pax = Pax::default();
            pax.read(&text).unwrap();
            assert_eq!(pax.path.map(|p| p.len()), Some(length));
            assert_eq!(pax.mtime, Some((-2, 500_000_000)));
            assert_eq!(pax.xattrs, [(b"user.x".to_vec(), b"y\n=1".to_vec())]);
        }
    }

    #[test]
    fn broken_records_are_refused() {
        // In this order: length too small, beyond the text, not a number; without a key; without an
        // equals sign; length above 64 bits; a negative number; a time without digits.
        for bad in [
            &b"5 a=b\n"[..],
            b"99 a=b\n",
            b"x a=b\n",
            b"3 \n",
            b"6 abc\n",
            b"18446744073709551616 a=b\n",
            b"11 size=-1\n",
            b"12 mtime=..\n",
        ] {
            let text = String::from_utf8_lossy(bad);
            assert!(Pax::default().read(bad).is_err(), "{text}");
        }
    }
}
