//! Extended headers of tar (POSIX.1-2017, pax) and the maps of sparse files in GNU tar's three pax formats.

use super::Problem;
use super::archive::Run;

/// What an extended header says about the entry that follows.
#[derive(Debug, Default)]
pub(super) struct Pax {
    pub path: Option<Vec<u8>>,
    pub link: Option<Vec<u8>>,
    pub size: Option<u64>,
    pub uid: Option<u64>,
    pub gid: Option<u64>,
    /// Seconds and nanoseconds.
    pub mtime: Option<(i64, u32)>,
    /// Name and value.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// Size of a sparse file with its holes.
    pub real_size: Option<u64>,
    /// Formats 0.0 and 0.1: the map is in the header.
    pub runs: Option<Vec<Run>>,
    /// Format 1.0: the map is the beginning of the data.
    pub map_in_data: bool,
    /// Format 0.0: an offset waits for its length.
    offset: Option<u64>,
}

/// Attributes that a layer may bring. Others mean something to this host (`trusted.overlay.*`, access control lists, labels).
fn is_kept(name: &[u8]) -> bool {
    name == b"security.capability" || name.starts_with(b"user.")
}

impl Pax {
    /// Takes the content of one extended header.
    pub(super) fn read(&mut self, mut text: &[u8]) -> Result<(), Problem> {
        // A name in the other encoding of sparse files' names comes last, whatever the order.
        let mut sparse_name = None;
        while !text.is_empty() && text[0] != 0 {
            let (record, rest) = record(text).ok_or(Problem::Header("a record's length"))?;
            text = rest;
            let equals = record.iter().position(|b| *b == b'=');
            let (key, value) = record.split_at(equals.ok_or(Problem::Header("a record"))?);
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

    fn take(&mut self, key: &[u8], value: &[u8]) -> Result<(), Problem> {
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
                let offset = (self.offset.take()).ok_or(Problem::Holes("a length alone"))?;
                let length = number(value)?;
                let run = Run { offset, length };
                self.runs.get_or_insert_default().push(run);
            }
            _ => {
                if let Some(name) = key.strip_prefix(b"SCHILY.xattr.")
                    && is_kept(name)
                {
                    self.xattrs.push((name.to_vec(), value.to_vec()));
                }
            }
        }
        Ok(())
    }
}

/// Splits the first `<length> <key>=<value>\n` off.
fn record(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let space = text.iter().take(20).position(|b| *b == b' ')?;
    let length = usize::try_from(number(&text[..space]).ok()?).ok()?;
    let record = text.get(space + 1..length)?;
    Some((record.strip_suffix(b"\n")?, &text[length..]))
}

/// A decimal number.
pub(super) fn number(digits: &[u8]) -> Result<u64, Problem> {
    let digits = std::str::from_utf8(digits).ok();
    let plain = digits.filter(|d| d.bytes().all(|b| b.is_ascii_digit()));
    (plain.and_then(|d| d.parse().ok())).ok_or(Problem::Header("a number"))
}

/// `-12.5`: seconds, rounded down, and nanoseconds.
fn time(text: &[u8]) -> Result<(i64, u32), Problem> {
    let bad = Problem::Header("a time");
    let text = std::str::from_utf8(text).map_err(|_| bad.clone())?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().map_err(|_| bad.clone())?;
    let digits: String = (fraction.chars().chain("000000000".chars()))
        .take(9)
        .collect();
    let ns: u32 = digits.parse().map_err(|_| bad.clone())?;
    Ok(match ns {
        1.. if whole.starts_with('-') => (
            seconds.checked_sub(1).ok_or(bad)?,
            1_000_000_000_u32.saturating_sub(ns),
        ),
        _ => (seconds, ns.min(999_999_999)),
    })
}

/// Format 0.1: `offset,length,offset,length`.
fn map(text: &[u8]) -> Result<Vec<Run>, Problem> {
    if text.is_empty() {
        return Ok(Vec::new());
    }
    let numbers = text.split(|b| *b == b',').map(number);
    let numbers = numbers.collect::<Result<Vec<_>, _>>()?;
    let (pairs, rest) = numbers.as_chunks();
    if !rest.is_empty() {
        return Err(Problem::Holes("an offset alone"));
    }
    Ok(pairs
        .iter()
        .map(|[offset, length]| Run {
            offset: *offset,
            length: *length,
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(pairs: &[(&str, &str)]) -> Vec<u8> {
        super::super::tests::pax(pairs)
    }

    #[test]
    fn records_are_read_and_foreign_attributes_left_out() {
        let mut pax = Pax::default();
        pax.read(&records(&[
            ("path", "a/ü=b"),
            ("mtime", "-1.5"),
            ("size", "12"),
            ("SCHILY.xattr.user.x", "y\n1"),
            ("SCHILY.xattr.trusted.overlay.opaque", "y"),
            ("SCHILY.xattr.security.selinux", "z"),
            ("comment", "whatever"),
        ]))
        .unwrap();
        assert_eq!(pax.path.as_deref(), Some("a/ü=b".as_bytes()));
        assert_eq!(pax.mtime, Some((-2, 500_000_000)));
        assert_eq!(pax.size, Some(12));
        assert_eq!(pax.xattrs, [(b"user.x".to_vec(), b"y\n1".to_vec())]);
    }

    #[test]
    fn broken_records_are_refused() {
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
