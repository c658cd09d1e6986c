//! Builds of functions from source, in a sandbox of the template `functions-builder` that ends with
//! the build.

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

/// Template that has the compilers.
const TEMPLATE: &str = "functions-builder";
/// Directory of the sources in the sandbox, beside the tools.
const DIRECTORY: &str = "/opt/jiffy/functions/source";
/// Time for a build.
const BUILD_TIMEOUT: Duration = Duration::from_secs(900);
/// Time after which the sandbox ends even if this program could not take a lease of it.
const SANDBOX_TIMEOUT_S: u32 = 1200;
/// Most of a source tree.
const MAX_SOURCE_BYTES: u64 = 64 << 20;
const MAX_SOURCE_FILES: usize = 10_000;
/// Files of builds in a source tree, which are not sent.
const LEFT_OUT: [&str; 6] = [
    ".build",
    ".git",
    "__pycache__",
    "function.wasm",
    "node_modules",
    "target",
];

/// Runs `jiffy function build`: the module becomes `function.wasm` in the directory, or the file
/// that is asked for.
pub async fn run(args: &FunctionBuildArgs) -> anyhow::Result<()> {
    let client = jiffy_daemon::open_client(&args.host.server()).await?;
    let module = build(&client, &args.directory).await?;
    let output = match &args.file {
        Some(file) => file.clone(),
        None => args.directory.join("function.wasm"),
    };
    let failed = || format!("cannot write the module {}", output.display());
    fs::write(&output, &module).with_context(failed)?;
    outln!("{}", output.display());
    Ok(())
}

/// Builds the function in `directory` and returns its module. The script `build` there writes it to
/// `function.wasm`.
pub async fn build(client: &Client, directory: &Path) -> anyhow::Result<Vec<u8>> {
    check(directory)?;
    let wanted = NewSandbox::of(TEMPLATE, BTreeMap::new()).with_timeout_s(SANDBOX_TIMEOUT_S);
    // The first one on a host builds the template, which takes some minutes.
    let creating = client.create(&wanted);
    let sandbox = while_waiting("starting a sandbox of template functions-builder", creating).await;
    let sandbox = sandbox.context("cannot build the function")?;
    let id = sandbox.record.id.clone();
    // It ends with this program, however that ends.
    let lease = client.lease(&id).await;
    let built = match &lease {
        Ok(_) => build_in(&client.agent(&sandbox)?, directory).await,
        Err(_) => Err(anyhow::anyhow!("the sandbox of the build is gone")),
    };
    let removed = client.delete(&id, true).await;
    lease?;
    let module = built?;
    removed.context("cannot remove the sandbox of the build")?;
    Ok(module)
}

async fn build_in(agent: &AgentClient, directory: &Path) -> anyhow::Result<Vec<u8>> {
    let options = ArchiveOptions {
        owner: Some("@".to_owned()),
        ..ArchiveOptions::default()
    };
    let contents = PackOptions {
        leave_out: is_left_out,
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
    while let Some(event) = process.next_event().await.context("the build broke off")? {
        match event {
            ProcessEvent::Stdout(text) | ProcessEvent::Stderr(text) => {
                // Without a reader the build goes on.
                let _ = std::io::stderr().lock().write_all(&text);
            }
            ProcessEvent::End(end) => status = Some(end),
            ProcessEvent::Started { .. } | ProcessEvent::Pty(_) | ProcessEvent::KeepAlive => {}
        }
    }
    let status = status.context("the build broke off")?;
    anyhow::ensure!(
        status.exit_code == 0,
        "the build failed ({}); above is its output",
        status.status
    );
    let limit = usize::try_from(MAX_MODULE_BYTES)?;
    let path = format!("{DIRECTORY}/function.wasm");
    let module = agent.read(&path, None, limit).await;
    let module: Bytes = module.context("the build left no function.wasm of 64 MiB at most")?;
    Ok(module.to_vec())
}

fn is_left_out(path: &[u8]) -> bool {
    let first = path
        .split(|byte| *byte == b'/')
        .find(|part| !matches!(*part, b"" | b"."));
    first.is_some_and(|first| LEFT_OUT.iter().any(|name| name.as_bytes() == first))
}

/// Checks that there is something to build, of bounded size.
fn check(directory: &Path) -> anyhow::Result<()> {
    let program = fs::metadata(directory.join("build"));
    let runs = |found: fs::Metadata| found.is_file() && found.permissions().mode() & 0o111 != 0;
    anyhow::ensure!(
        program.is_ok_and(runs),
        "{} has no program `build` that makes function.wasm: `jiffy function new` writes one",
        directory.display()
    );
    let (mut bytes, mut files) = (0, 0);
    let mut open: Vec<PathBuf> = vec![directory.to_owned()];
    while let Some(next) = open.pop() {
        let failed = || format!("cannot read {}", next.display());
        for entry in fs::read_dir(&next).with_context(failed)? {
            let entry = entry.with_context(failed)?;
            let name = entry.file_name();
            if next == directory && LEFT_OUT.iter().any(|left_out| name == *left_out) {
                continue;
            }
            let found = entry.metadata().with_context(failed)?;
            files += 1;
            bytes += found.len();
            anyhow::ensure!(
                files <= MAX_SOURCE_FILES && bytes <= MAX_SOURCE_BYTES,
                "{} has more than {MAX_SOURCE_FILES} files or 64 MiB",
                directory.display()
            );
            if found.is_dir() {
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
    fn what_builds_leave_is_not_sent() {
        for path in [
            "node_modules",
            "./node_modules/a",
            "target/debug",
            ".git/config",
        ] {
            assert!(is_left_out(path.as_bytes()), "{path}");
        }
        for path in [".", "src/target", "build", "Cargo.toml", ".gitignore"] {
            assert!(!is_left_out(path.as_bytes()), "{path}");
        }
    }

    #[test]
    fn a_directory_without_a_build_or_too_large_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let refused = check(directory.path()).unwrap_err().to_string();
        assert!(refused.contains("no program `build`"), "{refused}");
        let program = directory.path().join("build");
        fs::write(&program, "#!/bin/sh\n").unwrap();
        let refused = check(directory.path()).unwrap_err().to_string();
        assert!(refused.contains("no program `build`"), "{refused}");
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
