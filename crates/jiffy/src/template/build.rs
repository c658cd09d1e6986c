//! `jiffy template build CONTEXT`: a Dockerfile, sent to the daemon that builds it.

use super::show::mib;
use crate::cli::TemplateBuildArgs;
use anyhow::{Context, bail};
use hyper::Method;
use jiffy_api_types::{BuildState, BuildStatus, LogEntry, LogLevel, RequestedBuild, UploadLink};
use jiffy_build_spec::context::{PreparedBuild, prepare};
use jiffy_build_spec::dockerfile::{DockerfileOptions, parse};
use jiffy_build_spec::spec::BuildSpec;
use jiffy_client::{Client, terminal};
use jiffy_daemon::TemplateProgress;
use jiffy_engine_api::{StartCommand, Startup};
use jiffy_image::Recipe;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::io::AsyncReadExt;

/// Interval at which progress is polled.
const STATUS_POLL_INTERVAL: Duration = Duration::from_millis(200);
const CHUNK_BYTES: usize = 256 * 1024;

/// Path of the Dockerfile, if there is one to build.
pub fn dockerfile(args: &TemplateBuildArgs) -> Option<PathBuf> {
    if let Some(file) = &args.file {
        return Some(file.clone());
    }
    let context = Path::new(args.recipe.as_deref()?);
    let file = context.join("Dockerfile");
    (is_directory(args.recipe.as_deref()?)
        && file.is_file()
        && !context.join("recipe.toml").exists())
    .then_some(file)
}

/// Tells a directory from the name of a stock template, which a directory with the same name hides
/// only if it is given as a path (`./base`).
pub fn is_directory(name: &str) -> bool {
    let is_path = name.contains('/') || matches!(name, "." | "..");
    is_path || (Path::new(name).is_dir() && Recipe::built_in(name).is_err())
}

/// Builds.
pub fn run(args: &TemplateBuildArgs, file: &Path) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    runtime.block_on(build(args, file))
}

async fn build(args: &TemplateBuildArgs, file: &Path) -> anyhow::Result<()> {
    let began = Instant::now();
    let context = PathBuf::from(args.recipe.as_deref().unwrap_or("."));
    let name = name(args, &context)?;
    let mut prepared = read(args, file, &context)?;
    for warning in &prepared.warnings {
        errln!("jiffy: {warning}");
    }
    prepared.spec.startup = startup(args);
    prepared.spec.start_image_command = args.start_image_command;
    prepared.spec.force = args.no_cache;
    let client = jiffy_daemon::open_client(&args.host.server()).await?;
    let body = json!({
        "name": name,
        "tags": args.tag,
        "cpuCount": args.cpus,
        "memoryMB": args.memory,
        "minFreeDiskMb": args.disk,
    });
    let asked: RequestedBuild = client.call(Method::POST, "/v3/templates", &body).await?;
    let mut bar = TemplateProgress::plain(&name, args.json);
    send_files(&client, &asked.template_id, &prepared, &mut bar).await?;
    bar.end();
    let (template, build) = (&asked.template_id, &asked.build_id);
    if args.public {
        let path = format!("/v2/templates/{template}");
        let body = json!({ "public": true });
        let _: Value = client.call(Method::PATCH, &path, &body).await?;
    }
    start(&client, template, build, &prepared.spec).await?;
    let path = format!("/templates/{template}/builds/{build}");
    let followed = tokio::select! {
        followed = follow(&client, &path, args.json, &mut bar) => Some(followed),
        _ = tokio::signal::ctrl_c() => None,
    };
    let followed = match followed {
        Some(followed) => followed,
        None => match cancel(&client, &path, &mut bar).await {
            Ok(()) => Ok(()),
            Err(e) => bail!("{e:#}; what it finished is kept for the next one"),
        },
    };
    followed.with_context(|| format!("cannot build template `{name}`"))?;
    let took = began.elapsed().as_secs_f64();
    match args.json {
        true => outln!(
            "{}",
            terminal::json_line(&json!({
                "name": name, "templateID": template, "buildID": build, "seconds": took
            }))?
        ),
        false => outln!(
            "template {name}: ready after {took:.1} s; `jiffy create --template {name}` makes a sandbox of it"
        ),
    }
    Ok(())
}

