//! `jiffy mcp install`: entry of the server in the configuration file of a client.

pub mod jsonc;

use anyhow::{Context, ensure};
use serde_json::json;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Name of the entry.
const NAME: &str = "jiffy";
/// Header of the entry in the configuration of Codex.
const TOML_HEADER: &str = "[mcp_servers.jiffy]";

/// Client whose configuration file is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum McpClient {
    /// Claude Code.
    Claude,
    /// Codex.
    Codex,
    /// Cursor.
    Cursor,
    /// Visual Studio Code.
    Vscode,
    /// Zed.
    Zed,
}

/// Change of a configuration file.
#[derive(Debug, PartialEq)]
pub struct ConfigurationChange {
    /// Configuration file.
    pub path: PathBuf,
    old: String,
    new: String,
}

impl McpClient {
    /// Returns the configuration file. `home` is the home directory, and `config` the directory for
    /// configuration files.
    fn path(self, home: &Path, config: &Path) -> PathBuf {
        match self {
            Self::Claude => home.join(".claude.json"),
            Self::Codex => home.join(".codex/config.toml"),
            Self::Cursor => home.join(".cursor/mcp.json"),
            Self::Vscode => config.join("Code/User/mcp.json"),
            Self::Zed => config.join("zed/settings.json"),
        }
    }

    /// Returns the object with the servers in a JSON file.
    fn section(self) -> &'static str {
        match self {
            Self::Vscode => "servers",
            Self::Zed => "context_servers",
            Self::Claude | Self::Codex | Self::Cursor => "mcpServers",
        }
    }

    /// Returns `text` with the entry for `command`, or without the entry.
    fn edit(self, text: &str, command: Option<&[String]>) -> Option<String> {
        if self == Self::Codex {
            let rest = without_table(text);
            let Some([program, arguments @ ..]) = command else {
                return Some(rest);
            };
            // A JSON string without control characters is a TOML string.
            let entry = format!(
                "{TOML_HEADER}\ncommand = {}\nargs = {}\n",
                json!(program),
                json!(arguments)
            );
            let separator = match rest.as_str() {
                "" => "",
                rest if rest.ends_with('\n') => "\n",
                _ => "\n\n",
            };
            return Some([&rest, separator, &entry].concat());
        }
        let Some([program, arguments @ ..]) = command else {
            return jsonc::remove(text, self.section(), NAME);
        };
        let (program, arguments) = (json!(program), json!(arguments));
        let kind = match self {
            Self::Claude | Self::Vscode => r#""type": "stdio", "#,
            Self::Codex | Self::Cursor | Self::Zed => "",
        };
        let entry = format!(r#"{{{kind}"command": {program}, "args": {arguments}}}"#);
        jsonc::set(text, self.section(), NAME, &entry)
    }
}

/// Returns a TOML text without the table of the entry.
fn without_table(text: &str) -> String {
    let mut rest = String::new();
    let mut is_entry = false;
    for line in text.split_inclusive('\n') {
        if line.trim_start().starts_with('[') {
            is_entry = line.trim() == TOML_HEADER;
            if is_entry && rest.ends_with("\n\n") {
                // The empty line before the entry belongs to the entry.
                rest.pop();
            }
        }
        if !is_entry {
            rest.push_str(line);
        }
    }
    rest
}

impl ConfigurationChange {
    /// Returns the change of the configuration file that adds an entry for `command`, or removes
    /// the entry.
    pub fn new(client: McpClient, command: Option<&[String]>) -> anyhow::Result<Self> {
        let home = PathBuf::from(std::env::var_os("HOME").context("HOME is not set")?);
        let config = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
        let config = config.unwrap_or_else(|| home.join(".config"));
        Self::of_file(client, &client.path(&home, &config), command)
    }

    /// Returns the change of the file at `path` by `edit`, which returns `None` for a text with an
    /// unknown format. A missing file is an empty text.
    pub fn of_text(path: &Path, edit: impl FnOnce(&str) -> Option<String>) -> anyhow::Result<Self> {
        // A link to the file remains a link.
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let old = match fs::read_to_string(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(String::new()),
            result => result,
        };
        let old = old.with_context(|| format!("cannot read {}", path.display()))?;
        let new = edit(&old);
        let new = new.with_context(|| {
            format!(
                "{} has an unknown format and was not changed: repair it, or change it by hand",
                path.display()
            )
        })?;
        Ok(Self { path, old, new })
    }

    fn of_file(client: McpClient, path: &Path, command: Option<&[String]>) -> anyhow::Result<Self> {
        let change = Self::of_text(path, |text| client.edit(text, command))?;
        if client == McpClient::Codex {
            let parsed = change.new.parse::<toml::Table>();
            parsed.with_context(|| format!("cannot change {}", change.path.display()))?;
        }
        Ok(change)
    }

