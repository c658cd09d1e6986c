//! Linker's argument by which calls of `ioctl` reach `src/page_scan.rs`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-link-arg=-Wl,--wrap=ioctl");
}
