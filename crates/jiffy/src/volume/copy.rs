//! Copies files and directories between this host and a volume.

use super::encoded;
use anyhow::{Context, bail};
use bytes::Bytes;
use hyper::Method;
use jiffy_api_types::{VolumeEntry, VolumeEntryType};
use jiffy_client::Client;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// Size of the parts of a file in bytes.
const PART: usize = 256 << 10;
/// Maximum depth of a copied directory.
const MAX_DEPTH: u32 = 100;

/// Source or destination of a copy.
enum Place<'a> {
    Host(PathBuf),
    Volume(&'a str, &'a str),
}

/// Parses an argument. A path of this host that contains a colon must start with `./` or `/`.
fn place(text: &str) -> Place<'_> {
    match text.split_once(':') {
        Some((volume, path)) if !volume.is_empty() && !volume.contains(['/', '.']) => {
            Place::Volume(volume, path)
        }
        _ => Place::Host(text.into()),
    }
}

/// Runs `jiffy volume cp`.
pub(super) async fn run(client: &Client, from: &str, to: &str) -> anyhow::Result<()> {
    match (place(from), place(to)) {
        (Place::Host(from), Place::Volume(volume, to)) => upload(client, &from, volume, to).await,
        (Place::Volume(volume, from), Place::Host(to)) => download(client, volume, from, &to).await,
        _ => bail!("one of the arguments must be VOLUME:PATH, and the other a path of this host"),
    }
}

/// Returns the path of the API call `call` for the entry at `path` in a volume.
fn call(volume: &str, call: &str, path: &str) -> String {
    format!(
        "/volumecontent/{}/{call}?path={}",
        encoded(volume),
        encoded(path)
    )
}

/// Copies a file or a directory of the host to a volume.
async fn upload(client: &Client, from: &Path, volume: &str, to: &str) -> anyhow::Result<()> {
    // Entries that are not copied yet: their paths on the host and in the volume.
    let mut pending = vec![(from.to_owned(), to.trim_end_matches('/').to_owned())];
    // Metadata of the last pending entry. The argument may be a symbolic link. Links below it are
    // rejected.
    let mut metadata = fs::metadata(from);
    while let Some((from, to)) = pending.pop() {
        let context = || format!("cannot read {}", from.display());
        let kind = metadata.with_context(context)?;
        if kind.is_dir() {
            if !to.is_empty() {
                let path = format!("{}&force=true", call(volume, "dir", &to));
                let _: VolumeEntry = client.call(Method::POST, &path, &()).await?;
            }
            for entry in fs::read_dir(&from).with_context(context)? {
                let entry = entry.with_context(context)?;
                let name = entry.file_name();
                let name = name.to_str().with_context(|| {
                    format!("the name of {} is not UTF-8", entry.path().display())
                })?;
                pending.push((entry.path(), format!("{to}/{name}")));
            }
        } else if kind.is_file() {
            upload_file(client, &from, volume, &to).await?;
        } else {
            bail!("{} is neither a file nor a directory", from.display());
        }
        metadata = match pending.last() {
            Some((next, _)) => fs::symlink_metadata(next),
            None => break,
        };
    }
    Ok(())
}

/// Copies one file of the host to a volume.
async fn upload_file(client: &Client, from: &Path, volume: &str, to: &str) -> anyhow::Result<()> {
    let context = || format!("cannot read {}", from.display());
    let mut file = File::open(from).with_context(context)?;
    let path = format!("{}&force=true", call(volume, "file", to));
    let (parts, task) = client.upload::<VolumeEntry>(&path)?;
    loop {
        let mut part = vec![0; PART];
        let length = file.read(&mut part).with_context(context)?;
        part.truncate(length);
        // The send fails if the upload has failed. The error of the upload is returned below.
        if length == 0 || parts.send(Bytes::from(part)).await.is_err() {
            break;
        }
    }
    drop(parts);
    task.await??;
    Ok(())
}

/// Copies a file or a directory of a volume to the host.
async fn download(client: &Client, volume: &str, from: &str, to: &Path) -> anyhow::Result<()> {
    let from = if from.is_empty() { "/" } else { from };
    let path = call(volume, "path", from);
    let found: VolumeEntry = client.call(Method::GET, &path, &()).await?;
    if found.kind != VolumeEntryType::Directory {
        let target = match (to.is_dir(), found.name.as_str()) {
            (true, name) if !name.is_empty() => to.join(name),
            _ => to.to_owned(),
        };
        return download_file(client, volume, &found, &target).await;
    }
    let path = format!("{}&depth={MAX_DEPTH}", call(volume, "dir", from));
    let entries: Vec<VolumeEntry> = client.call(Method::GET, &path, &()).await?;
    fs::create_dir_all(to).with_context(|| format!("cannot create {}", to.display()))?;
    for entry in &entries {
        let below = entry.path.strip_prefix(found.path.trim_end_matches('/'));
        let below = below.unwrap_or(&entry.path).trim_start_matches('/');
        // Sandboxes choose the names in a volume: no name may lead out of the destination.
        let is_safe = below
            .split('/')
            .all(|part| !matches!(part, "" | "." | ".."));
        if !is_safe {
            bail!(
                "the volume returned the invalid path `{}`",
                entry.path.escape_debug()
            );
        }
        let target = to.join(below);
        match entry.kind {
            VolumeEntryType::Directory => match fs::create_dir(&target) {
                // A link is not followed.
                Err(e) if !fs::symlink_metadata(&target).is_ok_and(|found| found.is_dir()) => {
                    return Err(e).with_context(|| format!("cannot create {}", target.display()));
                }
                _ => {}
            },
            VolumeEntryType::File => download_file(client, volume, entry, &target).await?,
            VolumeEntryType::Symlink | VolumeEntryType::Unknown => {
                errln!(
                    "jiffy: skipped {}: not a regular file",
                    entry.path.escape_debug()
                );
            }
        }
    }
    Ok(())
}

/// Copies one file of a volume to the host.
async fn download_file(
    client: &Client,
    volume: &str,
    entry: &VolumeEntry,
    to: &Path,
) -> anyhow::Result<()> {
    let context = || format!("cannot write {}", to.display());
    if fs::symlink_metadata(to).is_ok_and(|found| !found.is_file()) {
        bail!("{} exists and is not a regular file", to.display());
    }
    let mut body = client.download(&call(volume, "file", &entry.path)).await?;
    let mut file = File::create(to).with_context(context)?;
    let mut length = 0;
    while let Some(part) = body.next().await? {
        file.write_all(&part).with_context(context)?;
        length += part.len() as u64;
    }
    if length != entry.size {
        errln!(
            "jiffy: {} changed during the copy",
            entry.path.escape_debug()
        );
    }
    Ok(())
}
