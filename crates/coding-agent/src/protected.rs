//! Files that the sandbox must not change on the host, because programs of the host execute
//! commands from them.

use crate::tree::{Content, FileState};
use crate::tree_path::TreePath;
use std::path::{Component, Path};

/// Files and directories with settings of coding agents and editors, which start programs.
const SETTINGS: [&[u8]; 13] = [
    b".claude",
    b".codex",
    b".opencode",
    b"opencode.json",
    b"opencode.jsonc",
    b".mcp.json",
    b".cursor",
    b".vscode",
    b".zed",
    b".idea",
    b".envrc",
    b".gemini",
    b".devcontainer",
];
/// Files and directories of a Git directory that start programs, at any depth: submodules have
/// directories of their own.
const GIT_SETTINGS: [&[u8]; 4] = [b"config", b"config.worktree", b"hooks", b"gitdir"];

/// Returns why the sandbox must not set the file at `path` to `state`, or must not remove it if
/// `state` is `None`. Returns `None` if the change is allowed.
pub fn reason(path: &TreePath, state: Option<&FileState>, project: &Path) -> Option<&'static str> {
    // A file `.git` can refer to another Git directory with settings. Its removal is allowed.
    let is_directory = state.is_none_or(FileState::is_directory);
    if is_setting(path) || path.name().eq_ignore_ascii_case(b".git") && !is_directory {
        return Some("programs of the host execute commands from this file");
    }
    match state.map(|state| &state.content) {
        Some(Content::Symlink(target)) if !stays_inside(path, &target.0, project) => {
            Some("the symbolic link leads out of the project directory")
        }
        _ => None,
    }
}

/// True if programs on the host execute or obey the file, for example a hook of Git. Commands in
/// the sandbox must not change such files on the host.
fn is_setting(path: &TreePath) -> bool {
    let names: Vec<Vec<u8>> = path.components().map(<[u8]>::to_ascii_lowercase).collect();
    let is = |name: &Vec<u8>, list: &[&[u8]]| list.contains(&name.as_slice());
    let git = names.iter().position(|name| name == b".git");
    let in_git = git.is_some_and(|at| {
        let inside = &names[at + 1..];
        // A file `commondir` can refer to another Git directory with settings.
        inside
            .iter()
            .any(|name| is(name, &GIT_SETTINGS) || name == b"commondir")
    });
    in_git || names.iter().any(|name| is(name, &SETTINGS))
}

/// Returns whether a symbolic link leads to a path in the project directory. `..` is accepted only
/// at the beginning, because `..` after a link leads to the parent of the link's target.
fn stays_inside(link: &TreePath, target: &[u8], project: &Path) -> bool {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    if target.is_empty() || target.contains(&0) {
        return false;
    }
    let target = Path::new(OsStr::from_bytes(target));
    let (target, mut parents) = match target.strip_prefix(project) {
        Ok(inside) if target.is_absolute() => (inside, 0),
        _ => (target, link.depth() - 1),
    };
    let mut has_name = false;
    target.components().all(|component| match component {
        Component::CurDir => true,
        Component::Normal(_) => {
            has_name = true;
            true
        }
        Component::ParentDir if !has_name && parents > 0 => {
            parents -= 1;
            true
        }
        Component::ParentDir | Component::RootDir | Component::Prefix(_) => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::LinkTarget;

    fn path(text: &str) -> TreePath {
        TreePath::new(text.as_bytes()).unwrap()
    }

    #[test]
    fn files_that_start_programs_of_the_host_are_protected() {
        for name in [
            ".git/config",
            ".git/hooks/post-checkout",
            "vendor/lib/.git/config",
            ".git/modules/lib/config",
            ".GIT/Config",
            ".claude/settings.json",
            "sub/.mcp.json",
            ".vscode/tasks.json",
            ".envrc",
            ".git/worktrees/w/commondir",
        ] {
            assert!(
                reason(&path(name), None, Path::new("/p")).is_some(),
                "{name}"
            );
        }
        for name in [
            "config",
            "hooks/x",
            ".git/index",
            ".git/refs/heads/main",
            "src/git/config",
        ] {
            assert!(
                reason(&path(name), None, Path::new("/p")).is_none(),
                "{name}"
            );
        }
    }

    #[test]
    fn links_must_stay_in_the_project_directory() {
        let allowed = |link: &str, target: &str| {
            let state = FileState {
                mode: 0,
                content: Content::Symlink(LinkTarget(target.into())),
            };
            reason(&path(link), Some(&state), Path::new("/p")).is_none()
        };
        for (link, target) in [
            ("l", "a"),
            ("l", "./a/b"),
            ("d/l", "../a"),
            ("d/e/l", "../../a/b"),
            ("l", "/p/a"),
            ("l", "/p"),
        ] {
            assert!(allowed(link, target), "{link} {target}");
        }
        for (link, target) in [
            ("l", ".."),
            ("l", "../p/a"),
            ("d/l", "../../a"),
            ("l", "d/../a"),
            ("l", "/etc/passwd"),
            ("l", "/p/../etc"),
            ("l", "/pp/a"),
            ("l", ""),
        ] {
            assert!(!allowed(link, target), "{link} {target}");
        }
    }
}
