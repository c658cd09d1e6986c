//! Tenants: neither other tenants nor the owner of the bucket can read their objects; keys can
//! change. Master keys encrypt the secrets from which the keys of tenants are derived.

use crate::support::{Fault, FaultyStore, quick};
use jiffy_store::{
    Backend, BackendSettings, KeyBroker, Keyring, SharedStore, StoreError, StoreUrl,
};
use object_store::ObjectStore;
use object_store::path::Path as Key;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Returns a keyring with the keys `k1` and `k2`.
fn keys(current: &str) -> Keyring {
    keys_of(current, &["k1", "k2"])
}

/// Returns a keyring with these key names. Keys of equal names are equal. The *locator* is the
/// secret from which the names of objects are derived.
fn keys_of(current: &str, names: &[&str]) -> Keyring {
    let keys = names.iter().map(|name| {
        let digit = name.trim_start_matches('k');
        format!("{name} = \"{}\"\n", digit.repeat(64))
    });
    let text = format!(
        "locator = \"{}\"\ncurrent = \"{current}\"\n[keys]\n{}",
        "a".repeat(64),
        keys.collect::<String>()
    );
    Keyring::parse(&text).unwrap()
}

fn store(dir: &Path, keyring: Keyring) -> SharedStore {
    let url: StoreUrl = format!("file://{}", dir.display()).parse().unwrap();
    SharedStore::new(url.open(BackendSettings::default()).unwrap(), keyring)
}

#[tokio::test]
async fn concurrent_hosts_create_a_tenant_once() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (store(dir.path(), keys("k1")), store(dir.path(), keys("k1")));
    let (ours, theirs) = tokio::join!(a.tenant("alice"), b.tenant("alice"));
    let (ours, theirs) = (ours.unwrap(), theirs.unwrap());
    assert_eq!(ours.id(), theirs.id());
    let hash = |tenant: &jiffy_store::Tenant| tenant.current().unwrap().chunk_hash(b"x");
    assert_eq!(hash(&ours), hash(&theirs));
    let mallory = a.tenant("mallory").await.unwrap();
    assert_ne!(hash(&ours), hash(&mallory));
}

#[tokio::test]
async fn a_new_master_key_replaces_the_old_one_and_data_keys_remain() {
    let dir = tempfile::tempdir().unwrap();
    let before = store(dir.path(), keys("k1")).tenant("alice").await.unwrap();
    store(dir.path(), keys("k2")).rewrap("alice").await.unwrap();
    let text = format!(
        "locator = \"{}\"\ncurrent = \"k2\"\n[keys]\nk2 = \"{}\"\n",
        "a".repeat(64),
        "2".repeat(64)
    );
    let only_new = store(dir.path(), Keyring::parse(&text).unwrap());
    let after = only_new.tenant("alice").await.unwrap();
    let hash = |tenant: &jiffy_store::Tenant| tenant.current().unwrap().chunk_hash(b"x");
    assert_eq!(hash(&before), hash(&after));
    let only_old = Keyring::parse(&text.replace("k2", "k1")).unwrap();
    let refused = store(dir.path(), only_old)
        .tenant("alice")
        .await
        .unwrap_err();
    assert!(matches!(refused, StoreError::Key { .. }), "{refused}");
}

#[tokio::test]
async fn a_rotation_adds_a_generation_and_keeps_the_old_one_readable() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path(), keys("k1"));
    let before = store.tenant("alice").await.unwrap();
    let after = store.rotate("alice").await.unwrap();
    assert_eq!(after.current().unwrap().generation(), 2);
    let hash = |keys: &jiffy_store::DataKeys| keys.chunk_hash(b"x");
    assert_eq!(
        hash(after.generation(1).unwrap()),
        hash(before.current().unwrap())
    );
    assert_ne!(
        hash(after.current().unwrap()),
        hash(before.current().unwrap())
    );
}

