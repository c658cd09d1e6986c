//! Tests of the upload store, which receives the files of builds. A client uploads a file under the
//! name of its digest, with a ticket, which is a link of limited validity. *OfArchive* names are
//! digests of the content that this program computed, which the store can verify. *OfClient* names
//! are digests by other clients, which it cannot.
use super::*;
use jiffy_build_spec::context::prepare;
use jiffy_build_spec::dockerfile::{DockerfileOptions, parse};

/// Returns a valid name of an upload.
fn name() -> String {
    "ab".repeat(32)
}

/// Uploads a file with a ticket.
async fn upload(uploads: &UploadStore, owner: Option<&str>, bytes: &[u8]) {
    let token = uploads
        .create_ticket(owner, &name(), UploadNaming::OfClient)
        .unwrap();
    let mut upload = uploads.begin(&token).await.unwrap();
    upload.write(bytes).await.unwrap();
    upload.finish().await.unwrap();
}

#[tokio::test]
async fn an_upload_is_visible_when_complete_and_to_its_owner_only() {
    let dir = tempfile::tempdir().unwrap();
    let uploads = UploadStore::open(dir.path().join("uploads")).unwrap();
    let token = uploads
        .create_ticket(Some("k1"), &name(), UploadNaming::OfClient)
        .unwrap();
    let mut half = uploads.begin(&token).await.unwrap();
    half.write(b"ha").await.unwrap();
    assert!(uploads.find(Some("k1"), &name()).unwrap().is_none());
    drop(half);
    upload(&uploads, Some("k1"), b"abc").await;
    let found = uploads.find(Some("k1"), &name()).unwrap().unwrap();
    assert_eq!(fs::read(found.path).unwrap(), b"abc");
    // The SHA-256 digest of `abc`.
    assert!(found.sum.starts_with("ba7816bf") && !found.is_verified);
    assert!(uploads.find(None, &name()).unwrap().is_none());
    // The upload and its checksum. `prune` returns the removed bytes of uploads.
    assert_eq!(uploads.files().unwrap().len(), 2, "nothing half is left");
    assert_eq!(uploads.prune(Duration::from_secs(60), None).unwrap(), 0);
    assert_eq!(uploads.prune(Duration::ZERO, None).unwrap(), 3);
    assert!(uploads.files().unwrap().is_empty());
}

#[tokio::test]
async fn an_upload_whose_checksum_was_lost_does_not_exist() {
    let dir = tempfile::tempdir().unwrap();
    let uploads = UploadStore::open(dir.path().join("uploads")).unwrap();
    upload(&uploads, Some("k1"), b"abc").await;
    let found = uploads.find(Some("k1"), &name()).unwrap().unwrap();
    fs::write(found.path.with_extension("sum"), "").unwrap();
    assert!(uploads.find(Some("k1"), &name()).unwrap().is_none());
    upload(&uploads, Some("k1"), b"abd").await;
    let found = uploads.find(Some("k1"), &name()).unwrap().unwrap();
    assert_eq!(fs::read(found.path).unwrap(), b"abd");
}

/// Uploads bytes with an existing ticket.
async fn send(uploads: &UploadStore, token: &str, bytes: &[u8]) -> Result<(), UploadError> {
    let mut upload = uploads.begin(token).await.unwrap();
    upload.write(bytes).await.unwrap();
    upload.finish().await
}

#[tokio::test]
async fn uploads_are_verified_against_their_name_or_the_first_upload() {
    let dir = tempfile::tempdir().unwrap();
    let uploads = UploadStore::open(dir.path().join("uploads")).unwrap();
    // Names from Jiffy's client are verified against the content.
    let context = dir.path().join("context");
    fs::create_dir(&context).unwrap();
    fs::write(context.join("a"), "content").unwrap();
    let text = "FROM scratch\nCOPY a /a\n";
    let parsed = parse(text, &DockerfileOptions::default()).unwrap();
    let prepared = prepare(parsed, &context, None).unwrap();
    let archive = &prepared.uploads[0];
    let mut bytes = Vec::new();
    archive.write_to(&mut bytes).unwrap();
    let owner = Some("k1");
    let ticket = |name: &str, naming| uploads.create_ticket(owner, name, naming).unwrap();
    let own = ticket(&archive.name, UploadNaming::OfArchive);
    for other in [&b"x"[..], &bytes[..bytes.len() / 2], &[]] {
        let refused = send(&uploads, &own, other).await;
        assert!(
            matches!(refused, Err(UploadError::Content(_))),
            "{refused:?}"
        );
    }
    assert!(uploads.find(owner, &archive.name).unwrap().is_none());
    send(&uploads, &own, &bytes).await.unwrap();
    let found = uploads.find(owner, &archive.name).unwrap().unwrap();
    assert!(found.is_verified && found.sum.len() == 64);
    let foreign = ticket(&archive.name, UploadNaming::OfClient);
    let refused = send(&uploads, &foreign, b"x").await;
    assert!(
        matches!(refused, Err(UploadError::Differs(_))),
        "{refused:?}"
    );
    // For other names, only a link that was created after the first upload may replace the upload,
    // and only once.
    let [early, late] = [(); 2].map(|()| ticket(&name(), UploadNaming::OfClient));
    send(&uploads, &early, b"one").await.unwrap();
    send(&uploads, &early, b"one").await.unwrap();
    for old in [&early, &late] {
        let refused = send(&uploads, old, b"two").await;
        assert!(
            matches!(refused, Err(UploadError::Differs(_))),
            "{refused:?}"
        );
    }
    let anew = ticket(&name(), UploadNaming::OfClient);
    send(&uploads, &anew, b"two").await.unwrap();
    let refused = send(&uploads, &anew, b"three").await;
    assert!(
        matches!(refused, Err(UploadError::Differs(_))),
        "{refused:?}"
    );
    let found = uploads.find(owner, &name()).unwrap().unwrap();
    assert_eq!(fs::read(found.path).unwrap(), b"two");
}

#[tokio::test]
async fn an_upload_needs_a_ticket_and_a_digest_as_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let uploads = UploadStore::open(dir.path().join("uploads")).unwrap();
    assert!(matches!(uploads.begin("x").await, Err(UploadError::Closed)));
    for bad in [
        "",
        "..",
        "../../etc/passwd",
        &"g".repeat(64),
        &"a".repeat(63),
    ] {
        assert!(
            matches!(
                uploads.create_ticket(None, bad, UploadNaming::OfClient),
                Err(UploadError::Name(_))
            ),
            "{bad}"
        );
    }
}
