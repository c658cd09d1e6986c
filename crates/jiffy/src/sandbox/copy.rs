//! `jiffy cp`: one file into a sandbox or out of it; directories are in `tree.rs`.

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

const CHUNK_BYTES: usize = 256 * 1024;

/// One end of a copy.
#[derive(Debug, PartialEq)]
enum CopyEndpoint<'a> {
    Here(&'a str),
    There { sandbox: &'a str, path: &'a str },
}

impl<'a> CopyEndpoint<'a> {
    /// `SANDBOX:PATH` unless a `/` comes before the colon.
    fn parse(text: &'a str) -> Self {
        match text.split_once(':') {
            Some((sandbox, path)) if !sandbox.is_empty() && !sandbox.contains('/') => {
                Self::There { sandbox, path }
            }
            _ => Self::Here(text),
        }
    }
}

/// Copies.
pub async fn run(args: &CpArgs) -> anyhow::Result<ExitCode> {
    match (
        CopyEndpoint::parse(&args.from),
        CopyEndpoint::parse(&args.to),
    ) {
        (CopyEndpoint::Here(from), CopyEndpoint::There { sandbox, path }) if args.recursive => {
            let agent = RemoteSandbox::find(&args.host, sandbox).await?.agent();
            tree::upload(args, &agent, from, path).await?;
        }
        (CopyEndpoint::There { sandbox, path }, CopyEndpoint::Here(to)) if args.recursive => {
            let agent = RemoteSandbox::find(&args.host, sandbox).await?.agent();
            tree::download(args, &agent, path, to).await?;
        }
        (CopyEndpoint::Here(from), CopyEndpoint::There { sandbox, path }) => {
            let path = with_name(path, from)?;
            upload(args, from, sandbox, &path).await?;
        }
        (CopyEndpoint::There { sandbox, path }, CopyEndpoint::Here(to)) => {
            download(args, sandbox, path, to).await?
        }
        _ => anyhow::bail!("one of the two must be SANDBOX:PATH, as in `jiffy cp file k3x9:/tmp/`"),
    }
    Ok(ExitCode::SUCCESS)
}

/// A path in the guest; a directory there gets the file's name.
fn with_name(path: &str, from: &str) -> anyhow::Result<String> {
    if !path.is_empty() && !path.ends_with('/') {
        return Ok(path.to_owned());
    }
    let name = Path::new(from).file_name().and_then(|n| n.to_str());
    let name = name
        .filter(|n| *n != "-")
        .context("name the file in the sandbox: SANDBOX:PATH")?;
    Ok(format!("{path}{name}"))
}

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
    let agent = RemoteSandbox::find(&args.host, sandbox).await?.agent();
    let mut writer = agent.write_stream(path, args.user.as_deref());
    let mut sent: u64 = 0;
    let failed = |e: ClientError, sent: u64| {
        let e = anyhow::Error::new(e).context(format!("cannot write {path} in sandbox {sandbox}"));
        incomplete(e, sent)
    };
    loop {
        let mut chunk = vec![0; CHUNK_BYTES];
        let n = source.read(&mut chunk).await;
        let n = n
            .with_context(|| format!("cannot read {from}"))
            .map_err(|e| incomplete(e, sent))?;
        if n == 0 {
            return writer.finish().await.map_err(|e| failed(e, sent));
        }
        chunk.truncate(n);
        writer.write(chunk).await.map_err(|e| failed(e, sent))?;
        sent += n as u64;
    }
}

/// Adds to the error of an upload that failed after so many bytes that a part may be there.
fn incomplete(error: anyhow::Error, sent: u64) -> anyhow::Error {
    match sent {
        0 => error,
        _ => anyhow::anyhow!("{error:#}; the file may be there with a part of what it should hold"),
    }
}

async fn download(args: &CpArgs, sandbox: &str, path: &str, to: &str) -> anyhow::Result<()> {
    let agent = RemoteSandbox::find(&args.host, sandbox).await?.agent();
    let failed = || format!("cannot read {path} in sandbox {sandbox}");
    let reader = agent.read_stream(path, args.user.as_deref()).await;
    let mut reader = reader.with_context(failed)?;
    let target = if Path::new(to).is_dir() {
        Path::new(to).join(
            Path::new(path)
                .file_name()
                .context("name the file: SANDBOX:PATH")?,
        )
    } else {
        PathBuf::from(to)
    };
    let unwritable = || format!("cannot write {}", target.display());
    let mut sink: Pin<Box<dyn AsyncWrite + Send>> = match to {
        "-" => Box::pin(tokio::io::stdout()),
        _ => Box::pin(File::create(&target).await.with_context(unwritable)?),
    };
    let mut copied: u64 = 0;
    let whole = async {
        while let Some(chunk) = reader.next().await.with_context(failed)? {
            sink.write_all(&chunk).await.with_context(unwritable)?;
            copied += chunk.len() as u64;
        }
        sink.flush().await.with_context(unwritable)
    };
    let whole: anyhow::Result<()> = whole.await;
    whole.map_err(|e| match to {
        "-" => e,
        _ => anyhow::anyhow!(
            "{e:#}; {} has only the beginning, {copied} bytes",
            target.display()
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_colon_names_a_sandbox_unless_the_word_is_a_path() {
        let there = CopyEndpoint::There {
            sandbox: "k3",
            path: "/a:b",
        };
        assert_eq!(CopyEndpoint::parse("k3:/a:b"), there);
        assert_eq!(CopyEndpoint::parse("./k3:x"), CopyEndpoint::Here("./k3:x"));
        assert_eq!(CopyEndpoint::parse("file"), CopyEndpoint::Here("file"));
        assert_eq!(with_name("/tmp/", "a/b.txt").unwrap(), "/tmp/b.txt");
        assert_eq!(with_name("", "b.txt").unwrap(), "b.txt");
        assert!(with_name("", "-").is_err());
    }
}
