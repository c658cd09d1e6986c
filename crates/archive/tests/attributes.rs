//! Extended attributes in archives.
#![allow(clippy::unwrap_used, reason = "tests")]

use jiffy_archive::{PackOptions, Packer, UnpackOptions, UnpackOwner, unpack};
use rustix::fs::{XattrFlags, getxattr, setxattr};
use std::fs::{self, File};
use std::os::fd::AsFd;

#[test]
fn attributes_of_users_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tree/f");
    fs::create_dir_all(dir.path().join("tree")).unwrap();
    fs::create_dir(dir.path().join("into")).unwrap();
    fs::write(&file, "x").unwrap();
    if setxattr(&file, "user.note", b"hello", XattrFlags::empty()).is_err() {
        println!("skipped: this file system does not support attributes");
        return;
    }
    // The value is longer than the first buffer.
    setxattr(&file, "user.long", &[b'l'; 900], XattrFlags::empty()).unwrap();
    let mut packer = Packer::new(Vec::new(), PackOptions::TREE);
    packer.add(&dir.path().join("tree"), b"tree").unwrap();
    let bytes = packer.finish().unwrap();
    let rules = UnpackOptions {
        owner: UnpackOwner::Process,
        mode: None,
        confined: false,
        rename: None,
        max_bytes: None,
        max_entries: None,
        layer: false,
    };
    let root = File::open(dir.path().join("into")).unwrap();
    unpack(&bytes[..], root.as_fd(), &rules).unwrap();
    for (name, expected) in [("user.note", &b"hello"[..]), ("user.long", &[b'l'; 900])] {
        let mut value = [0_u8; 1024];
        let length = getxattr(dir.path().join("into/tree/f"), name, &mut value[..]).unwrap();
        assert_eq!(&value[..length], expected);
    }
}
