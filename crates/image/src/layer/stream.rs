//! Decompresses layers, counts their bytes and computes their checksum.
//!
//! A layer of a container image is a tar archive, which may be compressed with gzip or zstd. Its
//! content is not trusted.

use super::limits::{UnpackLimits, too_much};
use super::{EntryProblem, LayerError};
use crate::verified::hex;
use sha2::{Digest, Sha256};
use std::cell::Cell;
use std::io::{self, BufRead, BufReader, Read};
use std::rc::Rc;

/// Size of the buffers for compressed and for uncompressed data.
const BUFFER_BYTES: usize = 1 << 18;

/// Uncompressed bytes of an archive. The returned [`io::Error`]s may wrap a [`LayerError`].
pub(crate) struct LayerStream<'a> {
    inner: Box<dyn Read + 'a>,
    /// Number of bytes that were read from the archive.
    packed: Rc<Cell<u64>>,
    /// Number of bytes after the decompression.
    unpacked: u64,
    /// Maximum of `unpacked`.
    max_bytes: u64,
    /// Maximum ratio of `unpacked` to `packed`.
    ratio: u64,
    hasher: Sha256,
}

/// Compression of a stream, detected by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Compression {
    None,
    Gzip,
    Zstd,
}

impl Compression {
    /// Detects the compression by the magic number of its format.
    fn of(start: &[u8]) -> Result<Self, LayerError> {
        let unsupported = |name| Err(LayerError::Problem(EntryProblem::Compression(name)));
        match start {
            [0x1f, 0x8b, ..] => Ok(Self::Gzip),
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Ok(Self::Zstd),
            // Skippable frames may come first (RFC 8878, 3.1.2).
            [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Ok(Self::Zstd),
            [b'B', b'Z', b'h', ..] => unsupported("bzip2"),
            [0xfd, b'7', b'z', b'X', b'Z', ..] => unsupported("xz"),
            _ => Ok(Self::None),
        }
    }
}

/// Reader that counts bytes.
struct CountingReader<R>(R, Rc<Cell<u64>>);

impl<R: Read> Read for CountingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.0.read(buffer)?;
        self.1.set(self.1.get() + n as u64);
        Ok(n)
    }
}

impl<'a> LayerStream<'a> {
    /// Starts to decompress a layer. The compression is detected from its first bytes.
    pub(crate) fn open(packed: impl Read + 'a, limits: &UnpackLimits) -> Result<Self, LayerError> {
        let count = Rc::new(Cell::new(0));
        let counted = CountingReader(packed, Rc::clone(&count));
        let mut buffered = BufReader::with_capacity(BUFFER_BYTES, counted);
        // `fill_buf` does not consume the bytes: the decoder below reads them again.
        let start = buffered.fill_buf().map_err(LayerError::read)?;
        let inner: Box<dyn Read + 'a> = match Compression::of(start)? {
            Compression::None => Box::new(buffered),
            // Some packers write several gzip members, or several zstd frames, in a row. Both
            // decoders continue with the next one.
            Compression::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(buffered)),
            Compression::Zstd => Box::new(
                zstd::stream::read::Decoder::with_buffer(buffered).map_err(LayerError::read)?,
            ),
        };
        Ok(Self {
            inner,
            packed: count,
            unpacked: 0,
            // Every entry adds a header of 512 bytes and less than 512 bytes of padding.
            max_bytes: limits
                .bytes
                .saturating_add(limits.entries.saturating_mul(1024)),
            ratio: limits.ratio,
            hasher: Sha256::new(),
        })
    }

    /// Checks the limits on the unpacked size, which stop decompression bombs.
    fn check(&self) -> Result<(), LayerError> {
        if self.unpacked > self.max_bytes {
            return Err(too_much("bytes", format!("{} MiB", self.max_bytes >> 20)));
        }
        // The decoder may have read packed bytes ahead, so the check is slightly too lenient.
        let max_unpacked = self.packed.get().saturating_mul(self.ratio);
        if self.unpacked > UnpackLimits::RATIO_SLACK && self.unpacked > max_unpacked {
            let limit = format!("{} bytes per compressed byte", self.ratio);
            return Err(too_much("bytes", limit));
        }
        Ok(())
    }

    /// Number of compressed bytes that were read.
    pub(super) fn packed(&self) -> u64 {
        self.packed.get()
    }

    /// Reads the rest, and returns the checksum of the whole stream in lower-case hexadecimal.
    pub(super) fn finish(mut self) -> Result<String, LayerError> {
        let mut buffer = vec![0; BUFFER_BYTES];
        while self.read(&mut buffer).map_err(LayerError::read)? > 0 {}
        Ok(hex(self.hasher))
    }
}

impl Read for LayerStream<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        // The checksum covers the uncompressed bytes, since a diff id does (OCI image
        // specification).
        self.hasher.update(&buffer[..n]);
        self.unpacked += n as u64;
        self.check().map_err(io::Error::other)?;
        Ok(n)
    }
}
