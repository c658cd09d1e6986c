#![no_main]
//! Requests of a guest to the server of a volume: every request has at most one valid reply, the
//! quota is never exceeded, and only existing files are recorded.

use jiffy_volume_server::abi::{REQUEST_HEADER, begin_request, finish};
use jiffy_volume_server::{MAX_MESSAGE, Quota, Session, SessionRights, Volume};
use libfuzzer_sys::fuzz_target;
use std::sync::{Arc, OnceLock};

/// Limits of the volume: bytes, and the number of files and directories (nodes).
const QUOTA: Quota = Quota {
    bytes: 1 << 20,
    nodes: 64,
};

/// Returns the volume of this process. Its files remain between inputs.
fn volume() -> Arc<Volume> {
    static VOLUME: OnceLock<(tempfile::TempDir, Arc<Volume>)> = OnceLock::new();
    let (_, volume) = VOLUME.get_or_init(|| {
        let home = tempfile::tempdir().unwrap();
        let volume = Arc::new(Volume::open(home.path(), QUOTA).unwrap());
        (home, volume)
    });
    volume.clone()
}

fuzz_target!(|data: &[u8]| {
    let volume = volume();
    let rights = SessionRights {
        is_read_only: false,
        is_daemon: false,
    };
    let session = Session::new(volume.clone(), rights);
    let mut reply = Vec::new();
    // A request as it is: the header may be invalid.
    let _ = session.answer(data, &mut reply);
    // Requests with a valid header: operation, node and length of the body.
    let mut rest = data;
    let mut id = 0;
    while let [operation, node, length, body @ ..] = rest {
        let (body, next) = body.split_at(usize::from(*length).min(body.len()));
        rest = next;
        id += 1;
        let mut request = Vec::with_capacity(REQUEST_HEADER + body.len());
        begin_request(
            &mut request,
            u32::from(*operation),
            id,
            u64::from(*node),
            (0, 0),
        );
        request.extend_from_slice(body);
        finish(&mut request);
        if session.answer(&request, &mut reply).unwrap() {
            assert!(reply.len() <= MAX_MESSAGE);
            assert_eq!(
                reply[..4],
                u32::try_from(reply.len()).unwrap().to_le_bytes()
            );
            assert_eq!(reply[8..16], id.to_le_bytes());
        }
    }
    let space = volume.space();
    assert!(space.bytes <= QUOTA.bytes && space.nodes <= QUOTA.nodes);
    assert!(session.used_nodes() as u64 <= QUOTA.nodes);
});
