//! Bounds-checked decoding of the little-endian fields of the formats.
//!
//! Objects of the store may be damaged or forged, so a missing byte is an error and no panic.

use crate::FormatError;

/// Remaining bytes of the input.
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Reads the next `count` bytes.
    pub fn bytes(&mut self, count: usize) -> Result<&'a [u8], FormatError> {
        let short = FormatError::Damaged("it is truncated");
        let (taken, rest) = self.0.split_at_checked(count).ok_or(short)?;
        self.0 = rest;
        Ok(taken)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], FormatError> {
        let short = FormatError::Damaged("it is truncated");
        self.bytes(N)?.try_into().map_err(|_| short)
    }

    pub fn u16(&mut self) -> Result<u16, FormatError> {
        self.array().map(u16::from_le_bytes)
    }

    pub fn u32(&mut self) -> Result<u32, FormatError> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Result<u64, FormatError> {
        self.array().map(u64::from_le_bytes)
    }

    /// Reads a count of elements of `size` bytes each. The count is at most `limit` and must fit
    /// into the remaining bytes.
    pub fn count(&mut self, size: usize, limit: usize) -> Result<usize, FormatError> {
        let count = self.u32()? as usize;
        if count > limit || count.saturating_mul(size) > self.0.len() {
            return Err(FormatError::Damaged("a count is too large"));
        }
        Ok(count)
    }

    /// Reads a length-prefixed string of at most 65,535 bytes.
    pub fn string(&mut self) -> Result<String, FormatError> {
        let length = self.u16()?;
        let text = std::str::from_utf8(self.bytes(length.into())?);
        text.map(str::to_owned)
            .map_err(|_| FormatError::Damaged("a string is not UTF-8"))
    }

    /// Checks that no bytes remain.
    pub fn end(&self) -> Result<(), FormatError> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(FormatError::Damaged("unexpected bytes follow its end"))
        }
    }

    /// Checks magic and version.
    pub fn header(&mut self, magic: [u8; 8], version: u32) -> Result<(), FormatError> {
        if self.array().map_err(|_| FormatError::Magic)? != magic {
            return Err(FormatError::Magic);
        }
        match self.u32()? {
            found if found == version => Ok(()),
            found => Err(FormatError::Version {
                found,
                read: version,
            }),
        }
    }
}

/// Appends a string after its length.
pub(crate) fn put_string(to: &mut Vec<u8>, text: &str) -> Result<(), FormatError> {
    let long = |_| FormatError::Damaged("a string is longer than 65,535 bytes");
    to.extend(u16::try_from(text.len()).map_err(long)?.to_le_bytes());
    to.extend(text.as_bytes());
    Ok(())
}

/// Appends a count.
pub(crate) fn put_count(to: &mut Vec<u8>, count: usize) -> Result<(), FormatError> {
    let long = |_| FormatError::Damaged("a count is too large");
    to.extend(u32::try_from(count).map_err(long)?.to_le_bytes());
    Ok(())
}
