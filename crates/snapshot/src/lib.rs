//! Snapshots on disk.
