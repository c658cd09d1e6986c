//! Contract between driver and device.
//!
//! A request returns its status and the number of bytes that the device wrote, including the
//! status. `owned_blocks() == [0]` means that no block was written to the overlay.

use super::*;
use crate::virtio::blk::request;

/// Returns the 32-bit field at offset `at` of the configuration.
fn config(block: &Block, at: u64) -> u32 {
    let mut bytes = [0; 4];
    block.read_config(at, &mut bytes);
    u32::from_le_bytes(bytes)
}

#[test]
fn zeroing_beyond_its_limits_is_an_error() {
    let (mut driver, _) = BlockDriver::overlay(&pattern(1 << 16));
    // The disk has 128 sectors, and flag 2 is unknown.
    for (sector, sectors, flags, status) in [
        (0, MAX_DISCARD_SECTORS + 1, 0, STATUS_IOERR),
        (128, 1, 0, STATUS_IOERR),
        (127, 2, 0, STATUS_IOERR),
        (u64::MAX, 1, 0, STATUS_IOERR),
        (u64::MAX / 512, 1, 0, STATUS_IOERR),
        (0, u32::MAX, 0, STATUS_IOERR),
        (0, 8, 2, STATUS_UNSUPP),
    ] {
        for kind in [REQUEST_DISCARD, REQUEST_WRITE_ZEROES] {
            assert_eq!(driver.zero(kind, &[(sector, sectors, flags)]), status);
        }
    }
    // A discard has no flags, 1 to 16 segments, and 16 bytes per segment.
    assert_eq!(driver.zero(REQUEST_DISCARD, &[(0, 8, 1)]), STATUS_UNSUPP);
    assert_eq!(driver.zero(REQUEST_DISCARD, &[(0, 8, 0); 17]), STATUS_IOERR);
    assert_eq!(driver.zero(REQUEST_DISCARD, &[]), STATUS_IOERR);
    assert_eq!(
        driver
            .request(REQUEST_DISCARD, 0, &[readable(DATA_ADDRESS, 15)])
            .0,
        STATUS_IOERR
    );
    assert_eq!(driver.block.owned_blocks(), [0]);
}

#[test]
fn access_beyond_the_disk_is_an_error() {
    let (mut driver, _) = BlockDriver::overlay(&pattern(8192));
    // The disk has 16 sectors. The position of sector 1 << 55 in bytes exceeds 64 bits.
    for sector in [16, 15, u64::MAX, u64::MAX / 512, 1 << 55, (1 << 55) - 1] {
        assert_eq!(
            driver.request(REQUEST_IN, sector, &[writable(DATA_ADDRESS, 1024)]),
            (STATUS_IOERR, 1)
        );
        assert_eq!(
            driver.request(REQUEST_OUT, sector, &[readable(DATA_ADDRESS, 1024)]),
            (STATUS_IOERR, 1)
        );
    }
    assert_eq!(driver.block.owned_blocks(), [0]);
}

#[test]
fn invalid_lengths_directions_and_kinds_cause_an_error() {
    let (mut driver, _) = BlockDriver::overlay(&pattern(8192));
    assert_eq!(
        driver
            .request(REQUEST_IN, 0, &[writable(DATA_ADDRESS, 511)])
            .0,
        STATUS_IOERR
    );
    assert_eq!(
        driver
            .request(REQUEST_OUT, 0, &[readable(DATA_ADDRESS, 1)])
            .0,
        STATUS_IOERR
    );
    assert_eq!(
        driver
            .request(REQUEST_IN, 0, &[readable(DATA_ADDRESS, 512)])
            .0,
        STATUS_IOERR
    );
    assert_eq!(
        driver
            .request(REQUEST_OUT, 0, &[writable(DATA_ADDRESS, 512)])
            .0,
        STATUS_IOERR
    );
    // Unknown kinds of requests.
    assert_eq!(driver.request(2, 0, &[]).0, STATUS_UNSUPP);
    assert_eq!(driver.request(u32::MAX, 0, &[]).0, STATUS_UNSUPP);
    assert_eq!(driver.request(REQUEST_IN, 0, &[]), (STATUS_OK, 1));
    assert_eq!(
        driver
            .request(REQUEST_GET_ID, 0, &[writable(DATA_ADDRESS, 19)])
            .0,
        STATUS_IOERR
    );
}

#[test]
fn a_request_longer_than_the_limit_is_an_error() {
    let (mut driver, _) = BlockDriver::overlay(&pattern(8 << 20));
    let limit = u32::try_from(request::MAX_REQUEST_BYTES).unwrap();
    assert_eq!(
        driver.request(REQUEST_IN, 0, &[writable(DATA_ADDRESS, limit)]),
        (STATUS_OK, limit + 1)
    );
    let over = [writable(DATA_ADDRESS, limit), writable(DATA_ADDRESS, 512)];
    assert_eq!(driver.request(REQUEST_IN, 0, &over), (STATUS_IOERR, 1));
}

