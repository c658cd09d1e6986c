//! Import of an image or a root file system by `jiffy template build`, in this process and without
//! a daemon.

use super::signatures::RequiredSignatures;
use crate::cli::{TemplateBuildArgs, TemplateSource};
use anyhow::bail;
use jiffy_engine_api::Readiness;
use jiffy_image::{
    DiskBudget, Import, ImportSource, ImportStart, RegistryAccess, UnpackLimits, Visibility,
};
use jiffy_registry_pull::{Cancel, Registries};
use std::path::Path;

/// Error of `--ready-port` without a start command.
const NO_START_COMMAND: &str = "--ready-port needs a process that listens on the port: add --start COMMAND \
     or --start-image-command";

/// Maximum number of characters of a derived template name.
const MAX_NAME_LENGTH: usize = 63;

/// Returns the import that the arguments request. `None` if they specify neither an image nor an
/// archive nor a directory.
pub fn requested(args: &TemplateBuildArgs) -> anyhow::Result<Option<Import>> {
    let TemplateSource {
        image,
        from_tar,
        from_dir,
    } = &args.source;
    let (source, suggested) = match (image, from_tar, from_dir) {
        (Some(reference), ..) => {
            let registries = Registries {
                plain_http: args.plain_http.clone(),
                allowed: args.registry_allow.clone(),
                mirrors: args.registry_mirror.clone().into(),
                ..Registries::default()
            };
            let source = ImportSource::Registry {
                reference: reference.clone(),
                access: RegistryAccess::Host,
                pull: registries.pull(false, &Cancel::new()?),
            };
            (source, name_of_image(reference))
        }
        (_, Some(path), _) => {
            // Standard input is opened as a file, which has no name for the template.
            let is_stdin = path.as_os_str() == "-";
            let path = if is_stdin {
                Path::new("/dev/stdin")
            } else {
                path
            };
            let name = if is_stdin {
                String::new()
            } else {
                name_of_file(path)
            };
            (ImportSource::Archive(path.to_owned()), name)
        }
        (.., Some(path)) => (ImportSource::Directory(path.clone()), name_of_file(path)),
        _ => return Ok(None),
    };
    let starts = args.start.is_some() || args.start_image_command;
    if args.ready_port.is_some() && !starts {
        bail!("{NO_START_COMMAND}");
    }
    let name = args.name.clone().unwrap_or(suggested);
    if name.is_empty() {
        bail!("the template needs a name: specify it with --name");
    }
    Ok(Some(Import {
        name,
        visibility: args.public.then_some(Visibility::Public),
        source,
        vcpus: args.cpus,
        memory_mib: args.memory,
        disk_mib: args.disk,
        start: match &args.start {
            Some(line) => ImportStart::Command(line.clone()),
            None if args.start_image_command => ImportStart::Image,
            None => ImportStart::Nothing,
        },
        ready: readiness(args),
        limits: UnpackLimits::default(),
        disk: DiskBudget::default(),
        signatures: RequiredSignatures::read(&args.signatures)?.policy()?,
    }))
}

/// Returns the condition to wait for before the snapshot of the template is taken.
pub fn readiness(args: &TemplateBuildArgs) -> Option<Readiness> {
    if args.ready_port.is_none() && args.ready_command.is_none() {
        return None;
    }
    Some(Readiness {
        port: args.ready_port,
        path: args.ready_path.clone(),
        command: args.ready_command.clone(),
        timeout_s: u32::try_from(args.ready_timeout.as_secs()).unwrap_or(u32::MAX),
    })
}

/// Derives a template name from an image: `ghcr.io/me/App:1.2@sha256:…` becomes `app-1.2`. The tag
/// `latest` is omitted.
fn name_of_image(reference: &str) -> String {
    // A digest is too long for a name.
    let tagged = reference.split('@').next().unwrap_or_default();
    let last = tagged.rsplit('/').next().unwrap_or_default();
    let name = match last.split_once(':') {
        Some((name, "latest")) => name.to_owned(),
        Some((name, tag)) => format!("{name}-{tag}"),
        None => last.to_owned(),
    };
    valid_name(&name)
}

/// Derives a template name from a file: `dist/App.tar.gz` becomes `app`.
fn name_of_file(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let name = name.split(".tar").next().unwrap_or_default();
    valid_name(name.strip_suffix(".tgz").unwrap_or(name))
}

/// Replaces invalid characters of a derived template name, and cuts it to [`MAX_NAME_LENGTH`]. The
/// importer rejects names that are still invalid.
pub fn valid_name(name: &str) -> String {
    let is_valid = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "._-".contains(c);
    let name = name.to_ascii_lowercase();
    name.chars()
        .map(|c| if is_valid(c) { c } else { '-' })
        .take(MAX_NAME_LENGTH)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_name_of_a_template_is_derived_from_its_image() {
        for (reference, name) in [
            ("alpine", "alpine"),
            ("python:3.12-slim", "python-3.12-slim"),
            ("ghcr.io/Me/App:latest", "app"),
            ("localhost:5000/app", "app"),
            ("app:1@sha256:abc", "app-1"),
            ("app@sha256:abc", "app"),
        ] {
            assert_eq!(name_of_image(reference), name);
        }
        assert_eq!(name_of_file(Path::new("/x/My App.tar.gz")), "my-app");
        assert_eq!(name_of_file(Path::new("root.tgz")), "root");
    }
}
