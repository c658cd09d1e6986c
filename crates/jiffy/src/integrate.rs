//! `jiffy integrate`: makes a coding agent run its shell commands in a sandbox.

use crate::cli::{CodingAgent, HookArgs, IntegrateArgs};
use anyhow::Context;
use jiffy_coding_agent::{HookOptions, answer_hook, quote};
use jiffy_mcp::{ConfigurationChange, jsonc};
use serde_json::json;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Part of the hook's command that identifies it in a configuration file.
const MARKER: &str = " agent-shell hook ";
/// Maximum size of the input of a hook in bytes.
const MAX_INPUT_BYTES: u64 = 16 << 20;
/// Exit status with which a hook denies a call.
const DENIED: u8 = 2;
/// Plugin of OpenCode.
const OPENCODE_PLUGIN: &str = include_str!("../../../integrations/opencode/jiffy.js");
/// Line of the plugin with the path of the program.
const PLUGIN_PROGRAM: &str = "const PROGRAM = \"jiffy\";";
/// Line of the plugin with the arguments of the hook.
const PLUGIN_WORDS: &str = r#""agent-shell", "hook", "opencode""#;

/// Returns the path of this program.
fn program() -> anyhow::Result<String> {
    let program = std::env::current_exe().context("cannot find the path of this program")?;
    let program = program.into_os_string().into_string().ok();
    program.context("the path of this program is not UTF-8")
}

/// Returns the directory of an agent's configuration: the value of a variable, or a directory of
/// the home directory.
pub fn directory(variable: &str, default: &str) -> anyhow::Result<PathBuf> {
    if let Some(directory) = std::env::var_os(variable).filter(|value| !value.is_empty()) {
        return Ok(PathBuf::from(directory));
    }
    let home = std::env::var_os("HOME").context("HOME is not set")?;
    Ok(Path::new(&home).join(default))
}

/// Returns the file of an agent that the integration changes.
fn file(agent: CodingAgent) -> anyhow::Result<PathBuf> {
    Ok(match agent {
        CodingAgent::ClaudeCode => directory("CLAUDE_CONFIG_DIR", ".claude")?.join("settings.json"),
        CodingAgent::Codex => directory("CODEX_HOME", ".codex")?.join("hooks.json"),
        CodingAgent::Opencode => {
            let config = directory("XDG_CONFIG_HOME", ".config")?;
            config.join("opencode/plugins/jiffy.js")
        }
    })
}

/// Returns the new text of the file.
fn edit(text: &str, args: &IntegrateArgs, program: &str) -> Option<String> {
    let allow = if args.allow { " --allow" } else { "" };
    let agent = args.agent.name();
    if args.agent == CodingAgent::Opencode {
        let words = if args.allow { r#", "--allow""# } else { "" };
        let plugin = OPENCODE_PLUGIN
            .replace(
                PLUGIN_PROGRAM,
                &format!("const PROGRAM = {};", json!(program)),
            )
            .replace(PLUGIN_WORDS, &format!("{PLUGIN_WORDS}{words}"));
        return Some(if args.remove { String::new() } else { plugin });
    }
    let (section, event) = ("hooks", "PreToolUse");
    if args.remove {
        return jsonc::remove_element(text, section, event, MARKER);
    }
    // A hook that cannot be started must not let the command run.
    let command = format!("{}{MARKER}{agent}{allow} || exit {DENIED}", quote(program));
    let hook = json!({ "type": "command", "command": command });
    let element = format!(r#"{{"matcher": "^Bash$", "hooks": [{hook}]}}"#);
    jsonc::add_element(text, section, event, &element, MARKER)
}

/// Installs or removes the integration.
pub fn run(args: &IntegrateArgs) -> anyhow::Result<ExitCode> {
    let (path, program) = (file(args.agent)?, program()?);
    let change = ConfigurationChange::of_text(&path, |text| edit(text, args, &program))?;
    if change.is_empty() {
        outln!("{} needs no change", path.display());
        return Ok(ExitCode::SUCCESS);
    }
    out!("{}:\n{}", path.display(), change.lines());
    if args.dry_run {
        return Ok(ExitCode::SUCCESS);
    }
    if args.agent == CodingAgent::Opencode && args.remove {
        let context = || format!("cannot remove {}", path.display());
        std::fs::remove_file(&path).with_context(context)?;
    } else {
        change.apply()?;
    }
    if args.agent == CodingAgent::Codex && !args.remove {
        outln!("Start Codex, review the hook with /hooks and trust it: until then it does not run");
    }
    Ok(ExitCode::SUCCESS)
}

/// `jiffy agent-shell hook`: answers the hook of a coding agent. Every error denies the call.
pub fn hook(args: &HookArgs) -> ExitCode {
    let answer = || {
        let mut input = Vec::new();
        let mut limited = std::io::stdin().take(MAX_INPUT_BYTES);
        limited
            .read_to_end(&mut input)
            .context("cannot read the call")?;
        let options = HookOptions {
            // Codex accepts a replaced command only with this decision.
            allow: args.allow || args.agent == CodingAgent::Codex,
            // The shell of Claude Code keeps its working directory between commands, and the
            // session in the sandbox keeps it as well. The other agents start each command in a
            // directory of their choice, so the command must run in the same directory of the
            // sandbox.
            uses_current_directory: args.agent != CodingAgent::ClaudeCode,
        };
        let output = answer_hook(&input, &program()?, options)?;
        let mut stdout = std::io::stdout();
        stdout.write_all(output.to_string().as_bytes())?;
        anyhow::Ok(stdout.flush()?)
    };
    match answer() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            errln!(
                "jiffy: the command was not run: {}",
                crate::error_text::describe(&e)
            );
            ExitCode::from(DENIED)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the arguments that remove the integration if `remove` is true, or else add it.
    fn args(agent: CodingAgent, remove: bool) -> IntegrateArgs {
        IntegrateArgs {
            agent,
            allow: !remove,
            remove,
            dry_run: false,
        }
    }

    #[test]
    fn the_hook_is_added_and_removed_and_the_rest_is_preserved() {
        let other = r#"{"matcher": "Bash", "hooks": [{"type": "command", "command": "x"}]}"#;
        let text =
            format!("{{\n  \"model\": \"m\",\n  \"hooks\": {{\"PreToolUse\": [{other}]}}\n}}\n");
        for agent in [CodingAgent::ClaudeCode, CodingAgent::Codex] {
            let added = edit(&text, &args(agent, false), "/opt/a b/jiffy").unwrap();
            let value: serde_json::Value = serde_json::from_str(&added).unwrap();
            let hooks = value["hooks"]["PreToolUse"].as_array().unwrap();
            assert_eq!(hooks.len(), 2);
            let command = hooks[0]["hooks"][0]["command"].as_str().unwrap();
            let name = agent.name();
            let expected = format!("'/opt/a b/jiffy' agent-shell hook {name} --allow || exit 2");
            assert_eq!(command, expected);
            assert_eq!(
                edit(&added, &args(agent, false), "/opt/a b/jiffy").unwrap(),
                added
            );
            assert_eq!(edit(&added, &args(agent, true), "").unwrap(), text);
        }
        let plugin = edit("", &args(CodingAgent::Opencode, false), "/opt/jiffy").unwrap();
        assert!(plugin.contains("PROGRAM = \"/opt/jiffy\";"), "{plugin}");
        assert!(
            plugin.contains(r#""hook", "opencode", "--allow"]"#),
            "{plugin}"
        );
    }
}
