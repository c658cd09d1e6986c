//! Passes the name of Cargo's profile to the crate, which rejects programs that are not optimised.

use std::path::PathBuf;

fn main() {
    // OUT_DIR is `<target>/<profile>/build/<package>/out`.
    let out = std::env::var_os("OUT_DIR")
        .map(PathBuf::from)
        .unwrap_or_default();
    let profile = out.ancestors().nth(3).and_then(|path| path.file_name());
    let profile = profile.unwrap_or_default().to_string_lossy();
    println!("cargo::rustc-env=JIFFY_PROFILE={profile}");
    println!("cargo::rerun-if-changed=build.rs");
}
