//! Tests of a guest's DNS server with name servers on loopback. A *member* is a sandbox that has
//! joined a private network.

#![allow(clippy::unwrap_used)]
use super::*;
use crate::policy::HostReachability;
use crate::private_network::NetworkId;
use hickory_proto::op::Query;
use hickory_proto::rr::{Name, RecordType};
use jiffy_engine_api::{ConnectionLog, NetworkMembership, NetworkRules};

/// Returns a record of questions.
fn record() -> Arc<ConnectionRecorder> {
    let sockets = Arc::new(crate::connections::ConnectionSockets::none());
    Arc::new(ConnectionRecorder::new("slot".to_owned(), sockets, true))
}

/// Starts a server at a loopback address that uses the name servers in `resolv_conf`.
async fn server(resolv_conf: &str, policy: Option<EgressPolicy>) -> (DnsServer, SocketAddr) {
    let sockets = DnsSockets {
        udp: net::UdpSocket::bind("127.0.0.1:0").unwrap(),
        tcp: net::TcpListener::bind("127.0.0.1:0").unwrap(),
    };
    sockets.udp.set_nonblocking(true).unwrap();
    sockets.tcp.set_nonblocking(true).unwrap();
    let at = sockets.udp.local_addr().unwrap();
    let (_, policy) = watch::channel(policy);
    let host = Arc::new(Upstreams::in_file(resolv_conf));
    let members = MemberNames {
        networks: Arc::default(),
        slot: 1,
    };
    let server = DnsServer::start(sockets, policy, host, Arc::default(), members, record());
    let server = server.unwrap();
    (server, at)
}

/// Id of each question, which its answer repeats.
const QUESTION_ID: u16 = 77;

/// Returns a question for the IPv4 addresses of `example.com`.
fn question() -> Vec<u8> {
    question_of(RecordType::A)
}

/// Returns a question for the records of a type of `example.com`.
fn question_of(wanted: RecordType) -> Vec<u8> {
    let mut question = Message::new(QUESTION_ID, MessageType::Query, OpCode::Query);
    let name = Name::from_ascii("example.com.").unwrap();
    question.add_query(Query::query(name, wanted));
    question.to_vec().unwrap()
}

/// Sends a question, and returns the answer.
async fn ask(at: SocketAddr, question: &[u8]) -> Message {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    socket.send_to(question, at).await.unwrap();
    let mut buffer = [0; 4096];
    let limit = Duration::from_secs(5);
    let received = tokio::time::timeout(limit, socket.recv(&mut buffer)).await;
    Message::from_vec(&buffer[..received.unwrap().unwrap()]).unwrap()
}

#[tokio::test]
async fn names_are_refused_if_nothing_may_be_reached() {
    let closed = NetworkRules {
        internet: false,
        ..NetworkRules::default()
    };
    let closed = EgressPolicy::new(&closed, &HostReachability::default()).unwrap();
    for policy in [None, Some(closed)] {
        let (_server, at) = server("/nonexistent", policy).await;
        let answer = ask(at, &question()).await;
        assert_eq!(answer.metadata.id, QUESTION_ID);
        assert_eq!(answer.metadata.response_code, ResponseCode::Refused);
        assert_eq!(answer.queries.len(), 1);
    }
}

#[tokio::test]
async fn malformed_questions_are_not_forwarded() {
    let open = EgressPolicy::new(&NetworkRules::default(), &HostReachability::default()).unwrap();
    let (_server, at) = server("/nonexistent", Some(open)).await;
    let mut none = Message::new(5, MessageType::Query, OpCode::Query);
    none.metadata.recursion_desired = true;
    let answer = ask(at, &none.to_vec().unwrap()).await;
    assert_eq!(answer.metadata.response_code, ResponseCode::NotImp);
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    // Datagrams that are no valid questions are not answered. The server continues: it rejects the
    // update that follows.
    for noise in [&b"x"[..], &[0xff; 300], &[]] {
        socket.send_to(noise, at).await.unwrap();
    }
    let update = Message::new(6, MessageType::Query, OpCode::Update);
    let answer = ask(at, &update.to_vec().unwrap()).await;
    assert_eq!(answer.metadata.response_code, ResponseCode::NotImp);
}

#[tokio::test]
async fn a_connection_is_answered_question_by_question() {
    let (server, _) = server("/nonexistent", None).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap())
        .await
        .unwrap();
    let (stream, _) = listener.accept().await.unwrap();
    let rules = server.rules.clone();
    let task = tokio::spawn(async move { serve_connection(stream, &rules).await });
    for _ in 0..2 {
        let question = question();
        client.write_u16(question.len() as u16).await.unwrap();
        client.write_all(&question).await.unwrap();
        let mut answer = vec![0; usize::from(client.read_u16().await.unwrap())];
        client.read_exact(&mut answer).await.unwrap();
        let answer = Message::from_vec(&answer).unwrap();
        assert_eq!(answer.metadata.response_code, ResponseCode::Refused);
    }
    drop(client);
    assert!(task.await.unwrap().is_err());
}

