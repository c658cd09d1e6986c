//! Search for the exported file of a stock template. The import of the file makes a build
//! unnecessary.
//!
//! A *stock template* is a template whose recipe Jiffy contains. A *recipe* is the source of a
//! stock template: a directory with its packages, files and settings.

use super::{FileImport, FileTrust, KnownDigests, download_template, unreadable_io};
use crate::import::ImportError;
use crate::progress::Progress;
use crate::template_model::{Recipe, Template};
use crate::templates::Templates;
use jiffy_installation::Installation;
use jiffy_registry_pull::PullerProgram;
use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Maximum number of parts of a template file.
const MAX_PARTS: u32 = 9;
/// Environment variable with the path or the `https` URL of a directory with template files.
const VARIABLE: &str = "JIFFY_TEMPLATES";

/// Error of importing the file of a stock template.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot use the template file {origin}: {source}; replace the file, or remove it to build the template"
)]
pub struct UnusableFile {
    /// Path or URL.
    pub origin: String,
    /// Cause.
    pub source: Box<ImportError>,
}

/// Location that may have the file of a template.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    File(PathBuf),
    Url(String),
}

/// Returns the locations of the file of template `name`, in the order of the search.
fn places(name: &str, variable: Option<OsString>, installed: Option<PathBuf>) -> Vec<Place> {
    // `.tpl` is the extension of exported templates.
    let file = format!("{name}.tpl");
    // A value with a scheme is a URL, and every other value is a path.
    let from_variable = variable.filter(|v| !v.is_empty()).map(|value| {
        match value.to_str().filter(|text| text.contains("://")) {
            Some(url) => Place::Url(format!("{}/{file}", url.trim_end_matches('/'))),
            None => Place::File(PathBuf::from(value).join(&file)),
        }
    });
    let from_package = installed.map(|directory| Place::File(directory.join(&file)));
    from_variable.into_iter().chain(from_package).collect()
}

/// Imports the file of the stock template that `recipe` describes. Returns `None` if `recipe` is
/// not a stock recipe of this program, or if no location has a file.
pub(crate) fn import_stock(
    templates: &Templates,
    recipe: &Recipe,
    on_progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Option<Template>, UnusableFile> {
    // A recipe of the user may have the name of a stock template.
    let is_stock = Recipe::built_in(recipe.name()).is_ok_and(|own| own.hash() == recipe.hash());
    if !is_stock {
        return Ok(None);
    }
    let installed = Installation::current().ok().map(|i| i.templates());
    let places = places(recipe.name(), env::var_os(VARIABLE), installed);
    import_first(
        templates,
        places,
        &KnownDigests::of_installation(),
        on_progress,
    )
}

/// Imports the first file that exists. A URL is assumed to exist: a failed download is an error,
/// and later places are not tried.
fn import_first(
    templates: &Templates,
    places: Vec<Place>,
    known: &KnownDigests,
    on_progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Option<Template>, UnusableFile> {
    for place in places {
        let (file, origin): (Box<dyn Read>, String) = match place {
            Place::File(path) => match open_file_or_parts(&path) {
                Ok(Some(file)) => (file, path.display().to_string()),
                Ok(None) => continue,
                Err(e) => return Err(unusable(path.display(), unreadable_io(e))),
            },
            Place::Url(url) => {
                let file =
                    download_template(templates, &url, PullerProgram::default(), on_progress);
                (Box::new(file.map_err(|e| unusable(&url, e))?), url)
            }
        };
        let import = FileImport {
            // The file was found by a search, so its digest must be known.
            trust: FileTrust {
                known: known.clone(),
                must_be_known: true,
                ..FileTrust::default()
            },
            ..FileImport::default()
        };
        // A damaged file is an error. A build instead would hide the damage and take minutes.
        let imported = import.run(templates, file, on_progress);
        return imported.map(Some).map_err(|e| unusable(origin, e));
    }
    Ok(None)
}

/// Opens a file, or its parts `FILE.1`, `FILE.2`, ... as one file. The parts exist because package
/// indexes limit the size of a file. Returns `None` if neither exists.
fn open_file_or_parts(path: &Path) -> io::Result<Option<Box<dyn Read>>> {
    if let Some(file) = open_if_exists(path)? {
        return Ok(Some(Box::new(file)));
    }
    let mut whole: Option<Box<dyn Read>> = None;
    for number in 1..=MAX_PARTS {
        // The numbers have no gaps, so the first missing part is the end.
        let Some(part) = open_if_exists(&path.with_added_extension(number.to_string()))? else {
            break;
        };
        whole = Some(match whole {
            Some(before) => Box::new(before.chain(part)),
            None => Box::new(part),
        });
    }
    Ok(whole)
}

fn open_if_exists(path: &Path) -> io::Result<Option<File>> {
    match File::open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some),
    }
}

fn unusable(origin: impl ToString, source: ImportError) -> UnusableFile {
    UnusableFile {
        origin: origin.to_string(),
        source: Box::new(source),
    }
}

#[cfg(test)]
mod tests {
    use super::super::export_template;
    use super::*;
    use crate::build::tests::{FakeRecipe, home};
    use crate::verified::sum_of;
    use std::fs;

    #[test]
    fn the_variable_comes_before_the_package_and_may_be_a_url() {
        let file = |path: &str| Place::File(PathBuf::from(path));
        let find = |variable: &str, installed: Option<&str>| {
            places("base", Some(variable.into()), installed.map(PathBuf::from))
        };
        assert_eq!(find("", None), []);
        assert_eq!(
            find("/a", Some("/b")),
            [file("/a/base.tpl"), file("/b/base.tpl")]
        );
        let url = Place::Url("https://x.example/y/base.tpl".to_owned());
        assert_eq!(find("https://x.example/y/", None), [url]);
    }

    #[test]
    fn the_first_existing_file_is_used_and_an_unknown_file_is_rejected() {
        let ((_a, source), (dir, target)) = (home(), home());
        FakeRecipe::new("one").build(&source).unwrap();
        let templates = Templates::new(&target);
        let (missing, path) = (dir.path().join("missing"), dir.path().join("one.tpl"));
        let mut file = Vec::new();
        let exported = export_template(&Templates::new(&source), "one", &mut file, &mut |_| ());
        exported.unwrap();
        fs::write(&path, &file).unwrap();
        let import = |known: &KnownDigests| {
            let places = [missing.clone(), path.clone()].map(Place::File);
            import_first(&templates, places.into(), known, &mut |_| ())
        };
        let error = import(&KnownDigests::default()).unwrap_err().to_string();
        assert!(
            error.contains("one.tpl") && error.contains(&sum_of(&file)),
            "{error}"
        );
        assert!(templates.get("one").is_err());
        let known = KnownDigests::parse(&format!("{}  one.tpl\n", sum_of(&file)));
        let imported = import(&known).unwrap().unwrap();
        assert_eq!(imported.manifest.reference(), "one");
        // The same file in two parts.
        templates.remove("one").unwrap();
        fs::remove_file(&path).unwrap();
        assert!(import(&known).unwrap().is_none());
        let (first, second) = file.split_at(file.len() / 3);
        fs::write(path.with_added_extension("1"), first).unwrap();
        assert!(import(&known).is_err(), "a part is missing");
        fs::write(path.with_added_extension("2"), second).unwrap();
        assert!(import(&known).unwrap().is_some());
    }
}
