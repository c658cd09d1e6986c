//! Loading of kernel modules, for images without a `modprobe`.
//!
//! The kernel starts [`PATH`] when it needs a module, and programs start the path in
//! `/proc/sys/kernel/modprobe`. An image's own `modprobe` takes precedence, because it reads the
//! image's `/etc/modprobe.d`.

use crate::sys;
use std::collections::HashSet;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

/// Path under which the agent is started as `modprobe`. The file of the agent has no other path,
/// because the initial archive was deleted.
pub const PATH: &str = "/proc/1/exe";
/// Paths of `modprobe` in images, in the kernel's search order.
const IMAGE_MODPROBES: [&str; 4] = [
    "/sbin/modprobe",
    "/usr/sbin/modprobe",
    "/bin/modprobe",
    "/usr/bin/modprobe",
];

/// Loads the modules for the first argument that is not an option. The argument is the name of a
/// module or an alias. Returns the exit code.
pub fn run(arguments: &[String]) -> i32 {
    // This call returns only if the image has no usable `modprobe`.
    exec_image_modprobe(arguments);
    let is_quiet = arguments.iter().any(|a| a == "-q" || a == "--quiet");
    let Some(name) = arguments.iter().find(|a| !a.starts_with('-')) else {
        eprintln!("modprobe: missing name of a module");
        return 1;
    };
    match load(&directory(), name) {
        Ok(()) => 0,
        Err(e) => {
            if !is_quiet {
                eprintln!("modprobe: {name}: {e}");
            }
            1
        }
    }
}

/// Returns the directory of this kernel's modules.
pub fn directory() -> PathBuf {
    Path::new("/lib/modules").join(sys::kernel_release())
}

/// Executes the `modprobe` of the image, if there is one.
fn exec_image_modprobe(arguments: &[String]) {
    for path in IMAGE_MODPROBES {
        let words = std::iter::once(path).chain(arguments.iter().map(String::as_str));
        let words: Result<Vec<CString>, _> = words.map(|w| sys::cstring(w.as_bytes())).collect();
        let Ok(words) = words else { return };
        let mut argv: Vec<_> = words.iter().map(|w| w.as_ptr()).collect();
        argv.push(std::ptr::null());
        // SAFETY: the path and the null-terminated arguments are zero-terminated strings. The call
        // returns only if it fails.
        unsafe { libc::execv(argv[0], argv.as_ptr()) };
    }
}

/// Loads the modules for `name`, with their dependencies.
fn load(directory: &Path, name: &str) -> io::Result<()> {
    let read = |file: &str| std::fs::read_to_string(directory.join(file));
    let dependencies = read("modules.dep")?;
    // `name` is a module, a built-in module, or an alias, in this order.
    let found = match load_order(&dependencies, &normalize(name)) {
        Some(chain) => vec![chain],
        None if is_built_in(&read("modules.builtin").unwrap_or_default(), name) => return Ok(()),
        None => {
            let aliases = read("modules.alias")?;
            let modules = resolve_alias(&aliases, name);
            modules
                .iter()
                .filter_map(|m| load_order(&dependencies, m))
                .collect()
        }
    };
    if found.is_empty() {
        let missing = "this kernel has no such module";
        return Err(io::Error::new(io::ErrorKind::NotFound, missing));
    }
    let mut done = HashSet::new();
    // Several modules may have a common dependency.
    for path in found.into_iter().flatten() {
        if done.insert(path) {
            insert(&directory.join(path))?;
        }
    }
    Ok(())
}

/// Loads one module into the kernel. A loaded module is not an error.
fn insert(path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    // SAFETY: the descriptor is open, the string is empty, and there are no flags.
    let result =
        unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), c"".as_ptr(), 0) };
    match sys::check(result as libc::c_int) {
        Err(e) if e.raw_os_error() != Some(libc::EEXIST) => Err(e),
        _ => Ok(()),
    }
}

/// Replaces `-` by `_`, which are equivalent in module names.
fn normalize(name: &str) -> String {
    name.replace('-', "_")
}

/// Returns the name of the module in a file.
fn module_name(path: &str) -> Option<String> {
    let file = path.rsplit('/').next()?;
    file.strip_suffix(".ko").map(normalize)
}

