//! Nodes that communicate over the members' channel.

use super::support::{Fleet, TestHost, fleet_id, hash, member_config, row};
use jiffy_fleet::certificates::{Authority, MEMBER_LIFETIME, MemberKey};
use jiffy_fleet::channel::{Client, Identity, Server, ServerHandle};
use jiffy_fleet::node::{
    BootClock, ChannelMessenger, Clock, MESSAGE_PATH, MessageReceiver, Node, NodeConfig,
    QUERY_PATH, QueryReceiver,
};
use jiffy_fleet_core::{MemberConfig, MemberId, RowChange, RowState, ShardId};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::net::TcpListener;
use tokio::time::{sleep, timeout};

const LIMIT: Duration = Duration::from_secs(60);

/// Returns the certificate and key of a member.
fn identity(authority: &Authority, member: MemberId) -> Identity {
    let key = MemberKey::generate().unwrap();
    let issued = authority.issue(
        &fleet_id(),
        member,
        &key.request,
        SystemTime::now(),
        MEMBER_LIFETIME,
    );
    Identity::new(
        fleet_id(),
        authority.certificate(),
        &issued.unwrap(),
        &key.key,
    )
    .unwrap()
}

#[tokio::test]
async fn nodes_register_and_locate_sandboxes_over_the_channel() {
    // Only the records of this fleet are used: its own nodes communicate in memory.
    let fleet = Fleet::start(0, false).await;
    let authority = Authority::generate(&fleet_id()).unwrap();
    let mut members: Vec<(Node, ServerHandle)> = Vec::new();
    let mut addresses: Vec<(TcpListener, SocketAddr)> = Vec::new();
    for _ in 1..=2 {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        addresses.push((listener, address));
    }
    fleet.create_shard(&addresses[0].1.to_string()).await;
    for (id, (listener, address)) in (1..).zip(addresses) {
        let identity = identity(&authority, MemberId(id));
        let messenger = ChannelMessenger::new(Client::new(identity.clone()));
        let node = Node::start(NodeConfig {
            member: MemberConfig {
                address: address.to_string(),
                ..member_config(id, BootClock.now().0)
            },
            shard: ShardId(0),
            records: Arc::new(fleet.sealed()),
            messenger: Arc::new(messenger),
            host: Arc::new(TestHost::default()),
            clock: Arc::new(BootClock),
        });
        let node = node.unwrap();
        let server = Server::new(identity, Arc::new(|_| Ok(())))
            .messages(MESSAGE_PATH, Arc::new(MessageReceiver(node.clone())))
            .messages(QUERY_PATH, Arc::new(QueryReceiver(node.clone())))
            .start(listener)
            .unwrap();
        members.push((node, server));
    }
    for (node, _) in &members {
        let ready = node.wait_for(|view| view.is_ready());
        timeout(LIMIT, ready).await.unwrap().unwrap();
    }
    let (one, two) = (&members[0].0, &members[1].0);
    two.change_row(RowChange::Put(row("s", RowState::Running)));
    let located = async {
        loop {
            if let Ok(Some(place)) = one.locate(hash("s")).await {
                return place.member;
            }
            sleep(Duration::from_millis(50)).await;
        }
    };
    assert_eq!(timeout(LIMIT, located).await.unwrap(), MemberId(2));
    let known = async {
        let mut members = two.members();
        while members.rows.len() < 2 {
            members = two.members_changed(&members).await;
        }
    };
    timeout(LIMIT, known).await.unwrap();
    let status = timeout(LIMIT, two.status()).await.unwrap();
    assert_eq!(status.nodes.len(), 2);
    assert!(status.nodes.iter().all(|node| node.summary.is_some()));
}
