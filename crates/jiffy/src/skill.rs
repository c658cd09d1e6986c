//! `jiffy skill`: describes the use of sandboxes to coding agents that load skills.

use crate::cli::{CodingAgent, SkillCommand, SkillInstallArgs};
use crate::integrate::directory;
use anyhow::Context;
use jiffy_mcp::ConfigurationChange;
use std::path::PathBuf;
use std::process::ExitCode;

/// The skill.
const SKILL: &str = include_str!("../../../skills/jiffy/SKILL.md");

/// Runs a subcommand.
pub fn run(command: &SkillCommand) -> anyhow::Result<ExitCode> {
    match command {
        SkillCommand::Show => out!("{SKILL}"),
        SkillCommand::Install(args) => install(args)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the directory that has the skills.
fn skills(args: &SkillInstallArgs) -> anyhow::Result<PathBuf> {
    let agent = match (&args.dir, args.agent) {
        (Some(dir), _) => return Ok(dir.clone()),
        (None, agent) => agent.context("name a coding agent, or a directory with --dir")?,
    };
    let (variable, of_user, of_project) = match agent {
        CodingAgent::ClaudeCode => ("CLAUDE_CONFIG_DIR", ".claude", ".claude"),
        CodingAgent::Codex => ("CODEX_HOME", ".codex", ".codex"),
        CodingAgent::Opencode => {
            let config = if args.project {
                PathBuf::from(".opencode")
            } else {
                directory("XDG_CONFIG_HOME", ".config")?.join("opencode")
            };
            return Ok(config.join("skills"));
        }
    };
    let config = if args.project {
        PathBuf::from(of_project)
    } else {
        directory(variable, of_user)?
    };
    Ok(config.join("skills"))
}

/// Writes or removes the skill file, which describes `jiffy` to coding agents.
fn install(args: &SkillInstallArgs) -> anyhow::Result<()> {
    let path = skills(args)?.join("jiffy/SKILL.md");
    let text = if args.remove { "" } else { SKILL };
    let change = ConfigurationChange::of_text(&path, |_| Some(text.to_owned()))?;
    if change.is_empty() {
        outln!("{} needs no change", path.display());
        return Ok(());
    }
    out!("{}:\n{}", path.display(), change.lines());
    if args.dry_run {
        return Ok(());
    }
    if !args.remove {
        return change.apply();
    }
    let context = || format!("cannot remove {}", path.display());
    std::fs::remove_file(&path).with_context(context)?;
    // Ignore the error: the directory may have other files.
    let _ = path.parent().map(std::fs::remove_dir);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(dir: PathBuf, remove: bool, dry_run: bool) -> SkillInstallArgs {
        SkillInstallArgs {
            agent: None,
            project: false,
            dir: Some(dir),
            remove,
            dry_run,
        }
    }

    #[test]
    fn the_skill_is_installed_updated_and_removed_without_a_trace() {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("skills");
        let path = dir.join("jiffy/SKILL.md");
        install(&args(dir.clone(), false, true)).unwrap();
        assert!(!path.exists());
        install(&args(dir.clone(), false, false)).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), SKILL);
        std::fs::write(&path, "older version").unwrap();
        install(&args(dir.clone(), false, false)).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), SKILL);
        install(&args(dir.clone(), true, false)).unwrap();
        assert!(!dir.join("jiffy").exists());
        install(&args(dir, true, false)).unwrap();
    }

    #[test]
    fn the_skill_has_the_header_that_agents_require() {
        let header = SKILL.strip_prefix("---\n").unwrap();
        let (header, _) = header.split_once("\n---\n").unwrap();
        for name in ["name: jiffy", "description: "] {
            assert!(header.lines().any(|line| line.starts_with(name)), "{name}");
        }
    }

    #[test]
    fn each_agent_has_a_directory_of_its_own_in_a_project() {
        let of = |agent| {
            skills(&SkillInstallArgs {
                agent: Some(agent),
                project: true,
                dir: None,
                remove: false,
                dry_run: false,
            })
            .unwrap()
        };
        assert_eq!(of(CodingAgent::ClaudeCode), PathBuf::from(".claude/skills"));
        assert_eq!(of(CodingAgent::Codex), PathBuf::from(".codex/skills"));
        assert_eq!(of(CodingAgent::Opencode), PathBuf::from(".opencode/skills"));
    }
}
