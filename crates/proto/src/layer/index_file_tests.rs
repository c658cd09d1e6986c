//! Tests of the file with the index of a layer. A *layer* is the part of a memory or disk that one
//! snapshot stores. Its index has a bit for each *unit* (block or chunk) that is stored, and a bit
//! for each unit that is zero.

use super::super::DISK_BLOCK;
use super::*;
use std::os::unix::fs::MetadataExt;

/// Returns an empty temporary file.
fn file() -> File {
    tempfile::tempfile().unwrap()
}

/// Returns an index for a disk of 10 GiB.
fn disk_index(stored: &[u64], zero: &[u64]) -> LayerIndex {
    let mut index = LayerIndex::empty(DISK_BLOCK, 10 << 30);
    stored.iter().for_each(|&unit| index.stored.insert(unit));
    zero.iter().for_each(|&unit| index.zero.insert(unit));
    index
}

#[test]
fn an_index_is_read_as_it_was_written_and_takes_little_of_the_disk() {
    let last = (10 << 30) / u64::from(DISK_BLOCK) - 1;
    for (stored, zero) in [
        (&[][..], &[][..]),
        (&[0, 1, 70_000, last], &[2, 700_000]),
        (&[5], &[last]),
    ] {
        let index = disk_index(stored, zero);
        let file = file();
        index.write(&file).unwrap();
        let length = file.metadata().unwrap().len();
        assert_eq!(length, index.encode().len() as u64);
        assert!(file.metadata().unwrap().blocks() * 512 <= 64 << 10);
        assert_eq!(LayerIndex::read(&file, length).unwrap(), index);
        assert_eq!(LayerIndex::decode_any(&index.encode()).unwrap(), index);
        assert!(LayerIndex::read(&file, length - 1).is_err());
    }
}

#[test]
fn a_damaged_file_is_refused() {
    let index = disk_index(&[64], &[65]);
    let bytes = index.encode();
    // Length of each of the two maps in bytes. Units 64 and 65 are bits 0 and 1 of byte 8.
    let maps = (bytes.len() - HEADER_BYTES) / 2;
    // Inverts bits of the byte at `at`.
    let damaged = |at: usize, bit: u8| {
        let mut bytes = bytes.clone();
        bytes[at] ^= bit;
        let file = file();
        file.write_all_at(&bytes, 0).unwrap();
        LayerIndex::read(&file, 1 << 20)
    };
    assert!(
        damaged(HEADER_BYTES + maps + 8, 1).is_err(),
        "unit 64 is stored and zero"
    );
    assert!(
        damaged(HEADER_BYTES + 8, 2).is_err(),
        "unit 65 is stored and zero"
    );
    assert!(damaged(16, 1).is_err(), "another number of units");
    assert!(damaged(HEADER_BYTES, 1).is_ok(), "unit 0 is stored as well");
    let short = file();
    short.write_all_at(&bytes[..HEADER_BYTES - 1], 0).unwrap();
    assert!(LayerIndex::read(&short, 1 << 20).is_err());
    let mut beyond = LayerIndex::empty(DISK_BLOCK, 70 * u64::from(DISK_BLOCK)).encode();
    // Unit 127, although the index has only 70 units.
    beyond[HEADER_BYTES + 15] = 0x80;
    let file = file();
    file.write_all_at(&beyond, 0).unwrap();
    assert!(LayerIndex::read(&file, 1 << 20).is_err());
}
