//! Tests of tokens, of their keys on one host, and of keys that several hosts share.

#![allow(clippy::unwrap_used)]
use super::*;
use jsonwebtoken::jwk::JwkSet;
use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode, decode_header};
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicBool, Ordering};

const URL: &str = "https://Jiffy.example:8443/eu";
const AUDIENCE: &str = "sts.example";
const DAY: u64 = 86_400;

fn issuer_of(home: &Path) -> TokenIssuer {
    let host_key = HostKey::open(home).unwrap();
    TokenIssuer::new(home, host_key, URL.parse().unwrap())
}

/// Returns a sandbox of `owner` and `template`.
fn workload(owner: Option<&str>, template: &str) -> Workload {
    Workload {
        sandbox: "sandbox1".to_owned(),
        owner: owner.map(str::to_owned),
        template: template.to_owned(),
        tokens: Default::default(),
    }
}

/// Verifies a token as a service does, with the published keys only.
fn verified(token: &str, keys: &Value) -> Result<Value, jsonwebtoken::errors::Error> {
    let keys: JwkSet = serde_json::from_value(keys.clone()).unwrap();
    let id = decode_header(token)?.kid.unwrap();
    let key = keys
        .find(&id)
        .ok_or(jsonwebtoken::errors::ErrorKind::InvalidToken)?;
    let mut rules = Validation::new(Algorithm::ES256);
    rules.set_audience(&[AUDIENCE]);
    rules.set_issuer(&[URL]);
    rules.validate_exp = false;
    decode::<Value>(token, &DecodingKey::from_jwk(key)?, &rules).map(|token| token.claims)
}

#[test]
fn tokens_are_verified_with_the_published_keys() {
    let home = tempfile::tempdir().unwrap();
    let issuer = issuer_of(home.path());
    let of_key = workload(Some("key1"), "key1/tool:v2");
    let token = issuer.token_at(&of_key, AUDIENCE, 1000).unwrap();
    let keys = issuer.public_keys_at(1000).unwrap();
    let claims = verified(&token, &keys).unwrap();
    let expected = json!({
        "iss": URL, "aud": AUDIENCE, "iat": 1000, "exp": 1300, "jti": claims["jti"],
        "sub": "spiffe://jiffy.example/owner/key1/template/key1/tool/v2/sandbox/sandbox1",
        "sandbox": "sandbox1", "key": "key1", "template": "key1/tool:v2",
    });
    assert_eq!(claims, expected);
    let again = issuer.token_at(&of_key, AUDIENCE, 1000).unwrap();
    assert_ne!(verified(&again, &keys).unwrap()["jti"], claims["jti"]);
    let of_host = issuer
        .token_at(&workload(None, "base"), AUDIENCE, 1000)
        .unwrap();
    let claims = verified(&of_host, &keys).unwrap();
    let subject = "spiffe://jiffy.example/owner/host/template/host/base/default/sandbox/sandbox1";
    assert_eq!(claims["sub"], subject);
    assert_eq!(claims.get("key"), None);
    // Another audience, changed claims and other keys are rejected.
    let other = issuer.token_at(&of_key, "other.example", 1000).unwrap();
    verified(&other, &keys).unwrap_err();
    let mut parts: Vec<&str> = token.split('.').collect();
    parts[1] = of_host.split('.').nth(1).unwrap();
    verified(&parts.join("."), &keys).unwrap_err();
    let elsewhere = tempfile::tempdir().unwrap();
    let foreign = issuer_of(elsewhere.path());
    verified(&token, &foreign.public_keys_at(1000).unwrap()).unwrap_err();
    // A reference that could change the form of a subject is an error.
    issuer
        .token_at(&workload(None, "a/b/c"), AUDIENCE, 1000)
        .unwrap_err();
}

