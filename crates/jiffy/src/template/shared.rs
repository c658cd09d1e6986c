//! `jiffy template push` and `pull`: templates in the store that hosts share.

use super::{mib, print_result, short};
use crate::cli::StoreTargetArgs;
use anyhow::Context;
use jiffy_daemon::TemplateProgress;
use jiffy_image::{Home, Reference, TemplateFiles, Templates, UnpackLimits, Visibility};
use jiffy_store::host::{RemoteSettings, RemoteStore, STORE_TIMEOUT, StoredTemplate};
use serde_json::json;
use std::fs::File;
use std::io::{self, Read};
use std::sync::Arc;

/// Longest manifest that is read, in bytes.
const MAX_MANIFEST_BYTES: u64 = 1 << 20;

fn open(target: &StoreTargetArgs, home: &Home) -> anyhow::Result<Arc<RemoteStore>> {
    let remote = RemoteStore::open(&RemoteSettings {
        url: target.store.clone(),
        keyring: target.store_keys.clone(),
        home: home.path().to_owned(),
        // The daemon keeps the bound.
        cache_bytes: u64::MAX,
        upload_bytes_per_second: None,
        timeout: STORE_TIMEOUT,
    });
    remote.with_context(|| format!("cannot use the store {}", target.store))
}

/// Name of a version of any template.
fn version_name(version: &str) -> String {
    format!("@{version}")
}

/// Pushes a template.
pub fn push(home: &Home, name: &str, target: &StoreTargetArgs, json: bool) -> anyhow::Result<()> {
    let files = TemplateFiles::open(&Templates::new(home), name)?;
    let manifest = &files.template.manifest;
    let reference = Reference::parse(name)?;
    let shared = reference.is_stock() || manifest.visibility == Visibility::Public;
    let names = [reference.to_string(), version_name(&manifest.version())];
    let mut sent = vec![(
        TemplateFiles::MANIFEST.to_owned(),
        in_memory(&files.manifest)?,
    )];
    for (name, image) in files.images() {
        sent.push((name, Arc::new(image.try_clone()?)));
    }
    let report = crate::runtime()?.block_on(async {
        let remote = open(target, home)?;
        let pushing = remote.push_template(&names, sent, shared);
        let waiting = jiffy_client::progress::while_waiting("uploading the template", pushing);
        anyhow::Ok(waiting.await?)
    })?;
    let text = format!(
        "template {reference} is in the store: version {}, {} of {} sent",
        short(&manifest.version()),
        mib(report.pack_bytes),
        mib(manifest.size()),
    );
    let value = json!({
        "name": reference.to_string(), "version": manifest.version(), "shared": shared,
        "bytes": manifest.size(), "sent": report.pack_bytes, "existed": report.existed,
    });
    print_result(json, &text, value)
}

/// Fetches a template, by its name or as NAME@VERSION.
pub fn pull(
    home: &Home,
    name: &str,
    public: bool,
    target: &StoreTargetArgs,
    json: bool,
) -> anyhow::Result<()> {
    let wanted = match name.rsplit_once('@') {
        Some((_, version)) => version_name(version),
        None => Reference::parse(name)?.to_string(),
    };
    let runtime = crate::runtime()?;
    let (remote, found) = runtime.block_on(async {
        let remote = open(target, home)?;
        let found = remote.find_template(&wanted).await?;
        let found = found.with_context(|| {
            format!("the store has no template {name} under these keys: `jiffy template push` on a host that has it, and the same --store-keys")
        })?;
        anyhow::Ok((remote, found))
    })?;
    let fetch = |name: &str| runtime.block_on(fetch(&remote, &found, name));
    let mut manifest = Vec::new();
    let file = fetch(TemplateFiles::MANIFEST)?;
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
    let (manifest, published) = imported.with_context(|| format!("cannot fetch {name}"))?;
    let reference = manifest.reference();
    let text = match published {
        true => format!(
            "template {reference}: version {}",
            short(&manifest.version())
        ),
        false => format!(
            "version {} of template {reference} is here for snapshots; `{reference}` itself stays as this version of jiffy builds it",
            short(&manifest.version())
        ),
    };
    let value = json!({
        "name": reference, "version": manifest.version(), "current": published,
        "bytes": manifest.size(),
    });
    print_result(json, &text, value)
}

async fn fetch(remote: &RemoteStore, found: &StoredTemplate, name: &str) -> anyhow::Result<File> {
    let fetched = remote.template_file(found, name);
    let fetched = jiffy_client::progress::while_waiting("fetching the template", fetched).await?;
    fetched.with_context(|| format!("the template in the store has no {name}"))
}

/// A file that no disk has.
fn in_memory(content: &[u8]) -> anyhow::Result<Arc<File>> {
    use std::io::Write;
    let mut file = tempfile::tempfile()?;
    file.write_all(content)?;
    Ok(Arc::new(file))
}
