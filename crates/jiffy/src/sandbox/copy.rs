//! `jiffy cp` of a single file. `tree.rs` copies directories.

use super::exec::RemoteSandbox;
use super::tree;
use crate::cli::CpArgs;
use crate::run::CommandTarget;
use anyhow::Context;
use jiffy_agent_client::ClientError;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::ExitCode;
use tokio::fs::File;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Maximum number of bytes that are read at once.
const CHUNK_BYTES: usize = 256 * 1024;

/// Source or destination of a copy.
#[derive(Debug, PartialEq)]
enum CopyEndpoint<'a> {
    Local(&'a str),
    Remote { sandbox: &'a str, path: &'a str },
}

impl<'a> CopyEndpoint<'a> {
    /// Parses `SANDBOX:PATH`. Text with a `/` before the colon is a local path.
    fn parse(text: &'a str) -> Self {
        match text.split_once(':') {
            Some((sandbox, path)) if !sandbox.is_empty() && !sandbox.contains('/') => {
                Self::Remote { sandbox, path }
            }
            _ => Self::Local(text),
        }
    }
}

/// Runs `jiffy cp`.
pub async fn run(args: &CpArgs) -> anyhow::Result<ExitCode> {
    match (
        CopyEndpoint::parse(&args.from),
        CopyEndpoint::parse(&args.to),
    ) {
        (CopyEndpoint::Local(from), CopyEndpoint::Remote { sandbox, path }) if args.recursive => {
            let agent = RemoteSandbox::find(&args.host, sandbox).await?.agent();
            tree::upload(args, &agent, from, path).await?;
        }
        (CopyEndpoint::Remote { sandbox, path }, CopyEndpoint::Local(to)) if args.recursive => {
            let agent = RemoteSandbox::find(&args.host, sandbox).await?.agent();
            tree::download(args, &agent, path, to).await?;
        }
        (CopyEndpoint::Local(from), CopyEndpoint::Remote { sandbox, path }) => {
            let path = with_name(path, from)?;
            upload(args, from, sandbox, &path).await?;
        }
        (CopyEndpoint::Remote { sandbox, path }, CopyEndpoint::Local(to)) => {
            download(args, sandbox, path, to).await?
        }
        _ => anyhow::bail!(
            "either source or destination must be SANDBOX:PATH, for example `jiffy cp file k3x9:/tmp/`"
        ),
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the path of the file in the guest. If `path` is a directory, appends the name of the
/// local file. Standard input has no name.
fn with_name(path: &str, from: &str) -> anyhow::Result<String> {
    if !path.is_empty() && !path.ends_with('/') {
        return Ok(path.to_owned());
    }
    let name = Path::new(from)
        .file_name()
        .and_then(|n| n.to_str())
        .filter(|n| *n != "-")
        .context("specify the file name in the sandbox: SANDBOX:PATH")?;
    Ok(format!("{path}{name}"))
}

/// Copies a local file or standard input to a file in the sandbox.
async fn upload(args: &CpArgs, from: &str, sandbox: &str, path: &str) -> anyhow::Result<()> {
    let mut source: Pin<Box<dyn AsyncRead + Send>> = match from {
        "-" => Box::pin(tokio::io::stdin()),
        from => {
            let file = File::open(from)
                .await
                .with_context(|| format!("cannot read {from}"))?;
            anyhow::ensure!(
                file.metadata().await?.is_file(),
                "{from} is not a file: copy directories with `jiffy cp -r`"
            );
            Box::pin(file)
        }
    };
    // Resolved after the source is opened: if the source is unreadable, no request is sent.
    let agent = RemoteSandbox::find(&args.host, sandbox).await?.agent();
    let mut writer = agent.write_stream(path, args.user.as_deref());
    let mut sent: u64 = 0;
    let write_error = |e: ClientError, sent: u64| {
        let e = anyhow::Error::new(e).context(format!("cannot write {path} in sandbox {sandbox}"));
        incomplete(e, sent)
    };
    loop {
        let mut chunk = vec![0; CHUNK_BYTES];
        let n = source
            .read(&mut chunk)
            .await
            .with_context(|| format!("cannot read {from}"))
            .map_err(|e| incomplete(e, sent))?;
        if n == 0 {
            return writer.finish().await.map_err(|e| write_error(e, sent));
        }
        chunk.truncate(n);
        writer
            .write(chunk)
            .await
            .map_err(|e| write_error(e, sent))?;
        sent += n as u64;
    }
}

/// Adds to the error of an upload that the file may be incomplete if data was sent.
fn incomplete(error: anyhow::Error, sent: u64) -> anyhow::Error {
    match sent {
        0 => error,
        _ => anyhow::anyhow!("{error:#}; the file in the sandbox may be incomplete"),
    }
}

/// Copies a file in the sandbox to a local file or to standard output.
async fn download(args: &CpArgs, sandbox: &str, path: &str, to: &str) -> anyhow::Result<()> {
    let agent = RemoteSandbox::find(&args.host, sandbox).await?.agent();
    let context = || format!("cannot read {path} in sandbox {sandbox}");
    let mut reader = agent
        .read_stream(path, args.user.as_deref())
        .await
        .with_context(context)?;
    let target = if Path::new(to).is_dir() {
        Path::new(to).join(
            Path::new(path)
                .file_name()
                .context("specify the file name: SANDBOX:PATH")?,
        )
    } else {
        PathBuf::from(to)
    };
    let write_context = || format!("cannot write {}", target.display());
    let mut sink: Pin<Box<dyn AsyncWrite + Send>> = match to {
        "-" => Box::pin(tokio::io::stdout()),
        _ => Box::pin(File::create(&target).await.with_context(write_context)?),
    };
    let mut copied: u64 = 0;
    let copy = async {
        while let Some(chunk) = reader.next().await.with_context(context)? {
            sink.write_all(&chunk).await.with_context(write_context)?;
            copied += chunk.len() as u64;
        }
        sink.flush().await.with_context(write_context)
    };
    // The incomplete file is retained, as by `cp`, and reported.
    let result: anyhow::Result<()> = copy.await;
    result.map_err(|e| match to {
        "-" => e,
        _ => anyhow::anyhow!(
            "{e:#}; {} is incomplete, with {copied} bytes",
            target.display()
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_before_a_colon_is_a_sandbox_unless_it_is_a_path() {
        let remote = CopyEndpoint::Remote {
            sandbox: "k3",
            path: "/a:b",
        };
        assert_eq!(CopyEndpoint::parse("k3:/a:b"), remote);
        assert_eq!(CopyEndpoint::parse("./k3:x"), CopyEndpoint::Local("./k3:x"));
        assert_eq!(CopyEndpoint::parse("file"), CopyEndpoint::Local("file"));
        assert_eq!(with_name("/tmp/", "a/b.txt").unwrap(), "/tmp/b.txt");
        assert_eq!(with_name("", "b.txt").unwrap(), "b.txt");
        assert!(with_name("", "-").is_err());
    }
}
