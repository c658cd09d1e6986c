use super::*;
use crate::virtio::testing::{Buffer, Ring, Surroundings, memory, readable, writable};
use std::fs::File;
use std::io::Write;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::tempfile::TempFile;

const HEADER: u64 = 0x8000;
const STATUS: u64 = 0x8800;
const DATA: u64 = 0x1_0000;
const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;
const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

fn file(content: &[u8]) -> File {
    let mut file = TempFile::new().unwrap().into_file();
    file.write_all(content).unwrap();
    file
}

/// Bytes that tell their place.
fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes)
        .map(|i| u8::try_from((i / 512 * 7 + i) % 251).unwrap())
        .collect()
}

struct Driver {
    block: Block,
    ring: Ring,
    around: Surroundings,
}

impl Driver {
    fn new(backend: Backend) -> Self {
        Self::with(Block::new("blk0", backend).unwrap())
    }

    fn overlay(content: &[u8]) -> (Self, File) {
        let overlay = file(b"what was here before must never be seen");
        let seen = overlay.try_clone().unwrap();
        let base = file(content);
        (Self::new(Backend::Overlay { base, overlay }), seen)
    }

    fn with(mut block: Block) -> Self {
        let around = Surroundings::new(memory(8 << 20));
        let ring = Ring::new(&around.memory, 0x1000, 256);
        let features = block.features();
        block
            .activate(around.activation(vec![ring.queue(true)], features))
            .unwrap();
        Self {
            block,
            ring,
            around,
        }
    }

    fn header(&self, kind: u32, sector: u64) {
        let memory = &self.around.memory;
        memory.write_obj(kind, GuestAddress(HEADER)).unwrap();
        memory.write_obj(0u32, GuestAddress(HEADER + 4)).unwrap();
        memory.write_obj(sector, GuestAddress(HEADER + 8)).unwrap();
        memory.write_obj(0xffu8, GuestAddress(STATUS)).unwrap();
    }

    /// Sends one request with `data` between header and status; returns the status and the used length.
    fn request(&mut self, kind: u32, sector: u64, data: &[Buffer]) -> (u8, u32) {
        self.header(kind, sector);
        let mut buffers = vec![readable(HEADER, 16)];
        buffers.extend(data);
        buffers.push(writable(STATUS, 1));
        let head = self.ring.add(&buffers);
        self.block.queue_event(0).unwrap();
        let used = self.ring.used();
        assert_eq!(used.len(), 1);
        assert_eq!(used[0].0, head);
        (
            self.around.memory.read_obj(GuestAddress(STATUS)).unwrap(),
            used[0].1,
        )
    }

    fn write(&mut self, sector: u64, data: &[u8]) -> u8 {
        self.around
            .memory
            .write_slice(data, GuestAddress(DATA))
            .unwrap();
        let len = u32::try_from(data.len()).unwrap();
        // Two pieces, cut where no boundary is.
        let cut = len / 3;
        let data = [
            readable(DATA, cut),
            readable(DATA + u64::from(cut), len - cut),
        ];
        self.request(OUT, sector, &data).0
    }

    fn read(&mut self, sector: u64, bytes: usize) -> Vec<u8> {
        let len = u32::try_from(bytes).unwrap();
        let cut = len / 5;
        let data = [
            writable(DATA, cut),
            writable(DATA + u64::from(cut), len - cut),
        ];
        assert_eq!(self.request(IN, sector, &data), (OK, len + 1));
        let mut data = vec![0; bytes];
        self.around
            .memory
            .read_slice(&mut data, GuestAddress(DATA))
            .unwrap();
        data
    }

    /// A discard or write-zeroes request.
    fn zero(&mut self, kind: u32, segments: &[(u64, u32, u32)]) -> u8 {
        let mut table = Vec::new();
        for (sector, sectors, flags) in segments {
            table.extend(sector.to_le_bytes());
            table.extend(sectors.to_le_bytes());
            table.extend(flags.to_le_bytes());
        }
        self.around
            .memory
            .write_slice(&table, GuestAddress(DATA))
            .unwrap();
        let len = u32::try_from(table.len()).unwrap();
        self.request(kind, 0, &[readable(DATA, len)]).0
    }

    fn refused(mut self, buffers: &[Buffer]) -> DeviceError {
        self.header(IN, 0);
        self.ring.add(buffers);
        let error = self.block.queue_event(0).unwrap_err();
        assert!(self.ring.used().is_empty());
        let _ = self.block.queue_event(0);
        error
    }
}

mod content;
mod contract;
mod layers;
mod limited;
