//! Opens the client of an S3 server with its credentials.

use object_store::ObjectStore;
use std::sync::Arc;

/// Opens a bucket with the settings and credentials in the environment variables `AWS_*`.
#[cfg(feature = "s3")]
pub(crate) fn open(bucket: &str) -> Result<Arc<dyn ObjectStore>, object_store::Error> {
    use object_store::aws::{AmazonS3Builder, S3ConditionalPut};
    use object_store::{ClientOptions, RetryConfig};

    const CONNECT_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(10);
    // An error means that another provider is already installed, which is acceptable.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = ClientOptions::new()
        .with_connect_timeout(CONNECT_TIMEOUT)
        // The backend has its own timeouts: a slow response may take long while bytes arrive.
        .with_timeout_disabled();
    // Set the options first, so that environment variables (AWS_ALLOW_HTTP) override them.
    let mut builder = AmazonS3Builder::new().with_client_options(client);
    for (name, value) in std::env::vars() {
        let key = name
            .strip_prefix("AWS_")
            .and_then(|_| name.to_ascii_lowercase().parse().ok());
        if let Some(key) = key {
            builder = builder.with_config(key, value);
        }
    }
    // The backend retries requests itself, because it counts them and knows the deadline.
    let retry = RetryConfig {
        max_retries: 0,
        ..RetryConfig::default()
    };
    let store = builder
        .with_bucket_name(bucket)
        .with_retry(retry)
        // Mutual exclusion depends on conditional writes: no variable may disable them.
        .with_conditional_put(S3ConditionalPut::ETagMatch)
        .with_http_connector(crate::bounded_http::BoundedConnector)
        .build()?;
    Ok(Arc::new(store))
}

/// Fails: programs that only read the store's formats are built without the S3 client.
#[cfg(not(feature = "s3"))]
pub(crate) fn open(_bucket: &str) -> Result<Arc<dyn ObjectStore>, object_store::Error> {
    Err(object_store::Error::NotImplemented {
        operation: "S3".to_owned(),
        implementer: "a build without the feature `s3`".to_owned(),
    })
}
