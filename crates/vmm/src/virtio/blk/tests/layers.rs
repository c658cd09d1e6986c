//! Disks with several layers: each block is read from the newest layer that contains it, and frozen
//! layers are never written.
//!
//! A snapshot *freezes* the overlay, which becomes the newest layer, and continues with an empty
//! overlay. A *thaw* undoes the last freeze if its snapshot failed. A *fold* merges a layer into
//! the layer above.

use super::*;
use crate::machine::file_identity;
use jiffy_proto::layer::LayerIndex;
use std::os::unix::fs::FileExt;

const DISK_BYTES: usize = 16 * 4096;

/// Returns the first sector of block `at`.
fn first_sector(at: u64) -> u64 {
    at * 8
}

/// Returns the content of a file as long as the disk.
fn whole(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; DISK_BYTES];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// Returns a disk with `base` and the layers.
fn layered(base: &File, layers: &[(File, LayerIndex)], overlay: File) -> BlockDriver {
    let layers = layers
        .iter()
        .map(|(file, index)| (file.try_clone().unwrap(), index.clone()))
        .collect();
    BlockDriver::new(DiskBackend::Layered {
        base: base.try_clone().unwrap(),
        layers,
        overlay,
    })
}

/// Returns a base and two frozen layers. Block 1 is in the first layer. Blocks 1 and 2 (partly
/// written by the guest) are in the second.
fn base_and_two_layers() -> (File, Vec<(File, LayerIndex)>) {
    let base = file(&pattern(DISK_BYTES));
    let overlay = file(b"");
    let first = overlay.try_clone().unwrap();
    let mut driver = BlockDriver::new(DiskBackend::Overlay {
        base: base.try_clone().unwrap(),
        overlay,
    });
    assert_eq!(driver.write(first_sector(1), &[1; 4096]), STATUS_OK);
    let second = file(b"");
    let index = driver.block.freeze(second.try_clone().unwrap()).unwrap();
    assert_eq!(index.stored.iter().collect::<Vec<_>>(), [1]);
    let mut layers = vec![(first, index)];
    assert_eq!(driver.write(first_sector(1) + 1, &[2; 512]), STATUS_OK);
    assert_eq!(driver.write(first_sector(2), &[2; 512]), STATUS_OK);
    let index = driver.block.freeze(file(b"")).unwrap();
    assert_eq!(index.stored.iter().collect::<Vec<_>>(), [1, 2]);
    layers.push((second, index));
    (base, layers)
}

/// Returns the content of a disk with the layers of [`base_and_two_layers`].
fn expected() -> Vec<u8> {
    let mut bytes = pattern(DISK_BYTES);
    bytes[4096..8192].fill(1);
    bytes[4096 + 512..4096 + 1024].fill(2);
    bytes[8192..8192 + 512].fill(2);
    bytes
}

#[test]
fn a_block_is_read_from_the_newest_layer_that_contains_it() {
    let (base, layers) = base_and_two_layers();
    let mut driver = layered(&base, &layers, file(b""));
    assert_eq!(driver.read(0, DISK_BYTES), expected());
}

#[test]
fn siblings_over_the_same_layers_do_not_see_each_other() {
    let (base, layers) = base_and_two_layers();
    let frozen: Vec<Vec<u8>> = layers.iter().map(|(file, _)| whole(file)).collect();
    let mut drivers: Vec<BlockDriver> =
        (0..3).map(|_| layered(&base, &layers, file(b""))).collect();
    for (number, driver) in (10u8..).zip(&mut drivers) {
        assert_eq!(driver.write(first_sector(1) + 3, &[number; 512]), STATUS_OK);
        assert_eq!(
            driver.zero(REQUEST_WRITE_ZEROES, &[(first_sector(2), 8, 0)]),
            STATUS_OK
        );
    }
    for (number, driver) in (10u8..).zip(&mut drivers) {
        let mut now = expected();
        now[4096 + 1536..4096 + 2048].fill(number);
        now[8192..12288].fill(0);
        assert_eq!(driver.read(0, DISK_BYTES), now);
    }
    let after: Vec<Vec<u8>> = layers.iter().map(|(file, _)| whole(file)).collect();
    assert_eq!(after, frozen);
    assert_eq!(whole(&base), pattern(DISK_BYTES));
}

#[test]
fn a_thaw_preserves_writes_before_and_after_the_freeze() {
    let (mut driver, overlay) = BlockDriver::overlay(&pattern(DISK_BYTES));
    assert_eq!(driver.write(first_sector(1), &[1; 4096]), STATUS_OK);
    driver.block.freeze(file(b"")).unwrap();
    assert_eq!(driver.write(first_sector(1), &[2; 512]), STATUS_OK);
    assert_eq!(driver.write(first_sector(5), &[3; 4096]), STATUS_OK);
    let before = driver.read(0, DISK_BYTES);
    driver.block.thaw().unwrap();
    assert_eq!(driver.read(0, DISK_BYTES), before);
    assert_eq!(driver.block.owned_blocks(), [0b10_0010]);
    assert_eq!(driver.write(first_sector(6), &[4; 4096]), STATUS_OK);
    assert_eq!(whole(&overlay)[6 * 4096..7 * 4096], [4; 4096]);
}

#[test]
fn a_layer_of_another_disk_is_rejected() {
    let assert_rejected = |base: File, layers: Vec<(File, LayerIndex)>| {
        let overlay = file(b"");
        let backend = DiskBackend::Layered {
            base,
            layers,
            overlay,
        };
        assert!(Block::new("blk0", backend).is_err());
    };
    let (base, layers) = base_and_two_layers();
    layers[0].0.set_len(4096).unwrap();
    assert_rejected(base, layers);
    let (_, layers) = base_and_two_layers();
    assert_rejected(file(&pattern(DISK_BYTES / 2)), layers);
}

#[test]
fn folded_layers_read_the_same_and_the_lower_file_is_closed() {
    let (base, mut layers) = base_and_two_layers();
    let third = file(b"");
    third.set_len(DISK_BYTES as u64).unwrap();
    third.write_all_at(&[3; 4096], 4 * 4096).unwrap();
    let mut index = LayerIndex::empty(4096, DISK_BYTES as u64);
    index.stored.insert(4);
    layers.push((third, index));
    let mut driver = layered(&base, &layers, file(b""));
    let before = driver.read(0, DISK_BYTES);
    let identities: Vec<_> = layers
        .iter()
        .map(|(file, _)| file_identity(file).unwrap())
        .collect();
    // Copy the blocks that only the second layer contains into the third layer's file, as a fold
    // requires. The third layer does not own these blocks yet, so reads do not change.
    let copied = &before[4096..3 * 4096];
    layers[2].0.write_all_at(copied, 4096).unwrap();
    assert_eq!(driver.read(0, DISK_BYTES), before);

    driver.block.fold_layers(identities[1], identities[2]);
    assert_eq!(driver.read(0, DISK_BYTES), before);
    // The lower file is no longer read.
    layers[1].0.write_all_at(&[9; 3 * 4096], 0).unwrap();
    assert_eq!(driver.read(0, DISK_BYTES), before);
    // The device ignores this: the second layer no longer exists.
    driver.block.fold_layers(identities[1], identities[0]);
    assert_eq!(driver.write(first_sector(1), &[7; 512]), STATUS_OK);
    // The first and third layers are adjacent now.
    driver.block.fold_layers(identities[0], identities[2]);
    layers[0].0.write_all_at(&[9; 4 * 4096], 0).unwrap();
    let mut now = before;
    now[4096..4096 + 512].fill(7);
    assert_eq!(driver.read(0, DISK_BYTES), now);
}
