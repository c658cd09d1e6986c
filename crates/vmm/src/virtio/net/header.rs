//! The header before every frame (`struct virtio_net_hdr`, virtio 1.2 section 5.1.6), 12 bytes on both sides of the
//! device: the tap speaks the same.

use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_HDR_F_NEEDS_CSUM,
    VIRTIO_NET_HDR_GSO_NONE, VIRTIO_NET_HDR_GSO_TCPV4, VIRTIO_NET_HDR_GSO_TCPV6,
};

/// Bytes.
pub const HEADER: usize = 12;
const FLAGS: usize = 0;
const GSO_TYPE: usize = 1;
const NUM_BUFFERS: usize = 10;

/// What of a transmit header may reach the host kernel: only offloads that were negotiated, and no field that means
/// nothing on this way. `None` if the frame asks for more than that and must be dropped.
pub fn cleaned(mut header: [u8; HEADER], features: u64) -> Option<[u8; HEADER]> {
    let negotiated = |bit: u32| features >> bit & 1 == 1;
    let needs_csum = u32::from(header[FLAGS]) & VIRTIO_NET_HDR_F_NEEDS_CSUM != 0;
    if needs_csum && !negotiated(VIRTIO_NET_F_CSUM) {
        return None;
    }
    let segmented = match u32::from(header[GSO_TYPE]) {
        VIRTIO_NET_HDR_GSO_NONE => false,
        VIRTIO_NET_HDR_GSO_TCPV4 if negotiated(VIRTIO_NET_F_HOST_TSO4) => true,
        VIRTIO_NET_HDR_GSO_TCPV6 if negotiated(VIRTIO_NET_F_HOST_TSO6) => true,
        _ => return None,
    };
    // A segment without a checksum to complete would leave the host with wrong ones (5.1.6.2.1).
    if segmented && !needs_csum {
        return None;
    }
    header[FLAGS] = u8::from(needs_csum);
    header[NUM_BUFFERS..].fill(0);
    Some(header)
}

/// Tells the driver over how many buffers the frame in `frame` is spread.
pub fn set_num_buffers(frame: &mut [u8], count: u16) {
    if let Some(field) = frame.get_mut(NUM_BUFFERS..HEADER) {
        field.copy_from_slice(&count.to_le_bytes());
    }
}
