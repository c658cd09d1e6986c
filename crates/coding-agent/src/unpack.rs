//! Unpacks archives of a sandbox, which are not trusted.

use anyhow::Context;
use jiffy_agent_client::FileReader;
use jiffy_agent_client::chunk_channel::{ChunkReader, QUEUED_CHUNKS};
use jiffy_archive::{UnpackOptions, UnpackOwner, unpack};
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use tokio::sync::mpsc;

/// Permissions of unpacked files. Their own permissions may not allow reading.
const MODE: u32 = 0o700;

/// Unpacks a download below a directory. Fails if its files have more than `max_bytes`.
pub async fn receive(
    mut reader: FileReader,
    directory: &Path,
    max_bytes: u64,
) -> anyhow::Result<()> {
    let root = File::open(directory)?;
    let options = UnpackOptions {
        owner: UnpackOwner::Process,
        mode: Some(MODE),
        confined: true,
        rename: None,
        max_bytes: Some(max_bytes),
        // Parent directories count as well.
        max_entries: Some(2 * crate::limits::MAX_FILES as u64),
        layer: false,
    };
    let (sender, receiver) = mpsc::channel(QUEUED_CHUNKS);
    let task = tokio::task::spawn_blocking(move || {
        unpack(ChunkReader::new(receiver), root.as_fd(), &options)
    });
    // Headers of many small files can be as large as their contents.
    let mut remaining = max_bytes.saturating_mul(2);
    let forward = async {
        while let Some(chunk) = reader.next().await? {
            remaining = remaining
                .checked_sub(chunk.len() as u64)
                .context("the archive is too large")?;
            // The unpacker may have stopped; its error is reported below.
            if sender.send(chunk).await.is_err() {
                break;
            }
        }
        anyhow::Ok(())
    };
    let forwarded = forward.await;
    drop(sender);
    let unpacked = task.await?;
    // A failed connection is reported instead of the truncated archive that it causes.
    forwarded?;
    unpacked.context("cannot unpack files of the sandbox")?;
    Ok(())
}
