//! Tests of the confinement of host programs.

use super::*;
use crate::command::Tool;
use crate::skipped;
use jiffy_confinement::{CapabilitySet, FsView, PROGRAM_DIRECTORIES};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::time::Duration;

/// Perl script with the attempts of a compromised program. Prints its user, its root directory, and
/// the attempts that succeeded. `syscall` takes the numbers of x86-64: 101 `ptrace` (16 is
/// `PTRACE_ATTACH`), 133 `mknod`, 165 `mount`, 272 `unshare`, 304 `open_by_handle_at`.
const ATTEMPTS: &str = r#"
use Socket; use POSIX ();
opendir(my $root, "/"); my @names = sort grep { !/^\.\.?$/ } readdir($root);
my @done;
sub attempt { my ($name, $work) = @_; push @done, $name if $work->() }
attempt("read its tree", sub { open(my $f, "<", "/tree/secret") or return 0; <$f> eq "tree" });
attempt("write its image", sub { open(my $f, ">", "/image") or return 0; print $f "image" });
attempt("write its tree", sub { open(my $f, ">", "/tree/new") });
attempt("write outside its tree", sub { open(my $f, ">", "/new") });
attempt("write a program", sub { open(my $f, ">>", "/usr/bin/env") });
attempt("read the daemon's environment", sub { grep { !/^(PATH|LC_ALL|PWD)$/ } keys %ENV });
attempt("read a file of the host", sub { open(my $f, "<", "/etc/passwd") });
attempt("leave by ..", sub { open(my $f, "<", "/tree/../../../../../etc/passwd") });
attempt("own its tree", sub { chown($>, $>, "/tree/secret") });
attempt("make a device", sub { my $name = "/device"; syscall(133, $name, 020666, 0x103) >= 0 });
attempt("become root", sub { POSIX::setuid(0) });
attempt("reach a network", sub { socket(my $s, PF_INET, SOCK_STREAM, 0) });
attempt("mount", sub { my ($kind, $at) = ("tmpfs", "/tree"); syscall(165, $kind, $at, $kind, 0, 0) >= 0 });
attempt("make a namespace", sub { syscall(272, 0x10000000) >= 0 });
attempt("open by handle", sub { my $handle = "\x08\0\0\0\x01\0\0\0" . "\x02" . "\0" x 7; syscall(304, -100, $handle, 0) >= 0 });
attempt("start a process", sub { my $pid = fork(); POSIX::_exit(0) if defined $pid && !$pid; defined $pid });
attempt("trace its parent", sub { syscall(101, 16, getppid(), 0, 0) >= 0 });
attempt("signal its parent", sub { kill(0, getppid()) });
print "$> @names\n", map { "$_\n" } @done;
"#;

/// Returns a Perl process that runs the script of forbidden operations in confinement.
fn perl(stage: &Path, tree: &Path, image: &Path) -> Tool {
    fs::write(tree.join("attempts"), ATTEMPTS).unwrap();
    let view = FsView::new(stage).unwrap();
    let view = view.programs().unwrap().reading(tree, "tree").unwrap();
    let view = view.writing(image, "image").unwrap();
    let mut perl = Tool::new("perl", "perl-base");
    perl.arg("/tree/attempts");
    perl.jailed(view, CapabilitySet::DAC_READ_SEARCH, image)
        .unwrap();
    perl
}

#[test]
fn a_compromised_program_reads_its_tree_writes_its_image_and_does_nothing_else() {
    if !is_on() {
        return skipped("jail::tests::a_compromised_program_*", "needs root");
    }
    let place = tempfile::tempdir().unwrap();
    let (tree, stage) = (place.path().join("tree"), place.path().join("stage"));
    let image = place.path().join("image");
    for directory in [&tree, &stage] {
        fs::create_dir(directory).unwrap();
    }
    fs::write(&image, "").unwrap();
    let secret = tree.join("secret");
    fs::write(&secret, "tree").unwrap();
    // Another user owns the file, and its mode permits no access: only the capability helps.
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o0)).unwrap();
    chown(&secret, Some(1234), Some(1234)).unwrap();
    let mut lines = Vec::new();
    let perl = perl(&stage, &tree, &image);
    perl.run(None, &mut |line| lines.push(line.to_owned()))
        .unwrap();
    let (first, done) = lines.split_first().unwrap();
    let (user, names) = first.split_once(' ').unwrap();
    let user: u32 = user.parse().unwrap();
    // Ids of confined processes start at `jiffy_proto::vm::jail::FIRST_UID`.
    assert!(user > 1_900_000_000, "{user}");
    let names: Vec<&str> = names.split(' ').collect();
    let others = names
        .iter()
        .filter(|name| !PROGRAM_DIRECTORIES.contains(name));
    // The root directory contains nothing else.
    assert_eq!(others.collect::<Vec<_>>(), [&"image", &"tree"]);
    assert_eq!(done, ["read its tree", "write its image"]);
    assert_eq!(fs::read(&image).unwrap(), b"image");
    assert_eq!(fs::metadata(&image).unwrap().uid(), user);
    // The mounts of the tree were not visible on the host.
    assert_eq!(fs::read_dir(&stage).unwrap().count(), 0);
}

#[test]
fn a_program_over_its_time_is_killed() {
    let mut perl = Tool::new("perl", "perl-base");
    perl.args(["-e", "sleep(600)"])
        .deadline(Duration::from_millis(200));
    let error = perl.run(None, &mut |_| ()).unwrap_err().to_string();
    assert!(error.contains("SIGKILL"), "{error}");
}
