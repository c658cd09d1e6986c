//! Hook of Claude Code and Codex before a tool call: replaces a shell command by a command that
//! runs it in the sandbox.

use crate::project::Project;
use crate::session_files::create_directory;
use crate::shell::ShellCommand;
use anyhow::{Context, ensure};
use serde_json::{Map, Value, json};
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Maximum length of a command that becomes an argument of a program, in bytes. Quoting makes a
/// command of quotation marks four times as long (96 KiB), and agents quote the result again. The
/// kernel permits 128 KiB per argument.
const MAX_ARGUMENT_BYTES: usize = 24 << 10;

/// Options of the hook.
#[derive(Debug, Clone, Copy, Default)]
pub struct HookOptions {
    /// True to execute commands without the agent's question for permission.
    pub allow: bool,
    /// True to use the current directory of the command on the host, for agents without a
    /// persistent working directory.
    pub uses_current_directory: bool,
}

/// Quotes a word for a shell.
pub fn quote(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-=+:,@".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Answers the hook for a call of a shell tool. `program` is the path of `jiffy`. The error is the
/// reason for which the call must be denied.
pub fn answer(input: &[u8], program: &str, options: HookOptions) -> anyhow::Result<Value> {
    let input: Value = serde_json::from_slice(input).context("the hook's input is not JSON")?;
    let tool_input = input.get("tool_input").and_then(Value::as_object);
    let tool_input = tool_input.context("the hook's input has no tool_input")?;
    let mut tool_input = tool_input.clone();
    let text = tool_input.get("command").and_then(Value::as_str);
    let text = text.context("the tool call has no command")?.to_owned();
    let current = input.get("cwd").and_then(Value::as_str).unwrap_or(".");
    let project = match std::env::var_os("CLAUDE_PROJECT_DIR").filter(|dir| !dir.is_empty()) {
        Some(directory) => Project::at(Path::new(&directory))?,
        None => Project::find(Path::new(current))?,
    };
    let is_background = tool_input.get("run_in_background") == Some(&Value::Bool(true));
    let command = ShellCommand {
        text,
        workdir: options.uses_current_directory.then(|| ".".to_owned()),
        background: is_background,
    };
    let command = replacement(&command, &project, program)?;
    // Disables the sandbox in which the coding agent would run the command: the new command must
    // connect to the daemon, which provides the sandbox.
    set_if_present(
        &mut tool_input,
        "dangerouslyDisableSandbox",
        Value::Bool(true),
    );
    tool_input.insert("command".to_owned(), Value::String(command));
    let mut output = json!({ "hookEventName": "PreToolUse", "updatedInput": tool_input });
    if options.allow {
        output["permissionDecision"] = json!("allow");
        output["permissionDecisionReason"] = json!("runs in the sandbox of the project");
    }
    Ok(json!({ "hookSpecificOutput": output }))
}

fn set_if_present(object: &mut Map<String, Value>, name: &str, value: Value) {
    if let Some(present) = object.get_mut(name) {
        *present = value;
    }
}

/// Returns the text of a shell command that runs `command` in the sandbox of a project. A long
/// command is stored in a file.
pub fn replacement(
    command: &ShellCommand,
    project: &Project,
    program: &str,
) -> anyhow::Result<String> {
    command.check()?;
    let directory = project
        .directory()
        .to_str()
        .context("the project is not UTF-8")?;
    let mut words = vec![program, "agent-shell", "exec", "--project", directory];
    if command.background {
        words.push("--background");
    }
    if let Some(workdir) = &command.workdir {
        words.extend(["--workdir", workdir]);
    }
    let file;
    if command.text.len() <= MAX_ARGUMENT_BYTES {
        words.extend(["--", &command.text]);
    } else {
        file = store(command, project)?;
        words.extend(["--file", &file]);
    }
    let words: Vec<String> = words.into_iter().map(quote).collect();
    Ok(words.join(" "))
}

/// Stores a command in a file that `jiffy agent-shell exec` removes. Returns its path.
fn store(command: &ShellCommand, project: &Project) -> anyhow::Result<String> {
    let directory = project.state().join("commands");
    create_directory(&directory)?;
    let number = getrandom::u64().context("cannot read random numbers")?;
    let path = directory.join(format!("{number:016x}"));
    let context = || format!("cannot write {}", path.display());
    let mut options = OpenOptions::new();
    let file = options.write(true).create_new(true).mode(0o600).open(&path);
    let written = file.and_then(|mut file| file.write_all(command.text.as_bytes()));
    written.with_context(context)?;
    let path = path.into_os_string().into_string().ok();
    let path = path.context("the state directory is not UTF-8")?;
    ensure!(!path.is_empty(), "the state directory has no path");
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(command: &str) -> anyhow::Result<Value> {
        let project = tempfile::tempdir().unwrap();
        let input = json!({
            "hook_event_name": "PreToolUse",
            "tool_name": "Bash",
            "cwd": project.path(),
            "tool_input": { "command": command, "description": "x", "timeout": 5 },
        });
        answer(
            input.to_string().as_bytes(),
            "/usr/bin/jiffy",
            HookOptions::default(),
        )
    }

    #[test]
    fn commands_are_passed_to_the_sandbox_unchanged() {
        for command in [
            "ls",
            "it's $x `y` \\ \"",
            "cat <<'EOF'\n$'a\\n'\nEOF",
            "'; touch /tmp/outside; '",
            "-- --file /etc/passwd",
            "\u{202e}x\n\n",
        ] {
            let output = call(command).unwrap();
            let input = &output["hookSpecificOutput"]["updatedInput"];
            assert_eq!(input["timeout"], 5);
            let text = input["command"].as_str().unwrap();
            // The shell of the host parses the text into the words of the program.
            let script = text.replace("/usr/bin/jiffy", "printf '%s\\0'");
            let words = std::process::Command::new("bash")
                .args(["-c", &script])
                .output();
            let words = String::from_utf8(words.unwrap().stdout).unwrap();
            let words: Vec<&str> = words.trim_end_matches('\0').split('\0').collect();
            assert_eq!(words[..3], ["agent-shell", "exec", "--project"], "{text}");
            assert_eq!(words[4..], ["--", command], "{text}");
            assert!(
                output["hookSpecificOutput"]
                    .get("permissionDecision")
                    .is_none()
            );
        }
    }

    #[test]
    fn inputs_without_a_valid_command_are_denied() {
        assert!(call("a\0b").is_err());
        assert!(call(&"x".repeat(2 << 20)).is_err());
        for input in [
            "",
            "[]",
            "{}",
            r#"{"tool_input": {}}"#,
            r#"{"tool_input": {"command": 1}}"#,
        ] {
            let result = answer(input.as_bytes(), "jiffy", HookOptions::default());
            assert!(result.is_err(), "{input}");
        }
    }
}
