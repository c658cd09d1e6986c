//! Names that users must not give to templates or sandboxes: they look like ids, or belong to
//! internal templates.

use crate::identity::is_id;

/// Name prefix of templates imported for builds.
pub const IMPORTED_IMAGE_PREFIX: &str = "image-";
/// Name prefix of unfinished templates of builds.
pub const UNFINISHED_BUILD_PREFIX: &str = "build-";
/// Number of hexadecimal digits at the end of an imported image's name.
pub const IMPORTED_IMAGE_DIGITS: usize = 8;
/// Lengths of the parts of a UUID.
const UUID_PARTS: [usize; 5] = [8, 4, 4, 4, 12];

/// Returns whether `name` is reserved: an id or the name of an internal template.
pub fn is_reserved(name: &str) -> bool {
    is_id(name) || is_uuid(name) || is_unfinished_build(name) || is_imported_image(name)
}

/// Returns whether `word` has the form of a UUID. Ids of builds are UUIDs.
fn is_uuid(word: &str) -> bool {
    let parts: Vec<&str> = word.split('-').collect();
    let hexadecimal = |part: &&str| part.bytes().all(|b| b.is_ascii_hexdigit());
    // Comparing the lengths also compares the number of parts.
    let lengths = parts.iter().map(|part| part.len());
    lengths.eq(UUID_PARTS) && parts.iter().all(hexadecimal)
}

/// Returns whether `name` belongs to an unfinished template of a build.
pub fn is_unfinished_build(name: &str) -> bool {
    name.strip_prefix(UNFINISHED_BUILD_PREFIX)
        .is_some_and(is_uuid)
}

/// Returns whether `name` belongs to an image imported for builds.
pub fn is_imported_image(name: &str) -> bool {
    let named = name.strip_prefix(IMPORTED_IMAGE_PREFIX);
    // The middle part is derived from the image's name and may itself contain dashes.
    let sum = named.and_then(|n| n.rsplit_once('-')).map(|(_, sum)| sum);
    sum.is_some_and(|s| {
        s.len() == IMPORTED_IMAGE_DIGITS && s.bytes().all(|b| b.is_ascii_hexdigit())
    })
}
