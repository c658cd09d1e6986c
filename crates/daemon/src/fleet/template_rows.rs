//! Publishes the templates of this host to the fleet: a row in the table of template names for each
//! name and tag. Other members find the templates by these rows.
//!
//! A *member* is a host of the fleet. The *home* of a row is the member that has published it.

use jiffy_fleet::node::Node;
use jiffy_fleet::tables::{Action, Tables};
use jiffy_fleet_core::MemberId;
use jiffy_fleet_core::record::{RowKey, Table, TemplateRow};
use jiffy_image::{Home, TemplateSummary, Templates, Visibility};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::time::sleep;

/// Interval at which the templates are compared with the rows.
const INTERVAL: Duration = Duration::from_secs(2);
/// Maximum number of changes per comparison.
const MAX_CHANGES: usize = 100;

/// Publishes the names of the templates that this member manages, until the task is aborted.
pub async fn publish(home: Home, tables: Tables, node: Node) {
    let templates = Templates::new(&home);
    loop {
        sleep(INTERVAL).await;
        // Before the tables are loaded, no row is known.
        if tables.number() == 0 {
            continue;
        }
        let reader = templates.clone();
        let local = tokio::task::spawn_blocking(move || local(&reader)).await;
        let local = match local {
            Ok(Ok(local)) => local,
            // Rows are not removed on missing data.
            Ok(Err(error)) => {
                tracing::warn!(%error, "cannot read the templates of this host, retrying");
                continue;
            }
            Err(_) => continue,
        };
        let members = node.members();
        let is_live = |id: MemberId| members.row(id).is_some_and(|row| row.state.is_live());
        let rows = tables.rows(Table::Templates);
        let rows = rows.iter().filter_map(|row| row.as_template());
        let mut actions = changes(node.id(), &local, rows, is_live);
        actions.truncate(MAX_CHANGES);
        for action in actions {
            if let Err(error) = tables.change(action).await {
                tracing::debug!(%error, "cannot publish the name of a template");
                break;
            }
        }
    }
}

/// Template of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Local {
    version: String,
    /// True if all keys may use the template.
    is_public: bool,
    created_ms: u64,
}

/// Reads the templates of this host, except for stock templates, which all hosts have.
fn local(templates: &Templates) -> Result<BTreeMap<RowKey, Local>, String> {
    let mut local = BTreeMap::new();
    let walked = templates.walk(None, &mut |summary: &TemplateSummary| {
        let reference = &summary.reference;
        if !reference.is_stock() && summary.visibility != Visibility::Internal {
            let key = RowKey::Template(
                reference.owner().map(str::to_owned),
                reference.name().to_owned(),
                reference.tag().to_owned(),
            );
            let template = Local {
                version: summary.version.clone(),
                is_public: summary.visibility == Visibility::Public,
                created_ms: summary.created.saturating_mul(1000),
            };
            local.insert(key, template);
        }
        ControlFlow::Continue(())
    });
    walked.map_err(|e| e.to_string())?;
    Ok(local)
}

/// Returns the changes of the rows of member `own`. A name belongs to the member that published it
/// first. Another member takes it over if the former one is not alive and the template is newer.
fn changes<'a>(
    own: MemberId,
    local: &BTreeMap<RowKey, Local>,
    rows: impl Iterator<Item = &'a TemplateRow>,
    is_live: impl Fn(MemberId) -> bool,
) -> Vec<Action> {
    let key =
        |row: &TemplateRow| RowKey::Template(row.owner.clone(), row.name.clone(), row.tag.clone());
    let rows: BTreeMap<RowKey, &TemplateRow> = rows.map(|row| (key(row), row)).collect();
    let mut actions = Vec::new();
    for (key, template) in local {
        let is_due = match rows.get(key) {
            None => true,
            Some(row) if row.home == Some(own) => {
                row.template_version != template.version || row.public != template.is_public
            }
            Some(row) => {
                let is_abandoned = row.home.is_none_or(|home| !is_live(home));
                is_abandoned && template.created_ms > row.updated_ms
            }
        };
        if let (true, RowKey::Template(owner, name, tag)) = (is_due, key) {
            actions.push(Action::PutTemplate(TemplateRow {
                owner: owner.clone(),
                name: name.clone(),
                tag: tag.clone(),
                template_version: template.version.clone(),
                root: None,
                home: Some(own),
                public: template.is_public,
                updated_ms: now_ms(),
                unknown: Default::default(),
            }));
        }
    }
    for (key, row) in rows {
        if row.home == Some(own) && !local.contains_key(&key) {
            actions.push(Action::RemoveTemplate {
                owner: row.owner.clone(),
                name: row.name.clone(),
                tag: row.tag.clone(),
            });
        }
    }
    actions
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: MemberId = MemberId(1);
    const OTHER: MemberId = MemberId(2);

    fn key(name: &str) -> RowKey {
        RowKey::Template(Some("k1".to_owned()), name.to_owned(), "default".to_owned())
    }

    /// Returns a template whose files are on the member `home`.
    fn row(name: &str, home: MemberId, version: &str) -> TemplateRow {
        TemplateRow {
            owner: Some("k1".to_owned()),
            name: name.to_owned(),
            tag: "default".to_owned(),
            template_version: version.to_owned(),
            root: None,
            home: Some(home),
            public: false,
            updated_ms: 1_000,
            unknown: Default::default(),
        }
    }

    fn template(version: &str, created_ms: u64) -> Local {
        Local {
            version: version.to_owned(),
            is_public: false,
            created_ms,
        }
    }

    /// Returns `+name` for each published name and `-name` for each removed one.
    fn names(local: &[(&str, Local)], rows: &[TemplateRow], is_other_live: bool) -> Vec<String> {
        let local = local
            .iter()
            .map(|(name, l)| (key(name), l.clone()))
            .collect();
        let is_live = |id| id == OWN || is_other_live;
        let changes = changes(OWN, &local, rows.iter(), is_live);
        let name = |action| match action {
            Action::PutTemplate(row) => {
                assert_eq!(row.home, Some(OWN));
                format!("+{}", row.name)
            }
            Action::RemoveTemplate { name, .. } => format!("-{name}"),
            other => panic!("{other:?}"),
        };
        changes.into_iter().map(name).collect()
    }

    #[test]
    fn a_member_publishes_its_templates_and_removes_its_own_names_only() {
        let local = [("new", template("v1", 0)), ("built", template("v2", 0))];
        let rows = [
            row("built", OWN, "v1"),
            row("removed", OWN, "v1"),
            row("foreign", OTHER, "v1"),
        ];
        assert_eq!(names(&local, &rows, true), ["+built", "+new", "-removed"]);
        let current = [row("new", OWN, "v1"), row("built", OWN, "v2")];
        assert!(names(&local, &current, true).is_empty());
    }

    #[test]
    fn a_name_of_a_live_member_is_not_taken_over_and_a_copy_never() {
        let rows = [row("web", OTHER, "v1")];
        let copy = [("web", template("v1", 500))];
        let newer = [("web", template("v2", 2_000))];
        assert!(names(&copy, &rows, true).is_empty());
        assert!(names(&newer, &rows, true).is_empty());
        assert!(names(&copy, &rows, false).is_empty());
        assert_eq!(names(&newer, &rows, false), ["+web"]);
    }
}
