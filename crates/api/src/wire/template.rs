//! Conversion of templates to the bodies of the API.

use super::moment;
use crate::hooks::TemplateInfo;
use jiffy_api_types::{Moment, Template, TemplateBuildStatus};
use jiffy_image::{Reference, Visibility};
use jiffy_proto::agent::ENVD_VERSION;
use jiffy_template_builder::TemplateRecord;

/// Returns a build id for a template that this host did not build: its version in the form of a
/// UUID. All zeros if the template has not been built yet.
pub(crate) fn build_id(info: &TemplateInfo) -> String {
    let sum = info.version.as_deref().unwrap_or_default();
    let digits: String = sum
        .chars()
        .filter(char::is_ascii_hexdigit)
        .take(32)
        .collect();
    // Pad a missing or short version with zeros.
    let digits = format!("{digits:0<32}");
    [0..8, 8..12, 12..16, 16..20, 20..32]
        .map(|part| digits.get(part).unwrap_or_default().to_owned())
        .join("-")
}

/// Returns the list entry of a template. `called` is its name as shown to the caller, `build` is
/// the id of the build that created it, and `names` are its references with all tags. A template
/// that was built on this host has an id of its own. The id of any other template is its name.
pub(crate) fn listed(
    info: &TemplateInfo,
    called: &str,
    record: Option<&TemplateRecord>,
    build: &str,
    names: &[String],
) -> Template {
    Template {
        template_id: record.map_or(called, |r| &r.id).to_owned(),
        build_id: build.to_owned(),
        cpu_count: info.size.vcpus,
        memory_mb: info.size.memory_mib,
        disk_size_mb: info.size.disk_mib,
        public: info.visibility == Visibility::Public,
        aliases: vec![called.to_owned()],
        names: names.to_vec(),
        created_at: record.map_or_else(|| created(info), |r| moment(r.created_ms)),
        updated_at: created(info),
        created_by: (),
        last_spawned_at: (),
        spawn_count: 0,
        build_count: 1,
        envd_version: ENVD_VERSION.to_owned(),
        build_status: TemplateBuildStatus::Ready,
        is_default: is_stock(info),
        network: info.network.as_deref().cloned(),
        allow_internet_access: info.network.as_ref().and_then(|n| n.allow_internet_access),
        builds: None,
    }
}

/// Returns whether the recipe of a template is part of this program.
fn is_stock(info: &TemplateInfo) -> bool {
    Reference::parse(&info.reference()).is_ok_and(|reference| reference.is_stock())
}

/// Returns the time of the build.
pub(crate) fn created(info: &TemplateInfo) -> Moment {
    moment(info.created.saturating_mul(1000))
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_engine_api::SandboxSize;

    #[test]
    fn a_build_is_named_by_its_image() {
        let mut info = TemplateInfo {
            name: "x".to_owned(),
            owner: None,
            visibility: Visibility::Private,
            tag: "default".to_owned(),
            version: Some("0123456789abcdef".repeat(4)),
            size: SandboxSize::default(),
            idle_timeout_s: None,
            network: Default::default(),
            created: 1,
        };
        assert_eq!(build_id(&info), "01234567-89ab-cdef-0123-456789abcdef");
        info.version = None;
        assert_eq!(build_id(&info), "00000000-0000-0000-0000-000000000000");
    }
}
