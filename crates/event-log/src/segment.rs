//! [`Segment`]: one file of a log. Its first line describes the file, and each further line is an
//! entry.
//!
//! A log consists of segments. Entries are appended to the newest, and a full log loses its oldest
//! segment as a whole.

use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Version of the format of a file.
const FORMAT: u32 = 1;
/// Maximum length of the first line.
const MAX_HEADER_BYTES: u64 = 4096;
/// Extension of the files.
const EXTENSION: &str = "jsonl";

/// First line of a file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Header {
    format: u32,
    host: String,
    /// Number of entries of the log before this file.
    before: u64,
    /// Time of the last entry before this file, in microseconds since 1970. 0 if none.
    previous_us: u64,
    /// Time at which the file was created, in microseconds since 1970.
    created_us: u64,
}

/// Time of an entry.
#[derive(Deserialize)]
struct Timed {
    t: u64,
}

/// File of a log.
#[derive(Debug, Clone)]
pub(crate) struct Segment {
    pub path: PathBuf,
    /// Host that recorded the entries.
    pub host: Arc<str>,
    /// Number of entries of the log before this file.
    pub before: u64,
    /// Time of the last entry before this file, in microseconds since 1970. 0 if none.
    pub previous_us: u64,
    pub created_us: u64,
    /// Number of entries. Unknown (0) for all files but the newest.
    pub entries: u64,
    /// Time of the last entry, or [`Self::previous_us`].
    pub last_us: u64,
    /// Size, without an incomplete last line.
    pub bytes: u64,
}

impl Segment {
    /// Creates the file that follows `before` entries.
    pub fn create(
        directory: &Path,
        host: &Arc<str>,
        (before, previous_us, created_us): (u64, u64, u64),
    ) -> io::Result<(Self, File)> {
        let path = directory.join(format!("{created_us:016}.{EXTENSION}"));
        let header = Header {
            format: FORMAT,
            host: host.to_string(),
            before,
            previous_us,
            created_us,
        };
        let mut line = serde_json::to_vec(&header)?;
        line.push(b'\n');
        let mut file = OpenOptions::new()
            .append(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)?;
        if let Err(e) = file.write_all(&line) {
            // Ignore the error: a file without a complete header is ignored when the log is opened.
            let _ = std::fs::remove_file(&path);
            return Err(e);
        }
        let segment = Self {
            path,
            host: host.clone(),
            before,
            previous_us,
            created_us,
            entries: 0,
            last_us: previous_us,
            bytes: line.len() as u64,
        };
        Ok((segment, file))
    }

    /// Reads the first line of a file. Returns `None` for a file that is no part of a log: its name
    /// has another form, or a crash during its creation left it incomplete.
    pub fn open(path: &Path) -> io::Result<Option<Self>> {
        let is_named = path.extension().is_some_and(|e| e == EXTENSION);
        if !is_named {
            return Ok(None);
        }
        let file = File::open(path)?;
        let bytes = file.metadata()?.len();
        let mut line = Vec::new();
        BufReader::new(file.take(MAX_HEADER_BYTES)).read_until(b'\n', &mut line)?;
        let header: Header = match serde_json::from_slice(&line) {
            Ok(header) if line.ends_with(b"\n") => header,
            _ => return Ok(None),
        };
        if header.format != FORMAT {
            return Ok(None);
        }
        Ok(Some(Self {
            path: path.to_owned(),
            host: header.host.into(),
            before: header.before,
            previous_us: header.previous_us,
            created_us: header.created_us,
            entries: 0,
            last_us: header.previous_us,
            bytes,
        }))
    }

    /// Counts the entries of the newest file and opens it for further entries. Removes an
    /// incomplete last line, which a crash of the host or a full disk left.
    pub fn reopen(&mut self) -> io::Result<File> {
        let content = std::fs::read(&self.path)?;
        let end = memchr::memrchr(b'\n', &content).map_or(0, |at| at + 1);
        let file = OpenOptions::new().append(true).open(&self.path)?;
        if end < content.len() {
            file.set_len(end as u64)?;
        }
        self.bytes = end as u64;
        let lines = entries(&content[..end]);
        for line in lines {
            self.entries += 1;
            // A damaged entry is counted, and skipped by readers.
            if let Ok(Timed { t }) = serde_json::from_slice(line) {
                self.last_us = self.last_us.max(t);
            }
        }
        Ok(file)
    }

    /// Reads the entries. Returns `None` if the file was removed.
    pub fn read(&self) -> io::Result<Option<Vec<u8>>> {
        let file = match File::open(&self.path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let mut content = Vec::with_capacity(usize::try_from(self.bytes).unwrap_or_default());
        file.take(self.bytes).read_to_end(&mut content)?;
        Ok(Some(content))
    }
}

/// Returns the entries of a file's content, without the first line.
pub(crate) fn entries(content: &[u8]) -> impl DoubleEndedIterator<Item = &[u8]> {
    let first = memchr::memchr(b'\n', content).map_or(content.len(), |at| at + 1);
    let lines = content[first..].split(|byte| *byte == b'\n');
    lines.filter(|line| !line.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_incomplete_last_entry_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let host = "h1".into();
        // 7 entries precede the file, the last one at the time 5. The file is created at the time
        // 9.
        let (segment, mut file) = Segment::create(directory.path(), &host, (7, 5, 9)).unwrap();
        file.write_all(b"{\"t\":11}\nnot an entry\n{\"t\":1")
            .unwrap();
        let mut opened = Segment::open(&segment.path).unwrap().unwrap();
        assert_eq!((opened.before, opened.previous_us), (7, 5));
        opened.reopen().unwrap();
        assert_eq!((opened.entries, opened.last_us), (2, 11));
        let content = opened.read().unwrap().unwrap();
        let lines: Vec<_> = entries(&content).collect();
        assert_eq!(lines, [&b"{\"t\":11}"[..], b"not an entry"]);
    }

    #[test]
    fn files_of_other_formats_are_ignored() {
        let directory = tempfile::tempdir().unwrap();
        for (name, content) in [
            ("1.jsonl", ""),
            ("2.jsonl", "{\"format\":1,\"host\":\"h1\",\"befo"),
            (
                "3.jsonl",
                "{\"format\":2,\"host\":\"h1\",\"before\":0,\"previousUs\":0,\"createdUs\":1}\n",
            ),
            (
                "4.txt",
                "{\"format\":1,\"host\":\"h1\",\"before\":0,\"previousUs\":0,\"createdUs\":1}\n",
            ),
        ] {
            let path = directory.path().join(name);
            std::fs::write(&path, content).unwrap();
            assert!(Segment::open(&path).unwrap().is_none(), "{name}");
        }
    }
}
