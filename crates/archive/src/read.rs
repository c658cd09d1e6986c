//! Reader of tar archives (v7, ustar, pax and GNU) with long names and holes. Uses bounded memory
//! for any input.
//!
//! The *map* of a sparse file lists its ranges with content. All other ranges are holes.

use crate::entry::{ArchiveEntry, ArchiveEntryKind, ContentRange, whole};
use crate::error::{ArchiveError, shown};
use crate::pax::{self, Pax};
use std::io::{self, Read};
use tar::{EntryType, GnuExtSparseHeader, Header};

/// Size of a block of an archive in bytes. Headers are one block, and content is padded to blocks.
const BLOCK: u64 = 512;
/// Problem in error messages about the map of a sparse file.
const HOLES: &str = "its map of holes is invalid";

/// Limits and options of a reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadLimits {
    /// Maximum size in bytes of an entry's extended headers, and of its map of holes.
    pub headers: u64,
    /// True to accept an archive without an end mark, if it ends between two entries.
    pub no_end_mark: bool,
}

impl Default for ReadLimits {
    fn default() -> Self {
        Self {
            headers: 1 << 20,
            no_end_mark: false,
        }
    }
}

impl ReadLimits {
    /// Returns the maximum number of ranges of a sparse file. A range takes 24 bytes in GNU's
    /// format.
    fn runs(&self) -> u64 {
        self.headers / 24
    }
}

/// Reader of an archive.
pub struct ArchiveReader<R> {
    input: R,
    /// Remaining bytes of the current entry.
    remaining: u64,
    /// Bytes between the content and the next block.
    padding: u64,
    /// Last entry that was started.
    last: Option<String>,
    limits: ReadLimits,
    /// True if the end mark was read.
    end_mark: bool,
}

impl<R: Read> ArchiveReader<R> {
    /// Creates a reader of the uncompressed archive in `input`.
    pub fn new(input: R) -> Self {
        Self::with_limits(input, ReadLimits::default())
    }

    /// Creates a reader with the given limits.
    pub fn with_limits(input: R, limits: ReadLimits) -> Self {
        Self {
            input,
            remaining: 0,
            padding: 0,
            last: None,
            limits,
            end_mark: false,
        }
    }

    /// Returns a reference to the input.
    pub fn input(&self) -> &R {
        &self.input
    }

    /// Returns the input.
    pub fn into_input(self) -> R {
        self.input
    }

    /// Returns true if the end mark was reached.
    pub fn has_end_mark(&self) -> bool {
        self.end_mark
    }

    /// Returns the next entry. `None` at the end of the archive. Skips unread content of the
    /// current entry.
    pub fn next_entry(&mut self) -> Result<Option<ArchiveEntry>, ArchiveError> {
        self.next_counted(&mut || Ok(()))
    }

    /// Like [`Self::next_entry`], but calls `count` for every header, including extended ones. An
    /// error of `count` stops reading.
    pub fn next_counted(
        &mut self,
        count: &mut dyn FnMut() -> io::Result<()>,
    ) -> Result<Option<ArchiveEntry>, ArchiveError> {
        let mut pax = Pax::default();
        let (mut long_path, mut long_link) = (None, None);
        // All extended headers of one entry share this limit.
        let (mut allowed, mut extended) = (self.limits.headers, false);
        loop {
            self.skip_rest()?;
            let Some(block) = self.header_block(extended)? else {
                return Ok(None);
            };
            // The end mark consists of two blocks of zeros. As in GNU tar, the first one is
            // sufficient.
            if block.iter().all(|b| *b == 0) {
                self.end_mark = true;
                return Ok(None);
            }
            // The caller limits the number of headers, which take time even without an entry.
            count().map_err(ArchiveError::Read)?;
            let header = Header::from_byte_slice(&block);
            self.verify_checksum(header)?;
            let size = (header.entry_size()).map_err(|_| self.broken("a size is malformed"))?;
            let kind = header.entry_type();
            extended =
                kind.is_pax_local_extensions() || kind.is_gnu_longname() || kind.is_gnu_longlink();
            match kind {
                EntryType::XHeader => {
                    let text = self.extended_header(size, &mut allowed)?;
                    pax.read(&text).map_err(|e| self.broken(e))?;
                }
                EntryType::GNULongName => {
                    long_path = Some(until_nul(self.extended_header(size, &mut allowed)?));
                }
                EntryType::GNULongLink => {
                    long_link = Some(until_nul(self.extended_header(size, &mut allowed)?));
                }
                // A global header, or the label of the archive. Both are skipped.
                EntryType::XGlobalHeader => self.begin(size),
                kind if kind.as_byte() == b'V' => self.begin(size),
                _ => {
                    // A field of an extended header has precedence over GNU's long name, and both
                    // over the header.
                    let path = pax.path.take().or(long_path);
                    let path = path.unwrap_or_else(|| header.path_bytes().into_owned());
                    let link = pax.link.take().or(long_link);
                    let link = link.or_else(|| header.link_name_bytes().map(|l| l.into_owned()));
                    self.last = Some(shown(&path));
                    let entry = self.entry(header, pax, path, link.unwrap_or_default(), size);
                    return entry.map(Some);
                }
            }
        }
    }

