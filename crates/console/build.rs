//! Embeds the files of the page, which `web/build.mjs` writes into `web/dist` together with their
//! compressed forms. Without these files the console answers 501.

use std::error::Error;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

fn main() -> Result<(), Box<dyn Error>> {
    let dist = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../web/dist");
    println!("cargo::rerun-if-changed={}", dist.display());
    // `scripts/build` builds the page concurrently, and holds this lock until it is complete.
    if let Some(path) = std::env::var_os("JIFFY_PAGE_LOCK") {
        fs::File::open(path)?.lock_shared()?;
    }
    let mut files: Vec<PathBuf> = Vec::new();
    collect(&dist, &mut files);
    files.sort();
    let mut table = String::from("pub(crate) static FILES: &[File] = &[\n");
    for path in files {
        let name = path.strip_prefix(&dist)?.display().to_string();
        // Only `index.html` and the files in `assets/` are served. The manifest of the build is in
        // `dist`, too.
        let is_served = name == "index.html" || name.starts_with("assets/");
        if !is_served || name.ends_with(".br") || name.ends_with(".gz") {
            continue;
        }
        let form = |suffix: &str| {
            let form = format!("{}{suffix}", path.display());
            if Path::new(&form).exists() {
                format!("Some(include_bytes!({form:?}))")
            } else {
                "None".to_owned()
            }
        };
        let (brotli, gzip) = (form(".br"), form(".gz"));
        let path = path.display().to_string();
        // The console decompresses the gzip form for clients without compression, so the plain form
        // is not embedded, too.
        let plain = match gzip.as_str() {
            "None" => format!("Some(include_bytes!({path:?}))"),
            _ => "None".to_owned(),
        };
        writeln!(
            table,
            "    File {{ name: {name:?}, plain: {plain}, brotli: {brotli}, gzip: {gzip} }},"
        )?;
    }
    table.push_str("];\n");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("cargo did not set OUT_DIR")?);
    Ok(fs::write(out.join("files.rs"), table)?)
}

/// Adds all files below `directory`.
fn collect(directory: &Path, files: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(directory) else {
        return;
    };
    for entry in entries.flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect(&path, files);
        } else {
            files.push(path);
        }
    }
}
