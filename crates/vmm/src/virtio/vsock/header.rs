//! Packet header (virtio 1.2 section 5.10.6, `struct virtio_vsock_hdr`, little-endian, packed).

/// Size of a header, in bytes.
pub const HEADER_BYTES: usize = 44;
/// Context id of the host (section 5.10.4).
pub const HOST_CID: u64 = 2;
/// `VIRTIO_VSOCK_TYPE_STREAM`.
pub const TYPE_STREAM: u16 = 1;
/// `VIRTIO_VSOCK_SHUTDOWN_F_RECEIVE`: the sender will receive no further data.
pub const SHUT_RECEIVE: u32 = 1;
/// `VIRTIO_VSOCK_SHUTDOWN_F_SEND`: the sender will send no further data.
pub const SHUT_SEND: u32 = 2;
/// Both directions.
pub const SHUT_BOTH: u32 = SHUT_RECEIVE | SHUT_SEND;

/// Operation of a packet (`VIRTIO_VSOCK_OP_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum VsockOp {
    /// Requests a connection.
    Request = 1,
    /// Accepts a connection.
    Response = 2,
    /// Rejects or closes a connection.
    Rst = 3,
    /// The sender stops receiving or sending.
    Shutdown = 4,
    /// Data.
    Rw = 5,
    /// Announces the sender's credit.
    CreditUpdate = 6,
    /// Requests a credit update.
    CreditRequest = 7,
}

impl VsockOp {
    /// Returns the operation with this number. `None` if there is none.
    pub fn from_number(number: u16) -> Option<Self> {
        [
            Self::Request,
            Self::Response,
            Self::Rst,
            Self::Shutdown,
            Self::Rw,
            Self::CreditUpdate,
            Self::CreditRequest,
        ]
        .into_iter()
        .find(|op| *op as u16 == number)
    }
}

/// Packet header, in wire order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct VsockHeader {
    /// Context id of the sender.
    pub src_cid: u64,
    /// Context id of the receiver.
    pub dst_cid: u64,
    /// Port of the sender.
    pub src_port: u32,
    /// Port of the receiver.
    pub dst_port: u32,
    /// Number of data bytes that follow.
    pub len: u32,
    /// Socket type, 1 for streams. Named `type` in the specification.
    pub kind: u16,
    /// [`VsockOp`], not validated.
    pub op: u16,
    /// `SHUT_*` flags of [`VsockOp::Shutdown`].
    pub flags: u32,
    /// Size of the sender's receive buffer for this connection.
    pub buf_alloc: u32,
    /// Bytes that the sender's side has consumed so far, modulo 2^32.
    pub fwd_cnt: u32,
}

impl VsockHeader {
    /// Reads a header.
    pub fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> Self {
        fn part<const N: usize>(bytes: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
            std::array::from_fn(|i| bytes[at + i])
        }
        Self {
            src_cid: u64::from_le_bytes(part(bytes, 0)),
            dst_cid: u64::from_le_bytes(part(bytes, 8)),
            src_port: u32::from_le_bytes(part(bytes, 16)),
            dst_port: u32::from_le_bytes(part(bytes, 20)),
            len: u32::from_le_bytes(part(bytes, 24)),
            kind: u16::from_le_bytes(part(bytes, 28)),
            op: u16::from_le_bytes(part(bytes, 30)),
            flags: u32::from_le_bytes(part(bytes, 32)),
            buf_alloc: u32::from_le_bytes(part(bytes, 36)),
            fwd_cnt: u32::from_le_bytes(part(bytes, 40)),
        }
    }

    /// Writes a header.
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut put = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
        put(0, &self.src_cid.to_le_bytes());
        put(8, &self.dst_cid.to_le_bytes());
        put(16, &self.src_port.to_le_bytes());
        put(20, &self.dst_port.to_le_bytes());
        put(24, &self.len.to_le_bytes());
        put(28, &self.kind.to_le_bytes());
        put(30, &self.op.to_le_bytes());
        put(32, &self.flags.to_le_bytes());
        put(36, &self.buf_alloc.to_le_bytes());
        put(40, &self.fwd_cnt.to_le_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decoded_header_encodes_to_the_same_bytes() {
        let bytes: [u8; HEADER_BYTES] = std::array::from_fn(|i| u8::try_from(i).unwrap());
        let header = VsockHeader::from_bytes(&bytes);
        assert_eq!(header.src_port, 0x1312_1110);
        assert_eq!(header.op, 0x1f1e);
        assert_eq!(header.to_bytes(), bytes);
    }
}
