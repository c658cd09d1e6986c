//! What a driver may and may not do.

use super::*;
use crate::virtio::blk::request;

fn config(block: &Block, at: u64) -> u32 {
    let mut bytes = [0; 4];
    block.read_config(at, &mut bytes);
    u32::from_le_bytes(bytes)
}

#[test]
fn zeroing_beyond_its_limits_is_an_error() {
    let (mut driver, _) = Driver::overlay(&pattern(1 << 16));
    for (sector, sectors, flags, status) in [
        (0, MAX_DISCARD_SECTORS + 1, 0, IOERR),
        (128, 1, 0, IOERR),
        (127, 2, 0, IOERR),
        (u64::MAX, 1, 0, IOERR),
        (u64::MAX / 512, 1, 0, IOERR),
        (0, u32::MAX, 0, IOERR),
        (0, 8, 2, UNSUPP),
    ] {
        for kind in [DISCARD, WRITE_ZEROES] {
            assert_eq!(driver.zero(kind, &[(sector, sectors, flags)]), status);
        }
    }
    assert_eq!(driver.zero(DISCARD, &[(0, 8, 1)]), UNSUPP);
    assert_eq!(driver.zero(DISCARD, &[(0, 8, 0); 17]), IOERR);
    assert_eq!(driver.zero(DISCARD, &[]), IOERR);
    assert_eq!(driver.request(DISCARD, 0, &[readable(DATA, 15)]).0, IOERR);
    assert_eq!(driver.block.owned_blocks(), [0]);
}

#[test]
fn what_lies_beyond_the_disk_is_an_error() {
    let (mut driver, _) = Driver::overlay(&pattern(8192));
    for sector in [16, 15, u64::MAX, u64::MAX / 512, 1 << 55, (1 << 55) - 1] {
        assert_eq!(
            driver.request(IN, sector, &[writable(DATA, 1024)]),
            (IOERR, 1)
        );
        assert_eq!(
            driver.request(OUT, sector, &[readable(DATA, 1024)]),
            (IOERR, 1)
        );
    }
    assert_eq!(driver.block.owned_blocks(), [0]);
}

#[test]
fn odd_lengths_directions_and_kinds_are_answered_with_an_error() {
    let (mut driver, _) = Driver::overlay(&pattern(8192));
    assert_eq!(driver.request(IN, 0, &[writable(DATA, 511)]).0, IOERR);
    assert_eq!(driver.request(OUT, 0, &[readable(DATA, 1)]).0, IOERR);
    assert_eq!(driver.request(IN, 0, &[readable(DATA, 512)]).0, IOERR);
    assert_eq!(driver.request(OUT, 0, &[writable(DATA, 512)]).0, IOERR);
    assert_eq!(driver.request(2, 0, &[]).0, UNSUPP);
    assert_eq!(driver.request(u32::MAX, 0, &[]).0, UNSUPP);
    assert_eq!(driver.request(IN, 0, &[]), (OK, 1));
    assert_eq!(driver.request(GET_ID, 0, &[writable(DATA, 19)]).0, IOERR);
}

#[test]
fn a_request_longer_than_the_limit_is_an_error() {
    let (mut driver, _) = Driver::overlay(&pattern(8 << 20));
    let limit = u32::try_from(request::MAX_DATA).unwrap();
    assert_eq!(
        driver.request(IN, 0, &[writable(DATA, limit)]),
        (OK, limit + 1)
    );
    let over = [writable(DATA, limit), writable(DATA, 512)];
    assert_eq!(driver.request(IN, 0, &over), (IOERR, 1));
}

