//! Lays the program out for huge pages: see `src/huge_text.rs`.

use std::process::Command;

/// First version of glibc whose programs apply packed relocations.
const PACKED_RELOCATIONS: (u32, u32) = (2, 36);

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // One segment contains code and constants, and no other segment begins in its last huge page.
    println!("cargo::rustc-link-arg-bins=-Wl,-z,max-page-size=0x200000,--no-rosegment,--icf=all");
    // Relocations are a part of the segment: 280 KiB, or 10 KiB if they are packed.
    if glibc_version().is_some_and(|version| version >= PACKED_RELOCATIONS) {
        println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
}

/// Returns the version of the C library of this host, which the program contains.
fn glibc_version() -> Option<(u32, u32)> {
    let output = Command::new("getconf").arg("GNU_LIBC_VERSION").output();
    let text = String::from_utf8(output.ok()?.stdout).ok()?;
    let (major, minor) = text.trim().strip_prefix("glibc ")?.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}
