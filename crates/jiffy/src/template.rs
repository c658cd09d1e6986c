//! `jiffy template`: manages the templates in the data directory of this host. Only builds of
//! Dockerfiles and pruning send requests to a daemon.
//!
//! A *recipe* is a source of a template: a directory with its packages, files and settings. A
//! *stock template* is a template whose recipe Jiffy contains.

pub mod build;
mod import;
mod prune;
pub mod shared;
mod show;
mod signatures;
mod ssh_agent;

use crate::cli::{TemplateBuildArgs, TemplateCommand, TemplateImportArgs};
use anyhow::Context;
use jiffy_daemon::TemplateProgress;
use jiffy_image::{
    FileImport, FileTrust, Home, ImportError, KnownDigests, Recipe, Template, TemplateManifest,
    Templates, Visibility, build_if_needed, download_template, export_template,
};
use jiffy_registry_pull::PullerProgram;
use serde_json::{Value, json};
use show::short;

pub use show::mib;
use std::fs::{self, File};
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;

/// Runs a subcommand of `jiffy template`.
pub fn run(command: &TemplateCommand) -> anyhow::Result<ExitCode> {
    let home = Home::locate()?;
    let templates = Templates::new(&home);
    match command {
        TemplateCommand::Ls { all, json } => {
            let mut list = templates.list()?;
            list.retain(|m| *all || m.visibility != Visibility::Internal);
            show::list(&list, *json)?;
        }
        TemplateCommand::Publish {
            names,
            private,
            json,
        } => {
            let visibility = if *private {
                Visibility::Private
            } else {
                Visibility::Public
            };
            return for_each(names, |name| {
                templates.set_visibility(name, visibility)?;
                let text = format!("template {name} is {}", visibility.name());
                let value = json!({ "name": name, "visibility": visibility });
                print_result(*json, &text, value)
            });
        }
        TemplateCommand::Build(args) => build(&templates, args)?,
        TemplateCommand::Inspect { name, json } => {
            show::inspect(&templates.manifest(name)?, &templates.list()?, *json)?;
        }
        TemplateCommand::History { name, json } => {
            show::history(&templates.manifest(name)?, *json)?;
        }
        TemplateCommand::Tag { from, to, json } => {
            let manifest = templates.tag(from, to, Visibility::Private)?;
            let to = manifest.reference();
            let text = format!("{to} is {}", short(&manifest.version()));
            print_result(
                *json,
                &text,
                json!({ "name": to, "version": manifest.version() }),
            )?;
        }
        TemplateCommand::Export { name, file, json } => export(&templates, name, file, *json)?,
        TemplateCommand::Import(args) => {
            let template = import_file(&templates, args)?;
            print_built(&template.manifest, args.json)?;
        }
        TemplateCommand::Push { name, target, json } => shared::push(&home, name, target, *json)?,
        TemplateCommand::Pull {
            name,
            public,
            target,
            json,
        } => shared::pull(&home, name, *public, target, *json)?,
        TemplateCommand::Rm { names, json } => {
            return for_each(names, |name| {
                templates.remove(name)?;
                let text = format!("template {name} removed");
                print_result(*json, &text, json!({ "removed": name }))
            });
        }
        TemplateCommand::Prune { older_than, json } => {
            prune::run(&home, older_than.unwrap_or_default(), *json)?
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs `work` for each name. Continues after failures.
fn for_each(
    names: &[String],
    mut work: impl FnMut(&str) -> anyhow::Result<()>,
) -> anyhow::Result<ExitCode> {
    let mut code = ExitCode::SUCCESS;
    for name in names {
        if let Err(e) = work(name) {
            errln!("jiffy: {e:#}");
            code = ExitCode::FAILURE;
        }
    }
    Ok(code)
}

/// Prints `value` as JSON, or `text`.
fn print_result(json: bool, text: &str, value: Value) -> anyhow::Result<()> {
    if json {
        outln!("{}", jiffy_client::terminal::json(&value)?);
    } else {
        outln!("{text}");
    }
    Ok(())
}

/// Exports a template to a file, which appears when it is complete, or to standard output.
fn export(templates: &Templates, name: &str, to: &Path, json: bool) -> anyhow::Result<()> {
    let mut bar = TemplateProgress::new(name);
    if to.as_os_str() == "-" {
        let mut output = io::stdout().lock();
        anyhow::ensure!(
            !output.is_terminal(),
            "refusing to write a template to a terminal: specify a file or redirect the output"
        );
        export_template(templates, name, &mut output, &mut |p| bar.update(p))?;
        bar.finish();
        // Errors of the implicit flush at exit are not reported.
        output.flush().context("cannot write to standard output")?;
        return Ok(());
    }
    let context = || format!("cannot write {}", to.display());
    let directory = to.parent().filter(|d| !d.as_os_str().is_empty());
    // Use the same directory, so that the rename cannot cross file systems.
    let mut new = tempfile::NamedTempFile::new_in(directory.unwrap_or(Path::new(".")))
        .with_context(context)?;
    let manifest = export_template(templates, name, &mut new, &mut |p| bar.update(p));
    bar.finish();
    let manifest =
        manifest.with_context(|| format!("cannot export template {name} to {}", to.display()))?;
    new.flush().with_context(context)?;
    // Sync the file before the rename, so that it is complete under its name even after a crash.
    new.as_file().sync_all().with_context(context)?;
    new.persist(to).with_context(context)?;
    let size = fs::metadata(to).with_context(context)?.len();
    let text = format!(
        "template {name} exported to {} ({})",
        to.display(),
        mib(size)
    );
    let value = json!({ "name": manifest.reference(), "version": manifest.version(), "file": to, "bytes": size });
    print_result(json, &text, value)
}

/// Imports a template from a file, from standard input or from an https URL.
fn import_file(templates: &Templates, args: &TemplateImportArgs) -> anyhow::Result<Template> {
    let from = &args.file;
    let url = from.to_str().filter(|text| text.contains("://"));
    let import = FileImport {
        name: args.name.clone(),
        visibility: args.public.then_some(Visibility::Public),
        trust: FileTrust {
            sha256: args.sha256.clone(),
            known: KnownDigests::of_installation(),
            force: args.force,
            // The network is not trusted: a downloaded file needs a known digest.
            must_be_known: url.is_some(),
        },
        ..FileImport::default()
    };
    let mut bar = TemplateProgress::new("import");
    let mut on_progress = |p: jiffy_image::Progress<'_>| bar.update(p);
    let imported = if from.as_os_str() == "-" {
        import.run(templates, io::stdin().lock(), &mut on_progress)
    } else if let Some(url) = url {
        download_template(templates, url, PullerProgram::default(), &mut on_progress)
            .and_then(|file| import.run(templates, file, &mut on_progress))
    } else {
        let file = File::open(from).with_context(|| format!("cannot open {}", from.display()))?;
        import.run(templates, file, &mut on_progress)
    };
    bar.finish();
    let name = if from.as_os_str() == "-" {
        "standard input".to_owned()
    } else {
        from.display().to_string()
    };
    match imported {
        Err(ImportError::NotExported) => anyhow::bail!("{name} is not an exported template"),
        imported => imported.with_context(|| format!("cannot import {name}")),
    }
}

/// Builds a template from a Dockerfile, an image or a recipe.
fn build(templates: &Templates, args: &TemplateBuildArgs) -> anyhow::Result<()> {
    if let Some(file) = build::dockerfile(args) {
        return build::run(args, &file);
    }
    let template = match import::requested(args)? {
        Some(import) => with_progress(&import.name, args.json, |bar| {
            let imported = import.run(templates, &mut |p| bar.update(p));
            imported.map_err(Into::into)
        })?,
        None => {
            anyhow::ensure!(
                !args.overrides_recipe(),
                "the options cannot be combined with a recipe: change its recipe.toml, or specify a \
                 directory with a Dockerfile"
            );
            let recipe = recipe(args.recipe.as_deref().unwrap_or("base"))?;
            with_progress(recipe.name(), args.json, |bar| {
                let built = build_if_needed(templates, &recipe, &mut |p| bar.update(p));
                built.map_err(Into::into)
            })?
        }
    };
    print_built(&template.manifest, args.json)
}

/// Prints a built or imported template.
fn print_built(manifest: &TemplateManifest, json: bool) -> anyhow::Result<()> {
    let text = format!(
        "template {}: {}, version {}",
        manifest.reference(),
        mib(manifest.size()),
        short(&manifest.version()),
    );
    print_result(json, &text, serde_json::to_value(manifest)?)
}

/// Runs a build with a progress bar, or with plain lines if `plain` is set.
fn with_progress(
    name: &str,
    plain: bool,
    build: impl FnOnce(&mut TemplateProgress) -> anyhow::Result<Template>,
) -> anyhow::Result<Template> {
    let mut bar = TemplateProgress::plain(name, plain);
    let built = build(&mut bar).with_context(|| format!("cannot build template `{name}`"));
    bar.finish();
    built
}

/// Returns the recipe in a directory, or the recipe of a stock template.
fn recipe(name: &str) -> anyhow::Result<Recipe> {
    if build::is_directory(name) {
        let directory = Path::new(name);
        // A path that does not exist passes this check: `from_directory` reports it.
        anyhow::ensure!(
            !directory.is_dir() || directory.join("recipe.toml").exists(),
            "{} has neither a Dockerfile nor a recipe.toml: specify the Dockerfile with --file",
            directory.display()
        );
        Ok(Recipe::from_directory(directory)?)
    } else {
        Ok(Recipe::built_in(name)?)
    }
}