#[test]
fn the_identity_is_the_name() {
    let (mut driver, _) = Driver::overlay(&pattern(4096));
    assert_eq!(driver.request(GET_ID, 0, &[writable(DATA, 20)]), (OK, 21));
    let mut id = [0; 20];
    driver
        .around
        .memory
        .read_slice(&mut id, GuestAddress(DATA))
        .unwrap();
    assert_eq!(&id, b"blk0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
}

#[test]
fn requests_without_header_or_status_are_refused() {
    let cases: [&[Buffer]; 6] = [
        &[readable(HEADER, 16)],
        &[writable(STATUS, 1)],
        &[readable(HEADER, 15), writable(STATUS, 1)],
        &[readable(HEADER, 16), writable(STATUS, 0)],
        &[readable(HEADER, 0)],
        &[
            readable(HEADER, 16),
            writable(DATA, u32::MAX),
            writable(STATUS, 1),
        ],
    ];
    for buffers in cases {
        let (driver, _) = Driver::overlay(&pattern(4096));
        let error = driver.refused(buffers);
        assert!(matches!(error, DeviceError::Guest(_)), "{error}");
    }
}

#[test]
fn header_and_status_may_lie_anywhere_in_their_buffers() {
    let content = pattern(8192);
    let (mut driver, _) = Driver::overlay(&content);
    driver.header(IN, 1);
    driver.ring.add_indirect(
        0x9000,
        &[
            readable(HEADER, 5),
            readable(HEADER + 5, 11),
            writable(DATA, 100),
            writable(DATA + 100, 413),
        ],
    );
    driver.block.queue_event(0).unwrap();
    assert_eq!(driver.ring.used(), [(0, 513)]);
    let mut data = vec![9; 513];
    driver
        .around
        .memory
        .read_slice(&mut data, GuestAddress(DATA))
        .unwrap();
    assert_eq!(data[..512], content[512..1024]);
    assert_eq!(data[512], OK);
}

#[test]
fn many_requests_cost_one_interrupt_and_long_work_is_finished_by_the_event_loop() {
    let (mut driver, _) = Driver::overlay(&pattern(4 << 20));
    driver.header(IN, 0);
    for _ in 0..5 {
        driver.ring.add(&[
            readable(HEADER, 16),
            writable(DATA, 3 << 20),
            writable(STATUS, 1),
        ]);
    }
    driver.block.queue_event(0).unwrap();
    assert_eq!(driver.ring.used().len(), 3);
    assert_eq!(driver.around.interrupt.queue_count(), 1);
    let ready = driver.around.ready(0);
    assert_eq!(ready.len(), 1);
    driver
        .block
        .host_event(ready[0].token, ready[0].flags)
        .unwrap();
    assert_eq!(driver.ring.used().len(), 2);
    assert!(driver.around.ready(0).is_empty());
    assert_eq!(driver.ring.avail_event(), 5);
}

#[test]
fn the_configuration_describes_the_disk() {
    let (driver, _) = Driver::overlay(&pattern(8192));
    let block = &driver.block;
    assert_eq!((config(block, 0), config(block, 4)), (16, 0));
    assert_eq!(config(block, 12), 254);
    assert_eq!(config(block, 20), 512);
    assert_eq!(config(block, 24), 0x0008_0003);
    assert_eq!(
        (config(block, 36), config(block, 40), config(block, 44)),
        (1 << 21, 16, 8)
    );
    assert_eq!(
        (config(block, 48), config(block, 52), config(block, 56)),
        (1 << 21, 16, 1)
    );
    for beyond in [60, 57, u64::MAX] {
        assert_eq!(config(block, beyond), 0);
    }
    let flushing = Block::new("b", Backend::ReadOnly(file(&[0; 512]))).unwrap();
    assert_eq!(
        flushing.flush_to_host(true).features() & 1 << VIRTIO_BLK_F_FLUSH,
        0
    );
}

#[test]
fn a_flush_is_offered_only_where_it_reaches_the_host() {
    let backend = Backend::Overlay {
        base: file(&[0; 4096]),
        overlay: file(b""),
    };
    let block = Block::new("b", backend).unwrap().flush_to_host(true);
    assert_ne!(block.features() & 1 << VIRTIO_BLK_F_FLUSH, 0);
    assert_eq!(Driver::with(block).request(FLUSH, 0, &[]), (OK, 1));
}

#[test]
fn files_that_are_no_disk_are_refused() {
    for bytes in [0, 511, 513] {
        assert!(Block::new("b", Backend::ReadOnly(file(&vec![0; bytes]))).is_err());
    }
}
