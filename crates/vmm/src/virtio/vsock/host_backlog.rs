//! Bytes of a vsock connection from the guest that the host has not read yet.
//!
//! The stream to the host may be full. The credit that the guest received bounds the backlog.

use super::credit::BUF_ALLOC_BYTES;
use super::socket::send_bytes;
use crate::virtio::device::chain::GuestBuffers;
use nix::errno::Errno;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;

/// Backlog of at most [`BUF_ALLOC_BYTES`] bytes, because no guest gets more credit. It allocates no
/// memory while it is empty.
#[derive(Debug, Default)]
pub struct HostBacklog(VecDeque<u8>);

impl HostBacklog {
    /// Returns whether the host has accepted all bytes.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the number of allocated bytes.
    #[cfg(test)]
    pub fn capacity(&self) -> usize {
        self.0.capacity()
    }

    /// Drops all bytes. Returns their number.
    pub fn clear(&mut self) -> u32 {
        let bytes = std::mem::take(&mut self.0).len();
        u32::try_from(bytes).unwrap_or(u32::MAX)
    }

    /// Appends guest memory.
    pub fn push(&mut self, data: &GuestBuffers<'_>) {
        let needed = self.0.len() + data.len();
        if needed > self.0.capacity() {
            // Double the capacity up to the limit: a slow host costs BUF_ALLOC_BYTES, not twice as
            // much.
            let limit = usize::try_from(BUF_ALLOC_BYTES).unwrap_or(usize::MAX);
            let grown = (2 * self.0.capacity()).clamp(needed, limit.max(needed));
            self.0.reserve_exact(grown - self.0.len());
        }
        // Copy in two steps, because guest memory cannot be borrowed as a slice.
        let mut bytes = vec![0; data.len()];
        let copied = data.copy_to(&mut bytes);
        self.0.extend(&bytes[..copied]);
    }

    /// Sends as many bytes as the stream accepts. Returns their number, also if a later call fails.
    pub fn flush(&mut self, stream: &OwnedFd) -> (u32, Result<(), Errno>) {
        let mut total = 0;
        while !self.0.is_empty() {
            let (first, second) = self.0.as_slices();
            let sent = match send_bytes(stream, first, second) {
                Ok(sent) => sent,
                Err(Errno::EAGAIN) => break,
                Err(e) => return (total, Err(e)),
            };
            self.0.drain(..sent);
            total += u32::try_from(sent).unwrap_or(u32::MAX);
        }
        // Release the memory: most connections never have a backlog again.
        if self.0.is_empty() {
            self.0 = VecDeque::new();
        }
        (total, Ok(()))
    }
}
