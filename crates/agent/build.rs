//! Lays the program out for huge pages: see `src/huge_text.rs`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // One segment contains code and constants, and no other segment begins in its last huge page.
    println!("cargo::rustc-link-arg-bins=-Wl,-z,max-page-size=0x200000,--no-rosegment,--icf=all");
}
