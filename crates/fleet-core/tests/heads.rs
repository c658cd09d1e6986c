//! Claims, pauses and kills of sandboxes, step by step.
//!
//! The *head* of a sandbox is the record that decides which member may run the sandbox. A *claim*
//! is the write of a head that makes a member the owner. The *root* of a snapshot is the digest by
//! which the store identifies it. The *home* has the files of a sandbox while no member owns it.
//!
//! To *purge* the head of a killed sandbox is to remove it. To *publish* a pause is to enter the
//! root of its snapshot in the head.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::match_bool,
    reason = "a panic is a failed test"
)]

use crate::samples::{head, sandbox, snapshot};
use jiffy_fleet_core::record::{Head, HeadState, KilledAt, Policy, SandboxRecord};
use jiffy_fleet_core::{
    Digest, Epoch, HeadUpdate, HeadWrite, HeldSandbox, MemberId, Millis, Owner, Publish,
    PublishEffect, PublishEvent, PublishInput, Purpose, ReadOutcome, Reconciliation, Resume,
    ResumeAnswer, ResumeEffect, ResumeEvent, ResumeInput, Revision, Timing, UpdateEffect,
    UpdateEvent, Version, WriteOutcome, may_purge, reconcile,
};

const ME: Owner = owner(1, 3);
const OTHER: Owner = owner(2, 1);
/// Epoch that is dead according to [`input`].
const DEAD_EPOCH: u64 = 99;
/// Wall clock at each change of a head, in milliseconds since 1970.
const AT_MS: u64 = 1_000;

const fn owner(member: u32, epoch: u64) -> Owner {
    Owner {
        member: MemberId(member),
        epoch: Epoch(epoch),
    }
}

/// Returns a version of a record in the store.
fn version(number: u8) -> Version {
    Version([number].into())
}

/// Returns the successor of the sample head in another state. Member 9 writes it.
fn head_in(state: HeadState) -> Head {
    head().successor(MemberId(9), state).unwrap()
}

/// Returns the state of the member at the time of an event.
fn input(now: u64, authority: Option<Owner>) -> ResumeInput<'static> {
    ResumeInput {
        now: Millis(now),
        member: ME.member,
        authority,
        is_dead: &|owner| owner.epoch == Epoch(DEAD_EPOCH),
    }
}

/// Passes an event to a resume and returns its effects.
fn step(resume: &mut Resume, input: &ResumeInput<'_>, event: ResumeEvent) -> Vec<ResumeEffect> {
    let mut effects = Vec::new();
    resume.handle(input, event, &mut effects);
    effects
}

/// Returns the event of a successful read of the head.
fn read(head: Head) -> ResumeEvent {
    ResumeEvent::HeadRead(ReadOutcome::Found(Box::new(head), version(1)))
}

/// Returns the event of the outcome of a write of the head.
fn written(write: &HeadWrite, outcome: WriteOutcome<Head>) -> ResumeEvent {
    ResumeEvent::HeadWritten {
        write: write.write,
        outcome,
    }
}

/// Starts a resume up to its claim.
fn claiming() -> (Resume, HeadWrite) {
    let (mut resume, first) = Resume::new(false);
    assert_eq!(first, ResumeEffect::ReadHead);
    let effects = step(&mut resume, &input(0, Some(ME)), read(head()));
    let [
        ResumeEffect::StartRestore(restored),
        ResumeEffect::WriteHead(write),
    ] = &effects[..]
    else {
        panic!("{effects:?}");
    };
    assert_eq!(Some(restored), head().snapshot.as_ref());
    assert_eq!(write.head.state(), HeadState::Running(ME));
    assert_eq!(write.head.revision, Revision(2));
    assert_eq!(write.expected, Some(version(1)));
    (resume, write.clone())
}

#[test]
fn the_claim_is_awaited_before_the_identity() {
    let (mut resume, write) = claiming();
    assert_eq!(
        step(&mut resume, &input(1, Some(ME)), ResumeEvent::Restored),
        []
    );
    let effects = step(
        &mut resume,
        &input(2, Some(ME)),
        written(&write, WriteOutcome::Done(version(2))),
    );
    assert!(matches!(
        effects[..],
        [
            ResumeEffect::AssignIdentity {
                revision: Revision(2),
                ..
            },
            ResumeEffect::Answer(ResumeAnswer::Running),
            ResumeEffect::Finished
        ]
    ));
    let (mut resume, write) = claiming();
    let done = written(&write, WriteOutcome::Done(version(2)));
    assert_eq!(step(&mut resume, &input(1, Some(ME)), done), []);
    let effects = step(&mut resume, &input(2, Some(ME)), ResumeEvent::Restored);
    assert!(matches!(effects[0], ResumeEffect::AssignIdentity { .. }));
}

