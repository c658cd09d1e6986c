//! Resolution of template names for a caller.

use super::records::{BuildRecords, RecordError};
use jiffy_engine::is_id;
use jiffy_image::{DEFAULT_TAG, Reference, Visibility};

/// Kind of name by which a template was resolved. The caller's snapshots rank between [`Self::Own`]
/// and [`Self::Shared`].
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

/// Lookup of a template's visibility in the image store; none: no such template.
pub type VisibilityLookup<'a, E> = &'a dyn Fn(&Reference) -> Result<Option<Visibility>, E>;

/// Tells if a template of `owner` is visible to `caller`; none: the host's owner.
pub fn is_visible(owner: Option<&str>, visibility: Visibility, caller: Option<&str>) -> bool {
    match visibility {
        Visibility::Internal => false,
        Visibility::Public => true,
        Visibility::Private => caller.is_none() || owner == caller,
    }
}

/// Resolves `which` (an id or `[owner/]name`, optionally with a tag) for `caller`; none: the host's
/// owner.
///
/// Order: ids, the caller's own names, stock templates, public templates of the host's owner. The
/// template of another key is found by `owner/name` only, if it is public or the caller is the
/// host's owner.
pub fn resolve<E: From<RecordError>>(
    which: &str,
    caller: Option<&str>,
    records: Option<&BuildRecords>,
    look: VisibilityLookup<'_, E>,
) -> Result<Option<ResolvedTemplate>, E> {
    let found = |reference: Reference, resolved_by| -> Result<Option<ResolvedTemplate>, E> {
        let seen = look(&reference)?;
        let seen = seen.filter(|v| is_visible(reference.owner(), *v, caller));
        Ok(seen.map(|_| ResolvedTemplate {
            reference,
            resolved_by,
        }))
    };
    let (word, tag) = which.split_once(':').unwrap_or((which, DEFAULT_TAG));
    if is_id(word)
        && let Some(records) = records
        && let Some(record) = records.template(word)?
        && let Ok(reference) = Reference::parse(&record.reference(tag))
        && let Some(meaning) = found(reference, ResolvedBy::Id)?
    {
        return Ok(Some(meaning));
    }
    let Ok(said) = Reference::parse(which) else {
        return Ok(None);
    };
    if said.owner().is_none() && caller.is_some() {
        // An owner that is not a key has no namespace.
        if let Ok(own) = Reference::in_namespace(caller, which)
            && let Some(meaning) = found(own, ResolvedBy::Own)?
        {
            return Ok(Some(meaning));
        }
    }
    let own = said.owner() == caller && !said.is_stock();
    found(
        said,
        if own {
            ResolvedBy::Own
        } else {
            ResolvedBy::Shared
        },
    )
}

#[cfg(test)]
mod tests {
    use super::super::records::TemplateRecord;
    use super::*;
    use std::collections::HashMap;

    const ALICE: &str = "aaaaaaaaaaaaaaaaaaaa";
    const MALLORY: &str = "mmmmmmmmmmmmmmmmmmmm";
    const ID: &str = "ttttttttttttttttttt2";

    struct Store {
        _dir: tempfile::TempDir,
        records: BuildRecords,
        all: HashMap<String, Visibility>,
    }

    impl Store {
        fn new(all: &[(&str, Visibility)]) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let records = BuildRecords::open(dir.path()).unwrap();
            Self {
                records,
                _dir: dir,
                all: all.iter().map(|(n, v)| ((*n).to_owned(), *v)).collect(),
            }
        }

        fn means(&self, which: &str, caller: Option<&str>) -> Option<(String, ResolvedBy)> {
            let look = |r: &Reference| {
                let stock = r.is_stock().then_some(Visibility::Public);
                Ok::<_, RecordError>(self.all.get(&r.to_string()).copied().or(stock))
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
        // Names of earlier versions that look like ids resolve for their owner only.
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
}
