//! Content: reads return the written bytes. The overlay receives all writes, and *owns* the blocks
//! (of 4 KiB) that were written. Other blocks are read from the base.

use super::*;
use std::os::unix::fs::{FileExt, MetadataExt};

#[test]
fn a_read_only_disk_reads_its_file_and_rejects_writes() {
    let content = pattern(8192);
    let mut driver = BlockDriver::new(DiskBackend::ReadOnly(file(&content)));
    assert_eq!(driver.read(0, 8192), content);
    assert_eq!(driver.read(3, 1024), content[1536..2560]);
    assert_eq!(driver.write(0, &[1; 512]), STATUS_IOERR);
    assert_eq!(driver.zero(REQUEST_DISCARD, &[(0, 8, 0)]), STATUS_UNSUPP);
    assert_eq!(
        driver.zero(REQUEST_WRITE_ZEROES, &[(0, 8, 0)]),
        STATUS_UNSUPP
    );
    assert_eq!(driver.request(REQUEST_FLUSH, 0, &[]), (STATUS_OK, 1));
    assert_eq!(driver.read(0, 8192), content);
    assert!(driver.block.owned_blocks().is_empty());
    assert_ne!(driver.block.features() & 1 << VIRTIO_BLK_F_RO, 0);
}

#[test]
fn writes_stay_in_the_overlay_and_own_their_blocks() {
    let content = pattern(128 * 4096);
    let base = file(&content);
    let seen = base.try_clone().unwrap();
    let mut driver = BlockDriver::new(DiskBackend::Overlay {
        base,
        overlay: file(b""),
    });
    assert_eq!(driver.write(8 * 65, &[0x55; 8192]), STATUS_OK);
    // Blocks 65 and 66 are bits 1 and 2 of the second word.
    assert_eq!(driver.block.owned_blocks(), [0, 0b110]);
    let mut expected = content.clone();
    expected[65 * 4096..67 * 4096].fill(0x55);
    assert_eq!(driver.read(0, expected.len()), expected);
    let mut base = vec![0; content.len()];
    seen.read_exact_at(&mut base, 0).unwrap();
    assert_eq!(base, content);
}

#[test]
fn a_partial_write_preserves_the_rest_of_its_block() {
    let content = pattern(5 * 4096);
    for (sector, sectors) in [(1, 1), (0, 1), (7, 1), (7, 2), (7, 10), (8, 9), (39, 1)] {
        let (mut driver, overlay) = BlockDriver::overlay(&content);
        let data = vec![0xee; sectors * 512];
        assert_eq!(
            driver.write(u64::try_from(sector).unwrap(), &data),
            STATUS_OK
        );
        let mut expected = content.clone();
        expected[sector * 512..][..data.len()].fill(0xee);
        assert_eq!(driver.read(0, content.len()), expected);
        for block in 0..5 {
            let owned = driver.block.owned_blocks()[0] >> block & 1 == 1;
            let touched = block * 8 < sector + sectors && sector < block * 8 + 8;
            assert_eq!(owned, touched);
            if owned {
                let mut bytes = [0; 4096];
                let at = u64::try_from(block * 4096).unwrap();
                overlay.read_exact_at(&mut bytes, at).unwrap();
                assert_eq!(bytes[..], expected[block * 4096..][..4096]);
            }
        }
    }
}

#[test]
fn the_overlay_is_as_long_as_the_disk_and_sparse() {
    let (mut driver, overlay) = BlockDriver::overlay(&pattern(1 << 20));
    assert_eq!(driver.write(8, &[1; 4096]), STATUS_OK);
    let metadata = overlay.metadata().unwrap();
    assert_eq!(metadata.size(), 1 << 20);
    assert!(metadata.blocks() * 512 <= 64 << 10, "{}", metadata.blocks());
}

#[test]
fn a_disk_that_ends_inside_a_block_is_served_to_its_last_sector() {
    let content = pattern(4096 + 3 * 512);
    let (mut driver, _) = BlockDriver::overlay(&content);
    assert_eq!(driver.write(9, &[0x77; 512]), STATUS_OK);
    let mut expected = content;
    expected[9 * 512..10 * 512].fill(0x77);
    assert_eq!(driver.read(0, expected.len()), expected);
    assert_eq!(driver.zero(REQUEST_WRITE_ZEROES, &[(8, 3, 1)]), STATUS_OK);
    expected[4096..].fill(0);
    assert_eq!(driver.read(0, expected.len()), expected);
}

#[test]
fn zeroed_ranges_read_as_zeroes_and_their_neighbours_do_not() {
    let content = pattern(16 * 4096);
    for kind in [REQUEST_DISCARD, REQUEST_WRITE_ZEROES] {
        for (sector, sectors) in [
            (0, 8),
            (8, 24),
            (9, 30),
            (1, 2),
            (7, 2),
            (15, 10),
            (127, 1),
            (0, 128),
        ] {
            let (mut driver, _) = BlockDriver::overlay(&content);
            driver.write(16, &pattern(4096 * 3));
            let mut expected = driver.read(0, content.len());
            let count = u32::try_from(sectors).unwrap();
            let start = u64::try_from(sector).unwrap();
            assert_eq!(driver.zero(kind, &[(start, count, 0)]), STATUS_OK);
            // A discard affects whole blocks only.
            let (from, to) = if kind == REQUEST_DISCARD {
                (usize::div_ceil(sector, 8) * 8, (sector + sectors) / 8 * 8)
            } else {
                (sector, sector + sectors)
            };
            if from < to {
                expected[from * 512..to * 512].fill(0);
            }
            assert!(
                driver.read(0, content.len()) == expected,
                "{kind} {sector} {sectors}"
            );
        }
    }
}

