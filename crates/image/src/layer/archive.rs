//! Reading a tar archive entry by entry: v7, ustar, pax and GNU, with long names and holes.

use super::limits::{Budget, Limits};
use super::pax::{self, Pax};
use super::stream::Stream;
use super::{LayerError, Problem};
use std::io::Read;
use tar::{EntryType, GnuExtSparseHeader, Header};

const BLOCK: u64 = 512;

/// A stretch of a file that has content; the rest is holes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub offset: u64,
    pub length: u64,
}

/// What an entry is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Kind {
    File,
    Directory,
    Symlink,
    HardLink,
    Fifo,
    /// Character or block device.
    Device,
}

/// One entry; its content is read by [`Archive::read`].
#[derive(Debug)]
pub(super) struct Entry {
    pub kind: Kind,
    pub path: Vec<u8>,
    /// Target of a link.
    pub link: Vec<u8>,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// Seconds since the epoch and nanoseconds.
    pub mtime: (i64, u32),
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// Bytes, holes included.
    pub size: u64,
    /// Where the content goes, in order; within `size`.
    pub runs: Vec<Run>,
}

/// A tar archive.
pub(super) struct Archive<'a> {
    stream: Stream<'a>,
    /// Of the present entry's data.
    left: u64,
    /// Zeros behind it.
    padding: u64,
    end_mark: bool,
}

impl<'a> Archive<'a> {
    pub(super) fn new(stream: Stream<'a>) -> Self {
        Self {
            stream,
            left: 0,
            padding: 0,
            end_mark: false,
        }
    }

    /// Bytes read of what the archive comes from.
    pub(super) fn packed(&self) -> u64 {
        self.stream.packed()
    }

    /// Reads the rest, which means nothing, and returns the checksum of the whole archive.
    pub(super) fn finish(self) -> Result<String, LayerError> {
        self.stream.finish()
    }

    /// Whether there was an end mark, now that there are no more entries.
    pub(super) fn has_end_mark(&self) -> bool {
        self.end_mark
    }

    /// The next entry, or none at the archive's end mark, or at its end.
    pub(super) fn next(&mut self, budget: &mut Budget) -> Result<Option<Entry>, LayerError> {
        let mut pax = Pax::default();
        let (mut long_path, mut long_link, mut extended) = (None, None, false);
        loop {
            self.skip_rest()?;
            let Some(block) = self.first_block()? else {
                // After an extended header its entry must come.
                let whole = !extended;
                return whole.then_some(None).ok_or(LayerError::Truncated);
            };
            if block.iter().all(|b| *b == 0) {
                self.end_mark = true;
                return Ok(None);
            }
            budget.entry()?;
            let header = Header::from_byte_slice(&block);
            check(header)?;
            let size = header.entry_size();
            let size = size.map_err(|_| LayerError::Problem(Problem::Header("a size")))?;
            let kind = header.entry_type();
            extended =
                kind.is_pax_local_extensions() || kind.is_gnu_longname() || kind.is_gnu_longlink();
            match kind {
                EntryType::XHeader => {
                    let text = self.extended(size, &budget.limits)?;
                    pax.read(&text).map_err(LayerError::Problem)?;
                }
                EntryType::GNULongName => {
                    long_path = Some(until_nul(self.extended(size, &budget.limits)?));
                }
                EntryType::GNULongLink => {
                    long_link = Some(until_nul(self.extended(size, &budget.limits)?));
                }
                // A comment for all entries, or the archive's label.
                EntryType::XGlobalHeader => self.begin(size),
                kind if kind.as_byte() == b'V' => self.begin(size),
                _ => {
                    let path = pax.path.take().or(long_path);
                    let path = path.unwrap_or_else(|| header.path_bytes().into_owned());
                    let link = pax.link.take().or(long_link);
                    let link = link.or_else(|| header.link_name_bytes().map(|l| l.into_owned()));
                    let entry =
                        self.entry(header, pax, path, link.unwrap_or_default(), size, budget);
                    return entry.map(Some);
                }
            }
        }
    }

