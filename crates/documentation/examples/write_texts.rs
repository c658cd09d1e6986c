//! Writes the texts for agents, and each page: `write_texts DIRECTORY`.

use std::error::Error;
use std::fs;
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn Error>> {
    let directory = std::env::args_os().nth(1).ok_or("name a directory")?;
    let directory = PathBuf::from(directory);
    for page in jiffy_documentation::pages() {
        let path = directory.join(page.path);
        fs::create_dir_all(path.parent().ok_or("a page has no directory")?)?;
        fs::write(path, page.text)?;
    }
    fs::write(directory.join("llms.txt"), jiffy_documentation::index(""))?;
    fs::write(directory.join("llms-full.txt"), jiffy_documentation::full())?;
    Ok(())
}
