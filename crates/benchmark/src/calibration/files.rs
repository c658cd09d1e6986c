//! Costs of files in the data directory.

use super::{Cost, batches};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

/// Size of a page in bytes.
const PAGE: usize = 4096;
/// Size of one write in bytes.
const WRITE_BYTES: usize = 1 << 20;
/// Number of writes to a new file.
const WRITES: usize = 16;

fn failed(directory: &Path) -> impl Fn(std::io::Error) -> String {
    move |e| format!("cannot use a file in {}: {e}", directory.display())
}

/// Measures writes to a new file, per page of 4 KiB.
pub(super) fn new_page_cache(directory: &Path) -> Result<Cost, String> {
    let failed = failed(directory);
    let bytes = vec![1; WRITE_BYTES];
    batches((WRITES * WRITE_BYTES / PAGE) as u32, || {
        // Each batch writes to a new file: writes to existing pages are cheaper.
        let mut file = tempfile::tempfile_in(directory).map_err(&failed)?;
        let began = Instant::now();
        for _ in 0..WRITES {
            file.write_all(&bytes).map_err(&failed)?;
        }
        Ok(began.elapsed())
    })
}

/// Measures an overwrite of 4 KiB, including the sync to the disk.
pub(super) fn fsync(directory: &Path) -> Result<Cost, String> {
    let failed = failed(directory);
    let mut file = tempfile::tempfile_in(directory).map_err(&failed)?;
    // The block is allocated before the measurement, so that each sync only writes its data.
    file.write_all(&[0; PAGE])
        .and_then(|()| file.sync_all())
        .map_err(&failed)?;
    let mut round = 0;
    batches(1, || {
        round += 1;
        // The content differs in each round, so that no layer can skip the write.
        let bytes = [round; PAGE];
        let began = Instant::now();
        file.write_all_at(&bytes, 0)
            .and_then(|()| file.sync_all())
            .map_err(&failed)?;
        Ok(began.elapsed())
    })
}