    /// Returns the entry of a plain header and of the extended headers before it.
    fn entry(
        &mut self,
        header: &Header,
        pax: Pax,
        path: Vec<u8>,
        link: Vec<u8>,
        size: u64,
    ) -> Result<ArchiveEntry, ArchiveError> {
        let bad = |problem| ArchiveError::entry(&path, problem);
        let kind = kind(header, &path).map_err(bad)?;
        // Ignore the size field of other kinds, as does the tar reader of Go, the language of most
        // programs that write layers.
        let stored = match kind {
            ArchiveEntryKind::File => pax.size.unwrap_or(size),
            _ => 0,
        };
        // An extended header is used for ids that do not fit into the header.
        let id = |extended: Option<u64>, plain: io::Result<u64>, problem| {
            let id = extended.map_or(plain, Ok).ok();
            id.and_then(|id| u32::try_from(id).ok()).ok_or(bad(problem))
        };
        let uid = id(pax.uid, header.uid(), "has an invalid owner")?;
        let gid = id(pax.gid, header.gid(), "has an invalid group")?;
        let mode = header.mode().map_err(|_| bad("has an invalid mode"))?;
        // An invalid time in the plain header becomes 0: it has no effect on access to the file.
        let seconds = i64::try_from(header.mtime().unwrap_or(0)).unwrap_or(0);
        self.begin(stored);
        let (size, runs) = self.content(header, &pax, kind, stored)?;
        Ok(ArchiveEntry {
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

    /// Returns the size of a file with holes, and its ranges.
    fn content(
        &mut self,
        header: &Header,
        pax: &Pax,
        kind: ArchiveEntryKind,
        stored: u64,
    ) -> Result<(u64, Vec<ContentRange>), ArchiveError> {
        if kind != ArchiveEntryKind::File {
            return Ok((0, Vec::new()));
        }
        let (size, runs) = if header.entry_type().is_gnu_sparse() {
            // Further blocks of the map precede the content and are not part of it. No content is
            // therefore pending while the map is read.
            let content = (self.remaining, self.padding);
            (self.remaining, self.padding) = (0, 0);
            let map = self.old_gnu_map(header)?;
            (self.remaining, self.padding) = content;
            map
        } else if pax.map_in_data {
            let runs = self.map_in_data()?;
            (pax.real_size.unwrap_or(self.remaining), runs)
        } else if let Some(runs) = &pax.runs {
            (pax.real_size.unwrap_or(self.remaining), runs.clone())
        } else {
            return Ok((stored, whole(stored)));
        };
        // The map is untrusted: wrong ranges would read content of the next entry.
        if !are_valid(&runs, size, self.remaining) {
            return Err(self.broken(HOLES));
        }
        // Packers append an empty range to mark a hole at the end.
        Ok((size, runs.into_iter().filter(|r| r.length > 0).collect()))
    }

    /// Reads the map of a sparse file in GNU's first format: ranges in the header, and in further
    /// blocks.
    fn old_gnu_map(&mut self, header: &Header) -> Result<(u64, Vec<ContentRange>), ArchiveError> {
        let gnu = header.as_gnu().ok_or_else(|| self.broken(HOLES))?;
        let (mut runs, max_runs) = (Vec::new(), self.limits.runs());
        let mut add = |sparse: &[tar::GnuSparseHeader]| -> io::Result<()> {
            for run in sparse.iter().filter(|run| !run.is_empty()) {
                let (offset, length) = (run.offset()?, run.length()?);
                runs.push(ContentRange { offset, length });
            }
            if runs.len() as u64 > max_runs {
                Err(io::ErrorKind::InvalidData.into())
            } else {
                Ok(())
            }
        };
        let bad = |last: &Option<String>| ArchiveError::Broken {
            last: last.clone(),
            problem: HOLES,
        };
        add(&gnu.sparse).map_err(|_| bad(&self.last))?;
        let mut more = gnu.is_extended();
        while more {
            let mut block = GnuExtSparseHeader::new();
            block.as_mut_bytes().copy_from_slice(&self.block()?);
            add(block.sparse()).map_err(|_| bad(&self.last))?;
            more = block.is_extended();
        }
        let size = gnu.real_size().map_err(|_| bad(&self.last))?;
        Ok((size, runs))
    }

    /// Reads a map in format 1.0: a count, then offsets and lengths, one decimal number per line,
    /// padded to a block.
    fn map_in_data(&mut self) -> Result<Vec<ContentRange>, ArchiveError> {
        let mut numbers: Vec<u64> = Vec::new();
        let mut digits = Vec::new();
        let (mut block, mut at) = ([0; BLOCK as usize], BLOCK as usize);
        loop {
            if at == block.len() {
                self.read_exact(&mut block)?;
                at = 0;
            }
            let byte = block[at];
            at += 1;
            if byte != b'\n' {
                digits.push(byte);
                // The largest number of 64 bits has 20 digits.
                if digits.len() > 20 {
                    return Err(self.broken(HOLES));
                }
                continue;
            }
            numbers.push(pax::number(&digits).map_err(|e| self.broken(e))?);
            digits.clear();
            // Check the count as soon as it is read, before memory is allocated.
            if numbers[0] > self.limits.runs() {
                return Err(self.broken("its map of holes is too long"));
            }
            if numbers.len() as u64 == 2 * numbers[0] + 1 {
                break;
            }
        }
        let (pairs, _) = numbers.get(1..).unwrap_or_default().as_chunks();
        Ok(pax::runs(pairs))
    }

    /// Reads content of the current entry. Returns 0 at its end.
    pub fn read_content(&mut self, buffer: &mut [u8]) -> Result<usize, ArchiveError> {
        let max_bytes = usize::try_from(self.remaining).unwrap_or(usize::MAX);
        let max_bytes = max_bytes.min(buffer.len());
        let n = self.read_some(&mut buffer[..max_bytes])?;
        self.remaining -= n as u64;
        Ok(n)
    }

    /// Reads up to `limit` bytes after the end mark, so that the sender can finish.
    pub fn drain(&mut self, limit: u64) -> io::Result<()> {
        io::copy(&mut (&mut self.input).take(limit), &mut io::sink()).map(drop)
    }

    /// Fills `buffer` with content of the current entry.
    fn read_exact(&mut self, mut buffer: &mut [u8]) -> Result<(), ArchiveError> {
        while !buffer.is_empty() {
            match self.read_content(buffer)? {
                0 => return Err(self.truncated()),
                n => buffer = &mut buffer[n..],
            }
        }
        Ok(())
    }

    /// Starts content of `size` bytes.
    fn begin(&mut self, size: u64) {
        self.remaining = size;
        // Content is padded to a multiple of the block size.
        self.padding = size.wrapping_neg() % BLOCK;
    }

    /// Skips unread content of the current entry and the padding after it.
    fn skip_rest(&mut self) -> Result<(), ArchiveError> {
        let mut buffer = [0; 8 << 10];
        while self.remaining > 0 {
            self.read_content(&mut buffer)?;
        }
        self.remaining = std::mem::take(&mut self.padding);
        while self.remaining > 0 {
            self.read_content(&mut buffer)?;
        }
        Ok(())
    }

    /// Reads a block that belongs to no content.
    fn block(&mut self) -> Result<[u8; BLOCK as usize], ArchiveError> {
        let mut block = [0; BLOCK as usize];
        self.fill(&mut block)?;
        Ok(block)
    }

    /// Returns the header block of an entry. `None` at a valid end of the archive. After an
    /// `extended` header, an entry must follow.
    fn header_block(
        &mut self,
        extended: bool,
    ) -> Result<Option<[u8; BLOCK as usize]>, ArchiveError> {
        if extended || !self.limits.no_end_mark {
            return self.block().map(Some);
        }
        let mut block = [0; BLOCK as usize];
        match self.read_input(&mut block)? {
            0 => Ok(None),
            n => {
                self.fill(&mut block[n..])?;
                Ok(Some(block))
            }
        }
    }

    /// Fills `buffer`, or fails if the input ends early.
    fn fill(&mut self, buffer: &mut [u8]) -> Result<(), ArchiveError> {
        let mut filled = 0;
        while filled < buffer.len() {
            filled += self.read_some(&mut buffer[filled..])?;
        }
        Ok(())
    }

    /// Reads at least one byte, unless `buffer` is empty.
    fn read_some(&mut self, buffer: &mut [u8]) -> Result<usize, ArchiveError> {
        match self.read_input(buffer)? {
            0 if !buffer.is_empty() => Err(self.truncated()),
            n => Ok(n),
        }
    }

    /// Reads some bytes. Returns 0 at the end of the input.
    fn read_input(&mut self, buffer: &mut [u8]) -> Result<usize, ArchiveError> {
        loop {
            match self.input.read(buffer) {
                Ok(n) => return Ok(n),
                Err(e) => match e.kind() {
                    io::ErrorKind::Interrupted => {}
                    // Decompressors report their errors by these kinds.
                    io::ErrorKind::UnexpectedEof => return Err(self.truncated()),
                    io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => {
                        return Err(self.broken("its compression is invalid"));
                    }
                    _ => return Err(ArchiveError::Read(e)),
                },
            }
        }
    }

    /// Reads the content of an extended header.
    fn extended_header(&mut self, size: u64, allowed: &mut u64) -> Result<Vec<u8>, ArchiveError> {
        let rest = allowed.checked_sub(size);
        *allowed = rest.ok_or_else(|| self.broken("an extended header is too large"))?;
        self.begin(size);
        let mut text = vec![0; usize::try_from(size).unwrap_or(0)];
        self.read_exact(&mut text)?;
        Ok(text)
    }

    /// Verifies the checksum of a header: the sum of all bytes, counting the checksum field as
    /// spaces.
    fn verify_checksum(&self, header: &Header) -> Result<(), ArchiveError> {
        let bytes = header.as_bytes();
        let others = bytes[..148].iter().chain(&bytes[156..]);
        // The checksum field (bytes 148 to 155) counts as eight spaces.
        let sum: u32 = others.map(|b| u32::from(*b)).sum::<u32>() + 8 * 32;
        match header.cksum() {
            Ok(expected) if expected == sum => Ok(()),
            // In the first header, a wrong checksum means another file format.
            _ if self.last.is_none() => Err(ArchiveError::NotTar),
            _ => Err(self.broken("a header's checksum is wrong")),
        }
    }

    fn truncated(&self) -> ArchiveError {
        ArchiveError::Truncated {
            last: self.last.clone(),
        }
    }

    fn broken(&self, problem: &'static str) -> ArchiveError {
        ArchiveError::Broken {
            last: self.last.clone(),
            problem,
        }
    }
}

/// Returns the kind of an entry of a tar archive.
fn kind(header: &Header, path: &[u8]) -> Result<ArchiveEntryKind, &'static str> {
    let device = |make: fn(u32, u32) -> ArchiveEntryKind| {
        let numbers = (header.device_major(), header.device_minor());
        match numbers {
            (Ok(Some(major)), Ok(Some(minor))) => make(major, minor),
            _ => ArchiveEntryKind::UnknownDevice,
        }
    };
    Ok(match header.entry_type() {
        // Before ustar, directories were files with a trailing slash.
        EntryType::Regular if path.ends_with(b"/") => ArchiveEntryKind::Directory,
        EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => ArchiveEntryKind::File,
        EntryType::Link => ArchiveEntryKind::HardLink,
        EntryType::Symlink => ArchiveEntryKind::Symlink,
        EntryType::Char => device(ArchiveEntryKind::Character),
        EntryType::Block => device(ArchiveEntryKind::Block),
        EntryType::Directory => ArchiveEntryKind::Directory,
        EntryType::Fifo => ArchiveEntryKind::Fifo,
        _ => return Err("has an unsupported kind"),
    })
}

/// Returns true if the ranges are sorted, disjoint, within the file, and as long as the content in
/// total.
fn are_valid(runs: &[ContentRange], size: u64, content: u64) -> bool {
    let (mut end, mut sum) = (0_u64, 0_u64);
    for run in runs {
        let Some(next) = run.offset.checked_add(run.length) else {
            return false;
        };
        if run.offset < end {
            return false;
        }
        end = next;
        sum = sum.saturating_add(run.length);
    }
    // Offsets in files are signed numbers of 64 bits.
    end <= size && sum == content && i64::try_from(size).is_ok()
}

fn until_nul(mut text: Vec<u8>) -> Vec<u8> {
    if let Some(nul) = text.iter().position(|b| *b == 0) {
        text.truncate(nul);
    }
    text
}
