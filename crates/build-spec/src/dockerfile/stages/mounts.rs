//! `--mount` flags of `RUN`.

use crate::dockerfile::error::DockerfileError;
use crate::dockerfile::instructions::Instruction;
use crate::dockerfile::stages::StageParser;
use crate::spec::{CopySource, RunMount};
use std::collections::BTreeMap;

/// Maximum number of mounts of one `RUN`.
const MAX_MOUNTS: usize = 64;
/// Directory of secrets without a target.
const SECRETS_DIRECTORY: &str = "/run/secrets";
/// Prefix of the sockets of SSH agents without a target, as in Docker. The number of the mount
/// follows.
const SSH_SOCKET: &str = "/run/buildkit/ssh_agent.";
/// Name of the SSH agent that a mount without an id uses, as in Docker.
const DEFAULT_SSH_ID: &str = "default";
/// Permissions of the sockets of SSH agents, as in Docker.
const SSH_MODE: u32 = 0o600;
/// Permissions of secrets, as in Docker.
const SECRET_MODE: u32 = 0o400;
/// Permissions of new cache directories, as in Docker.
const CACHE_MODE: u32 = 0o755;

/// Options of one mount that were not read yet.
struct MountOptions<'l> {
    line: &'l Instruction,
    kind: String,
    /// Values by name, with quotes and escapes converted.
    values: BTreeMap<String, String>,
}

impl StageParser<'_> {
    /// Parses the value of a `--mount` flag and appends the mount.
    pub(super) fn mount(
        &mut self,
        line: &Instruction,
        value: &str,
        mounts: &mut Vec<RunMount>,
    ) -> Result<(), DockerfileError> {
        if mounts.len() >= MAX_MOUNTS {
            return Err(line.error(format!("at most {MAX_MOUNTS} mounts are supported")));
        }
        let mut options = self.mount_options(line, value)?;
        let mount = match options.kind.as_str() {
            "bind" => {
                let from = match options.take("from") {
                    Some(name) => CopySource::Stage(self.copy_source(line, &name)?),
                    // `context::prepare` sets the name of the archive.
                    None => CopySource::Files(String::new()),
                };
                let source = options.first(&["source", "src"]).unwrap_or_default();
                let read_only = options.flag(&["readonly", "ro"])?;
                let writable = options.flag(&["rw", "readwrite"])?;
                RunMount::Bind {
                    from,
                    source: super::copy::relative(&source),
                    target: options.target()?,
                    writable: writable.unwrap_or(!read_only.unwrap_or(true)),
                }
            }
            "cache" => {
                let target = options.target()?;
                // The option has no effect: builds exchange the content of a cache as archives, so
                // each build has a copy of its own.
                let sharing = options.take("sharing");
                if let Some(sharing) = sharing
                    && !matches!(sharing.as_str(), "shared" | "private" | "locked")
                {
                    return Err(line.error(format!("--mount: sharing={sharing} is unknown")));
                }
                RunMount::Cache {
                    id: options.take("id").unwrap_or_else(|| target.clone()),
                    target,
                    read_only: options.flag(&["readonly", "ro"])?.unwrap_or(false),
                    uid: options.number("uid", 10)?.unwrap_or(0),
                    gid: options.number("gid", 10)?.unwrap_or(0),
                    mode: options.number("mode", 8)?.unwrap_or(CACHE_MODE),
                }
            }
            "tmpfs" => RunMount::Tmpfs {
                target: options.target()?,
                size_bytes: options.size()?,
            },
            "secret" => options.secret()?,
            "ssh" => {
                let is_socket = |mount: &&RunMount| matches!(mount, RunMount::Ssh { .. });
                options.ssh(mounts.iter().filter(is_socket).count())?
            }
            kind => return Err(line.error(format!("--mount=type={kind}: unknown type of mount"))),
        };
        if let Some((name, _)) = options.values.first_key_value() {
            return Err(line.error(format!(
                "--mount=type={}: the option '{name}' is not supported",
                options.kind
            )));
        }
        mounts.push(mount);
        Ok(())
    }

    /// Splits the options at commas outside of double quotes. Quotes around the whole value are
    /// removed before. The type defaults to `bind`.
    fn mount_options<'l>(
        &self,
        line: &'l Instruction,
        value: &str,
    ) -> Result<MountOptions<'l>, DockerfileError> {
        let inner = ['"', '\''].iter().find_map(|quote| {
            let inner = value.strip_prefix(*quote)?;
            inner.strip_suffix(*quote)
        });
        let mut fields = vec![String::new()];
        let mut quoted = false;
        for c in inner.unwrap_or(value).chars() {
            match c {
                '"' => quoted = !quoted,
                ',' if !quoted => fields.push(String::new()),
                c => fields
                    .last_mut()
                    .into_iter()
                    .for_each(|field| field.push(c)),
            }
        }
        let mut values = BTreeMap::new();
        for field in fields {
            let (name, value) = match field.trim().split_once('=') {
                Some((name, value)) => (name, self.word(line, value)?),
                // A name without a value sets an option such as `required`.
                None => (field.trim(), "true".to_owned()),
            };
            let name = name.to_ascii_lowercase();
            if name.is_empty() || values.insert(name.clone(), value).is_some() {
                return Err(
                    line.error(format!("--mount: the option '{name}' is empty or repeated"))
                );
            }
        }
        let kind = values.remove("type").unwrap_or_else(|| "bind".to_owned());
        Ok(MountOptions { line, kind, values })
    }
}

