//! `jiffy template prune`: removes unused images on this host, and requests the daemon to prune its
//! build cache.

use super::show::mib;
use hyper::Method;
use jiffy_image::{Home, PrunedImages, Templates};
use jiffy_template_builder::PrunedBuildCache;
use serde::Serialize;
use serde_json::json;
use std::time::Duration;

/// Removed data.
#[derive(Serialize)]
struct Removed {
    #[serde(flatten)]
    images: PrunedImages,
    /// Number of removed snapshots of build steps.
    steps: usize,
    /// Bytes of removed uploads.
    upload_bytes: u64,
}

/// Removes unused images, and steps and uploads of the build cache that were unused for
/// `unused_for`.
pub fn run(home: &Home, unused_for: Duration, json: bool) -> anyhow::Result<()> {
    // The build cache is pruned first, because it references images.
    let build_cache = if home.path().join("builds.db").exists() {
        prune_build_cache(unused_for)?
    } else {
        // No daemon has created a build cache yet.
        PrunedBuildCache::default()
    };
    let removed = Removed {
        images: Templates::new(home).prune()?,
        steps: build_cache.steps,
        upload_bytes: build_cache.upload_bytes,
    };
    if json {
        outln!("{}", jiffy_client::terminal::json(&removed)?);
        return Ok(());
    }
    show(&removed);
    Ok(())
}

/// Requests the daemon to prune its build cache.
fn prune_build_cache(unused_for: Duration) -> anyhow::Result<PrunedBuildCache> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let client = jiffy_daemon::local_daemon::local_client().await?;
        let body = json!({ "unusedSeconds": unused_for.as_secs() });
        client.call(Method::POST, "/templates/prune", &body).await
    })
}

/// Prints the removed data.
fn show(removed: &Removed) {
    match removed.steps {
        0 => {}
        1 => outln!("removed 1 build step"),
        n => outln!("removed {n} build steps"),
    }
    if removed.upload_bytes > 0 {
        outln!("removed uploads: {}", mib(removed.upload_bytes));
    }
    for version in &removed.images.versions {
        outln!("removed version {version}");
    }
    for image in &removed.images.images {
        outln!(
            "removed image sha256 {} ({})",
            image.sha256,
            mib(image.size)
        );
    }
    outln!("{} freed by images", mib(removed.images.bytes));
}