#[test]
fn discarded_blocks_are_released_on_the_host() {
    let (mut driver, overlay) = BlockDriver::overlay(&pattern(1 << 20));
    assert_eq!(driver.write(0, &pattern(1 << 20)), STATUS_OK);
    let full = overlay.metadata().unwrap().blocks();
    assert_eq!(
        driver.zero(REQUEST_DISCARD, &[(0, 1024, 0), (1024, 1024, 0)]),
        STATUS_OK
    );
    let empty = overlay.metadata().unwrap().blocks();
    assert!(empty < full / 2, "{full} {empty}");
    assert_eq!(driver.read(0, 1 << 20), vec![0; 1 << 20]);
}

#[test]
fn writes_survive_a_reset_of_the_device() {
    let (mut driver, _) = BlockDriver::overlay(&pattern(8192));
    assert_eq!(driver.write(3, &[0x42; 512]), STATUS_OK);
    driver.block.reset();
    // Without a driver, an event is ignored.
    driver.block.queue_event(0).unwrap();
    driver.ring = Ring::new(&driver.harness.memory, 0x1000, 16);
    let activation = driver.harness.activation(vec![driver.ring.queue(false)], 0);
    driver.block.activate(activation).unwrap();
    assert_eq!(driver.read(3, 512), [0x42; 512]);
    // The disk has only queue 0.
    driver.block.queue_event(9).unwrap();
}

#[test]
fn random_requests_have_the_same_result_as_an_array() {
    let sectors = 523;
    let mut model = pattern(sectors * 512);
    let (mut driver, _) = BlockDriver::overlay(&model);
    let mut state = 0x2545_f491_4f6c_dd1du64;
    let mut next = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state >> 33).unwrap() % below
    };
    for round in 0..2000 {
        let start = next(sectors);
        let count = 1 + next((sectors - start).min(40));
        let (from, to) = (start * 512, (start + count) * 512);
        let sector = u64::try_from(start).unwrap();
        match next(4) {
            0 => assert!(driver.read(sector, to - from) == model[from..to]),
            1 | 2 => {
                let byte = u8::try_from(round % 256).unwrap();
                model[from..to].fill(byte);
                assert_eq!(driver.write(sector, &model[from..to]), STATUS_OK);
            }
            _ => {
                let count = u32::try_from(count).unwrap();
                assert_eq!(
                    driver.zero(REQUEST_WRITE_ZEROES, &[(sector, count, 1)]),
                    STATUS_OK
                );
                model[from..to].fill(0);
            }
        }
    }
    assert!(driver.read(0, model.len()) == model);
}

#[test]
fn a_file_that_became_too_short_is_reported_as_an_error_of_the_host() {
    let base = file(&pattern(1 << 16));
    let host = base.try_clone().unwrap();
    let mut driver = BlockDriver::new(DiskBackend::ReadOnly(base));
    host.set_len(1 << 15).unwrap();
    assert_eq!(driver.read(0, 4096), pattern(1 << 16)[..4096]);
    assert_eq!(driver.block.take_warning(), None);
    let data = [writable(DATA_ADDRESS, 4096)];
    assert_eq!(
        driver.request(REQUEST_IN, 1 << 15 >> 9, &data).0,
        STATUS_IOERR
    );
    let warning = driver.block.take_warning().unwrap();
    assert!(warning.contains("cannot serve this disk"), "{warning}");
}

#[test]
fn a_write_that_fails_on_the_host_fails_in_the_guest_and_is_reported_once() {
    use nix::fcntl::{FcntlArg, SealFlag, fcntl};
    use nix::sys::memfd::{MFdFlags, memfd_create};
    let overlay = memfd_create(c"overlay", MFdFlags::MFD_ALLOW_SEALING).unwrap();
    let overlay = File::from(overlay);
    let host = overlay.try_clone().unwrap();
    let base = file(&pattern(1 << 16));
    let mut driver = BlockDriver::new(DiskBackend::Overlay { base, overlay });
    assert_eq!(driver.write(0, &[1; 4096]), STATUS_OK);
    fcntl(&host, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_WRITE)).unwrap();
    assert_eq!(driver.write(8, &[1; 4096]), STATUS_IOERR);
    let warning = driver.block.take_warning().unwrap();
    assert!(warning.contains("Operation not permitted"), "{warning}");
    assert_eq!(driver.write(8, &[1; 4096]), STATUS_IOERR);
    // An invalid request is not an error of the host.
    assert_eq!(driver.write(1 << 40, &[1; 512]), STATUS_IOERR);
    assert_eq!(driver.block.take_warning(), None);
    assert_eq!(driver.read(0, 4096), [1; 4096]);
    assert_eq!(driver.read(8, 4096), pattern(1 << 16)[4096..8192]);
}