#[test]
fn keys_are_encrypted_private_and_outlive_the_daemon() {
    let home = tempfile::tempdir().unwrap();
    let first = issuer_of(home.path());
    assert!(!home.path().join("identity-keys").exists());
    let keys = first.public_keys_at(1000).unwrap();
    let file = home.path().join("identity-keys");
    let mode = file.metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let published = keys.to_string();
    assert!(!published.contains("\"d\""), "{published}");
    assert_eq!(issuer_of(home.path()).public_keys_at(1000).unwrap(), keys);
    // Keys of another host are an error: new keys would invalidate the trust of verifiers.
    std::fs::remove_file(home.path().join("secrets-key")).unwrap();
    let error = issuer_of(home.path()).public_keys_at(1000).unwrap_err();
    assert!(matches!(error, IdentityError::Damaged { .. }), "{error}");
}

#[test]
fn a_new_key_is_published_before_it_signs_and_the_old_one_afterwards() {
    let home = tempfile::tempdir().unwrap();
    let issuer = issuer_of(home.path());
    let key_at = |day: u64| {
        let token = issuer
            .token_at(&workload(None, "base"), AUDIENCE, day * DAY)
            .unwrap();
        let keys = issuer.public_keys_at(day * DAY).unwrap();
        verified(&token, &keys).unwrap();
        let published = keys["keys"].as_array().unwrap().len();
        (decode_header(&token).unwrap().kid.unwrap(), published)
    };
    let (first, _) = key_at(0);
    assert_eq!(key_at(29), (first.clone(), 1));
    assert_eq!(key_at(30), (first.clone(), 2));
    let (second, published) = key_at(31);
    assert_ne!(second, first);
    assert_eq!(published, 2);
    assert_eq!(key_at(32), (second.clone(), 1));
    // A clock that was set back changes nothing.
    assert_eq!(key_at(1), (second.clone(), 1));
    // After a long time without use, the old key signs until verifiers can know the new one.
    assert_eq!(key_at(400), (second, 2));
    let restarted = issuer_of(home.path());
    let keys = restarted.public_keys_at(400 * DAY).unwrap();
    assert_eq!(keys["keys"].as_array().unwrap().len(), 2);
}

#[test]
fn a_key_that_cannot_be_stored_does_not_sign() {
    let home = tempfile::tempdir().unwrap();
    let issuer = issuer_of(home.path());
    let keys = issuer.public_keys_at(0).unwrap();
    // A directory at the path of the new file makes every write fail, also for root.
    let blocker = home.path().join("identity-keys.new");
    std::fs::create_dir(&blocker).unwrap();
    assert_eq!(issuer.public_keys_at(30 * DAY).unwrap(), keys);
    std::fs::remove_dir(&blocker).unwrap();
    assert_eq!(issuer.public_keys_at(30 * DAY).unwrap(), keys);
    let later = issuer.public_keys_at(30 * DAY + RETRY_S).unwrap();
    assert_eq!(later["keys"].as_array().unwrap().len(), 2);
}

/// Keys of a fleet, in memory.
#[derive(Debug, Default)]
struct FleetKeys {
    keys: Mutex<(u64, Vec<StoredKey>)>,
    is_cut_off: AtomicBool,
    /// True if this host does not see the keys that it or another host has stored.
    is_behind: AtomicBool,
}

impl SharedIdentityKeys for FleetKeys {
    fn read(&self) -> Result<(u64, Vec<StoredKey>), IdentityError> {
        // The next read sees the keys.
        if self.is_behind.swap(false, Ordering::SeqCst) {
            return Ok((0, Vec::new()));
        }
        Ok(self.keys.lock().clone())
    }

    fn replace(&self, version: u64, keys: Vec<StoredKey>) -> Result<bool, IdentityError> {
        let mut stored = self.keys.lock();
        let is_next = version == stored.0 + 1;
        if is_next {
            *stored = (version, keys);
        }
        Ok(is_next)
    }