/// A host exits at each request of rewrapping secrets or adding a generation.
#[tokio::test]
async fn an_interrupted_rotation_loses_no_key_and_can_be_repeated() {
    for data_keys in [false, true] {
        let (mut at, mut ended) = (0, false);
        while !ended {
            let inner: Arc<dyn ObjectStore> = Arc::new(object_store::memory::InMemory::new());
            let faulty = FaultyStore::new(inner.clone());
            let open = |inner: Arc<dyn ObjectStore>, current: &str| {
                let backend = Backend::new(inner, Key::default(), quick());
                SharedStore::new(backend, keys(current))
            };
            let before = open(inner.clone(), "k1").tenant("alice").await.unwrap();
            let hash = before.current().unwrap().chunk_hash(b"x");
            let rotating = open(faulty.clone(), "k2");
            faulty.die_at(at);
            let rotation = async {
                rotating.rewrap("alice").await.unwrap();
                if data_keys {
                    rotating.rotate("alice").await.unwrap();
                }
            };
            ended = faulty.until_death(rotation).await.is_some();
            let other = open(inner.clone(), "k2");
            let tenant = other.tenant("alice").await.unwrap();
            assert_eq!(tenant.generation(1).unwrap().chunk_hash(b"x"), hash);
            other.rewrap("alice").await.unwrap();
            let only_new = keys_of("k2", &["k2"]);
            let backend = Backend::new(inner.clone(), Key::default(), quick());
            let after = SharedStore::new(backend, only_new).tenant("alice").await;
            let after = after.unwrap();
            assert_eq!(after.generation(1).unwrap().chunk_hash(b"x"), hash);
            // The former master key decrypts nothing: older records do not accumulate, and the key
            // alone does not open the tenant. Each rewrap removes the records before the latest
            // record. A later record is permitted. Objects `name` are not records.
            let backend = Backend::new(inner, Key::default(), quick());
            let records = backend.list("tenants").await.unwrap();
            let records = records.iter().filter(|found| !found.key.ends_with("/name"));
            assert!(records.count() <= 2);
            let only_old = SharedStore::new(backend, keys_of("k1", &["k1"]));
            only_old.tenant("alice").await.unwrap_err();
            at += 1;
        }
        // With fewer requests, no rotation would have been interrupted.
        assert!(at > 4, "{at} requests");
    }
}

/// A tenant is opened between any two requests of a host that rewraps its secrets.
#[tokio::test]
async fn a_tenant_can_be_opened_while_its_secrets_are_rewrapped() {
    for at in 0.. {
        let inner: Arc<dyn ObjectStore> = Arc::new(object_store::memory::InMemory::new());
        let faulty = FaultyStore::new(inner.clone());
        let open = |inner: Arc<dyn ObjectStore>, current: &str| {
            let backend = Backend::new(inner, Key::default(), quick());
            Arc::new(SharedStore::new(backend, keys(current)))
        };
        let (opening, rotating) = (open(faulty.clone(), "k1"), open(inner, "k2"));
        opening.tenant("alice").await.unwrap();
        let (reached, arrived) = tokio::sync::oneshot::channel();
        let (mut reached, mut count) = (Some(reached), 0);
        faulty.on(move |_, _| {
            count += 1;
            if count == at + 1 {
                let _ = reached.take().map(|reached| reached.send(()));
                Fault::Slow(Duration::from_millis(30))
            } else {
                Fault::None
            }
        });
        let rotation = async {
            let reached = arrived.await.is_ok();
            rotating.rewrap("alice").await.unwrap();
            reached
        };
        let opened = async {
            let opened = opening.tenant("alice").await;
            faulty.heal();
            opened.unwrap();
        };
        let ((), reached) = tokio::join!(opened, rotation);
        if !reached {
            assert!(at >= 2, "{at} requests");
            return;
        }
    }
}

#[tokio::test]
async fn names_of_tenants_and_keys_are_not_in_the_store() {
    let dir = tempfile::tempdir().unwrap();
    store(dir.path(), keys("k1")).tenant("alice").await.unwrap();
    let mut stack = vec![dir.path().to_owned()];
    while let Some(path) = stack.pop() {
        assert!(!path.to_string_lossy().contains("alice"));
        if path.is_dir() {
            stack.extend(
                fs::read_dir(path)
                    .unwrap()
                    .map(|entry| entry.unwrap().path()),
            );
        } else {
            let bytes = fs::read(path).unwrap();
            for word in [&b"alice"[..], b"k1", b"generation"] {
                assert!(!bytes.windows(word.len()).any(|at| at == word));
            }
        }
    }
}

#[tokio::test]
async fn a_command_wraps_the_keys_instead_of_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let command = dir.path().join("kms");
    // The command wraps by reversing its input, which suffices to detect that it was called.
    fs::write(
        &command,
        "#!/bin/sh\n[ \"$2\" = alias ] || exit 1\nperl -0777 -pe '$_ = reverse'\n",
    )
    .unwrap();
    fs::set_permissions(&command, fs::Permissions::from_mode(0o755)).unwrap();
    let text = |current: &str| {
        format!(
            "locator = \"{}\"\ncurrent = \"{current}\"\ncommand = [\"{}\"]\n",
            "a".repeat(64),
            command.display()
        )
    };
    let place = dir.path().join("store");
    let ours = store(&place, Keyring::parse(&text("alias")).unwrap());
    let first = ours.tenant("alice").await.unwrap();
    assert_eq!(ours.tenant("alice").await.unwrap().id(), first.id());
    let refused = store(&place, Keyring::parse(&text("other")).unwrap());
    let refused = refused.tenant("bob").await.unwrap_err();
    assert!(refused.to_string().contains("key command"), "{refused}");
}