#[test]
fn a_claim_of_unknown_outcome_is_repeated_and_released() {
    let (mut resume, write) = claiming();
    let effects = step(
        &mut resume,
        &input(6_000, Some(ME)),
        written(&write, WriteOutcome::Unknown),
    );
    assert_eq!(
        effects,
        [
            ResumeEffect::DropGuest,
            ResumeEffect::Answer(ResumeAnswer::Unavailable)
        ]
    );
    let at = resume.wake_at().unwrap();
    let same = [ResumeEffect::WriteHead(write.clone())];
    assert_eq!(
        step(&mut resume, &input(at.0, Some(ME)), ResumeEvent::Timer),
        same
    );
    // The repetition is rejected, but the first attempt may still arrive.
    let effects = step(
        &mut resume,
        &input(at.0, Some(ME)),
        written(&write, WriteOutcome::Rejected),
    );
    assert_eq!(effects, []);
    let at = resume.wake_at().unwrap();
    assert_eq!(
        step(&mut resume, &input(at.0, None), ResumeEvent::Timer),
        same
    );
    let effects = step(
        &mut resume,
        &input(at.0, None),
        written(&write, WriteOutcome::Done(version(2))),
    );
    let [ResumeEffect::WriteHead(release)] = &effects[..] else {
        panic!("{effects:?}");
    };
    assert_eq!(release.head.state(), HeadState::Paused);
    assert_eq!(
        (release.head.revision, &release.expected),
        (Revision(3), &Some(version(2)))
    );
    assert_eq!(release.head.snapshot, head().snapshot);
    let effects = step(
        &mut resume,
        &input(at.0, None),
        written(release, WriteOutcome::Done(version(3))),
    );
    assert_eq!(effects, [ResumeEffect::Finished]);
}

#[test]
fn a_lost_claim_drops_the_guest_and_forwards_the_request() {
    let running = Box::new((head_in(HeadState::Running(OTHER)), version(2)));
    let (mut resume, write) = claiming();
    let effects = step(
        &mut resume,
        &input(1, Some(ME)),
        written(&write, WriteOutcome::Lost(Some(running))),
    );
    assert_eq!(
        effects,
        [
            ResumeEffect::DropGuest,
            ResumeEffect::Answer(ResumeAnswer::Forward(OTHER)),
            ResumeEffect::Finished
        ]
    );
}

#[test]
fn a_claim_that_outlasts_the_authority_is_released() {
    // No authority, and authority of a later epoch than the claim's epoch.
    for authority in [None, Some(owner(1, 4))] {
        let (mut resume, write) = claiming();
        step(&mut resume, &input(1, Some(ME)), ResumeEvent::Restored);
        let done = written(&write, WriteOutcome::Done(version(2)));
        let effects = step(&mut resume, &input(2, authority), done);
        assert!(matches!(
            effects[..],
            [
                ResumeEffect::DropGuest,
                ResumeEffect::Answer(ResumeAnswer::NoAuthority),
                ResumeEffect::WriteHead(_)
            ]
        ));
    }
}

#[test]
fn only_permitted_states_are_claimed() {
    let killed = HeadState::Killed(KilledAt {
        at_ms: 1,
        home: None,
    });
    let dead = owner(2, DEAD_EPOCH);
    // With `from_stored`, the client accepts the stored state of a sandbox whose host is dead.
    // `None` as the answer means that the sandbox is claimed.
    for (state, from_stored, authority, answer) in [
        (
            HeadState::Running(OTHER),
            true,
            Some(ME),
            Some(ResumeAnswer::Forward(OTHER)),
        ),
        (
            HeadState::Running(dead),
            false,
            Some(ME),
            Some(ResumeAnswer::HostLost(dead)),
        ),
        (HeadState::Running(dead), true, Some(ME), None),
        (HeadState::Running(owner(1, 2)), false, Some(ME), None),
        (killed, true, Some(ME), Some(ResumeAnswer::Killed)),
        (
            HeadState::Paused,
            false,
            None,
            Some(ResumeAnswer::NoAuthority),
        ),
        (HeadState::Paused, false, Some(ME), None),
    ] {
        let (mut resume, _) = Resume::new(from_stored);
        let effects = step(&mut resume, &input(0, authority), read(head_in(state)));
        match answer {
            Some(answer) => assert_eq!(effects[0], ResumeEffect::Answer(answer), "{state:?}"),
            None => assert!(
                matches!(effects[0], ResumeEffect::StartRestore(_)),
                "{state:?}"
            ),
        }
    }
    let (mut resume, _) = Resume::new(false);
    let missing = ResumeEvent::HeadRead(ReadOutcome::Missing);
    let effects = step(&mut resume, &input(0, Some(ME)), missing);
    assert_eq!(effects[0], ResumeEffect::Answer(ResumeAnswer::NotStored));
}

