//! Creation of users in images, by editing the user database. Images need no programs for this.

use super::copy::ROOT_USER;
use super::failure::BuildFailure;
use jiffy_agent_client::{AgentClient, ClientError, RpcCode};

/// Maximum size of a user database that is read, in bytes.
const MAX_PASSWD_BYTES: usize = 1 << 20;
/// Smallest uid of an ordinary user.
const MIN_UID: u32 = 1000;
/// Upper bound of uids, exclusive.
const MAX_UID: u32 = 60_000;

/// Creates a user with a home directory unless the user exists. Grants `sudo` rights if the image
/// has `sudo`.
pub async fn add_user(agent: &AgentClient, name: &str) -> Result<(), BuildFailure> {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "_-".contains(c);
    let begins = name.starts_with(|c: char| c.is_ascii_lowercase() || c == '_');
    if !begins || name.len() > 32 || !name.chars().all(fits) {
        return Err(BuildFailure::new(format!(
            "`{name}` is not a valid user name: use lower-case letters, digits, `_` and `-`"
        )));
    }
    // A missing file is read as empty, and created below.
    let passwd = read(agent, "/etc/passwd").await?;
    if passwd
        .lines()
        .any(|line| line.split(':').next() == Some(name))
    {
        return Ok(());
    }
    let group = read(agent, "/etc/group").await?;
    // The group has the same id as the user.
    let taken = |id: u32| {
        let has = |text: &str| {
            text.lines()
                .any(|l| l.split(':').nth(2) == Some(&id.to_string()))
        };
        has(&passwd) || has(&group)
    };
    let id = (MIN_UID..MAX_UID).find(|id| !taken(*id));
    let id = id.ok_or_else(|| BuildFailure::new("no free user id is left"))?;
    let shell = match agent.stat("/bin/bash", Some(ROOT_USER)).await {
        Ok(_) => "/bin/bash",
        Err(_) => "/bin/sh",
    };
    let home = format!("/home/{name}");
    let line = format!("{name}:x:{id}:{id}::{home}:{shell}\n");
    append(agent, "/etc/passwd", &passwd, &line).await?;
    append(agent, "/etc/group", &group, &format!("{name}:x:{id}:\n")).await?;
    if agent.stat("/etc/shadow", Some(ROOT_USER)).await.is_ok() {
        let shadow = read(agent, "/etc/shadow").await?;
        append(
            agent,
            "/etc/shadow",
            &shadow,
            // `!` denotes a locked password. 19000 is the date of its last change, in days since
            // 1970. The numbers after it are the defaults: minimum age, maximum age and warning
            // time of a password in days (shadow(5)).
            &format!("{name}:!:19000:0:99999:7:::\n"),
        )
        .await?;
    }
    if agent.stat("/etc/sudoers.d", Some(ROOT_USER)).await.is_ok() {
        let line = format!("{name} ALL=(ALL) NOPASSWD:ALL\n");
        append(agent, &format!("/etc/sudoers.d/{name}"), "", &line).await?;
    }
    // Create the directory as the new user, who then owns it.
    let created = agent.make_dir(&home, Some(name)).await;
    match created {
        Ok(_) => Ok(()),
        Err(e) if exists(&e) => Ok(()),
        Err(e) => Err(BuildFailure::agent(&format!("create {home}"), e)),
    }
}

/// Returns whether a call failed because its object exists already.
fn exists(error: &ClientError) -> bool {
    matches!(
        error,
        ClientError::Rpc {
            code: RpcCode::AlreadyExists,
            ..
        }
    )
}

async fn read(agent: &AgentClient, path: &str) -> Result<String, BuildFailure> {
    match agent.read(path, Some(ROOT_USER), MAX_PASSWD_BYTES).await {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(e) if e.is_not_found() => Ok(String::new()),
        Err(e) => Err(BuildFailure::agent(&format!("read {path}"), e)),
    }
}

/// Appends a line to a file with the content `before`, which is written again as a whole.
async fn append(
    agent: &AgentClient,
    path: &str,
    before: &str,
    line: &str,
) -> Result<(), BuildFailure> {
    let gap = if before.is_empty() || before.ends_with('\n') {
        ""
    } else {
        "\n"
    };
    let written = agent
        .write(path, Some(ROOT_USER), format!("{before}{gap}{line}"))
        .await;
    written.map_err(|e| BuildFailure::agent(&format!("write {path}"), e))
}
