//! Tests of the block device through a virtqueue, as a driver uses it.

use super::*;
use crate::virtio::testing::{Buffer, DeviceHarness, Ring, memory, readable, writable};
use std::fs::File;
use std::io::Write;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::tempfile::TempFile;

/// Addresses in guest memory of the parts of a request: header, status byte, and data.
const HEADER_ADDRESS: u64 = 0x8000;
const STATUS_ADDRESS: u64 = 0x8800;
const DATA_ADDRESS: u64 = 0x1_0000;
/// Types of requests, and values of the status byte (virtio 1.2 section 5.2.6).
const REQUEST_IN: u32 = 0;
const REQUEST_OUT: u32 = 1;
const REQUEST_FLUSH: u32 = 4;
const REQUEST_GET_ID: u32 = 8;
const REQUEST_DISCARD: u32 = 11;
const REQUEST_WRITE_ZEROES: u32 = 13;
const STATUS_OK: u8 = 0;
const STATUS_IOERR: u8 = 1;
const STATUS_UNSUPP: u8 = 2;

/// Returns a temporary file with this content.
fn file(content: &[u8]) -> File {
    let mut file = TempFile::new().unwrap().into_file();
    file.write_all(content).unwrap();
    file
}

/// Returns bytes that depend on their offset.
fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes)
        .map(|i| u8::try_from((i / 512 * 7 + i) % 251).unwrap())
        .collect()
}

struct BlockDriver {
    block: Block,
    ring: Ring,
    harness: DeviceHarness,
}

impl BlockDriver {
    /// Returns an active device with `backend`, and its driver.
    fn new(backend: DiskBackend) -> Self {
        Self::with(Block::new("blk0", backend).unwrap())
    }

    /// Returns the driver of a disk with the base `content`, and its overlay file.
    fn overlay(content: &[u8]) -> (Self, File) {
        let overlay = file(b"what was here before must never be seen");
        let seen = overlay.try_clone().unwrap();
        let base = file(content);
        (Self::new(DiskBackend::Overlay { base, overlay }), seen)
    }

    /// Activates the device, and returns its driver.
    fn with(mut block: Block) -> Self {
        let harness = DeviceHarness::new(memory(8 << 20));
        let ring = Ring::new(&harness.memory, 0x1000, 256);
        let features = block.features();
        block
            .activate(harness.activation(vec![ring.queue(true)], features))
            .unwrap();
        Self {
            block,
            ring,
            harness,
        }
    }

    /// Writes the header of a request to guest memory.
    fn header(&self, kind: u32, sector: u64) {
        let memory = &self.harness.memory;
        memory
            .write_obj(kind, GuestAddress(HEADER_ADDRESS))
            .unwrap();
        memory
            .write_obj(0u32, GuestAddress(HEADER_ADDRESS + 4))
            .unwrap();
        memory
            .write_obj(sector, GuestAddress(HEADER_ADDRESS + 8))
            .unwrap();
        memory
            .write_obj(0xffu8, GuestAddress(STATUS_ADDRESS))
            .unwrap();
    }

    /// Sends one request with `data` between header and status. Returns the status and the used
    /// length.
    fn request(&mut self, kind: u32, sector: u64, data: &[Buffer]) -> (u8, u32) {
        self.header(kind, sector);
        let mut buffers = vec![readable(HEADER_ADDRESS, 16)];
        buffers.extend(data);
        buffers.push(writable(STATUS_ADDRESS, 1));
        let head = self.ring.add(&buffers);
        self.block.queue_event(0).unwrap();
        let used = self.ring.used();
        assert_eq!(used.len(), 1);
        assert_eq!(used[0].0, head);
        (
            self.harness
                .memory
                .read_obj(GuestAddress(STATUS_ADDRESS))
                .unwrap(),
            used[0].1,
        )
    }

    /// Writes sectors, and returns the status byte.
    fn write(&mut self, sector: u64, data: &[u8]) -> u8 {
        self.harness
            .memory
            .write_slice(data, GuestAddress(DATA_ADDRESS))
            .unwrap();
        let len = u32::try_from(data.len()).unwrap();
        // Two buffers, split at an unaligned position.
        let cut = len / 3;
        let data = [
            readable(DATA_ADDRESS, cut),
            readable(DATA_ADDRESS + u64::from(cut), len - cut),
        ];
        self.request(REQUEST_OUT, sector, &data).0
    }

    /// Reads bytes from a sector on.
    fn read(&mut self, sector: u64, bytes: usize) -> Vec<u8> {
        let len = u32::try_from(bytes).unwrap();
        let cut = len / 5;
        let data = [
            writable(DATA_ADDRESS, cut),
            writable(DATA_ADDRESS + u64::from(cut), len - cut),
        ];
        assert_eq!(
            self.request(REQUEST_IN, sector, &data),
            (STATUS_OK, len + 1)
        );
        let mut data = vec![0; bytes];
        self.harness
            .memory
            .read_slice(&mut data, GuestAddress(DATA_ADDRESS))
            .unwrap();
        data
    }

    /// Sends a discard or write-zeroes request, and returns the status. Each segment has its first
    /// sector, its number of sectors, and its flags (1 is unmap).
    fn zero(&mut self, kind: u32, segments: &[(u64, u32, u32)]) -> u8 {
        let mut table = Vec::new();
        for (sector, sectors, flags) in segments {
            table.extend(sector.to_le_bytes());
            table.extend(sectors.to_le_bytes());
            table.extend(flags.to_le_bytes());
        }
        self.harness
            .memory
            .write_slice(&table, GuestAddress(DATA_ADDRESS))
            .unwrap();
        let len = u32::try_from(table.len()).unwrap();
        self.request(kind, 0, &[readable(DATA_ADDRESS, len)]).0
    }

    /// Sends a request that the device must answer with an error instead of a status. Returns the
    /// error.
    fn rejected(mut self, buffers: &[Buffer]) -> DeviceError {
        self.header(REQUEST_IN, 0);
        self.ring.add(buffers);
        let error = self.block.queue_event(0).unwrap_err();
        assert!(self.ring.used().is_empty());
        // A further call after the error must not panic.
        let _ = self.block.queue_event(0);
        error
    }
}

mod content;
mod contract;
mod layers;
mod rate_limits;