#[test]
fn the_serial_number_is_the_name() {
    let (mut driver, _) = BlockDriver::overlay(&pattern(4096));
    assert_eq!(
        driver.request(REQUEST_GET_ID, 0, &[writable(DATA_ADDRESS, 20)]),
        (STATUS_OK, 21)
    );
    let mut id = [0; 20];
    driver
        .harness
        .memory
        .read_slice(&mut id, GuestAddress(DATA_ADDRESS))
        .unwrap();
    assert_eq!(&id, b"blk0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
}

#[test]
fn requests_without_header_or_status_are_rejected() {
    let cases: [&[Buffer]; 6] = [
        &[readable(HEADER_ADDRESS, 16)],
        &[writable(STATUS_ADDRESS, 1)],
        &[readable(HEADER_ADDRESS, 15), writable(STATUS_ADDRESS, 1)],
        &[readable(HEADER_ADDRESS, 16), writable(STATUS_ADDRESS, 0)],
        &[readable(HEADER_ADDRESS, 0)],
        &[
            readable(HEADER_ADDRESS, 16),
            writable(DATA_ADDRESS, u32::MAX),
            writable(STATUS_ADDRESS, 1),
        ],
    ];
    for buffers in cases {
        let (driver, _) = BlockDriver::overlay(&pattern(4096));
        let error = driver.rejected(buffers);
        assert!(matches!(error, DeviceError::Guest(_)), "{error}");
    }
}

#[test]
fn header_and_status_may_be_anywhere_in_their_buffers() {
    let content = pattern(8192);
    let (mut driver, _) = BlockDriver::overlay(&content);
    driver.header(REQUEST_IN, 1);
    driver.ring.add_indirect(
        0x9000,
        &[
            readable(HEADER_ADDRESS, 5),
            readable(HEADER_ADDRESS + 5, 11),
            writable(DATA_ADDRESS, 100),
            writable(DATA_ADDRESS + 100, 413),
        ],
    );
    driver.block.queue_event(0).unwrap();
    assert_eq!(driver.ring.used(), [(0, 513)]);
    let mut data = vec![9; 513];
    driver
        .harness
        .memory
        .read_slice(&mut data, GuestAddress(DATA_ADDRESS))
        .unwrap();
    assert_eq!(data[..512], content[512..1024]);
    assert_eq!(data[512], STATUS_OK);
}

#[test]
fn many_requests_cost_one_interrupt_and_long_work_is_finished_by_the_event_loop() {
    let (mut driver, _) = BlockDriver::overlay(&pattern(4 << 20));
    driver.header(REQUEST_IN, 0);
    for _ in 0..5 {
        driver.ring.add(&[
            readable(HEADER_ADDRESS, 16),
            writable(DATA_ADDRESS, 3 << 20),
            writable(STATUS_ADDRESS, 1),
        ]);
    }
    driver.block.queue_event(0).unwrap();
    // Three requests of 3 MiB exceed the budget of 8 MiB per event.
    assert_eq!(driver.ring.used().len(), 3);
    assert_eq!(driver.harness.interrupt.queue_count(), 1);
    let ready = driver.harness.ready(0);
    assert_eq!(ready.len(), 1);
    driver
        .block
        .host_event(ready[0].token, ready[0].flags)
        .unwrap();
    assert_eq!(driver.ring.used().len(), 2);
    assert!(driver.harness.ready(0).is_empty());
    assert_eq!(driver.ring.avail_event(), 5);
}

#[test]
fn the_configuration_describes_the_disk() {
    let (driver, _) = BlockDriver::overlay(&pattern(8192));
    let block = &driver.block;
    // Fields of `struct virtio_blk_config` (virtio 1.2 section 5.2.4): the capacity in sectors.
    assert_eq!((config(block, 0), config(block, 4)), (16, 0));
    // `seg_max`, `blk_size`, and the topology: physical blocks of 8 sectors.
    assert_eq!(config(block, 12), 254);
    assert_eq!(config(block, 20), 512);
    assert_eq!(config(block, 24), 0x0008_0003);
    // Limits of discards: sectors, segments, and alignment in sectors.
    assert_eq!(
        (config(block, 36), config(block, 40), config(block, 44)),
        (1 << 21, 16, 8)
    );
    // Limits of write-zeroes requests: sectors, segments, and whether they may unmap.
    assert_eq!(
        (config(block, 48), config(block, 52), config(block, 56)),
        (1 << 21, 16, 1)
    );
    for beyond in [60, 57, u64::MAX] {
        assert_eq!(config(block, beyond), 0);
    }
    // A read-only disk has nothing to flush.
    let flushing = Block::new("b", DiskBackend::ReadOnly(file(&[0; 512]))).unwrap();
    assert_eq!(
        flushing.flush_to_host(true).features() & 1 << VIRTIO_BLK_F_FLUSH,
        0
    );
}

#[test]
fn a_flush_is_offered_only_where_it_reaches_the_host() {
    let backend = DiskBackend::Overlay {
        base: file(&[0; 4096]),
        overlay: file(b""),
    };
    let block = Block::new("b", backend).unwrap().flush_to_host(true);
    assert_ne!(block.features() & 1 << VIRTIO_BLK_F_FLUSH, 0);
    assert_eq!(
        BlockDriver::with(block).request(REQUEST_FLUSH, 0, &[]),
        (STATUS_OK, 1)
    );
}

#[test]
fn files_that_are_not_disks_are_rejected() {
    for bytes in [0, 511, 513] {
        assert!(Block::new("b", DiskBackend::ReadOnly(file(&vec![0; bytes]))).is_err());
    }
}