    fn entry(
        &mut self,
        header: &Header,
        pax: Pax,
        path: Vec<u8>,
        link: Vec<u8>,
        size: u64,
        budget: &Budget,
    ) -> Result<Entry, LayerError> {
        let bad = |problem| LayerError::entry(&path, problem);
        let kind = kind(header, &path).map_err(bad)?;
        // Only files have content, whatever their size says (as Go's reader has it, which most layers were made with).
        let stored = match kind {
            Kind::File => pax.size.unwrap_or(size),
            _ => 0,
        };
        let field =
            |value: std::io::Result<u64>, name| value.map_err(|_| bad(Problem::Header(name)));
        let id = |value: u64, name| u32::try_from(value).map_err(|_| bad(Problem::Header(name)));
        let seconds = i64::try_from(header.mtime().unwrap_or(0)).unwrap_or(0);
        let uid = pax
            .uid
            .map_or_else(|| field(header.uid(), "an owner"), Ok)?;
        let gid = pax.gid.map_or_else(|| field(header.gid(), "a group"), Ok)?;
        let mode = header.mode().map_err(|_| bad(Problem::Header("a mode")))?;
        let (uid, gid) = (id(uid, "an owner")?, id(gid, "a group")?);
        self.begin(stored);
        let (size, runs) = self
            .content(header, &pax, &kind, stored, &budget.limits)
            .map_err(|e| match e {
                LayerError::Problem(problem) => LayerError::entry(&path, problem),
                other => other,
            })?;
        Ok(Entry {
            kind,
            link,
            mode: mode & 0o7777,
            uid,
            gid,
            mtime: pax.mtime.unwrap_or((seconds, 0)),
            xattrs: pax.xattrs,
            size,
            runs,
            path,
        })
    }

    /// Size of a file with its holes, and what lies between them.
    fn content(
        &mut self,
        header: &Header,
        pax: &Pax,
        kind: &Kind,
        stored: u64,
        limits: &Limits,
    ) -> Result<(u64, Vec<Run>), LayerError> {
        let whole = |length| match length {
            0 => Vec::new(),
            length => vec![Run { offset: 0, length }],
        };
        if *kind != Kind::File {
            return Ok((0, Vec::new()));
        }
        let (size, runs) = if header.entry_type().is_gnu_sparse() {
            // The map's further blocks come before the content and are not counted in it.
            let held = (self.left, self.padding);
            (self.left, self.padding) = (0, 0);
            let map = self.old_gnu_map(header, limits)?;
            (self.left, self.padding) = held;
            map
        } else if pax.map_in_data {
            let runs = self.map_in_data(limits)?;
            (pax.real_size.unwrap_or(self.left), runs)
        } else if let Some(runs) = &pax.runs {
            (pax.real_size.unwrap_or(self.left), runs.clone())
        } else {
            return Ok((stored, whole(stored)));
        };
        check_runs(&runs, size, self.left).map_err(LayerError::Problem)?;
        Ok((size, runs))
    }

    fn old_gnu_map(
        &mut self,
        header: &Header,
        limits: &Limits,
    ) -> Result<(u64, Vec<Run>), LayerError> {
        let bad = |_| LayerError::Problem(Problem::Holes("a number"));
        let gnu = header.as_gnu();
        let gnu = gnu.ok_or(LayerError::Problem(Problem::Holes(
            "another format's header",
        )))?;
        let mut runs = Vec::new();
        let mut add = |sparse: &[tar::GnuSparseHeader]| {
            for run in sparse.iter().filter(|run| !run.is_empty()) {
                let (offset, length) = (run.offset().map_err(bad)?, run.length().map_err(bad)?);
                runs.push(Run { offset, length });
            }
            if runs.len() as u64 * 24 > limits.headers {
                return Err(LayerError::Problem(Problem::Holes("too many of them")));
            }
            Ok(())
        };
        add(&gnu.sparse)?;
        let mut more = gnu.is_extended();
        while more {
            let mut block = GnuExtSparseHeader::new();
            block.as_mut_bytes().copy_from_slice(&self.block()?);
            add(block.sparse())?;
            more = block.is_extended();
        }
        Ok((gnu.real_size().map_err(bad)?, runs))
    }

    /// Format 1.0: a count, then offsets and lengths, a decimal number each line, padded to a block.
    fn map_in_data(&mut self, limits: &Limits) -> Result<Vec<Run>, LayerError> {
        let (mut text, mut lines, mut count) = (Vec::new(), 0, None);
        let mut numbers: Vec<u64> = Vec::new();
        while count.is_none_or(|count: u64| lines < 1 + 2 * count) {
            let start = text.len();
            if start as u64 + BLOCK > limits.headers {
                return Err(LayerError::Problem(Problem::Holes("too many of them")));
            }
            text.resize(start + BLOCK as usize, 0);
            self.read_exact(&mut text[start..])?;
            numbers.clear();
            for line in text.split_inclusive(|b| *b == b'\n') {
                let Some(digits) = line.strip_suffix(b"\n") else {
                    break;
                };
                numbers.push(pax::number(digits).map_err(LayerError::Problem)?);
                // What follows the last line is padding.
                if numbers.len() as u64 == numbers[0].saturating_mul(2).saturating_add(1) {
                    break;
                }
            }
            lines = numbers.len() as u64;
            count = numbers.first().copied();
            if count.is_some_and(|count| count > limits.headers) {
                return Err(LayerError::Problem(Problem::Holes("too many of them")));
            }
        }
        let (pairs, _) = numbers.get(1..).unwrap_or_default().as_chunks();
        Ok(pairs
            .iter()
            .map(|[offset, length]| Run {
                offset: *offset,
                length: *length,
            })
            .collect())
    }

