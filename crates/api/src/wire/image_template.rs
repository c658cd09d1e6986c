//! Conversion of CubeSandbox's requests for templates from images.

use super::moment;
use crate::error::ApiError;
use crate::network::check_template;
use jiffy_api_types::{BuildState, ImageBuild, ImageRebuild, MAX_IMAGE_ITEMS, NewImageTemplate};
use jiffy_build_spec::expand::escape;
use jiffy_build_spec::spec::{
    BuildSpec, BuildStage, BuildStep, ImageSource, StageBase, StepAction,
};
use jiffy_engine_api::{Readiness, Startup, TemplateNetwork};
use jiffy_template_builder::{BuildRecord, TemplateRecord, WantedSize};

/// Timeout in seconds within which the probe must succeed.
const READY_S: u32 = 600;
/// Thousandths of a virtual CPU.
const MILLIS_PER_CPU: u32 = 1000;

/// Returns the size of the template's sandboxes.
pub(crate) fn size(new: &NewImageTemplate) -> Result<WantedSize, ApiError> {
    let vcpus = new.cpu.map(|cpu| cpu.div_ceil(MILLIS_PER_CPU).max(1));
    let vcpus = vcpus.map(u8::try_from).transpose();
    let disk = new.writable_layer_size.as_deref().map(mebibytes);
    Ok(WantedSize {
        vcpus: vcpus.map_err(|_| ApiError::invalid("`cpu` is too large"))?,
        memory_mib: new.memory,
        disk_mib: disk.transpose()?,
    })
}

/// Parses a size such as `1G` or `512Mi`, with units of powers of 1024.
fn mebibytes(text: &str) -> Result<u64, ApiError> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = text.get(digits.len()..).unwrap_or_default();
    let unit = unit.trim_end_matches(['B', 'b', 'i']).to_ascii_uppercase();
    let shift = match unit.as_str() {
        "M" => Some(0),
        "G" => Some(10),
        "T" => Some(20),
        _ => None,
    };
    let size = digits.parse::<u64>().ok().zip(shift);
    let size = size.and_then(|(count, shift)| count.checked_mul(1 << shift));
    size.ok_or_else(|| ApiError::invalid("`writableLayerSize` must be a size such as 1G or 512Mi"))
}

/// Rejects fields that a template of this host does not have, and lists that are too long.
fn check(new: &NewImageTemplate) -> Result<(), ApiError> {
    let nodes = new.nodes.as_ref();
    let network = new.network_type.as_deref();
    for (is_unsupported, field) in [
        (nodes.is_some_and(|nodes| !nodes.is_empty()), "nodes"),
        (
            network.is_some_and(|n| !matches!(n, "" | "tap")),
            "networkType",
        ),
        (new.enable_ivshmem == Some(true), "enableIvshmem"),
    ] {
        if is_unsupported {
            return Err(ApiError::unsupported_option(format!(
                "`{field}` is not supported for templates: omit it"
            )));
        }
    }
    let lengths = [
        new.exposed_ports.as_ref().map(Vec::len),
        new.env.as_ref().map(Vec::len),
        new.command.as_ref().map(Vec::len),
        new.args.as_ref().map(Vec::len),
    ];
    if lengths
        .into_iter()
        .flatten()
        .any(|length| length > MAX_IMAGE_ITEMS)
    {
        return Err(ApiError::invalid(format!(
            "a list of the request has more than {MAX_IMAGE_ITEMS} items"
        )));
    }
    Ok(())
}

/// Returns the build of a template from an image.
pub(crate) fn spec(new: NewImageTemplate) -> Result<BuildSpec, ApiError> {
    check(&new)?;
    if new.image.trim().is_empty() {
        return Err(ApiError::invalid("`image` is missing"));
    }
    let network = TemplateNetwork {
        allow_internet_access: new.allow_internet_access,
        allow_out: new.allow_out.unwrap_or_default(),
        deny_out: new.deny_out.unwrap_or_default(),
        dns: new.dns.unwrap_or_default(),
    };
    check_template(&network)?;
    let mut steps = Vec::new();
    let mut add = |text: String, action: StepAction| {
        steps.push(BuildStep {
            text,
            line: None,
            force: false,
            action,
        });
    };
    let env = new.env.unwrap_or_default();
    let pairs = env.iter().map(|pair| {
        let (name, value) = pair
            .split_once('=')
            .ok_or_else(|| ApiError::invalid("the items of `env` must have the form NAME=value"))?;
        Ok((escape(name), escape(value)))
    });
    let pairs = pairs.collect::<Result<Vec<_>, ApiError>>()?;
    if !pairs.is_empty() {
        let names: Vec<&str> = env
            .iter()
            .filter_map(|pair| pair.split('=').next())
            .collect();
        add(format!("ENV {}", names.join(" ")), StepAction::Env(pairs));
    }
    let ports = new.exposed_ports.unwrap_or_default();
    if !ports.is_empty() {
        let ports: Vec<String> = ports.iter().map(|port| format!("{port}/tcp")).collect();
        add(
            format!("EXPOSE {}", ports.join(" ")),
            StepAction::Expose(ports),
        );
    }
    let command = new.command.filter(|words| !words.is_empty());
    let args = new.args.filter(|words| !words.is_empty());
    // The container of CubeSandbox runs the command of its image. Here, this is an option.
    let start_image_command = command.is_some() || args.is_some() || new.probe_port.is_some();
    if let Some(words) = command {
        add(
            format!("ENTRYPOINT {words:?}"),
            StepAction::Entrypoint(words),
        );
    }
    if let Some(words) = args {
        add(format!("CMD {words:?}"), StepAction::Cmd(words));
    }
    let ready = new
        .probe_port
        .filter(|port| *port > 0)
        .map(|port| Readiness {
            port: Some(port),
            path: new.probe_path.filter(|path| !path.is_empty()),
            command: None,
            timeout_s: READY_S,
        });
    Ok(BuildSpec {
        stages: vec![BuildStage {
            name: None,
            from: StageBase::Image(ImageSource {
                reference: new.image.trim().to_owned(),
                credentials: new.registry_username.zip(new.registry_password),
                cloud: None,
                plain_http: false,
            }),
            steps,
        }],
        startup: Startup {
            start: None,
            ready,
            first_use: None,
        },
        start_image_command,
        force: false,
        idle_timeout_s: None,
        network,
        verify_keys: Vec::new(),
        verify_identities: Vec::new(),
        verify_trust_root: None,
    })
}

