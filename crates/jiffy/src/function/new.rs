//! `jiffy function new`: creates a function from an example in examples/functions.

use crate::cli::{FunctionLanguage, FunctionNewArgs};
use anyhow::Context;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Executable files of an example.
const SCRIPTS: [&str; 2] = ["build", "test"];

/// Files of an example: path and content.
type Example = &'static [(&'static str, &'static str)];

/// Embeds files of an example.
macro_rules! files {
    ($language:literal: $($path:literal),* $(,)?) => {
        &[$((
            $path,
            include_str!(concat!("../../../../examples/functions/", $language, "/", $path)),
        )),*]
    };
}

const RUST: Example = files!(
    "rust": ".gitignore", "Cargo.toml", "build", "src/function.rs", "src/handler.rs", "src/lib.rs",
    "test",
);
const JAVASCRIPT: Example = files!(
    "javascript": ".gitignore", "build", "build.js", "function.js", "handler.js",
    "handler.test.js", "package.json", "test",
);
const PYTHON: Example = files!(
    "python": ".gitignore", "app.py", "build", "handler.py", "test", "test_handler.py",
);
const GO: Example = files!(
    "go": ".gitignore", "build", "function.go", "go.mod", "handler.go", "handler_test.go",
    "main.go", "package.json", "test",
);
const C: Example = files!(
    "c": ".gitignore", "build", "function.c", "handler.c", "handler.h", "test", "test.c",
);

fn example(language: FunctionLanguage) -> Example {
    match language {
        FunctionLanguage::Rust => RUST,
        FunctionLanguage::Js => JAVASCRIPT,
        FunctionLanguage::Python => PYTHON,
        FunctionLanguage::Go => GO,
        FunctionLanguage::C => C,
    }
}

/// Writes the example into a new directory with the name of the function.
pub fn run(args: &FunctionNewArgs) -> anyhow::Result<()> {
    // A valid name contains neither `/` nor `.`, so the new directory is in the current directory.
    super::path(&args.name, "")?;
    let directory = Path::new(&args.name);
    let context = || format!("cannot create the directory {}", directory.display());
    // Fails if the directory exists, so that no file is overwritten.
    fs::create_dir(directory).with_context(context)?;
    write(example(args.lang), directory)?;
    outln!(
        "created {name}/: change the handler, run {name}/test, and deploy the function with\n\
         jiffy function deploy {name} {name}",
        name = args.name
    );
    Ok(())
}

/// Writes the files of an example into a directory.
fn write(example: Example, directory: &Path) -> anyhow::Result<()> {
    for (path, content) in example {
        let target = directory.join(path);
        let context = || format!("cannot write {}", target.display());
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent).with_context(context)?;
        }
        // The umask of the user removes permissions.
        let mode = if SCRIPTS.contains(path) { 0o777 } else { 0o666 };
        let mut file = OpenOptions::new();
        let file = file.write(true).create_new(true).mode(mode).open(&target);
        let result = file.and_then(|mut file| file.write_all(content.as_bytes()));
        result.with_context(context)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;

    #[test]
    fn examples_are_embedded_completely() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/functions");
        for (name, example) in [
            ("rust", RUST),
            ("javascript", JAVASCRIPT),
            ("python", PYTHON),
            ("go", GO),
            ("c", C),
        ] {
            let directory = tempfile::tempdir().unwrap();
            write(example, directory.path()).unwrap();
            // Build outputs in the directory are not part of the example.
            let tracked = Command::new("git")
                .args(["-C", root.join(name).to_str().unwrap(), "ls-files"])
                .output()
                .unwrap();
            let tracked = String::from_utf8(tracked.stdout).unwrap();
            let mut tracked: Vec<_> = tracked.lines().collect();
            let mut embedded: Vec<_> = example.iter().map(|(path, _)| *path).collect();
            tracked.sort_unstable();
            embedded.sort_unstable();
            assert_eq!(embedded, tracked, "{name}");
            for script in SCRIPTS {
                let mode = fs::metadata(directory.path().join(script))
                    .unwrap()
                    .permissions();
                assert_eq!(mode.mode() & 0o100, 0o100, "{name}/{script}");
            }
        }
    }
}
