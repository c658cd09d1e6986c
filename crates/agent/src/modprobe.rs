//! Loading of kernel modules, for images that bring no `modprobe`.
//!
//! The kernel starts [`PATH`] when it needs a module, and programs start what the kernel would
//! (`/proc/sys/kernel/modprobe`). An image's own `modprobe` goes first: it knows the image's
//! `/etc/modprobe.d`.

use crate::sys;
use std::collections::HashSet;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

/// Name under which the agent is started as `modprobe`. Its file has no other: it went with the
/// initial archive.
pub const PATH: &str = "/proc/1/exe";
/// Programs of images, in the kernel's order of search.
const OF_IMAGE: [&str; 4] = [
    "/sbin/modprobe",
    "/usr/sbin/modprobe",
    "/bin/modprobe",
    "/usr/bin/modprobe",
];

/// Loads the module, or the modules of the alias, that `arguments` names; returns the exit code.
pub fn run(arguments: &[String]) -> i32 {
    exec_of_image(arguments);
    let is_quiet = arguments.iter().any(|a| a == "-q" || a == "--quiet");
    let Some(name) = arguments.iter().find(|a| !a.starts_with('-')) else {
        eprintln!("modprobe: name a module");
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

/// Where the modules of this kernel are.
pub fn directory() -> PathBuf {
    Path::new("/lib/modules").join(sys::kernel_release())
}

/// Becomes the image's `modprobe`, if there is one.
fn exec_of_image(arguments: &[String]) {
    for path in OF_IMAGE {
        let words = std::iter::once(path).chain(arguments.iter().map(String::as_str));
        let words: Result<Vec<CString>, _> = words.map(|w| sys::cstring(w.as_bytes())).collect();
        let Ok(words) = words else { return };
        let mut argv: Vec<_> = words.iter().map(|w| w.as_ptr()).collect();
        argv.push(std::ptr::null());
        // SAFETY: the path and the null-terminated arguments are valid C strings. It returns if
        // it fails only.
        unsafe { libc::execv(argv[0], argv.as_ptr()) };
    }
}

/// Loads what `name` stands for, with all that it needs.
fn load(directory: &Path, name: &str) -> io::Result<()> {
    let read = |file: &str| std::fs::read_to_string(directory.join(file));
    let dependencies = read("modules.dep")?;
    let found = match chain(&dependencies, &normal(name)) {
        Some(chain) => vec![chain],
        None if is_built_in(&read("modules.builtin").unwrap_or_default(), name) => return Ok(()),
        None => {
            let aliases = read("modules.alias")?;
            let modules = aliased(&aliases, name);
            modules
                .iter()
                .filter_map(|m| chain(&dependencies, m))
                .collect()
        }
    };
    if found.is_empty() {
        let missing = "there is no such module of this kernel";
        return Err(io::Error::new(io::ErrorKind::NotFound, missing));
    }
    let mut done = HashSet::new();
    for path in found.into_iter().flatten() {
        if done.insert(path) {
            insert(&directory.join(path))?;
        }
    }
    Ok(())
}

/// Gives one module to the kernel. One that is loaded already is fine.
fn insert(path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    // SAFETY: a descriptor of ours, an empty C string, and no flags.
    let result =
        unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), c"".as_ptr(), 0) };
    match sys::check(result as libc::c_int) {
        Err(e) if e.raw_os_error() != Some(libc::EEXIST) => Err(e),
        _ => Ok(()),
    }
}

/// Names of modules make no difference between these two.
fn normal(name: &str) -> String {
    name.replace('-', "_")
}

/// Name of the module in a file.
fn module_of(path: &str) -> Option<String> {
    let file = path.rsplit('/').next()?;
    file.strip_suffix(".ko").map(normal)
}

/// Files of a module by `modules.dep`, in the order in which they are to be loaded.
fn chain<'a>(dependencies: &'a str, module: &str) -> Option<Vec<&'a str>> {
    let mut lines = dependencies.lines().filter_map(|line| line.split_once(':'));
    let (path, needed) = lines.find(|(path, _)| module_of(path).as_deref() == Some(module))?;
    // The file names what is needed first last.
    let needed = needed.split_ascii_whitespace().rev();
    Some(needed.chain([path]).collect())
}

fn is_built_in(list: &str, name: &str) -> bool {
    let name = normal(name);
    list.lines()
        .any(|path| module_of(path).is_some_and(|m| m == name))
}

/// Modules that `modules.alias` gives for a name.
fn aliased(aliases: &str, name: &str) -> Vec<String> {
    let name = normal(name);
    let mut modules: Vec<String> = aliases
        .lines()
        .filter_map(|line| line.strip_prefix("alias ")?.split_once(' '))
        .filter(|(pattern, _)| fits(normal(pattern).as_bytes(), name.as_bytes()))
        .map(|(_, module)| normal(module.trim()))
        .collect();
    modules.dedup();
    modules
}

/// Whether a pattern with `*` and `?` describes `name`.
fn fits(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n) = (0, 0);
    // Where to go on when what follows the last star did not fit.
    let mut again = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                again = Some((p + 1, n));
                p += 1;
            }
            Some(b) if *b == b'?' || *b == name[n] => {
                p += 1;
                n += 1;
            }
            _ => {
                let Some((after, from)) = again else {
                    return false;
                };
                again = Some((after, from + 1));
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

    const DEPENDENCIES: &str = "kernel/net/tls/tls.ko:\n\
        kernel/drivers/net/wireguard/wireguard.ko: kernel/net/udp_tunnel.ko kernel/lib/chacha.ko\n\
        kernel/crypto/xts-mode.ko: kernel/crypto/ecb.ko\n";

    #[test]
    fn what_a_module_needs_is_loaded_before_it() {
        assert_eq!(
            chain(DEPENDENCIES, "wireguard").unwrap(),
            [
                "kernel/lib/chacha.ko",
                "kernel/net/udp_tunnel.ko",
                "kernel/drivers/net/wireguard/wireguard.ko"
            ]
        );
        assert_eq!(
            chain(DEPENDENCIES, "xts_mode").unwrap(),
            ["kernel/crypto/ecb.ko", "kernel/crypto/xts-mode.ko"]
        );
        assert_eq!(chain(DEPENDENCIES, "tl"), None);
    }

    #[test]
    fn aliases_are_found_whatever_joins_their_words() {
        let aliases = "# Aliases\nalias tcp-ulp-tls tls\nalias net-pf-16-proto-*-x wireguard\n\
            alias fs-btrfs btrfs\nalias fs-btrfs btrfs\n";
        assert_eq!(aliased(aliases, "tcp_ulp-tls"), ["tls"]);
        assert_eq!(aliased(aliases, "net-pf-16-proto-20-x"), ["wireguard"]);
        assert_eq!(aliased(aliases, "fs-btrfs"), ["btrfs"]);
        assert!(aliased(aliases, "fs-ntfs").is_empty());
        assert!(is_built_in("kernel/fs/ext4/ext4.ko\n", "ext4"));
    }

    #[test]
    fn patterns_fit_whole_names_only() {
        assert!(fits(b"a*c?", b"abbcd"));
        assert!(fits(b"*", b""));
        assert!(!fits(b"a*c", b"abcd"));
        assert!(!fits(b"", b"a"));
    }

    #[test]
    fn a_module_that_is_not_there_is_an_error_and_no_panic() {
        let empty = tempfile::tempdir().unwrap();
        assert!(load(empty.path(), "x").is_err());
        for file in ["modules.dep", "modules.alias"] {
            std::fs::write(empty.path().join(file), "").unwrap();
        }
        let error = load(empty.path(), "../../etc/passwd").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
