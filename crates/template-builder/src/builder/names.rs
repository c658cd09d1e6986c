//! Resolution of template names: determines which template an id or a name means for a caller, and
//! whether the caller may see it.
//!
//! A *stock template* is a template whose recipe Jiffy contains. A *recipe* is a directory with the
//! packages, files and settings of a template.

use super::records::{BuildRecords, BuildStatus, RecordError, TemplateRecord};
use jiffy_engine_api::is_id;
use jiffy_image::{DEFAULT_TAG, Reference, Visibility};

/// Kind of name by which a template was resolved. The caller resolves names of snapshots itself.
/// Own snapshots rank between [`Self::Own`] and [`Self::Shared`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResolvedBy {
    /// An id.
    Id,
    /// A name in the caller's namespace.
    Own,
    /// A stock template, a template of the host's owner, or a name with its owner.
    Shared,
}

/// Template that a name resolves to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedTemplate {
    /// Reference in the image store.
    pub reference: Reference,
    /// Kind of name.
    pub resolved_by: ResolvedBy,
}

/// A template in the image store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredTemplate {
    /// Callers to whom the template is visible.
    pub visibility: Visibility,
    /// Version of the template. `None` if it is not built yet.
    pub version: Option<String>,
}

/// Lookup of a template in the image store. Returns `None` if the template does not exist.
pub type TemplateLookup<'a, E> = &'a dyn Fn(&Reference) -> Result<Option<StoredTemplate>, E>;

/// Returns whether a template of `owner` is visible to `caller`. `None` stands for the host's
/// owner.
pub fn is_visible(owner: Option<&str>, visibility: Visibility, caller: Option<&str>) -> bool {
    match visibility {
        Visibility::Internal => false,
        Visibility::Public => true,
        Visibility::Private => caller.is_none() || owner == caller,
    }
}

/// Resolves `which` (an id or `[owner/]name`, optionally with a tag or the id of a build) for
/// `caller`. A `caller` of `None` is the host's owner. If `records` is `None` because the host has
/// no builder, `which` is resolved as a name only.
///
/// Order: builds of a template, ids, the caller's own names, stock templates, public templates of
/// the host's owner. The template of another key is found by `owner/name` only, if it is public or
/// the caller is the host's owner.
pub fn resolve<E: From<RecordError>>(
    which: &str,
    caller: Option<&str>,
    records: Option<&BuildRecords>,
    look: TemplateLookup<'_, E>,
) -> Result<Option<ResolvedTemplate>, E> {
    if let Some(records) = records
        && let Some(built) = resolve_build(which, caller, records, look)?
    {
        return Ok(Some(built));
    }
    // Looks up a reference. An invisible template is treated as missing.
    let visible = |reference: Reference, resolved_by| -> Result<Option<ResolvedTemplate>, E> {
        let stored = look(&reference)?;
        let stored = stored.filter(|t| is_visible(reference.owner(), t.visibility, caller));
        Ok(stored.map(|_| ResolvedTemplate {
            reference,
            resolved_by,
        }))
    };
    let (word, tag) = which.split_once(':').unwrap_or((which, DEFAULT_TAG));
    if is_id(word)
        && let Some(records) = records
        && let Some(record) = records.template(word)?
        && let Ok(reference) = Reference::parse(&record.reference(tag))
        && let Some(meaning) = visible(reference, ResolvedBy::Id)?
    {
        return Ok(Some(meaning));
    }
    // An invalid name cannot exist. Callers report an unknown template.
    let Ok(reference) = Reference::parse(which) else {
        return Ok(None);
    };
    if reference.owner().is_none() && caller.is_some() {
        // `in_namespace` fails if `caller` is not the id of a key: such a caller has no namespace.
        if let Ok(own) = Reference::in_namespace(caller, which)
            && let Some(meaning) = visible(own, ResolvedBy::Own)?
        {
            return Ok(Some(meaning));
        }
    }
    let own = reference.owner() == caller && !reference.is_stock();
    visible(
        reference,
        if own {
            ResolvedBy::Own
        } else {
            ResolvedBy::Shared
        },
    )
}

/// Resolves `template:<build id>` to a tag that refers to exactly this build. Returns `None` if
/// `which` has no build id, or if every tag of the build refers to another build now.
fn resolve_build<E: From<RecordError>>(
    which: &str,
    caller: Option<&str>,
    records: &BuildRecords,
    look: TemplateLookup<'_, E>,
) -> Result<Option<ResolvedTemplate>, E> {
    let Some((word, id)) = which.split_once(':').filter(|(_, id)| is_build_id(id)) else {
        return Ok(None);
    };
    let Some(build) = records.build(id)? else {
        return Ok(None);
    };
    let Some(template) = records.template(&build.template)? else {
        return Ok(None);
    };
    let Some(resolved_by) = names_template(word, &template, caller) else {
        return Ok(None);
    };
    // A build that is unfinished or failed has no template, and its tags may refer to an earlier
    // build.
    if build.status != BuildStatus::Ready {
        return Ok(None);
    }
    // A later build with an equal result has the same version, and may have taken over the tags.
    let builds = records.builds(&template.id)?;
    let equal = builds.iter().filter(|other| other.version == build.version);
    for tag in equal.flat_map(|other| &other.tags) {
        let Ok(reference) = Reference::parse(&template.reference(tag)) else {
            continue;
        };
        let Some(stored) = look(&reference)? else {
            continue;
        };
        // A newer build publishes its tags before the database assigns them to it. Its image has
        // another version.
        let is_build = stored.version == build.version;
        if is_build && is_visible(reference.owner(), stored.visibility, caller) {
            return Ok(Some(ResolvedTemplate {
                reference,
                resolved_by,
            }));
        }
    }
    Ok(None)
}

