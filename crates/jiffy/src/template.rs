//! `jiffy template`.

mod import;

use crate::cli::{TemplateBuildArgs, TemplateCommand};
use crate::progress::Bar;
use anyhow::Context;
use jiffy_image::{Home, Manifest, Recipe, Template, Templates};
use std::path::Path;
use std::process::ExitCode;

/// Runs one subcommand.
pub fn run(command: &TemplateCommand) -> anyhow::Result<ExitCode> {
    let home = Home::locate()?;
    let templates = Templates::new(&home);
    match command {
        TemplateCommand::Ls { json } => list(&templates, *json)?,
        TemplateCommand::Build(args) => build(&templates, args)?,
        TemplateCommand::Inspect { name, json } => inspect(&templates.manifest(name)?, *json)?,
        TemplateCommand::Rm { name } => {
            templates.remove(name)?;
            println!("template {name} removed");
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn build(templates: &Templates, args: &TemplateBuildArgs) -> anyhow::Result<()> {
    let template = match import::wanted(args)? {
        Some(import) => shown(&import.name, |bar| {
            templates
                .import(&import, &mut |p| bar.update(p))
                .map_err(Into::into)
        })?,
        None => {
            let recipe = recipe(args.recipe.as_deref().unwrap_or("base"))?;
            shown(recipe.name(), |bar| {
                let built = templates.build_if_needed(&recipe, &mut |p| bar.update(p));
                built.map_err(Into::into)
            })?
        }
    };
    let manifest = &template.manifest;
    if args.json {
        println!("{}", serde_json::to_string_pretty(manifest)?);
        return Ok(());
    }
    println!(
        "template {}: {} MiB, version {}",
        manifest.reference(),
        manifest.size() >> 20,
        short(&manifest.version()),
    );
    Ok(())
}

/// Builds with a bar.
fn shown(
    name: &str,
    build: impl FnOnce(&mut Bar) -> anyhow::Result<Template>,
) -> anyhow::Result<Template> {
    let mut bar = Bar::new(name);
    let built = build(&mut bar).with_context(|| format!("cannot build template `{name}`"));
    bar.finish();
    built
}

fn inspect(m: &Manifest, json: bool) -> anyhow::Result<()> {
    if json {
        println!("{}", serde_json::to_string_pretty(m)?);
        return Ok(());
    }
    let line = |name: &str, value: &str| {
        if !value.is_empty() {
            println!("{name:<12} {value}");
        }
    };
    let d = &m.defaults;
    line("name", &m.reference());
    line("version", &m.version());
    for image in &m.images {
        line(
            "image",
            &format!("{} MiB, sha256 {}", image.size >> 20, image.sha256),
        );
    }
    line("user", &d.user);
    line("directory", &d.workdir);
    let memory = d
        .memory_mib
        .map(|n| format!("{n} MiB of memory, "))
        .unwrap_or_default();
    line("size", &format!("{memory}{} MiB of disk", d.disk_mib));
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
        line("starts", &words.join(" "));
    }
    if let Some(ready) = &m.startup.ready {
        line("awaits", &serde_json::to_string(ready)?);
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
        line("exposes", &origin.exposed_ports.join(" "));
    }
    Ok(())
}

/// The beginning of a checksum, for people.
fn short(sha256: &str) -> &str {
    &sha256[..12.min(sha256.len())]
}

/// A path is a directory with a recipe; anything else names a stock template.
fn recipe(name: &str) -> anyhow::Result<Recipe> {
    if name.contains('/') || name == "." {
        Ok(Recipe::from_directory(Path::new(name))?)
    } else {
        Ok(Recipe::built_in(name)?)
    }
}

fn list(templates: &Templates, json: bool) -> anyhow::Result<()> {
    let manifests = templates.list()?;
    if json {
        println!("{}", serde_json::to_string_pretty(&manifests)?);
        return Ok(());
    }
    if manifests.is_empty() {
        println!("no templates yet; `jiffy template build base` makes the first");
        return Ok(());
    }
    println!("{:<24} {:>10}  {:<14} USER", "NAME", "SIZE", "VERSION");
    for m in manifests {
        println!(
            "{:<24} {:>6} MiB  {:<14} {}",
            m.reference(),
            m.size() >> 20,
            short(&m.version()),
            m.defaults.user
        );
    }
    Ok(())
}
