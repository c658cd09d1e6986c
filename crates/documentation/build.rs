//! Embeds the pages that `docs/SUMMARY.md` lists.

use std::error::Error;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

fn main() -> Result<(), Box<dyn Error>> {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    println!("cargo::rerun-if-changed={}", docs.display());
    let summary = fs::read_to_string(docs.join("SUMMARY.md"))?;
    let mut table = String::from("static PAGES: &[Page] = &[\n");
    let mut part = "";
    for line in summary.lines() {
        if let Some(title) = line.strip_prefix("# ") {
            part = title;
        } else if let Some((title, path)) = page_of(line) {
            let file = docs.join(path);
            writeln!(
                table,
                "    Page {{ part: {part:?}, title: {title:?}, path: {path:?}, \
                 text: include_str!({file:?}) }},"
            )?;
        }
    }
    table.push_str("];\n");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("cargo did not set OUT_DIR")?);
    Ok(fs::write(out.join("pages.rs"), table)?)
}

/// Returns title and path of the page in a line such as `- [Title](path.md)`.
fn page_of(line: &str) -> Option<(&str, &str)> {
    let (title, path) = line.trim().strip_prefix("- [")?.split_once("](")?;
    Some((title, path.strip_suffix(')')?))
}
