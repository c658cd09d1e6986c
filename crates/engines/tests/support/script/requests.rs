//! Contents of buffers: requests, packets and frames, which the script corrupts at random.

use super::*;

impl Script {
    /// Returns a request as a driver sends it, well-formed most of the time.
    pub(super) fn request(&mut self, kind: Kind) -> Vec<u8> {
        let mut bytes = match kind {
            Kind::Blk => self.disk_request(),
            Kind::Vsock => self.packet(),
            Kind::Net => self.frame(),
            Kind::Balloon => self.page_numbers(),
            Kind::Rng => Vec::new(),
        };
        if !bytes.is_empty() && self.random.once_in(12) {
            let at = self.random.below(bytes.len().try_into().unwrap());
            bytes[usize::try_from(at).unwrap()] = self.random.next().to_le_bytes()[0];
        }
        bytes
    }

    /// Returns a `struct virtio_blk_req` (virtio 1.2 5.2.6): read, write, flush, get id, discard,
    /// write zeroes, or an unknown type.
    pub(super) fn disk_request(&mut self) -> Vec<u8> {
        let kind: u32 = self.random.of(&[0, 0, 1, 1, 4, 8, 11, 13, 99]);
        let sector = if self.random.once_in(4) {
            self.random.next()
        } else {
            self.random.below(4096)
        };
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend(0u32.to_le_bytes());
        bytes.extend(sector.to_le_bytes());
        bytes
    }

    /// Returns a `struct virtio_vsock_hdr` (5.10.6), with random source and destination.
    pub(super) fn packet(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        // The guest has the context id 3, and the host has the context id 2.
        let mut cid = |usual: u64| {
            if self.random.once_in(5) {
                self.random.of(&[0, 1, 2, 3, 4, u64::MAX])
            } else {
                usual
            }
        };
        let (from, to) = (cid(3), cid(2));
        bytes.extend(from.to_le_bytes());
        bytes.extend(to.to_le_bytes());
        let (ours, theirs) = (
            self.random.below(64),
            self.random
                .of(&[1024, 1024, 1024, 1024, 0, 22, 0xffff_ffff]),
        );
        let data = self.random.of(&[0, 0, 0, 0, 0, 8, 4096, 0xffff_ffff]);
        for word in [ours, theirs, data] {
            bytes.extend(u32::try_from(word).unwrap().to_le_bytes());
        }
        // Type 1 is a stream.
        let (kind, any) = (self.random.of(&[1u16, 1, 1, 1, 1, 2]), self.random.below(9));
        // VIRTIO_VSOCK_OP_REQUEST is more frequent than other operations, because most attacks need
        // a connection.
        let op = self.random.of(&[1, 1, any]);
        bytes.extend(kind.to_le_bytes());
        bytes.extend(u16::try_from(op).unwrap().to_le_bytes());
        let (flags, buffer_bytes, received_bytes) =
            (self.random.below(4), self.random.next(), self.random.next());
        for word in [flags, buffer_bytes, received_bytes] {
            bytes.extend(&word.to_le_bytes()[..4]);
        }
        bytes
    }

    /// Returns a `struct virtio_net_hdr` (5.1.6) with offloads that were not negotiated, and a
    /// frame of garbage.
    pub(super) fn frame(&mut self) -> Vec<u8> {
        let words = 2 + self.random.below(200);
        let mut bytes: Vec<u8> = (0..words)
            .flat_map(|_| self.random.next().to_le_bytes())
            .collect();
        // A header of zeros, which has 12 bytes, requests no offloads.
        if self.random.once_in(2) {
            bytes[..12].fill(0);
        }
        bytes
    }

    /// Returns page numbers for the balloon: mostly of the data area, some invalid.
    pub(super) fn page_numbers(&mut self) -> Vec<u8> {
        let count = 1 + self.random.below(256);
        let mut bytes = Vec::new();
        for _ in 0..count {
            let page = if self.random.once_in(2000) {
                self.random.next() | 0x8000_0000
            } else {
                (DATA >> 12) + self.random.below(DATA_BYTES >> 12)
            };
            bytes.extend(&page.to_le_bytes()[..4]);
        }
        bytes
    }
}