/// Starts the publication of a snapshot with root 2. The sample head names root 1.
fn publishing() -> Publish {
    let (publish, first) = Publish::new(PublishInput {
        member: ME.member,
        id: sandbox(),
        current: Some((head_in(HeadState::Running(ME)), version(2))),
        snapshot: snapshot(2),
        record: SandboxRecord::Inline("{}".to_owned()),
        policy: Policy::default(),
    })
    .unwrap();
    assert_eq!(first, PublishEffect::WriteManifest(Digest([2; 32])));
    publish
}

fn publish_step(publish: &mut Publish, event: PublishEvent) -> Vec<PublishEffect> {
    let mut effects = Vec::new();
    publish.handle(Millis(1), event, &mut effects);
    effects
}

/// Ends the publication with an outcome.
fn publish_with(outcome: WriteOutcome<Head>) -> Vec<PublishEffect> {
    let mut publish = publishing();
    let effects = publish_step(&mut publish, PublishEvent::ManifestWritten);
    let [PublishEffect::WriteHead(write)] = &effects[..] else {
        panic!("{effects:?}");
    };
    assert_eq!(write.head.root(), Some(Digest([2; 32])));
    // The write is in progress.
    assert!(!publish.cancel());
    let write = write.write;
    publish_step(&mut publish, PublishEvent::HeadWritten { write, outcome })
}

#[test]
fn a_pause_writes_manifest_then_head_then_retracts_the_former_root() {
    let effects = publish_with(WriteOutcome::Done(version(3)));
    assert!(matches!(
        effects[..],
        [
            PublishEffect::Stored { revision: Revision(3), .. },
            PublishEffect::Retract(Digest(former)),
            PublishEffect::Finished
        ] if former == [1; 32]
    ));
    let mut cancelled = publishing();
    assert!(cancelled.cancel());
    assert_eq!(
        publish_step(&mut cancelled, PublishEvent::ManifestWritten),
        []
    );
}

#[test]
fn a_lost_pause_retracts_only_a_root_that_no_head_names() {
    let lost = |head: Head| {
        let effects = publish_with(WriteOutcome::Lost(Some(Box::new((head, version(9))))));
        effects.into_iter().find_map(|effect| match effect {
            PublishEffect::Retract(root) => Some(root.0[0]),
            _ => None,
        })
    };
    // Another member has claimed the sandbox before the pause was written.
    assert_eq!(lost(head_in(HeadState::Running(OTHER))), Some(2));
    // An earlier attempt was written, and another member has claimed its root.
    let mut claimed = head_in(HeadState::Running(OTHER));
    claimed.snapshot = Some(snapshot(2));
    assert_eq!(lost(claimed), Some(1));
}

fn update_step(update: &mut HeadUpdate, event: UpdateEvent) -> Vec<UpdateEffect> {
    let mut effects = Vec::new();
    update.handle(Millis(1), AT_MS, event, &mut effects);
    effects
}

/// Executes a change of a head. Returns the new head, `None` if nothing is written.
fn update(purpose: Purpose, current: Option<Head>) -> Option<Head> {
    let (mut update, _) = HeadUpdate::new(sandbox(), purpose);
    let outcome = match current {
        Some(head) => ReadOutcome::Found(Box::new(head), version(1)),
        None => ReadOutcome::Missing,
    };
    let effects = update_step(&mut update, UpdateEvent::HeadRead(outcome));
    let write = match &effects[..] {
        [UpdateEffect::WriteHead(write)] => write.clone(),
        [UpdateEffect::Unchanged(_), UpdateEffect::Finished] => return None,
        _ => panic!("{effects:?}"),
    };
    let outcome = WriteOutcome::Done(version(2));
    let write_id = write.write;
    let effects = update_step(
        &mut update,
        UpdateEvent::HeadWritten {
            write: write_id,
            outcome,
        },
    );
    assert!(
        matches!(effects[0], UpdateEffect::Stored { .. }),
        "{effects:?}"
    );
    Some(*write.head)
}

