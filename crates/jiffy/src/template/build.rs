//! `jiffy template build CONTEXT`: sends a Dockerfile and the files that it copies to the daemon,
//! which builds the template.
//!
//! A *stock template* is a template whose recipe Jiffy contains. A *recipe* is a directory with the
//! packages, files and settings of a template.

use super::show::mib;
use super::signatures::RequiredSignatures;
use super::ssh_agent::{self, SshAgent};
use crate::cli::TemplateBuildArgs;
use anyhow::{Context, bail};
use data_encoding::BASE64;
use hyper::Method;
use jiffy_api_types::{
    BuildSecret, BuildState, BuildStatus, LogEntry, LogLevel, RequestedBuild, UploadLink,
};
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

/// Interval of requests for the progress of a build.
const STATUS_POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Size of the pieces in which an archive is uploaded, in bytes.
const CHUNK_BYTES: usize = 256 * 1024;

/// Returns the path of the Dockerfile. `None` if another source is built. Without `--file`, a
/// directory with a `recipe.toml` is a recipe, even if it also contains a Dockerfile.
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

/// Returns whether the argument is a directory. A path (`./base`, `.`) always counts as one, even
/// if it does not exist. A name without a slash counts as one if the directory exists and no stock
/// template has this name.
pub fn is_directory(name: &str) -> bool {
    let is_path = name.contains('/') || matches!(name, "." | "..");
    is_path || (Path::new(name).is_dir() && Recipe::built_in(name).is_err())
}

/// Builds a Dockerfile.
pub fn run(args: &TemplateBuildArgs, file: &Path) -> anyhow::Result<()> {
    // Reading files blocks the main thread; the worker continues the connections meanwhile.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    runtime.block_on(build(args, file))
}

/// Requests a build, uploads its files, starts the build and shows its progress.
async fn build(args: &TemplateBuildArgs, file: &Path) -> anyhow::Result<()> {
    let start = Instant::now();
    let context = PathBuf::from(args.recipe.as_deref().unwrap_or("."));
    let name = name(args, &context)?;
    let secrets = read_secrets(&args.secret)?;
    let agents = ssh_agent::read_options(&args.ssh)?;
    let mut prepared = read(args, file, &context)?;
    for warning in &prepared.warnings {
        errln!("jiffy: {warning}");
    }
    prepared.spec.startup = startup(args);
    prepared.spec.start_image_command = args.start_image_command;
    prepared.spec.force = args.no_cache;
    prepared.spec.idle_timeout_s = args.idle_timeout;
    let signatures = RequiredSignatures::read(&args.signatures)?;
    prepared.spec.verify_keys = signatures.keys;
    prepared.spec.verify_identities = signatures.identities;
    prepared.spec.verify_trust_root = signatures.trust_root;
    let client = jiffy_daemon::open_client(&args.host.server()).await?;
    let body = json!({
        "name": name,
        "tags": args.tag,
        "cpuCount": args.cpus,
        "memoryMB": args.memory,
        "minFreeDiskMb": args.disk,
    });
    let requested: RequestedBuild = client.call(Method::POST, "/v3/templates", &body).await?;
    let mut bar = TemplateProgress::plain(&name, args.json);
    send_files(&client, &requested.template_id, &prepared, &mut bar).await?;
    bar.end();
    let (template, build) = (&requested.template_id, &requested.build_id);
    // Set this before the start, so that the template is public as soon as it exists.
    if args.public {
        let path = format!("/v2/templates/{template}");
        let body = json!({ "public": true });
        let _: Value = client.call(Method::PATCH, &path, &body).await?;
    }
    let path = format!("/templates/{template}/builds/{build}");
    let body = start_body(&prepared.spec, &secrets, &agents);
    let start_path = format!("/v2{path}");
    let () = client.call(Method::POST, &start_path, &body).await?;
    // Offered until the end of this function.
    let _offered = ssh_agent::offer(&client, &path, &agents);
    let result = tokio::select! {
        result = follow(&client, &path, args.json, &mut bar) => Some(result),
        _ = tokio::signal::ctrl_c() => None,
    };
    let result = match result {
        Some(result) => result,
        None => match cancel(&client, &path, &mut bar).await {
            Ok(()) => Ok(()),
            Err(e) => bail!("{e:#}; completed steps remain in the build cache"),
        },
    };
    result.with_context(|| format!("cannot build template `{name}`"))?;
    let seconds = start.elapsed().as_secs_f64();
    if args.json {
        outln!(
            "{}",
            terminal::json_line(&json!({
                "name": name, "templateID": template, "buildID": build, "seconds": seconds
            }))?
        );
    } else {
        outln!(
            "template {name}: ready after {seconds:.1} s; create a sandbox with `jiffy create --template {name}`"
        );
    }
    Ok(())
}