/// A process that cannot start programs uses a broker to run the command. The broker only unwraps.
#[tokio::test]
async fn a_broker_calls_the_command_to_unwrap_only() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    // `$0` is `wrap` or `unwrap`, and `$1` is the name of the key. `cat` returns the secret
    // unchanged.
    let script = format!("echo $0 $1 >> {}; cat", log.display());
    let text = format!(
        "locator = \"{}\"\ncurrent = \"alias\"\ncommand = [\"sh\", \"-c\", \"{script}\"]\n",
        "a".repeat(64)
    );
    let place = dir.path().join("store");
    let first = store(&place, Keyring::parse(&text).unwrap());
    let first = first.tenant("alice").await.unwrap();
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let broker_keys = Keyring::parse(&text).unwrap();
    let serving = std::thread::spawn(move || KeyBroker::serve(theirs, &broker_keys));
    let keyring = Keyring::parse(&text).unwrap();
    let keyring = keyring.with_broker(KeyBroker::new(ours).unwrap());
    let brokered = store(&place, keyring);
    for _ in 0..3 {
        let found = brokered.find_tenant("alice").await.unwrap();
        assert_eq!(found.unwrap().id(), first.id());
    }
    let refused = brokered.tenant("bob").await.unwrap_err();
    assert!(refused.to_string().contains("cannot wrap"), "{refused}");
    drop(brokered);
    serving.join().unwrap().unwrap();
    // The first host has wrapped and unwrapped the secret once, and the broker has unwrapped the
    // secret for each of the three requests.
    let called = fs::read_to_string(&log).unwrap();
    assert_eq!(
        called,
        ["wrap alias\n", &"unwrap alias\n".repeat(4)].concat()
    );
    // Malformed requests end the broker.
    // A length that is too large, a message without fields, and a truncated message. The first four
    // bytes of a message are its length.
    for nonsense in [&[255; 4][..], b"\x02\0\0\0{}", b"\x01\0\0\0"] {
        let (mut ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        std::io::Write::write_all(&mut ours, nonsense).unwrap();
        ours.shutdown(std::net::Shutdown::Write).unwrap();
        let keyring = Keyring::parse(&text).unwrap();
        let serving = std::thread::spawn(move || KeyBroker::serve(theirs, &keyring));
        serving.join().unwrap().unwrap_err();
    }
}

#[test]
fn a_file_of_keys_that_others_can_read_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keys");
    fs::write(&path, "secret").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    let refused = Keyring::load(&path).unwrap_err().to_string();
    assert!(
        refused.contains("chmod 600") && !refused.contains("secret"),
        "{refused}"
    );
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    let refused = Keyring::load(&path).unwrap_err().to_string();
    assert!(!refused.contains("secret"), "{refused}");
}

#[test]
fn urls_of_stores_are_parsed_or_rejected() {
    let parse = |text: &str| text.parse::<StoreUrl>();
    assert!(
        matches!(parse("s3://b/p/q").unwrap(), StoreUrl::S3 { bucket, prefix } if bucket == "b" && prefix == "p/q")
    );
    assert!(
        matches!(parse("file:///x/y").unwrap(), StoreUrl::Directory(path) if path == Path::new("/x/y"))
    );
    for wrong in [
        "",
        "b/p",
        "http://b/p",
        "s3:///p",
        "file:///",
        "s3://b/p?x=1",
        "s3://u:p@b/p",
    ] {
        assert!(
            matches!(parse(wrong), Err(StoreError::Url { .. })),
            "{wrong}"
        );
    }
}

/// Opens the store in `dir` for a host whose version memory is the file `memory`. In this file, a
/// host remembers the latest version of each record that it has seen, so that it detects older
/// ones.
fn store_of_host(dir: &Path, memory: &str) -> SharedStore {
    // `here` names the store in the file.
    let versions = jiffy_store::VersionMemory::open(&dir.join(memory), "here").unwrap();
    store(&dir.join("store"), keys("k1")).with_versions(versions)
}

