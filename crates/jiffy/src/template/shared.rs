//! `jiffy template push` and `pull`: transfer templates to and from the shared store.
//!
//! A *tenant* is an owner of data in the store.

use super::{mib, print_result, short};
use crate::cli::StoreTargetArgs;
use anyhow::Context;
use jiffy_daemon::TemplateProgress;
use jiffy_image::{Home, Reference, TemplateFiles, Templates, UnpackLimits, Visibility};
use jiffy_store::host::{RemoteSettings, RemoteStore, STORE_TIMEOUT, StoredTemplate};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{self, Read};
use std::sync::Arc;

/// Maximum size of a manifest in bytes.
const MAX_MANIFEST_BYTES: u64 = 1 << 20;

/// Returns the settings of the store in the arguments.
pub fn settings(target: &StoreTargetArgs, home: &Home) -> RemoteSettings {
    RemoteSettings {
        url: target.store.clone(),
        keyring: target.store_keys.clone(),
        home: home.path().to_owned(),
        // The daemon enforces the size limit of the cache.
        cache_bytes: u64::MAX,
        upload_bytes_per_second: None,
        timeout: STORE_TIMEOUT,
    }
}

/// Opens the store in the arguments.
pub fn open(target: &StoreTargetArgs, home: &Home) -> anyhow::Result<Arc<RemoteStore>> {
    let remote = RemoteStore::open(&settings(target, home));
    remote.with_context(|| format!("cannot open the store {}", target.store))
}

/// Returns the name under which a template version is stored.
fn version_name(version: &str) -> String {
    format!("@{version}")
}

/// Result of a transfer.
pub struct Transferred {
    text: String,
    value: Value,
    /// Size of the template in bytes.
    pub bytes: u64,
}

/// Pushes a template and prints the result.
pub fn push(home: &Home, name: &str, target: &StoreTargetArgs, json: bool) -> anyhow::Result<()> {
    let stored = store(home, name, target)?;
    print_result(json, &stored.text, stored.value)
}

/// Pushes a template. All tenants of the store may use a stock or public template.
pub fn store(home: &Home, name: &str, target: &StoreTargetArgs) -> anyhow::Result<Transferred> {
    let files = TemplateFiles::open(&Templates::new(home), name)?;
    let manifest = &files.template.manifest;
    let reference = Reference::parse(name)?;
    let is_shared = reference.is_stock() || manifest.visibility == Visibility::Public;
    // A template can be pulled by its name, or by the version that a snapshot needs.
    let names = [reference.to_string(), version_name(&manifest.version())];
    let mut files_to_send = vec![(
        TemplateFiles::MANIFEST.to_owned(),
        temporary_file(&files.manifest)?,
    )];
    for (name, image) in files.images() {
        files_to_send.push((name, Arc::new(image.try_clone()?)));
    }
    let report = crate::runtime()?.block_on(async {
        let remote = open(target, home)?;
        let push = remote.push_template(&names, files_to_send, is_shared);
        let push = jiffy_client::progress::while_waiting("uploading the template", push);
        anyhow::Ok(push.await?)
    })?;
    let text = format!(
        "template {reference}: stored version {}, {} of {} sent",
        short(&manifest.version()),
        mib(report.pack_bytes),
        mib(manifest.size()),
    );
    let value = json!({
        "name": reference.to_string(), "version": manifest.version(), "shared": is_shared,
        "bytes": manifest.size(), "sent": report.pack_bytes, "existed": report.existed,
    });
    let bytes = manifest.size();
    Ok(Transferred { text, value, bytes })
}

/// Downloads a template and prints the result.
pub fn pull(
    home: &Home,
    name: &str,
    public: bool,
    target: &StoreTargetArgs,
    json: bool,
) -> anyhow::Result<()> {
    let fetched = fetch_named(home, name, public, target)?;
    print_result(json, &fetched.text, fetched.value)
}

/// Downloads a template by name or as NAME@VERSION. Of NAME@VERSION, only the version selects the
/// template.
pub fn fetch_named(
    home: &Home,
    name: &str,
    public: bool,
    target: &StoreTargetArgs,
) -> anyhow::Result<Transferred> {
    let stored_name = match name.rsplit_once('@') {
        Some((_, version)) => version_name(version),
        None => Reference::parse(name)?.to_string(),
    };
    let runtime = crate::runtime()?;
    let (remote, template) = runtime.block_on(async {
        let remote = open(target, home)?;
        let template = remote.find_template(&stored_name).await?.with_context(|| {
            format!("the store has no template {name} for these master keys: run `jiffy template push` on a host with the template and the same --store-keys")
        })?;
        anyhow::Ok((remote, template))
    })?;
    let fetch = |name: &str| runtime.block_on(fetch(&remote, &template, name));
    let mut manifest = Vec::new();
    let file = fetch(TemplateFiles::MANIFEST)?;
    // One byte more than the maximum, so that the import notices and rejects a larger manifest.
    file.take(MAX_MANIFEST_BYTES + 1)
        .read_to_end(&mut manifest)?;
    let mut bar = TemplateProgress::new(name);
    let imported = TemplateFiles::import(
        &Templates::new(home),
        &manifest,
        public.then_some(Visibility::Public),
        UnpackLimits::default().bytes,
        |name| fetch(name).map_err(io::Error::other),
        &mut |p| bar.update(p),
    );
    bar.finish();
    let (manifest, is_current) =
        imported.with_context(|| format!("cannot import template {name}"))?;
    let reference = manifest.reference();
    let text = if is_current {
        format!(
            "template {reference}: version {}",
            short(&manifest.version())
        )
    } else {
        format!(
            "version {} of template {reference} is available for snapshots; the name `{reference}` still refers to the template of this version of jiffy",
            short(&manifest.version())
        )
    };
    let value = json!({
        "name": reference, "version": manifest.version(), "current": is_current,
        "bytes": manifest.size(),
    });
    let bytes = manifest.size();
    Ok(Transferred { text, value, bytes })
}

/// Downloads a file of a template.
async fn fetch(
    remote: &RemoteStore,
    template: &StoredTemplate,
    name: &str,
) -> anyhow::Result<File> {
    let download = remote.template_file(template, name);
    let file = jiffy_client::progress::while_waiting("downloading the template", download).await?;
    file.with_context(|| format!("the template in the store has no {name}"))
}

/// Creates an unlinked temporary file with `content`.
fn temporary_file(content: &[u8]) -> anyhow::Result<Arc<File>> {
    use std::io::Write;
    let mut file = tempfile::tempfile()?;
    file.write_all(content)?;
    Ok(Arc::new(file))
}
