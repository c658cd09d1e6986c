//! Builds packs during a push: reads, compresses and encrypts chunks, until a pack is full.
//!
//! A *chunk* is 64 KiB of memory or of a disk. A *pack* is an object in the store with many
//! compressed and encrypted chunks.

use super::unwritable;
use crate::StoreError;
use crate::data_keys::DataKeys;
use crate::manifest::CHUNK_BYTES;
use crate::pack::{Entry, MAX_FRAME_BYTES, PackId, PackWriter, encode_frame};
use crate::source::{ChunkPlace, PartSource};
use bytes::Bytes;
use tokio::sync::mpsc;

/// Pack that is ready for its upload.
pub(super) struct BuiltPack {
    pub id: PackId,
    pub object: Bytes,
    pub entries: Vec<Entry>,
}

/// Task that reads, compresses and encrypts chunks on a blocking thread.
pub(super) struct PackBuilder {
    pub tenant: crate::envelope::TenantId,
    pub keys: DataKeys,
    pub parts: Vec<PartSource>,
    /// Chunks to write, in this order.
    pub places: Vec<ChunkPlace>,
    /// Target size of a pack in bytes.
    pub pack_bytes: usize,
    pub sender: mpsc::Sender<Result<BuiltPack, StoreError>>,
}

impl PackBuilder {
    pub fn run(&self) {
        if let Err(e) = self.build() {
            // Ignore the error: the push has ended, and no task receives the result.
            let _ = self.sender.blocking_send(Err(e));
        }
    }

    /// Reads all chunks of this builder, and sends complete packs. Returns early if the push has
    /// failed.
    fn build(&self) -> Result<(), StoreError> {
        let begin = || PackWriter::new(&self.keys, self.tenant).map_err(unwritable);
        let mut writer = begin()?;
        let mut buffer = vec![0; CHUNK_BYTES as usize];
        for place in &self.places {
            let part = self
                .parts
                .get(place.part)
                .ok_or_else(|| StoreError::Source("a part does not exist".into()))?;
            let bytes = part
                .file
                .metadata()
                .map_err(StoreError::io(part.name.as_ref()))?
                .len();
            let chunk = part.read(place.number, bytes, &mut buffer)?;
            if self.keys.chunk_hash(chunk) != place.hash {
                return Err(StoreError::Source(format!(
                    "{} changed during the push",
                    part.name
                )));
            }
            let frame = encode_frame(&self.keys, &place.hash, chunk).map_err(unwritable)?;
            writer
                .push(place.hash, &frame, chunk.len())
                .map_err(unwritable)?;
            if writer.len() + MAX_FRAME_BYTES > self.pack_bytes
                && !self.send(std::mem::replace(&mut writer, begin()?))?
            {
                return Ok(());
            }
        }
        if !writer.is_empty() {
            self.send(writer)?;
        }
        Ok(())
    }

    /// Queues a pack for upload. Returns false if the push has ended.
    fn send(&self, writer: PackWriter) -> Result<bool, StoreError> {
        let id = writer.id();
        let (object, entries) = writer.finish(&self.keys).map_err(unwritable)?;
        let built = BuiltPack {
            id,
            object,
            entries,
        };
        Ok(self.sender.blocking_send(Ok(built)).is_ok())
    }
}
