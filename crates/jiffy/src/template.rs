//! `jiffy template`.

use crate::cli::TemplateCommand;
use crate::progress::Bar;
use anyhow::Context;
use jiffy_image::{Home, Recipe, Templates};
use std::path::Path;
use std::process::ExitCode;

/// Runs one subcommand.
pub fn run(command: &TemplateCommand) -> anyhow::Result<ExitCode> {
    let home = Home::locate()?;
    let templates = Templates::new(&home);
    match command {
        TemplateCommand::Ls { json } => list(&templates, *json)?,
        TemplateCommand::Build { name } => {
            let recipe = recipe(name)?;
            let name = recipe.name();
            let mut bar = Bar::new(name);
            let template = templates
                .build_if_needed(&recipe, &mut |p| bar.update(p))
                .with_context(|| format!("cannot build template `{name}`"))?;
            bar.finish();
            let image = &template.manifest.image;
            println!(
                "template {name}: {} MiB, sha256 {}, in {}",
                image.size >> 20,
                &image.sha256[..12.min(image.sha256.len())],
                template.directory.display()
            );
        }
        TemplateCommand::Rm { name } => {
            templates.remove(name)?;
            println!("template {name} removed");
        }
    }
    Ok(ExitCode::SUCCESS)
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
    println!("{:<24} {:>10}  {:<14} USER", "NAME", "SIZE", "IMAGE");
    for m in manifests {
        println!(
            "{:<24} {:>6} MiB  {:<14} {}",
            m.name,
            m.image.size >> 20,
            &m.image.sha256[..12.min(m.image.sha256.len())],
            m.defaults.user
        );
    }
    Ok(())
}
