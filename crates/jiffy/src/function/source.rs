//! Builds of functions from source, in a sandbox of the template `functions-builder` that is
//! removed after the build.
//!
//! A *lease* is a connection to the daemon. The daemon removes the sandbox when the connection
//! ends.

use crate::cli::FunctionBuildArgs;
use crate::sandbox::tree;
use anyhow::Context;
use bytes::Bytes;
use jiffy_agent_client::{AgentClient, ArchiveOptions, ProcessEvent, ProcessSpec};
use jiffy_archive::PackOptions;
use jiffy_client::progress::while_waiting;
use jiffy_client::{Client, NewSandbox};
use jiffy_proto::function::MAX_MODULE_BYTES;
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Template with the compilers.
const TEMPLATE: &str = "functions-builder";
/// Directory of the sources in the sandbox, next to the tools.
const DIRECTORY: &str = "/opt/jiffy/functions/source";
/// Timeout of a build.
const BUILD_TIMEOUT: Duration = Duration::from_secs(900);
/// Timeout of the sandbox in seconds, in case this process exits before it has a lease.
const SANDBOX_TIMEOUT_S: u32 = 1200;
/// Maximum size of a source tree in bytes.
const MAX_SOURCE_BYTES: u64 = 64 << 20;
/// Maximum number of files in a source tree.
const MAX_SOURCE_FILES: usize = 10_000;
/// Build outputs and other files in a source tree that are not uploaded.
const IGNORED_FILES: [&str; 6] = [
    ".build",
    ".git",
    "__pycache__",
    "function.wasm",
    "node_modules",
    "target",
];

/// Runs `jiffy function build`. Writes the module to the requested file, or to `function.wasm` in
/// the directory.
pub async fn run(args: &FunctionBuildArgs) -> anyhow::Result<()> {
    let client = jiffy_daemon::open_client(&args.host.server()).await?;
    let module = build(&client, &args.directory).await?;
    let output = match &args.file {
        Some(file) => file.clone(),
        None => args.directory.join("function.wasm"),
    };
    let context = || format!("cannot write the module {}", output.display());
    fs::write(&output, &module).with_context(context)?;
    outln!("{}", output.display());
    Ok(())
}

/// Builds the function in `directory` and returns its module, which the program `build` in the
/// directory writes to `function.wasm`.
pub async fn build(client: &Client, directory: &Path) -> anyhow::Result<Vec<u8>> {
    check(directory)?;
    let new_sandbox = NewSandbox::of(TEMPLATE, BTreeMap::new()).with_timeout_s(SANDBOX_TIMEOUT_S);
    // The first build on a host also builds the template, which takes some minutes.
    let create = client.create(&new_sandbox);
    let sandbox = while_waiting("starting a sandbox of template functions-builder", create)
        .await
        .context("cannot build the function")?;
    let id = sandbox.record.id.clone();
    // The lease removes the sandbox even if this process is killed.
    let lease = client.lease(&id).await;
    let result = match &lease {
        Ok(_) => build_in(&client.agent(&sandbox)?, directory).await,
        // This error is never reported: `lease?` below returns the error of the lease.
        Err(_) => Err(anyhow::anyhow!("the sandbox of the build was removed")),
    };
    // Remove the sandbox in any case. The errors of lease and build take precedence.
    let removed = client.delete(&id, true).await;
    lease?;
    let module = result?;
    removed.context("cannot remove the sandbox of the build")?;
    Ok(module)
}