/// Returns the files of a module from `modules.dep`, in the order in which they must be loaded.
fn load_order<'a>(dependencies: &'a str, module: &str) -> Option<Vec<&'a str>> {
    let mut lines = dependencies.lines().filter_map(|line| line.split_once(':'));
    let (path, needed) = lines.find(|(path, _)| module_name(path).as_deref() == Some(module))?;
    // The dependency that must be loaded first is last in the list.
    let needed = needed.split_ascii_whitespace().rev();
    Some(needed.chain([path]).collect())
}

/// Returns whether `modules.builtin` lists the module `name`.
fn is_built_in(list: &str, name: &str) -> bool {
    let name = normalize(name);
    list.lines()
        .any(|path| module_name(path).is_some_and(|m| m == name))
}

/// Returns the modules that `modules.alias` lists for a name.
fn resolve_alias(aliases: &str, name: &str) -> Vec<String> {
    let name = normalize(name);
    let mut modules: Vec<String> = aliases
        .lines()
        .filter_map(|line| line.strip_prefix("alias ")?.split_once(' '))
        .filter(|(pattern, _)| matches_pattern(normalize(pattern).as_bytes(), name.as_bytes()))
        .map(|(_, module)| normalize(module.trim()))
        .collect();
    modules.dedup();
    modules
}

/// Returns whether a pattern with `*` and `?` matches `name`.
fn matches_pattern(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n) = (0, 0);
    // Positions from which to continue if the text after the last star does not match. Earlier
    // stars need no retry: the last star can match everything that they could match in addition.
    let mut retry = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                retry = Some((p + 1, n));
                p += 1;
            }
            Some(b) if *b == b'?' || *b == name[n] => {
                p += 1;
                n += 1;
            }
            _ => {
                let Some((after, from)) = retry else {
                    return false;
                };
                retry = Some((after, from + 1));
                p = after;
                n = from + 1;
            }
        }
    }
    pattern[p..].iter().all(|b| *b == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Example of `modules.dep`: each line has a module, and after the colon the modules that it
    /// needs.
    const DEPENDENCIES: &str = "kernel/net/tls/tls.ko:\n\
        kernel/drivers/net/wireguard/wireguard.ko: kernel/net/udp_tunnel.ko kernel/lib/chacha.ko\n\
        kernel/crypto/xts-mode.ko: kernel/crypto/ecb.ko\n";

    #[test]
    fn dependencies_of_a_module_are_loaded_before_it() {
        assert_eq!(
            load_order(DEPENDENCIES, "wireguard").unwrap(),
            [
                "kernel/lib/chacha.ko",
                "kernel/net/udp_tunnel.ko",
                "kernel/drivers/net/wireguard/wireguard.ko"
            ]
        );
        assert_eq!(
            load_order(DEPENDENCIES, "xts_mode").unwrap(),
            ["kernel/crypto/ecb.ko", "kernel/crypto/xts-mode.ko"]
        );
        assert_eq!(load_order(DEPENDENCIES, "tl"), None);
    }

    #[test]
    fn aliases_are_found_with_dashes_or_underscores() {
        let aliases = "# Aliases\nalias tcp-ulp-tls tls\nalias net-pf-16-proto-*-x wireguard\n\
            alias fs-btrfs btrfs\nalias fs-btrfs btrfs\n";
        assert_eq!(resolve_alias(aliases, "tcp_ulp-tls"), ["tls"]);
        assert_eq!(
            resolve_alias(aliases, "net-pf-16-proto-20-x"),
            ["wireguard"]
        );
        assert_eq!(resolve_alias(aliases, "fs-btrfs"), ["btrfs"]);
        assert!(resolve_alias(aliases, "fs-ntfs").is_empty());
        assert!(is_built_in("kernel/fs/ext4/ext4.ko\n", "ext4"));
    }

    #[test]
    fn patterns_match_whole_names_only() {
        assert!(matches_pattern(b"a*c?", b"abbcd"));
        assert!(matches_pattern(b"*", b""));
        assert!(!matches_pattern(b"a*c", b"abcd"));
        assert!(!matches_pattern(b"", b"a"));
    }

    #[test]
    fn a_missing_module_is_an_error_and_no_panic() {
        let empty = tempfile::tempdir().unwrap();
        assert!(load(empty.path(), "x").is_err());
        for file in ["modules.dep", "modules.alias"] {
            std::fs::write(empty.path().join(file), "").unwrap();
        }
        let error = load(empty.path(), "../../etc/passwd").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