/// The store serves an older record to a host that has seen later versions.
#[tokio::test]
async fn a_store_that_returns_to_old_records_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("store");
    let open = |memory: &str| store_of_host(dir.path(), memory);
    let record = |version: u32| {
        let folder = fs::read_dir(place.join("tenants")).unwrap().next().unwrap();
        folder.unwrap().path().join(format!("{version:010}"))
    };
    open("one").tenant("alice").await.unwrap();
    let first = fs::read(record(1)).unwrap();
    open("one").rotate("alice").await.unwrap();
    let second = fs::read(record(2)).unwrap();
    open("one").rotate("alice").await.unwrap();
    assert_eq!(
        open("two")
            .tenant("alice")
            .await
            .unwrap()
            .current()
            .unwrap()
            .generation(),
        3
    );
    let regressed = |e: &StoreError| matches!(e, StoreError::Regressed { .. });
    // The latest record is missing, or replaced by an older one, or an older one has a later
    // number.
    let third = fs::read(record(3)).unwrap();
    fs::remove_file(record(3)).unwrap();
    for host in ["one", "two"] {
        let refused = open(host).find_tenant("alice").await.unwrap_err();
        assert!(regressed(&refused), "{refused}");
        let refused = open(host).rotate("alice").await.unwrap_err();
        assert!(regressed(&refused), "{refused}");
    }
    for (version, old) in [
        (3, &first),
        (3, &second),
        (4, &second),
        (4, &first),
        (4, &third),
    ] {
        fs::write(record(version), old).unwrap();
        let refused = open("two").tenant("alice").await.unwrap_err();
        let is_damage = matches!(refused, StoreError::Damaged { .. });
        assert!(regressed(&refused) || is_damage, "{version}: {refused}");
        fs::remove_file(record(version)).unwrap();
    }
    // Even a host without version memory detects a record that was moved.
    fs::write(record(4), &second).unwrap();
    let refused = open("new").tenant("alice").await.unwrap_err();
    assert!(matches!(refused, StoreError::Damaged { .. }), "{refused}");
    fs::remove_file(record(4)).unwrap();
    // The absence of all records is a regression, too.
    let folder = record(1).parent().unwrap().to_owned();
    fs::rename(&folder, dir.path().join("away")).unwrap();
    let refused = open("two").tenant("alice").await.unwrap_err();
    assert!(regressed(&refused), "{refused}");
    fs::rename(dir.path().join("away"), &folder).unwrap();
    fs::write(record(3), &third).unwrap();
    open("two").tenant("alice").await.unwrap();
}

#[tokio::test]
async fn a_name_that_moved_does_not_move_back() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("store");
    let open = |memory: &str| store_of_host(dir.path(), memory);
    let (one, two) = (open("one"), open("two"));
    let tenant = one.tenant("alice").await.unwrap();
    let id: String = tenant
        .id()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let names = place.join(id).join("names");
    let name = |root: jiffy_store::Hash| {
        let folder = fs::read_dir(&names).unwrap().next().unwrap().unwrap();
        folder.path().join(root.to_string())
    };
    let (old, new) = (jiffy_store::Hash([9; 32]), jiffy_store::Hash([1; 32]));
    one.move_name(&tenant, "template t", old).await.unwrap();
    let kept = fs::read(name(old)).unwrap();
    one.move_name(&tenant, "template t", new).await.unwrap();
    assert_eq!(two.named(&tenant, "template t").await.unwrap(), Some(new));
    // The store restores the old name as its newest object.
    fs::write(name(old), &kept).unwrap();
    assert_eq!(
        open("new").named(&tenant, "template t").await.unwrap(),
        Some(new)
    );
    let moved = fs::read(name(new)).unwrap();
    fs::remove_file(name(new)).unwrap();
    for host in [&one, &two, &open("two")] {
        let refused = host.named(&tenant, "template t").await.unwrap_err();
        assert!(matches!(refused, StoreError::Regressed { .. }), "{refused}");
    }
    // `set_name`, unlike `move_name`, gives a new name no version. This name has one in the store,
    // and keeps a version even if the host has not seen it.
    fs::write(name(new), &moved).unwrap();
    let ignorant = open("ignorant");
    ignorant.set_name(&tenant, "template t", new).await.unwrap();
    assert_eq!(two.named(&tenant, "template t").await.unwrap(), Some(new));
    // A name that a host sets again is valid, even after a removal.
    two.move_name(&tenant, "template t", old).await.unwrap();
    assert_eq!(one.named(&tenant, "template t").await.unwrap(), Some(old));
    open("new")
        .remove_name(&tenant, "template t")
        .await
        .unwrap();
    open("new")
        .move_name(&tenant, "template t", new)
        .await
        .unwrap();
    assert_eq!(one.named(&tenant, "template t").await.unwrap(), Some(new));
}