impl MountOptions<'_> {
    fn take(&mut self, name: &str) -> Option<String> {
        self.values.remove(name)
    }

    /// Returns the value of the first of several names for one option.
    fn first(&mut self, names: &[&str]) -> Option<String> {
        names.iter().find_map(|name| self.take(name))
    }

    fn invalid(&self, name: &str, value: &str) -> DockerfileError {
        self.line.error(format!(
            "--mount=type={}: '{value}' is not a valid value of {name}",
            self.kind
        ))
    }

    /// Returns the value of an option that is true or false. The option may have several names.
    fn flag(&mut self, names: &[&str]) -> Result<Option<bool>, DockerfileError> {
        match self.first(names).as_deref() {
            None => Ok(None),
            Some("true" | "1") => Ok(Some(true)),
            Some("false" | "0") => Ok(Some(false)),
            Some(value) => Err(self.invalid(names[0], value)),
        }
    }

    fn number(&mut self, name: &str, radix: u32) -> Result<Option<u32>, DockerfileError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        let number = u32::from_str_radix(&value, radix).ok();
        // Octal numbers are permissions.
        let number = number.filter(|n| radix != 8 || *n <= 0o7777);
        number.map(Some).ok_or_else(|| self.invalid(name, &value))
    }

    /// Returns the `size` of a tmpfs, with an optional unit of powers of 1024.
    fn size(&mut self) -> Result<Option<u64>, DockerfileError> {
        let Some(value) = self.take("size") else {
            return Ok(None);
        };
        let digits = value.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let shift = match value[digits.len()..].to_ascii_lowercase().as_str() {
            "" | "b" => Some(0),
            "k" | "kb" => Some(10),
            "m" | "mb" => Some(20),
            "g" | "gb" => Some(30),
            _ => None,
        };
        let bytes = digits.parse::<u64>().ok().zip(shift);
        let bytes = bytes.and_then(|(count, shift)| count.checked_mul(1 << shift));
        let bytes = bytes.filter(|bytes| *bytes > 0);
        bytes.map(Some).ok_or_else(|| self.invalid("size", &value))
    }

    fn target(&mut self) -> Result<String, DockerfileError> {
        let target = self.first(&["target", "dst", "destination"]);
        // A mount on the root would hide the programs of the image.
        let target = target.filter(|t| !t.trim_matches('/').is_empty());
        target.ok_or_else(|| {
            let kind = &self.kind;
            self.line
                .error(format!("--mount=type={kind}: needs a target other than /"))
        })
    }

    fn secret(&mut self) -> Result<RunMount, DockerfileError> {
        let env = self.take("env");
        let target = self.first(&["target", "dst", "destination"]);
        let id = match (self.take("id"), &target) {
            (Some(id), _) => id,
            // As in Docker, the id defaults to the last component of the target.
            (None, Some(target)) => target.rsplit('/').next().unwrap_or_default().to_owned(),
            (None, None) => env.clone().unwrap_or_default(),
        };
        if id.is_empty() {
            return Err(self.line.error("--mount=type=secret: needs an id"));
        }
        if let Some(name) = env
            .as_deref()
            .filter(|n| n.is_empty() || n.contains(['=', '$']))
        {
            return Err(self.invalid("env", name));
        }
        // With a variable, a file is created only if a target is given.
        let target = match (target, &env) {
            (None, None) => Some(format!("{SECRETS_DIRECTORY}/{id}")),
            (target, _) => target,
        };
        Ok(RunMount::Secret {
            id,
            target,
            env,
            required: self.flag(&["required"])?.unwrap_or(false),
            uid: self.number("uid", 10)?.unwrap_or(0),
            gid: self.number("gid", 10)?.unwrap_or(0),
            mode: self.number("mode", 8)?.unwrap_or(SECRET_MODE),
        })
    }

    /// Returns the mount of an SSH agent. `number` is the number of such mounts before.
    fn ssh(&mut self, number: usize) -> Result<RunMount, DockerfileError> {
        let target = self.first(&["target", "dst", "destination"]);
        let target = target.filter(|t| !t.trim_matches('/').is_empty());
        let id = self.take("id").filter(|id| !id.is_empty());
        Ok(RunMount::Ssh {
            id: id.unwrap_or_else(|| DEFAULT_SSH_ID.to_owned()),
            target: target.unwrap_or_else(|| format!("{SSH_SOCKET}{number}")),
            required: self.flag(&["required"])?.unwrap_or(false),
            uid: self.number("uid", 10)?.unwrap_or(0),
            gid: self.number("gid", 10)?.unwrap_or(0),
            mode: self.number("mode", 8)?.unwrap_or(SSH_MODE),
        })
    }
}