/// Builds the template `name` from an image of a registry, unless it is up to date.
pub async fn build_from_image(
    client: &Client,
    name: &str,
    image: &str,
    quiet: bool,
) -> anyhow::Result<()> {
    let asked = json!({ "name": name });
    let asked: RequestedBuild = client.call(Method::POST, "/v3/templates", &asked).await?;
    let (template, build) = (&asked.template_id, &asked.build_id);
    let path = format!("/v2/templates/{template}/builds/{build}");
    let spec = json!({ "fromImage": image, "steps": [] });
    let () = client.call(Method::POST, &path, &spec).await?;
    let path = format!("/templates/{template}/builds/{build}");
    let mut bar = TemplateProgress::plain(image, quiet);
    let followed = tokio::select! {
        // Its lines are those of a build; the bar is all that matters of one without steps.
        followed = follow(client, &path, true, &mut bar) => Some(followed),
        _ = tokio::signal::ctrl_c() => None,
    };
    let followed = match followed {
        Some(followed) => followed,
        None => Err(match cancel(client, &path, &mut bar).await {
            Ok(()) => Interrupted(format!("interrupted; image {image} is imported")).into(),
            Err(e) => Interrupted(format!("the import of image {image} ended: {e:#}")).into(),
        }),
    };
    bar.end();
    followed
}

/// An import that its caller was told to leave.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Interrupted(String);

/// Cancels a build, and tells how it ended: it may have been ready before.
async fn cancel(client: &Client, path: &str, bar: &mut TemplateProgress) -> anyhow::Result<()> {
    let () = client
        .call(Method::POST, &format!("{path}/cancel"), &Value::Null)
        .await?;
    tokio::select! {
        followed = follow(client, path, true, bar) => followed,
        _ = tokio::signal::ctrl_c() => bail!("it is being cancelled, and has not ended yet"),
    }
}

/// As it was called, or after the directory that it is built of.
fn name(args: &TemplateBuildArgs, context: &Path) -> anyhow::Result<String> {
    if let Some(name) = &args.name {
        return Ok(name.clone());
    }
    let full = context.canonicalize();
    let full = full.with_context(|| format!("cannot read {}", context.display()))?;
    let name = full.file_name().map(|n| n.to_string_lossy().into_owned());
    let name = super::import::valid_name(&name.unwrap_or_default());
    anyhow::ensure!(!name.is_empty(), "the template needs a name: say --name");
    Ok(name)
}

fn read(args: &TemplateBuildArgs, file: &Path, context: &Path) -> anyhow::Result<PreparedBuild> {
    let mut build_args = BTreeMap::new();
    for arg in &args.build_arg {
        let (name, value) = match arg.split_once('=') {
            Some((name, value)) => (name.to_owned(), value.to_owned()),
            // As docker does: from here, and none if there is none.
            None => match std::env::var(arg) {
                Ok(value) => (arg.clone(), value),
                Err(_) => continue,
            },
        };
        build_args.insert(name, value);
    }
    let options = DockerfileOptions {
        build_args,
        target: args.target.clone(),
    };
    let stdin = file == Path::new("-");
    let text = match stdin {
        true => std::io::read_to_string(std::io::stdin()),
        false => std::fs::read_to_string(file),
    };
    let text = text.with_context(|| format!("cannot read {}", file.display()))?;
    let parsed = parse(&text, &options).with_context(|| file.display().to_string())?;
    let prepared = prepare(parsed, context, (!stdin).then_some(file));
    prepared.with_context(|| file.display().to_string())
}

fn startup(args: &TemplateBuildArgs) -> Startup {
    let start = args.start.as_ref().map(|line| StartCommand {
        command: line.clone(),
        args: None,
        user: None,
        workdir: None,
    });
    Startup {
        start,
        ready: super::import::readiness(args),
        first_use: None,
    }
}

