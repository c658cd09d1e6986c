//! Manual pages, generated from the definitions of `--help`.

use crate::cli::Cli;
use anyhow::Context;
use clap::CommandFactory;
use std::fs;
use std::path::Path;
use std::process::ExitCode;

/// `jiffy man`: writes a page for each subcommand into `directory`.
pub fn write(directory: &Path) -> anyhow::Result<ExitCode> {
    let context = || format!("cannot write manual pages to {}", directory.display());
    fs::create_dir_all(directory).with_context(context)?;
    clap_mangen::generate_to(Cli::command(), directory).with_context(context)?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_subcommand_has_a_manual_page_with_its_options() {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path()).unwrap();
        let page = |name: &str| fs::read_to_string(directory.path().join(name)).unwrap();
        assert!(page("jiffy.1").contains("jiffy\\-run(1)"));
        assert!(page("jiffy-template-import.1").contains("sha256"));
        // The pages are reproducible: they do not contain the time.
        let before = page("jiffy-run.1");
        write(directory.path()).unwrap();
        assert_eq!(before, page("jiffy-run.1"));
        assert!(!directory.path().join("jiffy-man.1").exists());
    }
}