#[tokio::test]
async fn names_have_no_ipv6_addresses_without_an_ipv6_route() {
    let open = EgressPolicy::new(&NetworkRules::default(), &HostReachability::default()).unwrap();
    let (_server, at) = server("/nonexistent", Some(open)).await;
    let answer = ask(at, &question_of(RecordType::AAAA)).await;
    assert_eq!(answer.metadata.response_code, ResponseCode::NoError);
    assert!(answer.answers.is_empty() && answer.queries.len() == 1);
}

#[tokio::test]
async fn the_control_planes_name_is_resolved_locally_if_rules_contain_it() {
    let api = |wanted| {
        let mut question = Message::new(QUESTION_ID, MessageType::Query, OpCode::Query);
        let name = Name::from_ascii("API.jiffy.internal.").unwrap();
        question.add_query(Query::query(name, wanted));
        question.to_vec().unwrap()
    };
    let named = NetworkRules {
        allow_out: vec!["api.jiffy.internal".to_owned()],
        owner: Some("k".to_owned()),
        ..NetworkRules::default()
    };
    for (rules, is_reached) in [(NetworkRules::default(), false), (named, true)] {
        let policy = EgressPolicy::new(&rules, &HostReachability::default()).unwrap();
        let (_server, at) = server("/nonexistent", Some(policy)).await;
        let answer = ask(at, &api(RecordType::A)).await;
        assert_eq!((answer.metadata.id, answer.queries.len()), (QUESTION_ID, 1));
        let addresses: Vec<_> = answer.answers.iter().map(|r| r.data.clone()).collect();
        if is_reached {
            assert_eq!(addresses, [RData::A(A(GATEWAY))])
        } else {
            assert_eq!(answer.metadata.response_code, ResponseCode::Refused)
        }
        assert_eq!(addresses.is_empty(), !is_reached);
        let answer = ask(at, &api(RecordType::AAAA)).await;
        assert!(answer.answers.is_empty());
    }
}

#[tokio::test]
async fn a_flood_of_questions_is_read_at_a_limited_rate() {
    let (server, at) = server("", None).await;
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let question = question();
    let flood = async {
        loop {
            let _ = socket.send_to(&question, at).await;
            tokio::task::yield_now().await;
        }
    };
    let time = Duration::from_millis(500);
    let _ = tokio::time::timeout(time, flood).await;
    let recorded: u64 = server
        .rules
        .record
        .read()
        .list
        .iter()
        .map(|q| q.times)
        .sum();
    // The burst, and one question per 2 ms. The margin of 100 is for a timeout that fires late.
    let maximum = u64::from(BURST) + 500 / 2 + 100;
    assert!((10..=maximum).contains(&recorded), "{recorded}");
}

#[tokio::test]
async fn names_of_members_are_answered_although_nothing_else_may_be_resolved() {
    let membership = |last, name: &str| NetworkMembership {
        network: "lab".to_owned(),
        address: Ipv4Addr::new(169, 254, 64, last),
        id: format!("id{last}"),
        name: Some(name.to_owned()),
    };
    let closed = NetworkRules {
        internet: false,
        owner: Some("key".to_owned()),
        membership: Some(membership(2, "own")),
        ..NetworkRules::default()
    };
    let closed = EgressPolicy::new(&closed, &HostReachability::default()).unwrap();
    let (server, at) = server("/nonexistent", Some(closed)).await;
    let networks = &server.rules.members.networks;
    let own = NetworkId::new(Some("key"), "lab");
    networks.set(&own, 1, &membership(2, "own"));
    networks.set(&own, 2, &membership(3, "web"));
    networks.set(&NetworkId::new(None, "lab"), 3, &membership(4, "other"));
    use ResponseCode::{NXDomain, NoError, Refused};
    let v4 = |last| vec![RData::A(A(Ipv4Addr::new(169, 254, 64, last)))];
    for (name, kind, code, data) in [
        ("web.", RecordType::A, NoError, v4(3)),
        ("id3.net.jiffy.internal.", RecordType::A, NoError, v4(3)),
        ("web.", RecordType::AAAA, NoError, vec![]),
        (
            "own.",
            RecordType::A,
            NoError,
            vec![RData::A(A(crate::guest::ADDRESS))],
        ),
        ("other.net.jiffy.internal.", RecordType::A, NXDomain, vec![]),
        ("other.", RecordType::A, Refused, vec![]),
        ("example.com.", RecordType::A, Refused, vec![]),
    ] {
        let mut question = Message::new(7, MessageType::Query, OpCode::Query);
        question.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
        let answer = ask(at, &question.to_vec().unwrap()).await;
        assert_eq!(answer.metadata.response_code, code, "{name}");
        let found: Vec<RData> = answer.answers.iter().map(|a| a.data.clone()).collect();
        assert_eq!(found, data, "{name}");
    }
}