/// Returns whether `text` has the form of a build id: a UUID in lower case.
fn is_build_id(text: &str) -> bool {
    let parts: Vec<&str> = text.split('-').collect();
    let is_hex = |part: &&str| part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    let lengths: Vec<usize> = parts.iter().map(|part| part.len()).collect();
    lengths == [8, 4, 4, 4, 12] && parts.iter().all(is_hex)
}

/// Returns how `word` (an id or `[owner/]name`) names `template` for `caller`. `None` if it names
/// another template.
fn names_template(
    word: &str,
    template: &TemplateRecord,
    caller: Option<&str>,
) -> Option<ResolvedBy> {
    if word == template.id {
        return Some(ResolvedBy::Id);
    }
    let named = Reference::parse(word).ok()?;
    let owner = template.owner.as_deref();
    let is_own = owner == caller;
    let is_named = match named.owner() {
        Some(namespace) => owner == Some(namespace),
        None => is_own || owner.is_none(),
    };
    let resolved_by = if is_own {
        ResolvedBy::Own
    } else {
        ResolvedBy::Shared
    };
    (is_named && named.name() == template.name).then_some(resolved_by)
}

#[cfg(test)]
mod tests {
    use super::super::records::{BuildRecord, WantedSize};
    use super::*;
    use std::collections::HashMap;

    /// Ids of two API keys.
    const ALICE: &str = "aaaaaaaaaaaaaaaaaaaa";
    const MALLORY: &str = "mmmmmmmmmmmmmmmmmmmm";
    /// Id of a template.
    const ID: &str = "ttttttttttttttttttt2";

    /// Stored templates and their builds.
    struct Store {
        _dir: tempfile::TempDir,
        records: BuildRecords,
        all: HashMap<String, Visibility>,
        versions: HashMap<String, String>,
    }

    impl Store {
        fn new(all: &[(&str, Visibility)]) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let records = BuildRecords::open(dir.path()).unwrap();
            Self {
                records,
                _dir: dir,
                all: all.iter().map(|(n, v)| ((*n).to_owned(), *v)).collect(),
                versions: HashMap::new(),
            }
        }