    /// Returns whether the file already is as requested.
    pub fn is_empty(&self) -> bool {
        self.old == self.new
    }

    /// Returns the changed lines, with `-` and `+`.
    pub fn lines(&self) -> String {
        let (old, new): (Vec<_>, Vec<_>) = (self.old.lines().collect(), self.new.lines().collect());
        let same = |(a, b): &(&&str, &&str)| a == b;
        // Omits the equal lines at the beginning and at the end.
        let start = old.iter().zip(&new).take_while(same).count();
        let (old, new) = (&old[start..], &new[start..]);
        let end = old
            .iter()
            .rev()
            .zip(new.iter().rev())
            .take_while(same)
            .count();
        let removed = old[..old.len() - end]
            .iter()
            .map(|line| format!("-{line}\n"));
        let added = new[..new.len() - end]
            .iter()
            .map(|line| format!("+{line}\n"));
        removed.chain(added).collect()
    }

    /// Writes the file. Fails if the file was changed meanwhile.
    pub fn apply(&self) -> anyhow::Result<()> {
        let context = || format!("cannot write {}", self.path.display());
        let directory = self.path.parent().with_context(context)?;
        fs::create_dir_all(directory).with_context(context)?;
        let current = fs::read_to_string(&self.path).unwrap_or_default();
        ensure!(
            current == self.old,
            "{} was changed by another program: repeat the command",
            self.path.display()
        );
        let mode = fs::metadata(&self.path).map_or(0o600, |m| m.permissions().mode() & 0o777);
        let temporary = self.path.with_extension(crate::session::random_word());
        let mut options = fs::OpenOptions::new();
        let file = options
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&temporary);
        let write = file.and_then(|mut file| {
            file.write_all(self.new.as_bytes())?;
            file.sync_all()?;
            fs::rename(&temporary, &self.path)
        });
        if write.is_err() {
            // Ignore the error: the write error is reported.
            let _ = fs::remove_file(&temporary);
        }
        write.with_context(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [McpClient; 5] = [
        McpClient::Claude,
        McpClient::Codex,
        McpClient::Cursor,
        McpClient::Vscode,
        McpClient::Zed,
    ];

    fn command() -> Vec<String> {
        ["/usr/bin/jiffy", "mcp"].map(str::to_owned).to_vec()
    }

    fn change(client: McpClient, path: &Path, command: Option<&[String]>) -> ConfigurationChange {
        let change = ConfigurationChange::of_file(client, path, command).unwrap();
        change.apply().unwrap();
        change
    }

    #[test]
    fn an_installation_can_be_repeated_and_reverted_and_preserves_the_rest() {
        let directory = tempfile::tempdir().unwrap();
        for client in ALL {
            let (path, section) = (directory.path().join("file"), client.section());
            let text = match client {
                McpClient::Codex => {
                    "model = \"x\"\n\n[mcp_servers.other]\ncommand = \"y\"\n".into()
                }
                _ => format!(
                    "{{\n  // note\n  \"{section}\": {{\"other\": {{}}}},\n  \"a\": 1\n}}\n"
                ),
            };
            fs::write(&path, &text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
            let added = change(client, &path, Some(&command()));
            assert!(
                added.lines().contains("/usr/bin/jiffy"),
                "{}",
                added.lines()
            );
            assert!(change(client, &path, Some(&command())).is_empty());
            change(client, &path, None);
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
            let mode = fs::metadata(&path).unwrap().permissions().mode() & 0o777;
            assert_eq!(mode, 0o640);
            assert!(change(client, &path, None).is_empty());
        }
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn missing_files_are_created_and_damaged_files_are_not_changed() {
        let directory = tempfile::tempdir().unwrap();
        for (number, client) in ALL.into_iter().enumerate() {
            let path = directory.path().join(format!("{number}/file"));
            change(client, &path, Some(&command()));
            assert!(fs::read_to_string(&path).unwrap().contains("\"mcp\""));
            fs::write(&path, "mcp_servers = {").unwrap();
            let result = ConfigurationChange::of_file(client, &path, Some(&command()));
            assert!(result.is_err(), "{client:?}");
        }
    }

    #[test]
    fn a_file_that_changed_meanwhile_is_not_overwritten() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let command = command();
        let change = ConfigurationChange::of_file(McpClient::Cursor, &path, Some(&command));
        fs::write(&path, "{}").unwrap();
        assert!(change.unwrap().apply().is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), "{}");
    }
}
