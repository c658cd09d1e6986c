//! Output of `jiffy template ls`, `inspect` and `history`.

use jiffy_client::terminal;
use jiffy_image::{ImageSum, TemplateManifest};
use serde::Serialize;
use std::collections::BTreeMap;

/// Template with derived values. The field names are part of the JSON output.
#[derive(Serialize)]
struct Listed<'a> {
    #[serde(flatten)]
    manifest: &'a TemplateManifest,
    /// SHA-256 of the data from which its sandboxes are created.
    version: String,
    /// Bytes of its images.
    size: u64,
    /// Bytes of its images that no other template uses.
    own: u64,
}

/// Names of templates by image. Templates share an image if their data are equal.
struct Sharing<'a>(BTreeMap<&'a ImageSum, Vec<String>>);

impl<'a> Sharing<'a> {
    /// Collects the names of the templates that use each image.
    fn of(all: &'a [TemplateManifest]) -> Self {
        let mut names: BTreeMap<&ImageSum, Vec<String>> = BTreeMap::new();
        for manifest in all {
            for image in &manifest.images {
                names.entry(image).or_default().push(manifest.reference());
            }
        }
        Self(names)
    }

    /// Returns the names of other templates that use an image.
    fn others(&self, image: &ImageSum, than: &str) -> Vec<&str> {
        let all = self.0.get(image).into_iter().flatten();
        all.map(String::as_str).filter(|n| *n != than).collect()
    }

    fn listed<'m>(&self, manifest: &'m TemplateManifest) -> Listed<'m> {
        let name = manifest.reference();
        let own = |i: &&ImageSum| self.others(i, &name).is_empty();
        Listed {
            manifest,
            version: manifest.version(),
            size: manifest.size(),
            own: manifest.images.iter().filter(own).map(|i| i.size).sum(),
        }
    }
}

/// Prints all templates.
pub fn list(all: &[TemplateManifest], json: bool) -> anyhow::Result<()> {
    let sharing = Sharing::of(all);
    let listed: Vec<Listed<'_>> = all.iter().map(|m| sharing.listed(m)).collect();
    if json {
        outln!("{}", jiffy_client::terminal::json(&listed)?);
        return Ok(());
    }
    if all.is_empty() {
        outln!("no templates; build one with `jiffy template build base`");
        return Ok(());
    }
    outln!(
        "{:<24} {:<20} {:<10} {:>10} {:>10} {:>6}  {:<14} USER",
        "NAME",
        "OWNER",
        "VISIBILITY",
        "SIZE",
        "UNSHARED",
        "IMAGES",
        "VERSION"
    );
    for l in &listed {
        outln!(
            "{:<24} {:<20} {:<10} {:>10} {:>10} {:>6}  {:<14} {}",
            l.manifest.reference(),
            l.manifest.owner.as_deref().unwrap_or("host"),
            l.manifest.visibility.name(),
            mib(l.size),
            mib(l.own),
            l.manifest.images.len(),
            short(&l.version),
            terminal::line(&l.manifest.defaults.user),
        );
    }
    Ok(())
}

/// Prints a template. Images that it shares are determined from `all`.
pub fn inspect(m: &TemplateManifest, all: &[TemplateManifest], json: bool) -> anyhow::Result<()> {
    let sharing = Sharing::of(all);
    let listed = sharing.listed(m);
    if json {
        outln!("{}", jiffy_client::terminal::json(&listed)?);
        return Ok(());
    }
    let d = &m.defaults;
    line("name", &m.reference());
    line("owner", m.owner.as_deref().unwrap_or("host"));
    line("visibility", m.visibility.name());
    line("version", &listed.version);
    for image in &m.images {
        let others = sharing.others(image, &m.reference()).join(", ");
        let shared = if others.is_empty() {
            String::new()
        } else {
            format!(", shared with {others}")
        };
        let size = mib(image.size);
        line("image", &format!("{size}, sha256 {}{shared}", image.sha256));
    }
    line("user", &d.user);
    line("directory", &d.workdir);
    let vcpus = d.vcpus.map(|n| format!("{n} vCPUs, ")).unwrap_or_default();
    let memory = d
        .memory_mib
        .map(|n| format!("{n} MiB of memory, "))
        .unwrap_or_default();
    let disk = d.disk_mib;
    line("size", &format!("{vcpus}{memory}{disk} MiB of disk"));
    if let Some(seconds) = m.idle_timeout_s {
        line("idle timeout", &format!("{seconds} s"));
    }
    if !m.network.is_empty() {
        line("network", &serde_json::to_string(&m.network)?);
    }
    for (name, value) in &d.env {
        line("environment", &format!("{name}={value}"));
    }
    if let Some(start) = &m.startup.start {
        let args = start.args.iter().flatten();
        let words: Vec<&str> = [&start.command]
            .into_iter()
            .chain(args)
            .map(String::as_str)
            .collect();
        line("start", &words.join(" "));
    }
    if let Some(ready) = &m.startup.ready {
        line("ready", &serde_json::to_string(ready)?);
    }
    if let Some(origin) = &m.origin {
        line("from", &origin.from);
        line(
            "manifest",
            origin.manifest_sha256.as_deref().unwrap_or_default(),
        );
        line("layers", &origin.layers.len().to_string());
        line("entrypoint", &origin.entrypoint.join(" "));
        line("command", &origin.cmd.join(" "));
        line("ports", &origin.exposed_ports.join(" "));
    }
    Ok(())
}

/// Prints the history of a template, oldest step first.
pub fn history(m: &TemplateManifest, json: bool) -> anyhow::Result<()> {
    if json {
        outln!("{}", jiffy_client::terminal::json(&m.history)?);
        return Ok(());
    }
    outln!("{:>10} {:>10}  STEP", "TIME", "SIZE");
    for step in &m.history {
        let size = step.bytes.map(mib).unwrap_or_default();
        outln!(
            "{:>8.1} s {size:>10}  {}",
            step.seconds,
            terminal::line(&step.text)
        );
    }
    Ok(())
}

/// Prints a line, unless the value is empty.
fn line(name: &str, value: &str) {
    if !value.is_empty() {
        outln!("{name:<12} {}", terminal::line(value));
    }
}

/// Formats bytes as MiB, with two decimals below 1 MiB.
pub fn mib(bytes: u64) -> String {
    match bytes >> 20 {
        0 => format!("{:.2} MiB", bytes as f64 / f64::from(1 << 20)),
        n => format!("{n} MiB"),
    }
}

/// Returns the first characters of a checksum.
pub fn short(sha256: &str) -> &str {
    &sha256[..12.min(sha256.len())]
}
