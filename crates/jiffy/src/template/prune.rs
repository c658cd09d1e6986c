//! `jiffy template prune`.

use super::show::mib;
use hyper::Method;
use jiffy_image::{Home, PrunedImages, Templates};
use jiffy_template_builder::PrunedBuildCache;
use serde::Serialize;
use serde_json::json;
use std::time::Duration;

/// All that was removed.
#[derive(Serialize)]
struct Removed {
    #[serde(flatten)]
    needless: PrunedImages,
    /// Snapshots of steps.
    steps: usize,
    /// Bytes of uploads.
    upload_bytes: u64,
}

/// Removes what nobody needs, and what builds did not use for `unused_for`.
pub fn run(home: &Home, unused_for: Duration, json: bool) -> anyhow::Result<()> {
    // First what builds keep: it keeps images.
    let prune_build_cache = match home.path().join("builds.db").exists() {
        true => prune_build_cache(unused_for)?,
        // There was no daemon yet, so nothing was built.
        false => PrunedBuildCache::default(),
    };
    let removed = Removed {
        needless: Templates::new(home).prune()?,
        steps: prune_build_cache.steps,
        upload_bytes: prune_build_cache.upload_bytes,
    };
    if json {
        outln!("{}", jiffy_client::terminal::json(&removed)?);
        return Ok(());
    }
    show(&removed);
    Ok(())
}

/// The daemon's own records say what that is.
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

fn show(removed: &Removed) {
    match removed.steps {
        0 => {}
        1 => outln!("1 step of a build"),
        n => outln!("{n} steps of builds"),
    }
    if removed.upload_bytes > 0 {
        outln!("uploads of {}", mib(removed.upload_bytes));
    }
    for version in &removed.needless.versions {
        outln!("version {version}");
    }
    for image in &removed.needless.images {
        outln!("image   sha256 {} ({})", image.sha256, mib(image.size));
    }
    outln!("{} of images freed", mib(removed.needless.bytes));
}
