//! One block request: header, data and status byte (virtio 1.2 section 5.2.6).

use super::disk::{Disk, SECTOR_BYTES};
use super::{ID_BYTES, MAX_DISCARD_SECTORS, MAX_DISCARD_SEGMENTS};
use crate::virtio::DeviceError;
use crate::virtio::device::chain::{DescriptorChain, GuestBuffers};
use std::io;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};

/// Size of the header of `struct virtio_blk_req`, in bytes.
const HEADER_BYTES: usize = 16;
/// Size of `struct virtio_blk_discard_write_zeroes`, in bytes.
const SEGMENT_BYTES: usize = 16;
/// Maximum number of data bytes in one request, which is also the default of Linux.
pub const MAX_REQUEST_BYTES: usize = 4 << 20;

/// Reason for an error status of a request. The device continues to work.
#[derive(Debug)]
enum BlockRequestError {
    Unsupported,
    /// The request is invalid.
    Io,
    /// The host failed to read or write a file, or a file is shorter than the disk.
    Host(io::Error),
}

impl From<io::Error> for BlockRequestError {
    fn from(error: io::Error) -> Self {
        // Errors without a number are the device's own: the request is invalid. An unexpected end
        // is the exception, since the file is shorter than the disk.
        match (error.raw_os_error(), error.kind()) {
            (Some(_), _) | (None, io::ErrorKind::UnexpectedEof) => Self::Host(error),
            (None, _) => Self::Io,
        }
    }
}

/// Serves requests.
pub struct RequestServer<'d> {
    /// The disk.
    pub disk: &'d mut Disk,
    /// Reply to `GET_ID`.
    pub id: [u8; ID_BYTES],
    /// True if a flush syncs the host's storage.
    pub flush_to_host: bool,
    /// First error of the host's files.
    pub failed: Option<io::Error>,
    /// Number of segments that were zeroed or discarded. The caller resets this number after each
    /// request.
    pub zeroed_segments: u64,
}

