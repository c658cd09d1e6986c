//! Credit-based flow control of a vsock connection (virtio 1.2 section 5.10.6.3): each side
//! announces the size of its receive buffer and the number of bytes that it has consumed. The other
//! side never sends more than the free space. All counts are modulo 2^32, as in the packets.

use super::header::VsockHeader;

/// Receive buffer of a connection in bytes, used while the host does not read.
pub const BUF_ALLOC_BYTES: u32 = 256 * 1024;

/// Flow control of both directions of a connection.
#[derive(Debug, Default)]
pub struct Credit {
    /// Bytes received from the guest.
    received: u32,
    /// Received bytes that the host has accepted.
    forwarded: u32,
    /// Value of `forwarded` last announced to the guest.
    announced: u32,
    /// Bytes sent to the guest.
    sent: u32,
    /// Receive buffer of the guest, as last announced.
    guest_buf_alloc: u32,
    /// Bytes that the guest has consumed (`fwd_cnt`), as last announced.
    guest_forwarded: u32,
}

impl Credit {
    /// Updates the guest's credit from the header of a packet.
    pub fn update(&mut self, header: &VsockHeader) {
        self.guest_buf_alloc = header.buf_alloc;
        self.guest_forwarded = header.fwd_cnt;
    }

    /// Returns the number of bytes for which the guest has buffer space.
    pub fn available(&self) -> u32 {
        let in_flight = self.sent.wrapping_sub(self.guest_forwarded);
        // Saturating: a guest may announce a smaller buffer than it has bytes in flight.
        self.guest_buf_alloc.saturating_sub(in_flight)
    }

    /// Counts bytes sent to the guest.
    pub fn send(&mut self, bytes: u32) {
        self.sent = self.sent.wrapping_add(bytes);
    }

    /// Counts bytes received from the guest. Returns `false` if they exceed the guest's credit.
    pub fn receive(&mut self, bytes: u32) -> bool {
        // This check bounds the backlog. A correct guest never exceeds its credit.
        let allowed = bytes <= BUF_ALLOC_BYTES.saturating_sub(self.unacknowledged());
        if allowed {
            self.received = self.received.wrapping_add(bytes);
        }
        allowed
    }

    /// Counts bytes that the host has accepted.
    pub fn forward(&mut self, bytes: u32) {
        self.forwarded = self.forwarded.wrapping_add(bytes);
    }

    /// Returns `fwd_cnt` for a packet that is sent to the guest now.
    pub fn announce(&mut self) -> u32 {
        self.announced = self.forwarded;
        self.announced
    }

    /// Returns whether a credit update must be sent. This requires that less than half of the
    /// buffer is free from the guest's view. The update must also announce all received bytes or
    /// at least an eighth of the buffer. Without this minimum, a host that reads a few bytes at a
    /// time would cause an update each time.
    pub fn needs_update(&self) -> bool {
        let unannounced = self.forwarded.wrapping_sub(self.announced);
        let all_forwarded = self.forwarded == self.received;
        self.unacknowledged() > BUF_ALLOC_BYTES / 2
            && unannounced > 0
            && (all_forwarded || unannounced >= BUF_ALLOC_BYTES / 8)
    }

    /// Returns the received bytes whose acceptance was not announced to the guest.
    fn unacknowledged(&self) -> u32 {
        self.received.wrapping_sub(self.announced)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_never_sends_more_than_its_credit() {
        let mut credit = Credit::default();
        assert!(credit.receive(BUF_ALLOC_BYTES));
        credit.forward(BUF_ALLOC_BYTES);
        assert!(!credit.receive(1));
        assert!(credit.needs_update());
        assert_eq!(credit.announce(), BUF_ALLOC_BYTES);
        assert!(!credit.needs_update());
        assert!(credit.receive(BUF_ALLOC_BYTES));
        assert!(!credit.receive(u32::MAX));
    }

    #[test]
    fn counts_wrap_around() {
        let mut credit = Credit::default();
        credit.update(&VsockHeader {
            buf_alloc: 100,
            ..VsockHeader::default()
        });
        let mut forwarded = 0u32;
        for _ in 0..100_000u32 {
            credit.send(50_000);
            forwarded = forwarded.wrapping_add(50_000);
            credit.update(&VsockHeader {
                buf_alloc: 100,
                fwd_cnt: forwarded,
                ..VsockHeader::default()
            });
        }
        assert_eq!(credit.available(), 100);
        credit.send(101);
        assert_eq!(credit.available(), 0);
    }

    #[test]
    fn a_guest_with_inconsistent_credit_gets_nothing() {
        let mut credit = Credit::default();
        credit.update(&VsockHeader {
            buf_alloc: 4096,
            fwd_cnt: 1,
            ..VsockHeader::default()
        });
        assert_eq!(credit.available(), 0);
    }

    #[test]
    fn a_trickling_host_does_not_cause_a_packet_per_byte() {
        let mut credit = Credit::default();
        assert!(credit.receive(BUF_ALLOC_BYTES));
        credit.forward(1);
        assert!(!credit.needs_update());
        credit.forward(BUF_ALLOC_BYTES / 8);
        assert!(credit.needs_update());
    }
}