async fn send_files(
    client: &Client,
    template: &str,
    prepared: &PreparedBuild,
    bar: &mut TemplateProgress,
) -> anyhow::Result<()> {
    for upload in &prepared.uploads {
        let path = format!("/templates/{template}/files/{}?verified=true", upload.name);
        let link: UploadLink = client.call(Method::GET, &path, &Value::Null).await?;
        if link.present {
            continue;
        }
        // Packed once more, into a file: memory is for people.
        let mut file = tempfile::tempfile().context("cannot make a temporary file")?;
        upload.write_to(&mut file)?;
        file.flush()?;
        std::io::Seek::rewind(&mut file)?;
        let size = file.metadata()?.len();
        let mut sent = 0;
        bar.on_phase(&format!("sending files ({})", mib(size)));
        // The way to the host is known; its answer may name it as others see it.
        let at = link.url.find("/templates/uploads/").unwrap_or(0);
        let (pieces, call) = client.upload(&link.url[at..])?;
        let mut file = tokio::fs::File::from_std(file);
        loop {
            let mut chunk = vec![0; CHUNK_BYTES];
            let n = file.read(&mut chunk).await?;
            chunk.truncate(n);
            sent += n as u64;
            bar.on_percent(u8::try_from(sent * 100 / size.max(1)).unwrap_or(100));
            if n == 0 || pieces.send(chunk.into()).await.is_err() {
                break;
            }
        }
        drop(pieces);
        call.await??;
    }
    Ok(())
}

async fn start(
    client: &Client,
    template: &str,
    build: &str,
    spec: &BuildSpec,
) -> anyhow::Result<()> {
    let path = format!("/v2/templates/{template}/builds/{build}");
    client
        .call(Method::POST, &path, &json!({ "spec": spec }))
        .await
}

/// Shows what the build says until it is over.
async fn follow(
    client: &Client,
    path: &str,
    quiet: bool,
    bar: &mut TemplateProgress,
) -> anyhow::Result<()> {
    let colours = std::io::stderr().is_terminal();
    let mut seen = 0;
    loop {
        let page = format!("{path}/status?logsOffset={seen}&limit=100");
        let status: BuildStatus = client.call(Method::GET, &page, &Value::Null).await?;
        seen += status.log_entries.len();
        for entry in &status.log_entries {
            show(entry, colours, quiet, bar);
        }
        match &status.progress {
            Some(now) => {
                if !bar.shows(&now.text) {
                    bar.on_phase(&now.text);
                }
                bar.on_percent(now.percent);
            }
            None => bar.end(),
        }
        if !status.log_entries.is_empty() {
            continue;
        }
        match status.status {
            BuildState::Ready => return Ok(()),
            BuildState::Error => {
                let why = status.reason.map(|r| r.message);
                bail!(
                    "{}",
                    why.unwrap_or_else(|| "the host does not say why".to_owned())
                )
            }
            BuildState::Waiting | BuildState::Building => {
                tokio::time::sleep(STATUS_POLL_INTERVAL).await
            }
        }
    }
}

fn show(entry: &LogEntry, colours: bool, quiet: bool, bar: &TemplateProgress) {
    // The last words are told once more, with what was built.
    if quiet || entry.level == LogLevel::Error {
        return;
    }
    let step = entry.message.starts_with('[') || entry.message.starts_with("CACHED [");
    match (entry.level, colours && step) {
        (_, true) => bar.print(&entry.message, true),
        (LogLevel::Debug, _) => {}
        _ => bar.print(&entry.message, false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_one_also_without_a_slash() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_str().unwrap();
        assert!(is_directory(path) && is_directory(".") && is_directory("./nowhere"));
        // A stock template's name is the template's, and what is not there is no directory.
        assert!(!is_directory("base") && !is_directory("nowhere"));
        // Tests run in the directory of their package.
        assert!(is_directory("src"));
    }
}