#[test]
fn a_killed_head_is_retained_until_its_home_has_confirmed() {
    let timing = Timing::PRODUCTION;
    let home = MemberId(7);
    let kill = Purpose::Kill {
        by: ME.member,
        home: Some(home),
    };
    // The kill is recorded although the sandbox was never stored.
    let killed = update(kill, None).unwrap();
    let day = 24 * 3_600 * 1_000;
    // The last argument returns whether a member has left the fleet.
    assert!(!may_purge(&killed, AT_MS + 100 * day, &timing, &|_| false));
    assert!(may_purge(&killed, AT_MS + day, &timing, &|member| member == home));
    let held = HeldSandbox {
        is_running: true,
        revision: None,
        root: None,
    };
    assert_eq!(reconcile(home, &held, Some(&killed)), Reconciliation::Kill);
    assert_eq!(
        update(Purpose::Confirm(ME.member), Some(killed.clone())),
        None
    );
    let confirmed = update(Purpose::Confirm(home), Some(killed)).unwrap();
    assert!(!may_purge(&confirmed, AT_MS + day - 1, &timing, &|_| false));
    assert!(may_purge(&confirmed, AT_MS + day, &timing, &|_| false));
}

#[test]
fn a_kill_by_another_member_waits_for_the_creator_of_the_head() {
    let kill = Purpose::Kill {
        by: ME.member,
        home: None,
    };
    let mut created = head();
    created.origin = Some(OTHER.member);
    let killed = update(kill, Some(created.clone())).unwrap();
    assert!(!may_purge(&killed, u64::MAX, &Timing::PRODUCTION, &|_| {
        false
    }));
    created.origin = Some(ME.member);
    let killed = update(kill, Some(created)).unwrap();
    assert!(may_purge(&killed, u64::MAX, &Timing::PRODUCTION, &|_| {
        false
    }));
}

#[test]
fn a_sandbox_on_another_member_is_not_killed_without_its_owner() {
    let kill = |home| Purpose::Kill {
        by: ME.member,
        home,
    };
    let running = head_in(HeadState::Running(OTHER));
    assert_eq!(update(kill(None), Some(running.clone())), None);
    assert!(update(kill(Some(OTHER.member)), Some(running)).is_some());
    assert!(update(kill(None), Some(head_in(HeadState::Running(ME)))).is_some());
}

#[test]
fn only_its_owner_releases_a_claimed_sandbox() {
    let running = |owner| Some(head_in(HeadState::Running(owner)));
    assert!(update(Purpose::Release(ME), running(ME)).is_some());
    assert_eq!(update(Purpose::Release(ME), running(OTHER)), None);
    assert_eq!(
        update(Purpose::Release(ME), Some(head_in(HeadState::Paused))),
        None
    );
}

#[test]
fn a_returning_host_stops_what_others_have_claimed() {
    // Sandbox in the journal of the returning host. The revision 0 stands for a sandbox that has no
    // head. The sample head has revision 1 and root 1, and its successors have revision 2. The host
    // removes a sandbox if the head no longer exists, has a later revision or another root, or
    // names OTHER.
    let held = |is_running, revision: u64, root: Option<u8>| HeldSandbox {
        is_running,
        revision: (revision > 0).then_some(Revision(revision)),
        root: root.map(|root| Digest([root; 32])),
    };
    let former = HeadState::Running(owner(1, 2));
    for (held, head, expected) in [
        (held(true, 0, None), None, Reconciliation::Retain),
        (held(false, 1, Some(1)), None, Reconciliation::Remove),
        (
            held(true, 2, None),
            Some(head_in(former)),
            Reconciliation::Adopt,
        ),
        (
            held(true, 2, None),
            Some(head_in(HeadState::Running(OTHER))),
            Reconciliation::Remove,
        ),
        (
            held(true, 1, None),
            Some(head_in(HeadState::Paused)),
            Reconciliation::Remove,
        ),
        (
            held(false, 1, Some(1)),
            Some(head()),
            Reconciliation::Retain,
        ),
        (
            held(false, 1, Some(2)),
            Some(head()),
            Reconciliation::Remove,
        ),
    ] {
        let action = reconcile(ME.member, &held, head.as_ref());
        assert_eq!(action, expected, "{held:?} {head:?}");
    }
    let adopted = update(Purpose::Adopt(ME), Some(head_in(former))).unwrap();
    assert_eq!(adopted.state(), HeadState::Running(ME));
    assert_eq!(
        update(Purpose::Adopt(ME), Some(head_in(HeadState::Running(OTHER)))),
        None
    );
}