/// Adds the credentials of a rebuild to the stored request.
pub(crate) fn with_credentials(new: NewImageTemplate, again: ImageRebuild) -> NewImageTemplate {
    NewImageTemplate {
        registry_username: again.registry_username.or(new.registry_username),
        registry_password: again.registry_password,
        ..new
    }
}

/// Returns the response to a started build.
pub(crate) fn started(template: TemplateRecord, build: BuildRecord) -> ImageBuild {
    ImageBuild {
        job_id: build.id.clone(),
        build_id: build.id,
        template_id: template.id,
        name: template.name,
        status: BuildState::Waiting,
        progress: 0,
        created_at: moment(build.created_ms),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn request(body: Value) -> NewImageTemplate {
        serde_json::from_value(body).unwrap()
    }

    #[test]
    fn all_fields_of_cubesandbox_are_used_or_rejected() {
        let new = request(json!({
            "image": " python:3 ", "name": "n", "instanceType": "any", "writableLayerSize": "2Gi",
            "exposedPorts": [80], "probePort": 80, "probePath": "/up", "cpu": 1500, "memory": 512,
            "env": ["A=$b", "C="], "allowInternetAccess": true, "networkType": "tap",
            "nodes": [], "registryUsername": "u", "registryPassword": "p", "command": ["serve"],
            "args": ["-v"], "dns": [], "enableIvshmem": false,
        }));
        let size = size(&new).unwrap();
        assert_eq!(
            (size.vcpus, size.memory_mib, size.disk_mib),
            (Some(2), Some(512), Some(2048))
        );
        assert!(!format!("{new:?}").contains("\"p\""));
        let spec = spec(new).unwrap();
        let StageBase::Image(image) = &spec.stages[0].from else {
            panic!()
        };
        assert_eq!(image.reference, "python:3");
        assert_eq!(image.credentials, Some(("u".to_owned(), "p".to_owned())));
        let actions: Vec<&StepAction> = spec.stages[0].steps.iter().map(|s| &s.action).collect();
        assert_eq!(
            actions,
            [
                &StepAction::Env(vec![
                    ("A".to_owned(), "\\$b".to_owned()),
                    ("C".to_owned(), String::new())
                ]),
                &StepAction::Expose(vec!["80/tcp".to_owned()]),
                &StepAction::Entrypoint(vec!["serve".to_owned()]),
                &StepAction::Cmd(vec!["-v".to_owned()]),
            ]
        );
        assert!(spec.start_image_command);
        let ready = spec.startup.ready.unwrap();
        assert_eq!((ready.port, ready.path.as_deref()), (Some(80), Some("/up")));
        let rules = request(json!({
            "image": "a", "allowInternetAccess": false, "allowOut": ["a.example"],
            "denyOut": ["0.0.0.0/0"], "dns": ["1.1.1.1"],
        }));
        let rules = serde_json::to_value(super::spec(rules).unwrap().network).unwrap();
        let expected = json!({
            "allowInternetAccess": false, "allowOut": ["a.example"], "denyOut": ["0.0.0.0/0"],
            "dns": ["1.1.1.1"],
        });
        assert_eq!(rules, expected);
        for (field, value) in [
            ("denyOut", json!(["a.example"])),
            ("dns", json!(["a.example"])),
            ("nodes", json!(["a"])),
            ("networkType", json!("bridge")),
            ("enableIvshmem", json!(true)),
        ] {
            let refused = super::spec(request(json!({ "image": "a", field: value })));
            let message = refused.unwrap_err().message;
            assert!(message.contains(field), "{message}");
        }
        for bad in [json!({}), json!({ "image": "a", "env": ["x"] })] {
            assert!(super::spec(request(bad.clone())).is_err(), "{bad}");
        }
        let large = request(json!({ "image": "a", "writableLayerSize": "1X" }));
        assert!(super::size(&large).is_err());
    }
}
