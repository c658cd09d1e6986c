//! Template names in a fleet: finds the member and the version that a name denotes, in a table that
//! all members hold in memory.
//!
//! A *member* is a host of the fleet. The *tables* of the fleet contain API keys and template
//! names. Each member has a copy in memory.
//!
//! Each member publishes the names of the templates that it manages. A name therefore denotes the
//! same template on all members, also on members that have another template of this name.

use super::Fleet;
use crate::app::App;
use crate::caller::Caller;
use crate::hooks::TemplateInfo;
use jiffy_engine_api::is_id;
use jiffy_fleet::tables::Tables;
use jiffy_fleet_core::MemberId;
use jiffy_fleet_core::record::Table;
use jiffy_image::{DEFAULT_TAG, Reference};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// Template with a tag, as the fleet knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedTemplate {
    /// Key that owns the template. `None` for the owner of the fleet.
    pub owner: Option<String>,
    /// Member that manages the template.
    pub home: MemberId,
    /// Version.
    pub version: String,
}

/// Names of the templates of all members.
pub trait TemplateNames: Send + Sync {
    /// Returns the template with this name and tag.
    fn find(&self, owner: Option<&str>, name: &str, tag: &str) -> Option<NamedTemplate>;
    /// Returns whether a template has this name, with any tag.
    fn contains(&self, owner: Option<&str>, name: &str) -> bool;
}

/// Tags of the templates with one name.
type Tags = HashMap<String, NamedTemplate>;
type Index = HashMap<(Option<String>, String), Tags>;

/// Names in the tables of the fleet.
pub struct TableNames {
    tables: Tables,
    /// Index of the rows, with the number of the commit of the tables from which it was built.
    index: Mutex<(u64, Arc<Index>)>,
}

impl TableNames {
    /// Returns the names in `tables`.
    #[must_use]
    pub fn new(tables: Tables) -> Self {
        Self {
            tables,
            index: Mutex::default(),
        }
    }

    /// Returns the index of the template names. Builds it again if the tables have changed.
    fn index(&self) -> Arc<Index> {
        let number = self.tables.number();
        let mut index = self.index.lock();
        if index.0 != number {
            let mut new = Index::new();
            for row in self.tables.rows(Table::Templates) {
                let Some(row) = row.as_template() else {
                    continue;
                };
                let Some(home) = row.home else { continue };
                let template = NamedTemplate {
                    owner: row.owner.clone(),
                    home,
                    version: row.template_version.clone(),
                };
                let tags = new.entry((row.owner.clone(), row.name.clone()));
                tags.or_default().insert(row.tag.clone(), template);
            }
            *index = (number, Arc::new(new));
        }
        index.1.clone()
    }
}

impl TemplateNames for TableNames {
    fn find(&self, owner: Option<&str>, name: &str, tag: &str) -> Option<NamedTemplate> {
        let key = (owner.map(str::to_owned), name.to_owned());
        self.index().get(&key)?.get(tag).cloned()
    }

    fn contains(&self, owner: Option<&str>, name: &str) -> bool {
        let key = (owner.map(str::to_owned), name.to_owned());
        self.index().contains_key(&key)
    }
}

impl Fleet {
    /// Adds the names of the templates of all members. Without them, members find templates only by
    /// probes: calls to all members, which answer whether they have the template.
    pub fn set_template_names(&mut self, names: Arc<dyn TemplateNames>) {
        self.template_names = Some(names);
    }

    /// Returns the template that a text of a caller denotes, if its name is in the table.
    pub(super) fn named_template(&self, caller: &Caller, text: &str) -> Option<NamedTemplate> {
        let names = self.template_names.as_ref()?;
        if is_id(text) {
            return None;
        }
        let reference = Reference::parse(text).ok()?;
        let name = reference.name();
        let find = |owner: Option<&str>| {
            // Every template implicitly has the tag `latest`, which denotes the same version as its
            // default tag.
            let implicit = || names.find(owner, name, DEFAULT_TAG);
            let exact = names.find(owner, name, reference.tag());
            exact.or_else(|| implicit().filter(|_| reference.tag() == "latest"))
        };
        match (reference.owner(), caller.owner_scope()) {
            // The templates of a key precede shared templates.
            (None, Some(key)) => find(Some(key)).or_else(|| find(None)),
            (owner, _) => find(owner),
        }
    }
}

impl App {
    /// Returns whether this host has the version of a template that its name denotes.
    pub(super) fn has_version(&self, caller: &Caller, text: &str, named: &NamedTemplate) -> bool {
        let found: Option<TemplateInfo> = self.template(caller, text).ok();
        found.is_some_and(|found| {
            found.owner == named.owner && found.version.as_deref() == Some(&named.version)
        })
    }

    /// Returns whether a template of the fleet has this name (`[owner/]name`).
    pub(crate) fn is_named_in_fleet(&self, name: &str) -> bool {
        let names = self
            .fleet
            .as_ref()
            .and_then(|fleet| fleet.template_names.as_ref());
        let Some((names, reference)) = names.zip(Reference::parse(name).ok()) else {
            return false;
        };
        names.contains(reference.owner(), reference.name())
    }
}