impl RequestServer<'_> {
    /// Serves one request and writes its status. Returns the number of bytes written to the
    /// writable buffers.
    pub fn serve(&mut self, chain: DescriptorChain<'_>) -> Result<u32, DeviceError> {
        let DescriptorChain {
            mut readable,
            mut writable,
            ..
        } = chain;
        let mut header = [0; HEADER_BYTES];
        let taken = readable.take(HEADER_BYTES).ok_or_else(|| {
            DeviceError::Guest("request without a complete header (5.2.6)".into())
        })?;
        taken.copy_to(&mut header);
        // The status byte is the last writable byte, and may be in a buffer with data.
        let data = writable
            .len()
            .checked_sub(1)
            .and_then(|data| writable.take(data))
            .ok_or_else(|| DeviceError::Guest("request without a status byte (5.2.6)".into()))?;
        let bytes = data.len();
        let (status, written) = match self.execute(&header, readable, data) {
            Ok(()) => (VIRTIO_BLK_S_OK, bytes + 1),
            Err(BlockRequestError::Unsupported) => (VIRTIO_BLK_S_UNSUPP, 1),
            Err(BlockRequestError::Io) => (VIRTIO_BLK_S_IOERR, 1),
            Err(BlockRequestError::Host(error)) => {
                // Report only the first error to the owner.
                self.failed.get_or_insert(error);
                (VIRTIO_BLK_S_IOERR, 1)
            }
        };
        writable.copy_from(&[u8::try_from(status).unwrap_or(u8::MAX)]);
        u32::try_from(written)
            .map_err(|_| DeviceError::Guest("request longer than 4 GiB (2.7.5.2)".into()))
    }

    /// Executes one request. `input` contains data of the guest, and `output` receives data for the
    /// guest.
    fn execute(
        &mut self,
        header: &[u8; HEADER_BYTES],
        input: GuestBuffers<'_>,
        output: GuestBuffers<'_>,
    ) -> Result<(), BlockRequestError> {
        // The header consists of the type (4 bytes), 4 reserved bytes, and the sector (8 bytes).
        let [kind @ .., _, _, _, _] = header.first_chunk::<8>().ok_or(BlockRequestError::Io)?;
        let sector = header.last_chunk::<8>().ok_or(BlockRequestError::Io)?;
        let offset = u64::from_le_bytes(*sector).checked_mul(SECTOR_BYTES);
        match u32::from_le_bytes(*kind) {
            VIRTIO_BLK_T_IN => {
                check_data(&output, &input)?;
                Ok(self
                    .disk
                    .read(offset.ok_or(BlockRequestError::Io)?, output)?)
            }
            VIRTIO_BLK_T_OUT => {
                check_data(&input, &output)?;
                Ok(self
                    .disk
                    .write(offset.ok_or(BlockRequestError::Io)?, &input)?)
            }
            VIRTIO_BLK_T_FLUSH => {
                // Without `flush_to_host`, a flush has no effect: writes need not be durable,
                // because the host's page cache survives the guest.
                if self.flush_to_host {
                    self.disk.sync()?;
                }
                Ok(())
            }
            VIRTIO_BLK_T_GET_ID => {
                if output.len() < ID_BYTES {
                    return Err(BlockRequestError::Io);
                }
                output.copy_from(&self.id);
                Ok(())
            }
            kind @ (VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES) => {
                self.zero(&input, kind == VIRTIO_BLK_T_DISCARD)
            }
            _ => Err(BlockRequestError::Unsupported),
        }
    }

    /// Executes a discard or write-zeroes request. Both zero the ranges that `input` lists.
    /// `discard` states that this is a discard request.
    fn zero(&mut self, input: &GuestBuffers<'_>, discard: bool) -> Result<(), BlockRequestError> {
        if self.disk.read_only() {
            return Err(BlockRequestError::Unsupported);
        }
        let mut table = [0; SEGMENT_BYTES * MAX_DISCARD_SEGMENTS];
        if input.is_empty()
            || input.len() > table.len()
            || !input.len().is_multiple_of(SEGMENT_BYTES)
        {
            return Err(BlockRequestError::Io);
        }
        let bytes = input.copy_to(&mut table);
        // Each segment has a sector (8 bytes), a number of sectors (4 bytes), and flags (4 bytes).
        let (segments, _) = table[..bytes].as_chunks::<SEGMENT_BYTES>();
        for segment in segments {
            let (start, rest) = segment
                .split_first_chunk::<8>()
                .ok_or(BlockRequestError::Io)?;
            let (count, rest) = rest.split_first_chunk::<4>().ok_or(BlockRequestError::Io)?;
            let flags = rest.first_chunk::<4>().ok_or(BlockRequestError::Io)?;
            // `unmap` is only a hint: zeroed blocks are always released.
            let allowed_flags = if discard {
                0
            } else {
                VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP
            };
            if u32::from_le_bytes(*flags) & !allowed_flags != 0 {
                return Err(BlockRequestError::Unsupported);
            }
            let sectors = u32::from_le_bytes(*count);
            let offset = u64::from_le_bytes(*start).checked_mul(SECTOR_BYTES);
            if sectors > MAX_DISCARD_SECTORS {
                return Err(BlockRequestError::Io);
            }
            let bytes = u64::from(sectors) * SECTOR_BYTES;
            self.zeroed_segments += 1;
            self.disk
                .zero(offset.ok_or(BlockRequestError::Io)?, bytes, discard)?;
        }
        Ok(())
    }
}

/// Checks that data consists of whole sectors, has at most [`MAX_REQUEST_BYTES`], and has only the
/// direction of the request.
fn check_data(
    wanted: &GuestBuffers<'_>,
    other: &GuestBuffers<'_>,
) -> Result<(), BlockRequestError> {
    let whole = wanted.len().is_multiple_of(512);
    if !whole || wanted.len() > MAX_REQUEST_BYTES || !other.is_empty() {
        return Err(BlockRequestError::Io);
    }
    Ok(())
}
