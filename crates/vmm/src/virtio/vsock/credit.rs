//! Who may still send how much (virtio 1.2 section 5.10.6.3). All counts are modulo 2^32, as on the wire.

use super::header::Header;

/// Bytes we keep for a connection whose host side is slow.
pub const BUF_ALLOC: u32 = 256 * 1024;

/// Both directions of one connection's flow control.
#[derive(Debug, Default)]
pub struct Credit {
    /// Bytes that came from the guest.
    received: u32,
    /// Of these, bytes the host took.
    forwarded: u32,
    /// The last `forwarded` that the guest was told.
    told: u32,
    /// Bytes that went to the guest.
    sent: u32,
    /// What the guest last said of its own room.
    guest_alloc: u32,
    guest_forwarded: u32,
}

impl Credit {
    /// Notes what the guest says with every packet.
    pub fn update(&mut self, header: &Header) {
        self.guest_alloc = header.buf_alloc;
        self.guest_forwarded = header.fwd_cnt;
    }

    /// Bytes the guest has room for.
    pub fn room(&self) -> u32 {
        let under_way = self.sent.wrapping_sub(self.guest_forwarded);
        self.guest_alloc.saturating_sub(under_way)
    }

    /// `bytes` went to the guest.
    pub fn send(&mut self, bytes: u32) {
        self.sent = self.sent.wrapping_add(bytes);
    }

    /// `bytes` came from the guest; false if it was never told that there is room for them.
    pub fn receive(&mut self, bytes: u32) -> bool {
        let allowed = bytes <= BUF_ALLOC.saturating_sub(self.unacknowledged());
        if allowed {
            self.received = self.received.wrapping_add(bytes);
        }
        allowed
    }

    /// The host took `bytes`.
    pub fn forward(&mut self, bytes: u32) {
        self.forwarded = self.forwarded.wrapping_add(bytes);
    }

    /// The `fwd_cnt` for a packet that goes to the guest now.
    pub fn tell(&mut self) -> u32 {
        self.told = self.forwarded;
        self.told
    }

    /// Whether the guest believes that less than half of our room is free, and there is news worth a packet.
    /// A host that takes a few bytes at a time does not cause a packet each.
    pub fn owes_update(&self) -> bool {
        let news = self.forwarded.wrapping_sub(self.told);
        let all = self.forwarded == self.received;
        self.unacknowledged() > BUF_ALLOC / 2 && news > 0 && (all || news >= BUF_ALLOC / 8)
    }

    fn unacknowledged(&self) -> u32 {
        self.received.wrapping_sub(self.told)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_never_gets_more_than_it_was_told() {
        let mut credit = Credit::default();
        assert!(credit.receive(BUF_ALLOC));
        credit.forward(BUF_ALLOC);
        assert!(!credit.receive(1));
        assert!(credit.owes_update());
        assert_eq!(credit.tell(), BUF_ALLOC);
        assert!(!credit.owes_update());
        assert!(credit.receive(BUF_ALLOC));
        assert!(!credit.receive(u32::MAX));
    }

    #[test]
    fn counts_wrap_around() {
        let mut credit = Credit::default();
        credit.update(&Header {
            buf_alloc: 100,
            ..Header::default()
        });
        let mut forwarded = 0u32;
        for _ in 0..100_000u32 {
            credit.send(50_000);
            forwarded = forwarded.wrapping_add(50_000);
            credit.update(&Header {
                buf_alloc: 100,
                fwd_cnt: forwarded,
                ..Header::default()
            });
        }
        assert_eq!(credit.room(), 100);
        credit.send(101);
        assert_eq!(credit.room(), 0);
    }

    #[test]
    fn a_guest_that_lies_about_its_room_gets_nothing() {
        let mut credit = Credit::default();
        credit.update(&Header {
            buf_alloc: 4096,
            fwd_cnt: 1,
            ..Header::default()
        });
        assert_eq!(credit.room(), 0);
    }

    #[test]
    fn a_trickling_host_does_not_cause_a_packet_per_byte() {
        let mut credit = Credit::default();
        assert!(credit.receive(BUF_ALLOC));
        credit.forward(1);
        assert!(!credit.owes_update());
        credit.forward(BUF_ALLOC / 8);
        assert!(credit.owes_update());
    }
}