    fn check_contact(&self) -> Result<(), IdentityError> {
        let lost = IdentityError::Shared {
            reason: "no contact".to_owned(),
            is_temporary: true,
        };
        let is_cut_off = self.is_cut_off.load(Ordering::SeqCst);
        (!is_cut_off).then_some(()).ok_or(lost)
    }
}

/// Returns the issuer of a host of a fleet.
fn issuer_in(fleet: &Arc<FleetKeys>, home: &Path) -> TokenIssuer {
    let key = HostKey::of_fleet(&[7; 32], home).unwrap();
    TokenIssuer::of_fleet(home, key, URL.parse().unwrap(), fleet.clone())
}

#[test]
fn hosts_of_a_fleet_sign_and_publish_the_same_keys_and_replace_them_once() {
    let homes = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let fleet = Arc::new(FleetKeys::default());
    let [one, two] = [0, 1].map(|i| issuer_in(&fleet, homes[i].path()));
    let of_host = workload(None, "base");
    let token = one.token_at(&of_host, AUDIENCE, 0).unwrap();
    // The second host does not see the first key yet when it is used.
    fleet.is_behind.store(true, Ordering::SeqCst);
    let keys = two.public_keys_at(0).unwrap();
    verified(&token, &keys).unwrap();
    assert_eq!(one.public_keys_at(0).unwrap(), keys);
    assert!(!homes[0].path().join("identity-keys").exists());
    // Requests do not replace keys.
    assert_eq!(two.public_keys_at(30 * DAY).unwrap(), keys);
    one.replace_due_keys_at(30 * DAY).unwrap();
    let (version, stored) = fleet.read().unwrap();
    assert_eq!((version, stored.len()), (2, 2));
    // The other host has nothing to do.
    two.replace_due_keys_at(30 * DAY).unwrap();
    assert_eq!(fleet.read().unwrap(), (version, stored));
    let both = two.public_keys_at(30 * DAY).unwrap();
    let token = two.token_at(&of_host, AUDIENCE, 31 * DAY).unwrap();
    verified(&token, &keys).unwrap_err();
    verified(&token, &both).unwrap();
    two.replace_due_keys_at(32 * DAY).unwrap();
    let last = one.public_keys_at(32 * DAY).unwrap();
    assert_eq!(last["keys"].as_array().unwrap().len(), 1);
    verified(&token, &last).unwrap();
}

#[test]
fn a_host_without_contact_to_its_fleet_signs_nothing_but_publishes_its_keys() {
    let home = tempfile::tempdir().unwrap();
    let fleet = Arc::new(FleetKeys::default());
    let issuer = issuer_in(&fleet, home.path());
    let keys = issuer.public_keys_at(0).unwrap();
    fleet.is_cut_off.store(true, Ordering::SeqCst);
    let lost = issuer.token_at(&workload(None, "base"), AUDIENCE, 0);
    assert!(matches!(
        lost,
        Err(IdentityError::Shared {
            is_temporary: true,
            ..
        })
    ));
    assert_eq!(issuer.public_keys_at(0).unwrap(), keys);
}

#[test]
fn the_keys_of_the_first_host_become_the_keys_of_its_fleet() {
    let [home, elsewhere] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let keys = issuer_of(home.path()).public_keys_at(1000).unwrap();
    issuer_of(elsewhere.path()).public_keys_at(1000).unwrap();
    let fleet = Arc::new(FleetKeys::default());
    let first = issuer_in(&fleet, home.path());
    let token = first.token_at(&workload(None, "base"), AUDIENCE, 2000);
    let token = token.unwrap();
    verified(&token, &keys).unwrap();
    // A host that joins later has keys of its own, but uses the keys of the fleet.
    let later = issuer_in(&fleet, elsewhere.path());
    assert_eq!(later.public_keys_at(2000).unwrap(), keys);
    // The keys are encrypted with the key of the fleet, which each host has.
    let other = tempfile::tempdir().unwrap();
    let other = issuer_in(&fleet, other.path());
    assert_eq!(other.public_keys_at(2000).unwrap(), keys);
}
