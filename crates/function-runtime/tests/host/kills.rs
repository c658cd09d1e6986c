//! Tests for deployments during which the daemon, the compiler or the tenant's process is killed
//! with SIGKILL.
//!
//! A deployment calls an *observer* before each of its steps ([`deploy_step::observe`]). The
//! observer of these tests kills a process. A child process performs the deployments, because an
//! observer sees all deployments of its process, also of other tests.

use super::{DeployChanges, NAME, files, settings, try_get};
use crate::support::constant;
use jiffy_function_manager::deploy_step::{self, DeployStep};
use jiffy_function_manager::{FunctionError, FunctionHostSettings, Functions, owner};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::HashSet;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Directory, key and step of a child. Without a step, the child kills other processes instead of
/// itself.
const CHILD: [&str; 3] = ["JIFFY_KILL_DIR", "JIFFY_KILL_KEY", "JIFFY_KILL_STEP"];
/// Answer of the version that the child deploys.
const NEW_ANSWER: &str = "of the child";
/// Time without a daemon after which an unrecorded process exits.
const SHORT_GRACE: Duration = Duration::from_secs(1);
/// Timeout for an expected state.
const LIMIT: Duration = Duration::from_secs(20);

/// Process that is killed at a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Daemon,
    Compiler,
    Tenant,
}

/// Next process to kill, its step, and the key of the function.
static NEXT: Mutex<Option<(Victim, DeployStep, String)>> = Mutex::new(None);

/// Kills the selected process at the selected step.
fn kill_at(step: DeployStep) {
    let mut next = NEXT.lock().unwrap();
    if next.as_ref().is_none_or(|(_, at, _)| *at != step) {
        return;
    }
    let (victim, _, key) = next.take().unwrap();
    match victim {
        Victim::Daemon => kill(Pid::this(), Signal::SIGKILL).unwrap(),
        Victim::Compiler => kill_one("compile", &key),
        Victim::Tenant => kill_one("serve", &key),
    }
}

/// Returns the processes of `jiffy-functions` with this command and key.
fn processes(command: &str, key: &str) -> Vec<Pid> {
    let owner = owner::process_owner(Some(key));
    let is_one = |id: &i32| {
        let line = std::fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        let words: Vec<_> = line.split(|byte| *byte == 0).collect();
        words.get(1) == Some(&command.as_bytes()) && words.contains(&owner.as_bytes())
    };
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let ids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    ids.filter(is_one).map(Pid::from_raw).collect()
}