/// Imports an image of a registry as template `name`, unless the image was imported before and has
/// not changed.
pub async fn build_from_image(
    client: &Client,
    name: &str,
    image: &str,
    quiet: bool,
) -> anyhow::Result<()> {
    let path = client.import_image(name, image).await?;
    let mut bar = TemplateProgress::plain(image, quiet);
    let result = tokio::select! {
        // Log lines of the build are hidden, because an import has no steps; the progress bar is
        // shown.
        result = follow(client, &path, true, &mut bar) => Some(result),
        _ = tokio::signal::ctrl_c() => None,
    };
    let result = match result {
        Some(result) => result,
        None => Err(match cancel(client, &path, &mut bar).await {
            Ok(()) => Interrupted(format!("interrupted after image {image} was imported")).into(),
            Err(e) => {
                Interrupted(format!("the import of image {image} was cancelled: {e:#}")).into()
            }
        }),
    };
    bar.end();
    result
}

/// Import that the user interrupted. After this error, an earlier import of the image must not be
/// used instead.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Interrupted(String);

/// Cancels a build and returns its result. The build may have succeeded before it was cancelled.
async fn cancel(client: &Client, path: &str, bar: &mut TemplateProgress) -> anyhow::Result<()> {
    let () = client
        .call(Method::POST, &format!("{path}/cancel"), &Value::Null)
        .await?;
    tokio::select! {
        result = follow(client, path, true, bar) => result,
        _ = tokio::signal::ctrl_c() => bail!("interrupted while the build was being cancelled"),
    }
}

/// Returns the name in the arguments, or the name of the context directory.
fn name(args: &TemplateBuildArgs, context: &Path) -> anyhow::Result<String> {
    if let Some(name) = &args.name {
        return Ok(name.clone());
    }
    let directory = context
        .canonicalize()
        .with_context(|| format!("cannot read {}", context.display()))?;
    let name = directory
        .file_name()
        .map(|n| n.to_string_lossy().into_owned());
    let name = super::import::valid_name(&name.unwrap_or_default());
    anyhow::ensure!(
        !name.is_empty(),
        "the template needs a name: specify it with --name"
    );
    Ok(name)
}

