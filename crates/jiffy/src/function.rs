//! `jiffy function`: manages functions through the API, and prints the JSON responses as tables.

mod deploy;
mod invoke;
mod logs;
mod new;
mod source;
mod table;

use crate::cli::{FunctionArgs, FunctionCommand, FunctionOutputArgs};
use crate::sandbox::table::show;
use hyper::Method;
use serde_json::{Value, json};
use std::process::ExitCode;

/// Runs a subcommand of `jiffy function`.
pub fn run(command: &FunctionCommand) -> anyhow::Result<ExitCode> {
    crate::runtime()?.block_on(dispatch(command))
}

/// Executes a command on functions. Returns the exit code.
async fn dispatch(command: &FunctionCommand) -> anyhow::Result<ExitCode> {
    match command {
        FunctionCommand::New(args) => new::run(args)?,
        FunctionCommand::Build(args) => source::run(args).await?,
        FunctionCommand::Deploy(args) => deploy::run(args).await?,
        FunctionCommand::Ls { all, output } => {
            let path = format!("/functions?all={all}");
            let functions = call(output, Method::GET, &path, &Value::Null).await?;
            show(output.json, &functions, table::functions)?;
        }
        FunctionCommand::Info(args) => {
            request_and_show(args, Method::GET, "", table::function).await?
        }
        FunctionCommand::Logs(args) => logs::run(args).await?,
        FunctionCommand::Versions(args) => {
            request_and_show(args, Method::GET, "/versions", table::versions).await?;
        }
        FunctionCommand::Rollback {
            name,
            version,
            output,
        } => {
            let path = path(name, "/rollback")?;
            let body = json!({ "version": version });
            let function = call(output, Method::POST, &path, &body).await?;
            show(output.json, &function, table::current_version)?;
        }
        FunctionCommand::Disable(args) => {
            request_and_show(args, Method::POST, "/disable", table::name).await?
        }
        FunctionCommand::Enable(args) => {
            request_and_show(args, Method::POST, "/enable", table::name).await?
        }
        FunctionCommand::Rm { names, output } => {
            for name in names {
                call(output, Method::DELETE, &path(name, "")?, &Value::Null).await?;
                show(output.json, &json!({ "name": name }), table::name)?;
            }
        }
        FunctionCommand::Invoke(args) => return invoke::run(args).await,
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the API path of a request for function `name`. `call` is the rest of the path, for
/// example `/logs`.
pub fn path(name: &str, call: &str) -> anyhow::Result<String> {
    // The name becomes part of a path. The daemon checks the exact rules.
    let is_valid = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    anyhow::ensure!(
        !name.is_empty() && name.chars().all(is_valid),
        "`{name}` is not a function name: use a-z, 0-9 and dashes"
    );
    Ok(format!("/functions/{name}{call}"))
}

/// Sends a request to the daemon that the arguments select.
async fn call(
    output: &FunctionOutputArgs,
    method: Method,
    path: &str,
    body: &Value,
) -> anyhow::Result<Value> {
    let client = jiffy_daemon::open_client(&output.host.server()).await?;
    client.call(method, path, body).await
}

/// Sends a request for a function and prints the response. `name` is the rest of the API path after
/// the name of the function. `text` formats the response if `--json` is not set.
async fn request_and_show(
    args: &FunctionArgs,
    method: Method,
    name: &str,
    text: impl FnOnce(&Value) -> String,
) -> anyhow::Result<()> {
    let path = path(&args.name, name)?;
    let response = call(&args.output, method, &path, &Value::Null).await?;
    show(args.output.json, &response, text)
}
