//! Redirects calls of `ioctl` to `src/fast_reset/page_scan.rs`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_FEATURE_FAST_RESET").is_some() {
        println!("cargo:rustc-link-arg=-Wl,--wrap=ioctl");
    }
}
