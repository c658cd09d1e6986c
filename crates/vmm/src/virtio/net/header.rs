//! Header of every frame (`struct virtio_net_hdr`, virtio 1.2 section 5.1.6): 12 bytes, the same
//! for the guest and the tap.

use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_HDR_F_NEEDS_CSUM,
    VIRTIO_NET_HDR_GSO_NONE, VIRTIO_NET_HDR_GSO_TCPV4, VIRTIO_NET_HDR_GSO_TCPV6,
};

/// Size of the header, in bytes.
pub const HEADER_BYTES: usize = 12;
/// Offsets of the fields `flags`, `gso_type` and `num_buffers`.
const FLAGS_OFFSET: usize = 0;
const GSO_TYPE_OFFSET: usize = 1;
const NUM_BUFFERS_OFFSET: usize = 10;

/// Clears the fields of a transmit header that have no meaning for transmission, before it reaches
/// the host kernel. Returns `None` if the frame must be dropped because it requests an offload that
/// was not negotiated.
pub fn sanitize(mut header: [u8; HEADER_BYTES], features: u64) -> Option<[u8; HEADER_BYTES]> {
    let negotiated = |bit: u32| features >> bit & 1 == 1;
    let needs_csum = u32::from(header[FLAGS_OFFSET]) & VIRTIO_NET_HDR_F_NEEDS_CSUM != 0;
    // The guest chooses the header, and the host's kernel would trust it.
    if needs_csum && !negotiated(VIRTIO_NET_F_CSUM) {
        return None;
    }
    let segmented = match u32::from(header[GSO_TYPE_OFFSET]) {
        VIRTIO_NET_HDR_GSO_NONE => false,
        VIRTIO_NET_HDR_GSO_TCPV4 if negotiated(VIRTIO_NET_F_HOST_TSO4) => true,
        VIRTIO_NET_HDR_GSO_TCPV6 if negotiated(VIRTIO_NET_F_HOST_TSO6) => true,
        // Unknown types, and types with the ECN flag.
        _ => return None,
    };
    // A segmented frame without a checksum to complete would give the host wrong checksums
    // (5.1.6.2.1).
    if segmented && !needs_csum {
        return None;
    }
    header[FLAGS_OFFSET] = u8::from(needs_csum);
    header[NUM_BUFFERS_OFFSET..].fill(0);
    Some(header)
}

/// Sets the number of buffers over which `frame` is spread.
pub fn set_num_buffers(frame: &mut [u8], count: u16) {
    if let Some(field) = frame.get_mut(NUM_BUFFERS_OFFSET..HEADER_BYTES) {
        field.copy_from_slice(&count.to_le_bytes());
    }
}