        /// Returns the template that `which` means for a caller, and how it was found.
        fn means(&self, which: &str, caller: Option<&str>) -> Option<(String, ResolvedBy)> {
            let look = |r: &Reference| {
                let stock = r.is_stock().then_some(Visibility::Public);
                let visibility = self.all.get(&r.to_string()).copied().or(stock);
                Ok::<_, RecordError>(visibility.map(|visibility| StoredTemplate {
                    visibility,
                    version: self.versions.get(&r.to_string()).cloned(),
                }))
            };
            let found = resolve(which, caller, Some(&self.records), &look).unwrap();
            found.map(|m| (m.reference.to_string(), m.resolved_by))
        }
    }

    #[test]
    fn a_bare_name_never_resolves_to_the_template_of_another_key() {
        use Visibility::{Internal, Private, Public};
        let of = |owner: &str, name: &str| format!("{owner}/{name}");
        let (python, secret, hidden) = (
            of(MALLORY, "python:3.12"),
            of(MALLORY, "secret"),
            of(MALLORY, "image-x-01234567"),
        );
        let store = Store::new(&[
            (&python, Public),
            (&secret, Private),
            (&hidden, Internal),
            ("hosts", Private),
            ("shared", Public),
            ("image-y-01234567", Internal),
        ]);
        for (which, caller) in [
            ("python:3.12", Some(ALICE)),
            ("python:3.12", None),
            (&secret, Some(ALICE)),
            (&hidden, Some(MALLORY)),
            ("image-x-01234567", Some(MALLORY)),
            ("image-y-01234567", Some(ALICE)),
            (&hidden, None),
            ("image-y-01234567", None),
            ("hosts", Some(ALICE)),
            ("library/python", None),
            ("../hosts", None),
        ] {
            assert_eq!(store.means(which, caller), None, "{which} {caller:?}");
        }
        for (which, caller, means, resolved_by) in [
            (
                "python:3.12",
                Some(MALLORY),
                python.as_str(),
                ResolvedBy::Own,
            ),
            (&python, Some(ALICE), &python, ResolvedBy::Shared),
            (&python, Some(MALLORY), &python, ResolvedBy::Own),
            (&secret, None, &secret, ResolvedBy::Shared),
            ("hosts", None, "hosts", ResolvedBy::Own),
            ("shared", Some(ALICE), "shared", ResolvedBy::Shared),
            ("base", Some(ALICE), "base", ResolvedBy::Shared),
            ("base", None, "base", ResolvedBy::Shared),
        ] {
            let expected = Some((means.to_owned(), resolved_by));
            assert_eq!(store.means(which, caller), expected, "{which} {caller:?}");
        }
    }

    #[test]
    fn ids_have_priority_over_names_and_own_names_over_shared_ones() {
        use Visibility::{Private, Public};
        let of = |owner: &str, name: &str| format!("{owner}/{name}");
        let (app, shadow, own) = (of(ALICE, "app"), of(MALLORY, ID), of(ALICE, "shared"));
        let store = Store::new(&[
            (&app, Private),
            (&shadow, Public),
            (&own, Private),
            ("shared", Public),
        ]);
        let record = TemplateRecord {
            id: ID.to_owned(),
            name: "app".to_owned(),
            owner: Some(ALICE.to_owned()),
            public: false,
            created_ms: 1,
        };
        store.records.insert_template(&record).unwrap();
        let expected = |name: &str, resolved_by| Some((name.to_owned(), resolved_by));
        assert_eq!(store.means(ID, Some(ALICE)), expected(&app, ResolvedBy::Id));
        assert_eq!(store.means(ID, None), expected(&app, ResolvedBy::Id));
        // Data directories of earlier versions of Jiffy may contain names that look like ids. Such
        // a name resolves for its owner only.
        assert_eq!(
            store.means(ID, Some(MALLORY)),
            expected(&shadow, ResolvedBy::Own)
        );
        assert_eq!(
            store.means("shared", Some(ALICE)),
            expected(&own, ResolvedBy::Own)
        );
        let host = expected("shared", ResolvedBy::Shared);
        assert_eq!(store.means("shared", Some(MALLORY)), host);
    }

    #[test]
    fn the_id_of_a_build_names_exactly_that_build() {
        use Visibility::{Private, Public};
        let of = |owner: &str, name: &str| format!("{owner}/{name}");
        let (app, tagged) = (of(ALICE, "app"), of(ALICE, "app:v1"));
        let mut store = Store::new(&[(&app, Private), (&tagged, Private), ("app", Public)]);
        let template = TemplateRecord {
            id: ID.to_owned(),
            name: "app".to_owned(),
            owner: Some(ALICE.to_owned()),
            public: false,
            created_ms: 1,
        };
        store.records.insert_template(&template).unwrap();
        let uuid = |n: u32| format!("0123456{n}-89ab-4cde-8f01-23456789abcd");
        for (n, tag) in [(1, "v1"), (2, "default"), (3, "default")] {
            let build = BuildRecord {
                id: uuid(n),
                template: ID.to_owned(),
                caller: None,
                tags: vec![tag.to_owned()],
                size: WantedSize::default(),
                status: BuildStatus::Building,
                reason: None,
                steps: Vec::new(),
                version: None,
                created_ms: 1,
                changed_ms: 1,
            };
            store.records.insert_build(&build).unwrap();
        }
        let named = |word: &str, n: u32| format!("{word}:{}", uuid(n));
        assert_eq!(
            store.means(&named("app", 1), Some(ALICE)),
            None,
            "unfinished"
        );
        for n in [1, 2] {
            let version = format!("version-{n}");
            store.records.set_ready(&uuid(n), &[], &version).unwrap();
            let reference = if n == 1 { &tagged } else { &app };
            store.versions.insert(reference.clone(), version);
        }
        let expected = |name: &str, resolved_by| Some((name.to_owned(), resolved_by));
        for (word, n, caller, means, by) in [
            ("app", 1, Some(ALICE), &tagged, ResolvedBy::Own),
            ("App", 1, Some(ALICE), &tagged, ResolvedBy::Own),
            ("app", 2, Some(ALICE), &app, ResolvedBy::Own),
            (ID, 1, Some(ALICE), &tagged, ResolvedBy::Id),
            (&app, 1, None, &tagged, ResolvedBy::Shared),
        ] {
            let which = named(word, n);
            assert_eq!(
                store.means(&which, caller),
                expected(means, by),
                "{which} {caller:?}"
            );
        }
        for (word, caller) in [
            ("app", Some(MALLORY)),
            (app.as_str(), Some(MALLORY)),
            (ID, Some(MALLORY)),
            ("app", None),
            ("other", Some(ALICE)),
        ] {
            assert_eq!(
                store.means(&named(word, 1), caller),
                None,
                "{word} {caller:?}"
            );
        }
        // The tag belongs to a newer build: the reference to the older build no longer resolves,
        // unless both builds have the same version.
        store
            .records
            .retag(ID, Some(&uuid(3)), &["default".to_owned()])
            .unwrap();
        for (version, means) in [("version-3", None), ("version-2", Some(&app))] {
            store.records.set_ready(&uuid(3), &[], version).unwrap();
            store.versions.insert(app.clone(), version.to_owned());
            let found = store.means(&named("app", 2), Some(ALICE));
            assert_eq!(found.map(|(name, _)| name).as_ref(), means, "{version}");
        }
    }
}