    /// Content of the present entry.
    pub(super) fn read(&mut self, buffer: &mut [u8]) -> Result<usize, LayerError> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX);
        let most = most.min(buffer.len());
        if most == 0 {
            return Ok(0);
        }
        match self.stream.read(&mut buffer[..most]) {
            Ok(0) => Err(LayerError::Truncated),
            Ok(n) => {
                self.left -= n as u64;
                Ok(n)
            }
            Err(e) => Err(LayerError::read(e)),
        }
    }

    fn read_exact(&mut self, mut buffer: &mut [u8]) -> Result<(), LayerError> {
        while !buffer.is_empty() {
            match self.read(buffer)? {
                0 => return Err(LayerError::Truncated),
                n => buffer = &mut buffer[n..],
            }
        }
        Ok(())
    }

    /// Content follows.
    fn begin(&mut self, size: u64) {
        self.left = size;
        self.padding = size.next_multiple_of(BLOCK).wrapping_sub(size) % BLOCK;
    }

    /// Passes over what was not read of the last entry.
    fn skip_rest(&mut self) -> Result<(), LayerError> {
        let mut buffer = [0; 16 << 10];
        while self.left > 0 {
            self.read(&mut buffer)?;
        }
        self.left = std::mem::take(&mut self.padding);
        while self.left > 0 {
            self.read(&mut buffer)?;
        }
        Ok(())
    }

    fn block(&mut self) -> Result<[u8; BLOCK as usize], LayerError> {
        let mut block = [0; BLOCK as usize];
        (self.stream.read_exact(&mut block)).map_err(LayerError::read)?;
        Ok(block)
    }

    /// A block, unless the archive ends here.
    fn first_block(&mut self) -> Result<Option<[u8; BLOCK as usize]>, LayerError> {
        let mut block = [0; BLOCK as usize];
        let mut filled = 0;
        while filled < block.len() {
            match self.stream.read(&mut block[filled..]) {
                Ok(0) if filled == 0 => return Ok(None),
                Ok(0) => return Err(LayerError::Truncated),
                Ok(n) => filled += n,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(LayerError::read(e)),
            }
        }
        Ok(Some(block))
    }

    /// Content of an extended header.
    fn extended(&mut self, size: u64, limits: &Limits) -> Result<Vec<u8>, LayerError> {
        if size > limits.headers {
            return Err(LayerError::Problem(Problem::Header("it is too large")));
        }
        self.begin(size);
        let mut text = vec![0; usize::try_from(size).unwrap_or(0)];
        self.read_exact(&mut text)?;
        Ok(text)
    }
}

/// Compares a header with its own checksum: the sum of all bytes, its own field as spaces.
fn check(header: &Header) -> Result<(), LayerError> {
    let bytes = header.as_bytes();
    let others = bytes[..148].iter().chain(&bytes[156..]);
    let sum: u32 = others.map(|b| u32::from(*b)).sum::<u32>() + 8 * 32;
    match header.cksum() {
        Ok(expected) if expected == sum => Ok(()),
        _ => Err(LayerError::Problem(Problem::NotTar)),
    }
}

fn kind(header: &Header, path: &[u8]) -> Result<Kind, Problem> {
    Ok(match header.entry_type() {
        // Before ustar, a directory was a file with this name.
        EntryType::Regular if path.ends_with(b"/") => Kind::Directory,
        EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => Kind::File,
        EntryType::Link => Kind::HardLink,
        EntryType::Symlink => Kind::Symlink,
        EntryType::Char | EntryType::Block => Kind::Device,
        EntryType::Directory => Kind::Directory,
        EntryType::Fifo => Kind::Fifo,
        other => return Err(Problem::Kind(char::from(other.as_byte()))),
    })
}

/// In order, apart, within the file, and as long together as the content.
fn check_runs(runs: &[Run], size: u64, content: u64) -> Result<(), Problem> {
    let (mut end, mut sum) = (0_u64, 0_u64);
    for run in runs {
        if run.offset < end {
            return Err(Problem::Holes("they overlap"));
        }
        end = (run.offset.checked_add(run.length)).ok_or(Problem::Holes("an overflow"))?;
        sum = (sum.checked_add(run.length)).ok_or(Problem::Holes("an overflow"))?;
    }
    if end > size {
        return Err(Problem::Holes("content behind the end"));
    }
    if sum != content {
        return Err(Problem::Holes("content of another length"));
    }
    Ok(())
}

fn until_nul(mut text: Vec<u8>) -> Vec<u8> {
    if let Some(nul) = text.iter().position(|b| *b == 0) {
        text.truncate(nul);
    }
    text
}