/// Parses the Dockerfile and determines the files to upload.
fn read(args: &TemplateBuildArgs, file: &Path, context: &Path) -> anyhow::Result<PreparedBuild> {
    let mut build_args = BTreeMap::new();
    for arg in &args.build_arg {
        let (name, value) = match arg.split_once('=') {
            Some((name, value)) => (name.to_owned(), value.to_owned()),
            // As in `docker build`, the value comes from the environment, and the argument is
            // omitted if the variable is not set.
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
    let text = if stdin {
        std::io::read_to_string(std::io::stdin())
    } else {
        std::fs::read_to_string(file)
    }
    .with_context(|| format!("cannot read {}", file.display()))?;
    let parsed = parse(&text, &options).with_context(|| file.display().to_string())?;
    let prepared = prepare(parsed, context, (!stdin).then_some(file));
    prepared.with_context(|| file.display().to_string())
}

/// Returns the start command and the readiness check in the arguments.
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

/// Uploads the files of `COPY` and `ADD` that the daemon does not have yet.
async fn send_files(
    client: &Client,
    template: &str,
    prepared: &PreparedBuild,
    bar: &mut TemplateProgress,
) -> anyhow::Result<()> {
    for upload in &prepared.uploads {
        // With `verified=true`, the daemon considers and accepts only content that has this hash.
        let path = format!("/templates/{template}/files/{}?verified=true", upload.name);
        let link: UploadLink = client.call(Method::GET, &path, &Value::Null).await?;
        if link.present {
            continue;
        }
        // `prepare` packed the archive only to compute its name. Packing it again into a file
        // avoids an archive in memory.
        let mut file = tempfile::tempfile().context("cannot create a temporary file")?;
        upload.write_to(&mut file)?;
        file.flush()?;
        std::io::Seek::rewind(&mut file)?;
        let size = file.metadata()?.len();
        let mut sent = 0;
        bar.on_phase(&format!("sending files ({})", mib(size)));
        // Only the path of the link is used: its host name may not be reachable from here.
        let at = link.url.find("/templates/uploads/").unwrap_or(0);
        let (chunks, request) = client.upload::<()>(&link.url[at..])?;
        let mut file = tokio::fs::File::from_std(file);
        loop {
            let mut chunk = vec![0; CHUNK_BYTES];
            let n = file.read(&mut chunk).await?;
            chunk.truncate(n);
            sent += n as u64;
            // An empty archive must not divide by zero.
            bar.on_percent(u8::try_from(sent * 100 / size.max(1)).unwrap_or(100));
            if n == 0 || chunks.send(chunk.into()).await.is_err() {
                break;
            }
        }
        // Ends the body of the request.
        drop(chunks);
        request.await??;
    }
    Ok(())
}

/// Returns the body of the request that starts a build.
fn start_body(spec: &BuildSpec, secrets: &[BuildSecret], agents: &[SshAgent]) -> Value {
    let mut body = json!({ "spec": spec });
    if !secrets.is_empty() {
        body["secrets"] = json!(secrets);
    }
    if !agents.is_empty() {
        let names: Vec<&str> = agents.iter().map(|agent| agent.id.as_str()).collect();
        body["ssh"] = json!(names);
    }
    body
}

/// Reads the secrets of a build in the form of `docker build --secret`.
fn read_secrets(options: &[String]) -> anyhow::Result<Vec<BuildSecret>> {
    let secret = |option: &String| {
        let (mut id, mut file, mut variable) = (None, None, None);
        for field in option.split(',') {
            match field.split_once('=') {
                Some(("id", value)) => id = Some(value),
                Some(("src" | "source", value)) => file = Some(value),
                Some(("env", value)) => variable = Some(value),
                Some(("type", "file" | "env")) => {}
                _ => bail!("--secret {option}: use id=NAME,src=FILE or id=NAME,env=VARIABLE"),
            }
        }
        let id = id.filter(|id| !id.is_empty());
        let id = id.with_context(|| format!("--secret {option}: the id is missing"))?;
        let value = match (file, variable) {
            (Some(file), None) => {
                std::fs::read(file).with_context(|| format!("--secret: cannot read {file}"))?
            }
            // As in `docker build`, the id is the default name of the variable.
            (None, variable) => {
                let name = variable.unwrap_or(id);
                let value = std::env::var_os(name).map(std::os::unix::ffi::OsStringExt::into_vec);
                value.with_context(|| format!("--secret {option}: {name} is not set"))?
            }
            (Some(_), Some(_)) => bail!("--secret {option}: src and env exclude each other"),
        };
        Ok(BuildSecret {
            id: id.to_owned(),
            value: BASE64.encode(&value),
        })
    };
    options.iter().map(secret).collect()
}

/// Shows the progress of a build until it is complete. If `quiet` is true, the lines of the build
/// log are hidden. Fails with the daemon's reason if the build fails.
async fn follow(
    client: &Client,
    path: &str,
    quiet: bool,
    bar: &mut TemplateProgress,
) -> anyhow::Result<()> {
    let use_colours = std::io::stderr().is_terminal();
    let mut seen = 0;
    loop {
        // Requests only new lines, so that each line is printed once.
        let page = format!("{path}/status?logsOffset={seen}&limit=100");
        let status: BuildStatus = client.call(Method::GET, &page, &Value::Null).await?;
        seen += status.log_entries.len();
        for entry in &status.log_entries {
            show(entry, use_colours, quiet, bar);
        }
        match &status.progress {
            Some(progress) => {
                if !bar.shows(&progress.text) {
                    bar.on_phase(&progress.text);
                }
                bar.on_percent(progress.percent);
            }
            None => bar.end(),
        }
        // There may be more lines: request them before the status is evaluated.
        if !status.log_entries.is_empty() {
            continue;
        }
        match status.status {
            BuildState::Ready => return Ok(()),
            BuildState::Error => {
                let reason = status.reason.map(|r| r.message);
                bail!(
                    "{}",
                    reason.unwrap_or_else(|| "the host reports no reason".to_owned())
                )
            }
            BuildState::Waiting | BuildState::Building => {
                tokio::time::sleep(STATUS_POLL_INTERVAL).await
            }
        }
    }
}

/// Prints a line of the build log. Steps are highlighted on a terminal.
fn show(entry: &LogEntry, use_colours: bool, quiet: bool, bar: &TemplateProgress) {
    // The final error is printed by the caller.
    if quiet || entry.level == LogLevel::Error {
        return;
    }
    let is_step = entry.message.starts_with('[') || entry.message.starts_with("CACHED [");
    match (entry.level, use_colours && is_step) {
        (_, true) => bar.print(&entry.message, true),
        (LogLevel::Debug, _) => {}
        _ => bar.print(&entry.message, false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_come_from_files_and_variables() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        std::fs::write(&path, "t0ken").unwrap();
        let option = |text: &str| read_secrets(&[text.to_owned()]);
        let file = format!("type=file,id=a,src={}", path.display());
        let read = option(&file).unwrap();
        assert_eq!(
            (read[0].id.as_str(), read[0].value.as_str()),
            ("a", "dDBrZW4=")
        );
        assert_eq!(option("id=PATH").unwrap()[0].id, "PATH");
        for bad in [
            "a",
            "src=/x",
            "id=a,src=/nonexistent",
            "id=a,env=NOT_SET_HERE",
            "id=a,x=y",
        ] {
            assert!(option(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_directory_is_recognised_without_a_slash() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_str().unwrap();
        assert!(is_directory(path) && is_directory(".") && is_directory("./nowhere"));
        // The name of a stock template refers to the template, and a missing path is not a
        // directory.
        assert!(!is_directory("base") && !is_directory("nowhere"));
        // Tests run in the directory of their package.
        assert!(is_directory("src"));
    }
}