/// Builds the function in a sandbox: copies the sources, runs `build`, and reads the module.
async fn build_in(agent: &AgentClient, directory: &Path) -> anyhow::Result<Vec<u8>> {
    let options = ArchiveOptions {
        // The user of the sandbox owns the files.
        owner: Some("@".to_owned()),
        ..ArchiveOptions::default()
    };
    let contents = PackOptions {
        leave_out: is_ignored,
        ..PackOptions::TREE
    };
    let tree = tree::from_tree_with(directory.to_owned(), b".".to_vec(), contents);
    tree::send(agent, DIRECTORY, &options, tree).await?;
    let build = ProcessSpec {
        cwd: Some(DIRECTORY.to_owned()),
        timeout: Some(BUILD_TIMEOUT),
        ..ProcessSpec::new(format!("{DIRECTORY}/build"), Vec::<String>::new())
    };
    let mut process = agent.start(&build).await.context("cannot run `build`")?;
    let mut status = None;
    while let Some(event) = process
        .next_event()
        .await
        .context("lost the connection to the build")?
    {
        match event {
            ProcessEvent::Stdout(text) | ProcessEvent::Stderr(text) => {
                // The build continues if standard error is closed.
                let _ = std::io::stderr().lock().write_all(&text);
            }
            ProcessEvent::End(end) => status = Some(end),
            ProcessEvent::Started { .. } | ProcessEvent::Pty(_) | ProcessEvent::KeepAlive => {}
        }
    }
    let status = status.context("lost the connection to the build")?;
    anyhow::ensure!(
        status.exit_code == 0,
        "the build failed ({}); see its output above",
        status.status
    );
    let limit = usize::try_from(MAX_MODULE_BYTES)?;
    let path = format!("{DIRECTORY}/function.wasm");
    let module = agent.read(&path, None, limit).await;
    let module: Bytes =
        module.context("the build did not create a function.wasm of at most 64 MiB")?;
    Ok(module.to_vec())
}

/// Returns whether a path in the archive of the sources is an ignored entry of the source directory
/// or is below such an entry.
fn is_ignored(path: &[u8]) -> bool {
    let first = path
        .split(|byte| *byte == b'/')
        // Paths in the archive may begin with `./`.
        .find(|part| !matches!(*part, b"" | b"."));
    first.is_some_and(|first| IGNORED_FILES.iter().any(|name| name.as_bytes() == first))
}

/// Checks that the directory has a program `build` and is not too large.
fn check(directory: &Path) -> anyhow::Result<()> {
    let program = fs::metadata(directory.join("build"));
    let is_executable =
        |metadata: fs::Metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0;
    anyhow::ensure!(
        program.is_ok_and(is_executable),
        "{} has no program `build` that creates function.wasm: see the example of `jiffy function new`",
        directory.display()
    );
    let (mut bytes, mut files) = (0, 0);
    let mut open: Vec<PathBuf> = vec![directory.to_owned()];
    while let Some(next) = open.pop() {
        let context = || format!("cannot read {}", next.display());
        for entry in fs::read_dir(&next).with_context(context)? {
            let entry = entry.with_context(context)?;
            let name = entry.file_name();
            // Ignored files do not count towards the limits.
            if next == directory && IGNORED_FILES.iter().any(|ignored| name == *ignored) {
                continue;
            }
            let metadata = entry.metadata().with_context(context)?;
            files += 1;
            bytes += metadata.len();
            anyhow::ensure!(
                files <= MAX_SOURCE_FILES && bytes <= MAX_SOURCE_BYTES,
                "{} has more than {MAX_SOURCE_FILES} files or 64 MiB",
                directory.display()
            );
            if metadata.is_dir() {
                open.push(entry.path());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn build_outputs_are_not_uploaded() {
        for path in [
            "node_modules",
            "./node_modules/a",
            "target/debug",
            ".git/config",
        ] {
            assert!(is_ignored(path.as_bytes()), "{path}");
        }
        for path in [".", "src/target", "build", "Cargo.toml", ".gitignore"] {
            assert!(!is_ignored(path.as_bytes()), "{path}");
        }
    }

    #[test]
    fn a_directory_without_a_build_or_too_large_is_rejected() {
        let directory = tempfile::tempdir().unwrap();
        let error = check(directory.path()).unwrap_err().to_string();
        assert!(error.contains("no program `build`"), "{error}");
        let program = directory.path().join("build");
        fs::write(&program, "#!/bin/sh\n").unwrap();
        let error = check(directory.path()).unwrap_err().to_string();
        assert!(error.contains("no program `build`"), "{error}");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        check(directory.path()).unwrap();
        fs::create_dir(directory.path().join("target")).unwrap();
        for name in ["target/large", "large"] {
            check(directory.path()).unwrap();
            let file = fs::File::create(directory.path().join(name)).unwrap();
            file.set_len(MAX_SOURCE_BYTES + 1).unwrap();
        }
        assert!(
            check(directory.path())
                .unwrap_err()
                .to_string()
                .contains("more than")
        );
    }
}
