//! Metadata that clients attach to files. It is stored in extended attributes `user.e2b.<key>`.

use crate::sys;
use hyper::HeaderMap;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::path::Path;

/// Prefix of the extended attributes that store the metadata.
const PREFIX: &str = "user.e2b.";
/// Maximum length of the name of an extended attribute.
const MAX_NAME_BYTES: usize = 255;
/// Maximum number of bytes that are read of the list of names and of each value.
const MAX_READ_BYTES: usize = 64 * 1024;

/// Reads the headers `X-Metadata-<key>`. Keys are lower case.
pub fn from_headers(headers: &HeaderMap) -> Result<BTreeMap<String, String>, String> {
    metadata_headers(headers)
        .map(|(key, value)| {
            if key.is_empty() || PREFIX.len() + key.len() > MAX_NAME_BYTES {
                return Err(format!("metadata key '{key}' is empty or too long"));
            }
            let value = std::str::from_utf8(value)
                .map_err(|_| format!("metadata value of '{key}' is not text"))?;
            Ok((key.to_owned(), value.to_owned()))
        })
        .collect()
}

/// Returns the keys and values of metadata headers.
fn metadata_headers(headers: &HeaderMap) -> impl Iterator<Item = (&str, &[u8])> {
    headers.iter().filter_map(|(name, value)| {
        Some((name.as_str().strip_prefix("x-metadata-")?, value.as_bytes()))
    })
}

/// Replaces the metadata of a file.
pub fn replace(path: &Path, metadata: &BTreeMap<String, String>) -> io::Result<()> {
    let target = sys::cpath(path)?;
    for key in keys(&target).iter().filter(|k| !metadata.contains_key(*k)) {
        let name = sys::cstring(format!("{PREFIX}{key}").as_bytes())?;
        // Ignore the result: another process may have removed the attribute.
        // SAFETY: both strings are zero-terminated.
        unsafe { libc::removexattr(target.as_ptr(), name.as_ptr()) };
    }
    for (key, value) in metadata {
        let name = sys::cstring(format!("{PREFIX}{key}").as_bytes())?;
        // SAFETY: the strings are zero-terminated; pointer and length describe `value`.
        sys::check(unsafe {
            libc::setxattr(
                target.as_ptr(),
                name.as_ptr(),
                value.as_ptr().cast(),
                value.len(),
                0,
            )
        })?;
    }
    Ok(())
}

/// Returns the metadata of a file. Empty if the file system does not support extended attributes.
pub fn read(path: &Path) -> BTreeMap<String, String> {
    let Ok(target) = sys::cpath(path) else {
        return BTreeMap::new();
    };
    keys(&target)
        .into_iter()
        .filter_map(|key| {
            let name = sys::cstring(format!("{PREFIX}{key}").as_bytes()).ok()?;
            // SAFETY: the strings are zero-terminated; pointer and length describe the buffer.
            let value = fill(|buffer| unsafe {
                libc::getxattr(
                    target.as_ptr(),
                    name.as_ptr(),
                    buffer.as_mut_ptr().cast(),
                    buffer.len(),
                )
            })?;
            Some((key, String::from_utf8_lossy(&value).into_owned()))
        })
        .collect()
}

/// Returns the keys of a file's metadata.
fn keys(target: &CString) -> Vec<String> {
    // SAFETY: the string is zero-terminated; pointer and length describe the buffer.
    let Some(names) = fill(|buffer| unsafe {
        libc::listxattr(target.as_ptr(), buffer.as_mut_ptr().cast(), buffer.len())
    }) else {
        return Vec::new();
    };
    names
        .split(|b| *b == 0)
        .filter_map(|name| std::str::from_utf8(name).ok()?.strip_prefix(PREFIX))
        .map(str::to_owned)
        .collect()
}

/// Returns the bytes that `call` writes into a buffer, or `None` if `call` fails. `call` returns
/// the number of bytes, and for an empty buffer the required size. The size is requested first,
/// since nearly all files have no attributes and need no buffer.
fn fill(mut call: impl FnMut(&mut [u8]) -> isize) -> Option<Vec<u8>> {
    let size = usize::try_from(call(&mut [])).ok()?.min(MAX_READ_BYTES);
    if size == 0 {
        return Some(Vec::new());
    }
    let mut buffer = vec![0; size];
    // The call fails if the value has grown since the first call. The value then counts as missing.
    let n = usize::try_from(call(&mut buffer)).ok()?;
    buffer.truncate(n);
    Some(buffer)
}
