//! Store with a shifted clock.

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use object_store::path::Path as Key;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use std::sync::Arc;
use std::time::Duration;

/// Store whose times are ahead by the given number of seconds.
#[derive(Debug)]
pub struct ShiftedStore(Arc<dyn ObjectStore>, i64);

impl std::fmt::Display for ShiftedStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ShiftedStore")
    }
}

impl ShiftedStore {
    pub fn new(inner: Arc<dyn ObjectStore>, seconds: i64) -> Arc<Self> {
        Arc::new(Self(inner, seconds))
    }
}

fn shift(mut meta: ObjectMeta, seconds: i64) -> ObjectMeta {
    let time = Duration::from_secs(seconds.unsigned_abs());
    if seconds < 0 {
        meta.last_modified -= time
    } else {
        meta.last_modified += time
    }
    meta
}

#[async_trait]
impl ObjectStore for ShiftedStore {
    async fn put_opts(&self, key: &Key, data: PutPayload, how: PutOptions) -> Result<PutResult> {
        self.0.put_opts(key, data, how).await
    }

    async fn put_multipart_opts(
        &self,
        _: &Key,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        unimplemented!()
    }

    async fn get_opts(&self, key: &Key, options: GetOptions) -> Result<GetResult> {
        let mut found = self.0.get_opts(key, options).await?;
        found.meta = shift(found.meta, self.1);
        Ok(found)
    }

    fn delete_stream(
        &self,
        keys: BoxStream<'static, Result<Key>>,
    ) -> BoxStream<'static, Result<Key>> {
        self.0.delete_stream(keys)
    }

    fn list(&self, prefix: Option<&Key>) -> BoxStream<'static, Result<ObjectMeta>> {
        let seconds = self.1;
        let listed = self.0.list(prefix);
        listed
            .map(move |meta| meta.map(|meta| shift(meta, seconds)))
            .boxed()
    }

    async fn list_with_delimiter(&self, _: Option<&Key>) -> Result<ListResult> {
        unimplemented!()
    }

    async fn copy_opts(&self, _: &Key, _: &Key, _: CopyOptions) -> Result<()> {
        unimplemented!()
    }
}