fn wait_for(what: &str, ready: impl Fn() -> bool) {
    let start = Instant::now();
    while !ready() {
        assert!(start.elapsed() < LIMIT, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Kills the only process, and waits until it has exited.
fn kill_one(command: &str, key: &str) {
    // A process that has just started has no command line for a moment.
    wait_for(command, || processes(command, key).len() == 1);
    kill(processes(command, key)[0], Signal::SIGKILL).unwrap();
    wait_for("the process is still running", || {
        processes(command, key).is_empty()
    });
}

/// Returns a key that no other test run on this host uses.
fn key(test: &str) -> String {
    format!("{test}-{}", std::process::id())
}

fn open(directory: &Path) -> Functions {
    Functions::open(settings(directory, Duration::from_secs(600)))
}

/// Module whose compilation takes far longer than finding its compiler.
fn long_module() -> Vec<u8> {
    let step = "(local.set 0 (i32.mul (local.get 0) (i32.add (local.get 0) (i32.const 3))))";
    let function = format!(
        "(func (param i32) (result i32) {} (local.get 0))",
        step.repeat(200)
    );
    let text = String::from_utf8(constant("new")).unwrap();
    let (last, items) = (text.rfind(')').unwrap(), function.repeat(500));
    // Inserts 500 functions before the last parenthesis of the module.
    format!("{}{items})", &text[..last]).into_bytes()
}

/// Deploys a module that answers with `text`.
async fn deploy(functions: &Functions, key: &str, text: &str) -> Result<(), FunctionError> {
    deploy_module(functions, key, &constant(text)).await
}

/// Deploys a module that is received in two parts.
async fn deploy_module(
    functions: &Functions,
    key: &str,
    module: &[u8],
) -> Result<(), FunctionError> {
    let module = wat::parse_bytes(module).unwrap().into_owned();
    let mut upload = functions.upload().unwrap();
    for part in module.chunks(module.len() / 2 + 1) {
        upload.write(part).unwrap();
    }
    let deployed = functions.deploy(Some(key), NAME, DeployChanges::default(), upload);
    deployed.await.map(drop)
}

async fn get(functions: &Functions, key: &str) -> String {
    try_get(functions, Some(key), NAME).await.unwrap()
}

/// Child process. Does nothing unless another test has started it.
#[tokio::test(flavor = "multi_thread")]
async fn work_in_a_child_process() {
    let [Ok(directory), Ok(key), Ok(step)] = CHILD.map(std::env::var) else {
        return;
    };
    let Ok(step) = step.parse::<usize>() else {
        return kill_other_processes(&key).await;
    };
    let (directory, step) = (Path::new(&directory), DeployStep::ALL[step]);
    let grace = match step {
        DeployStep::RecordProcess => SHORT_GRACE,
        _ => LIMIT,
    };
    let functions = Functions::open(FunctionHostSettings {
        grace,
        ..settings(directory, Duration::from_secs(600))
    });
    *NEXT.lock().unwrap() = Some((Victim::Daemon, step, key.clone()));
    deploy_step::observe(kill_at);
    deploy(&functions, &key, NEW_ANSWER).await.unwrap();
    functions.detach_all().await;
}

/// Runs the test program as a child with the values of [`CHILD`].
fn child(directory: &Path, key: &str, step: &str) -> ExitStatus {
    let values = [directory.to_str().unwrap(), key, step];
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args([
            "--exact",
            "host::kills::work_in_a_child_process",
            "--nocapture",
        ])
        .envs(CHILD.into_iter().zip(values))
        .stdout(Stdio::null());
    command.status().unwrap()
}

/// Deploys a function in a child process that is killed before `step`.
fn deploy_until_killed(directory: &Path, key: &str, step: DeployStep) {
    let number = DeployStep::ALL.iter().position(|one| *one == step).unwrap();
    let status = child(directory, key, &number.to_string());
    assert_eq!(
        status.signal(),
        Some(9),
        "{step:?} was not reached: {status}"
    );
}

/// Returns whether the deployment is committed if the daemon is killed before `step`.
fn is_committed(step: DeployStep) -> bool {
    matches!(step, DeployStep::SyncDirectory | DeployStep::RemoveFile)
}

/// Returns the number of files of a record with `modules` modules: the record, and for each module
/// its source and its machine code.
fn files_of(modules: usize) -> usize {
    1 + 2 * modules
}

/// Returns the number of different modules of existing versions.
fn modules(functions: &Functions, key: &str) -> usize {
    let record = functions.find(Some(key), NAME).unwrap();
    let modules: HashSet<_> = record.versions.iter().map(|v| &v.module).collect();
    modules.len()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deployment_killed_at_any_step_leaves_the_previous_or_the_new_version() {
    let directory = tempfile::tempdir().unwrap();
    let (directory, key) = (directory.path(), key("former"));
    let mut functions = open(directory);
    let mut former = "former".to_owned();
    deploy(&functions, &key, &former).await.unwrap();
    for step in DeployStep::ALL {
        match step {
            // The child reaches this step only if it has to start a process itself.
            DeployStep::RecordProcess => functions.stop_all().await,
            _ => functions.detach_all().await,
        }
        drop(functions);
        deploy_until_killed(directory, &key, step);
        functions = open(directory);
        let expected = if is_committed(step) {
            NEW_ANSWER
        } else {
            former.as_str()
        };
        assert_eq!(get(&functions, &key).await, expected, "{step:?}");
        let retained = files_of(modules(&functions, &key));
        assert_eq!(files(directory).len(), retained, "{step:?}");
        former = format!("after {step:?}");
        deploy(&functions, &key, &former).await.unwrap();
        assert_eq!(get(&functions, &key).await, former);
        // A process that no daemon knows exits by itself.
        wait_for("one process remains", || {
            processes("serve", &key).len() == 1
        });
    }
    functions.stop_all().await;
    assert_eq!(processes("serve", &key), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_first_deployment_leaves_the_function_or_no_files() {
    for step in [
        DeployStep::Receive,
        DeployStep::StoreArtifact,
        DeployStep::ReplaceRecord,
        DeployStep::SyncDirectory,
    ] {
        let directory = tempfile::tempdir().unwrap();
        let (directory, key) = (directory.path(), key("first"));
        deploy_until_killed(directory, &key, step);
        let functions = open(directory);
        if is_committed(step) {
            assert_eq!(get(&functions, &key).await, NEW_ANSWER);
            assert_eq!(files(directory).len(), files_of(1));
        } else {
            assert!(functions.list().is_empty(), "{step:?}");
            assert_eq!(files(directory), [""; 0], "{step:?}");
            wait_for("no process remains", || processes("serve", &key).is_empty());
        }
        deploy(&functions, &key, "after").await.unwrap();
        assert_eq!(get(&functions, &key).await, "after");
        functions.stop_all().await;
    }
}

#[test]
fn a_deployment_whose_compiler_or_process_is_killed_succeeds_or_fails_with_a_reason() {
    // The step is not a number, so the child kills other processes.
    let status = child(Path::new("/"), &key("parts"), "none");
    assert!(status.success(), "{status}");
}

/// Kills the compiler or the process of the tenant at each step, while the daemon continues.
async fn kill_other_processes(key: &str) {
    deploy_step::observe(kill_at);
    for (victim, step) in [
        (Victim::Compiler, DeployStep::Compile),
        (Victim::Tenant, DeployStep::Compile),
        (Victim::Tenant, DeployStep::Load),
        (Victim::Tenant, DeployStep::Publish),
        (Victim::Tenant, DeployStep::ReplaceRecord),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let functions = open(directory.path());
        deploy(&functions, key, "former").await.unwrap();
        let module = match victim {
            Victim::Compiler => long_module(),
            _ => constant("new"),
        };
        *NEXT.lock().unwrap() = Some((victim, step, key.to_owned()));
        let deployed = deploy_module(&functions, key, &module).await;
        assert!(NEXT.lock().unwrap().is_none(), "{step:?} was not reached");
        let versions = match (victim, step) {
            (Victim::Compiler, _) => {
                assert!(
                    matches!(deployed, Err(FunctionError::Module(_))),
                    "{deployed:?}"
                );
                1
            }
            // The killed process had loaded the version, or was about to load it. The deployment
            // fails.
            (_, DeployStep::Load | DeployStep::Publish) => {
                assert!(
                    matches!(deployed, Err(FunctionError::Unavailable(_))),
                    "{deployed:?}"
                );
                1
            }
            // The daemon starts another process, to load the version or for the next request.
            _ => {
                deployed.unwrap();
                2
            }
        };
        // With one version, the deployment has failed, and the former version answers.
        let expected = ["former", "new"][versions - 1];
        assert_eq!(get(&functions, key).await, expected, "{victim:?} {step:?}");
        assert_eq!(
            files(directory.path()).len(),
            files_of(versions),
            "{victim:?} {step:?}"
        );
        deploy(&functions, key, "after").await.unwrap();
        assert_eq!(get(&functions, key).await, "after");
        functions.stop_all().await;
    }
}
