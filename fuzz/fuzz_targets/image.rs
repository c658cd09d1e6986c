#![no_main]
//! Any image of a template unpacks only to entries that a layer can contain, within the limits, and
//! changes no file outside of the target directory.
//!
//! Half of the inputs are offsets and bytes to change in an image that `mkfs.erofs` wrote. The
//! image (`small.erofs.gz`) contains files, links, a pipe, a deletion, an emptied directory and
//! attributes. The other inputs are a complete image except its super block.

use flate2::read::GzDecoder;
use jiffy_fuzz::tree::survey;
use jiffy_image::{UnpackLimits, unpack_image};
use libfuzzer_sys::fuzz_target;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::sync::LazyLock;
use std::time::Duration;

static SMALL: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut image = Vec::new();
    let mut packed = GzDecoder::new(&include_bytes!("../small.erofs.gz")[..]);
    packed.read_to_end(&mut image).unwrap();
    image
});

/// The image with changed bytes. Each change takes three bytes: offset (2) and value (1).
fn changed(orders: &[u8]) -> Vec<u8> {
    let mut image = SMALL.clone();
    let length = image.len();
    for order in orders.chunks_exact(3) {
        let at = usize::from(u16::from_le_bytes([order[0], order[1]]));
        image[at % length] = order[2];
    }
    image
}

/// An image with blocks of 512 bytes, whose inodes start directly after the super block. `rest`
/// follows the super block.
fn made(rest: &[u8]) -> Vec<u8> {
    let mut image = vec![0; 1152];
    // Fields of `struct erofs_super_block`, which starts at offset 1024: `magic`, `blkszbits`,
    // `root_nid`, `meta_blkaddr` and `xattr_blkaddr`.
    image[1024..1028].copy_from_slice(&0xe0f5_e1e2_u32.to_le_bytes());
    image[1036] = 9;
    image[1038] = 4;
    image[1064] = 2;
    image[1068] = 2;
    image.extend(rest);
    image.resize(image.len().next_multiple_of(512), 0);
    image
}

fuzz_target!(|data: &[u8]| {
    let Some((first, rest)) = data.split_first() else {
        return;
    };
    let image = match first % 2 {
        0 => changed(rest),
        _ => made(rest),
    };
    // Unpack to a tmpfs: unpacking flushes the target's file system.
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = |name: &str| dir.path().join(name);
    fs::create_dir(path("in")).unwrap();
    File::create(path("image"))
        .unwrap()
        .write_all(&image)
        .unwrap();
    let limits = UnpackLimits {
        bytes: 1 << 20,
        entries: 64,
        time: Duration::from_secs(5),
        ..UnpackLimits::default()
    };
    let file = File::open(path("image")).unwrap();
    let unpacked = unpack_image(&file, &path("in"), limits);
    // The unchanged image is valid.
    assert!(unpacked.is_ok() || *first % 2 != 0 || !rest.is_empty());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    // A file may have several names, each of which counts its bytes.
    assert!(survey(&path("in")).1 <= (1 << 20) * 64);
});
