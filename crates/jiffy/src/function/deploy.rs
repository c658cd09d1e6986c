//! `jiffy function deploy`: builds a function from source if necessary, and deploys its module.

use super::{path, source, table};
use crate::cli::FunctionDeployArgs;
use crate::run::environment;
use crate::sandbox::table::show;
use anyhow::Context;
use jiffy_client::progress::while_waiting;
use serde_json::{Map, Value, json};

/// Deploys a module.
pub async fn run(args: &FunctionDeployArgs) -> anyhow::Result<()> {
    // Invalid arguments are reported before a build that takes minutes.
    path(&args.name, "")?;
    let settings = settings(args)?;
    let client = jiffy_daemon::open_client(&args.output.host.server()).await?;
    let module = match &args.source {
        None => None,
        Some(directory) if directory.is_dir() => Some(source::build(&client, directory).await?),
        Some(file) => {
            let context = || format!("cannot read the module {}", file.display());
            Some(std::fs::read(file).with_context(context)?)
        }
    };
    let request = client.deploy_function(&args.name, &settings, module.as_deref());
    let deployed: Value = while_waiting("compiling the function", request)
        .await
        .with_context(|| format!("cannot deploy function `{}`", args.name))?;
    show(args.output.json, &deployed, table::current_version)
}

/// Returns the settings in the arguments as a request of the API. Settings that are not specified
/// are omitted. The daemon then retains their values, except for the sandbox key, which it revokes.
pub(super) fn settings(args: &FunctionDeployArgs) -> anyhow::Result<Value> {
    let mut limits = Map::new();
    let mut limit = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            limits.insert(name.to_owned(), value);
        }
    };
    limit("memoryMB", args.memory.map(Value::from));
    limit("cpuMs", args.cpu_ms.map(Value::from));
    let timeout = args.timeout.map(|time| json!(time.as_millis()));
    limit("timeoutMs", timeout);
    limit("concurrency", args.concurrency.map(Value::from));
    let mut settings = Map::new();
    if !limits.is_empty() {
        settings.insert("limits".to_owned(), limits.into());
    }
    if !args.env.is_empty() {
        settings.insert("env".to_owned(), json!(environment(&args.env)?));
    }
    if !args.allow.is_empty() {
        settings.insert("allow".to_owned(), json!(args.allow));
    }
    // Without either option, the access of an existing function does not change.
    if args.public || args.private {
        settings.insert("public".to_owned(), json!(args.public));
    }
    if let Some(schedule) = &args.schedule {
        settings.insert("schedule".to_owned(), json!(schedule));
    }
    if let Some(scope) = args.sandbox_key {
        settings.insert("sandboxKey".to_owned(), json!(scope.name()));
        let renew = json!(args.renew_sandbox_key);
        settings.insert("renewSandboxKey".to_owned(), renew);
    }
    if let Some(digest) = &args.digest {
        settings.insert("digest".to_owned(), json!(digest));
    }
    Ok(settings.into())
}
