//! An engine and a peer made by hand, over real sockets: what it says wrong is answered, and named in the failure.

use penstock_engine::fingerprint::{Fingerprint, Name};
use penstock_engine::plan::Collective;
use penstock_engine::{Call, Config, Contact, Engine, Group, GroupSpec, Ticket};
use penstock_stream::frame::{Direction, Kind, NumberSpace, VERSION_MAJOR, VERSION_MINOR};
use penstock_stream::handshake::{Acceptor, Connector, HandshakeError, Hello, NodeKey, RefusalCode};
use penstock_stream::peer::{Body, Counts, Farewell, OpStatus, Outgoing, Peer, PeerConfig, Report, seal, verify};
use penstock_stream::{Header, MessageKey};
use penstock_types::{ChannelId, DType, Failure, FailureKind, Generation, GroupId, OpSeq, Priority, ReduceOp, Time};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::sync::{Mutex, Once};
use std::time::{Duration, Instant};

/// A stream whose HELLO has another major version is refused, over TCP and over the local socket: the text on both ends
/// names both versions, and a peer of the right version still gets in.
#[test]
fn a_connector_of_another_version_is_refused() {
    read_log();
    let engine = engine();
    let (_group, ticket) = join(&engine, &contact(LARGEST, Vec::new()));
    let (mut tcp, mut local) = (tcp(&engine), local(&engine));
    let newer = |stream: &mut dyn Stream| shake_hands(stream, &hello(&engine, (NEWER, 0)));
    for result in [newer(&mut tcp), newer(&mut local)] {
        let Err(HandshakeError::Refused { code, reason }) = result else { panic!("{result:?}") };
        assert_eq!(code, RefusalCode::Version as u8, "{reason}");
        assert!(reason.contains(&newer_than_ours()), "{reason}");
    }
    until(|| logged(&newer_than_ours()) == 2);
    assert!(ticket.result().is_none(), "an unauthenticated peer has ended the join");
    let mut peer = connect(&engine, self::local);
    assert!(peer.read(&mut [0; 1024]).expect("frames") > 0);
}

/// An acceptor that the connector refuses, for its version or its secret, logs the reason that it is told, over TCP and over
/// the local socket, but once. It ends nothing: the connector has proved nothing, and a peer that can still gets in.
#[test]
fn a_connector_that_refuses_is_heard() {
    fn refuse(stream: &mut dyn Stream, engine: &Engine, secret: &[u8], version: u8) -> HandshakeError {
        let mut connector = Connector::new(hello(engine, (VERSION_MAJOR, 0)), secret);
        stream.write_all(&connector.poll_transmit()).expect("the engine reads");
        // CHALLENGE, its length, the version; then features, nonce and proof.
        let mut challenge = [0; 73];
        stream.read_exact(&mut challenge).expect("the engine answers");
        challenge[3] = version;
        let error = connector.handle_input(&challenge, &mut Vec::new()).expect_err("refused");
        stream.write_all(&connector.poll_transmit()).expect("the engine reads");
        // It closes its end when it has read that.
        assert_eq!(stream.read(&mut [0]).expect("the end"), 0);
        error
    }

    read_log();
    let engine = engine();
    let (_group, ticket) = join(&engine, &contact(LARGEST, Vec::new()));
    // Answered after the join was begun.
    engine.stats().expect("it runs");
    let wrong = "refused: the job secret does not match; set the same PENSTOCK_SECRET";
    // No other test logs this version.
    let (later, theirs) = (NEWER + 1, (NEWER + 1, 0));
    let newer = format!(
        "rank 1 (on test) failed: refused: protocol versions differ: theirs is {later}.0, ours {VERSION_MAJOR}.0"
    );
    for (secret, version, found, expected) in [
        (SECRET, later, HandshakeError::Version { theirs }, newer.as_str()),
        (b"other", VERSION_MAJOR, HandshakeError::Secret, wrong),
    ] {
        for stream in [&mut tcp(&engine) as &mut dyn Stream, &mut self::local(&engine)] {
            assert_eq!(refuse(stream, &engine, secret, version), found);
        }
        assert_eq!(logged(expected), 1, "{expected}");
    }
    assert!(ticket.result().is_none(), "who has proved nothing has ended the join");
    let mut peer = connect(&engine, self::local);
    assert!(peer.read(&mut [0; 1024]).expect("frames") > 0);
}

/// The same where the engine connects: it is told, or finds out itself, and the join fails with the reason.
#[test]
fn an_acceptor_of_another_version_is_named() {
    let mut acceptor = Acceptor::new([1; 32], 0);
    let older = format!("theirs is {VERSION_MAJOR}.0, ours {NEWER}.0");
    acceptor.refuse(RefusalCode::Version, &format!("protocol versions differ: {older}"));
    let refusal = acceptor.poll_transmit();
    // CHALLENGE, its length, the version; then features, nonce and proof.
    let challenge = |version| [&[2, 70, 0, version, 0][..], &[0; 68]].concat();
    // The version before, whose frames have other payloads.
    let before = format!("theirs is 2.0, ours {VERSION_MAJOR}.0; install the same");
    let answers = [(refusal, older), (challenge(NEWER), newer_than_ours()), (challenge(2), before)];
    for (answer, expected) in answers {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound");
        let engine = engine();
        let (_group, ticket) = join(&engine, &contact(SMALLEST, vec![address]));
        let (mut stream, _) = listener.accept().expect("the engine connects");
        assert!(stream.read(&mut [0; 1024]).expect("a HELLO") > 0);
        stream.write_all(&answer).expect("the engine reads");
        let failure = wait(&ticket).expect_err("refused");
        assert_eq!(failure.kind, FailureKind::Refused, "{failure}");
        assert!(failure.message.contains(&expected) && failure.message.contains("rank 1"), "{failure}");
    }
}

/// Of thousands of processes that refuse this one, only the last ones are kept, and their numbers are used again; the engine takes no more
/// memory. One that comes after them all is joined as ever.
#[test]
fn those_that_refuse_are_forgotten() {
    let engine = engine();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    let mut memory = 0;
    for number in 1..=600u64 {
        let mut acceptor = Acceptor::new([1; 32], 0);
        acceptor.refuse(RefusalCode::Version, "a test");
        let mut node = SMALLEST;
        node[8..].copy_from_slice(&number.to_le_bytes());
        let (group, ticket) = join_as(&engine, &contact(node, vec![address]), GroupId(1000 + number));
        let (mut stream, _) = listener.accept().expect("the engine connects");
        assert!(stream.read(&mut [0; 1024]).expect("a HELLO") > 0);
        stream.write_all(&acceptor.poll_transmit()).expect("the engine reads");
        assert_eq!(wait(&ticket).expect_err("refused").kind, FailureKind::Refused);
        group.leave();
        if number == 300 {
            memory = engine.stats().expect("it runs").memory_bytes;
        }
    }
    let stats = engine.stats().expect("it runs");
    assert!(stats.peers.len() < 200, "{} peers", stats.peers.len());
    println!("{memory} bytes after 300, {} after 600", stats.memory_bytes);
    // The last connections may not have ended yet.
    until(|| engine.stats().expect("it runs").memory_bytes <= memory);
    let (_group, _ticket) = join(&engine, &contact(LARGEST, Vec::new()));
    let mut peer = connect(&engine, self::local);
    assert!(peer.read(&mut [0; 1024]).expect("frames") > 0);
}

/// A peer on this host that sends what is no frame is cut off, and the failure says so, here and in a last frame to the peer;
/// only one that closes its connection is taken for dead.
#[test]
fn a_local_peer_that_breaks_the_protocol() {
    for (bytes, expected, other) in [
        (&[7; Header::BYTES][..], "was cut off: it sent bytes that are not a Penstock frame", "died"),
        (&[], "closed its connection: the process has died", "cut off"),
    ] {
        let engine = engine();
        let (_group, ticket) = join(&engine, &contact(LARGEST, Vec::new()));
        let mut peer = connect(&engine, local);
        peer.write_all(bytes).expect("the engine reads");
        if bytes.is_empty() {
            drop(peer);
        } else {
            let (header, payload) = loop {
                let (header, payload) = next_frame(&mut peer);
                if header.kind == Kind::Report {
                    break (header, payload);
                }
            };
            assert_eq!(header.key.group, JOB);
            let told = String::from_utf8(payload).expect("text");
            assert!(told.contains("rank 1") && told.contains(expected), "{told}");
            assert_eq!(peer.read(&mut [0]).expect("the end"), 0, "more after the last word");
        }
        let failure = wait(&ticket).expect_err("the peer is lost");
        assert_eq!(failure.kind, FailureKind::PeerLost, "{failure}");
        assert!(failure.message.contains(expected) && !failure.message.contains(other), "{failure}");
    }
}

/// A group that fails while half a frame of its is written gives the tensor back at once, and the frame goes on with the
/// bytes of before: the receiver, which may not know yet, finds nothing wrong in it. Other groups of the same two processes
/// keep their connection, over TCP and over the local socket, where it is the only one.
#[test]
fn half_a_frame_of_a_failed_group() {
    fn run(engine: &Engine, stream: impl Stream, medium: &str, first: &Group, joined: &Ticket) {
        let mut peer = Hand::new(stream);
        peer.join(JOB);
        wait(joined).expect("joined");
        let (second, joined) = join_as(engine, &contact(LARGEST, Vec::new()), OTHER);
        peer.join(OTHER);
        wait(&joined).expect("joined");

        // More than a batch of frames, of which a socket that nobody reads takes a part.
        let mut tensor: Vec<u32> = (0..1 << 18).map(|index| 1_000_003 + index).collect();
        let kept = tensor.clone();
        // SAFETY: the buffer outlives the wait below.
        let lost = unsafe { first.start(call(Collective::Send { to: 1 }, &mut tensor)) };
        let fingerprint = fingerprint(tensor.len());
        peer.machine.grant(MessageKey { group: JOB, space: TO_PEER, op: OpSeq(0), message: 0 }, 1000, fingerprint);
        peer.flush();
        let sent = || engine.stats().expect("it runs").peers[0].streams[0].1.sent_bytes;
        until(|| sent() > 100_000);
        first.abort("a test");
        assert_eq!(wait(&lost).expect_err("aborted").kind, FailureKind::Closed, "{medium}");
        tensor.fill(0);

        let mut bytes = 0;
        loop {
            let (header, payload) = peer.read();
            match header.kind {
                Kind::Data => {
                    // Messages but the last are of one length.
                    let at = (u64::from(header.key.message) * header.total + header.offset) as usize / 4;
                    let expected: Vec<u8> =
                        kept[at..][..payload.len() / 4].iter().flat_map(|n| n.to_le_bytes()).collect();
                    assert!(payload == expected, "{medium}: a frame at {} is not what was sent", header.offset);
                    bytes += payload.len();
                }
                Kind::Report => break,
                _ => {}
            }
        }
        assert!(bytes > 100_000 && bytes < 4 * kept.len(), "{medium}: {bytes} bytes have come");

        let mut result = vec![0; 10];
        // SAFETY: as above.
        let ticket = unsafe { second.start(call(Collective::Recv { from: 1 }, &mut result)) };
        peer.machine.send(Outgoing {
            key: MessageKey { group: OTHER, space: FROM_PEER, op: OpSeq(0), message: 0 },
            priority: Priority(0),
            is_changed: false,
            fingerprint: self::fingerprint(10),
            coflow: 0,
            body: Body::Owned([7; 40].into()),
        });
        peer.flush();
        wait(&ticket).unwrap_or_else(|failure| panic!("{medium}: {failure}"));
        assert_eq!(result, [u32::from_le_bytes([7; 4]); 10], "{medium}");
    }

    for medium in ["tcp", "local socket"] {
        let engine = engine();
        let (group, joined) = join(&engine, &contact(LARGEST, Vec::new()));
        match medium {
            "tcp" => run(&engine, connect(&engine, tcp), medium, &group, &joined),
            _ => run(&engine, connect(&engine, local), medium, &group, &joined),
        }
    }
}

/// A group fails while half of a frame of its has come that is not for its memory: the other half is read too, and the connection stays,
/// with the other groups on it.
#[test]
fn half_a_farewell_of_a_failed_group() {
    let engine = engine();
    let (first, joined) = join(&engine, &contact(LARGEST, Vec::new()));
    let mut peer = Hand::new(connect(&engine, local));
    peer.join(JOB);
    wait(&joined).expect("joined");
    let (second, joined) = join_as(&engine, &contact(LARGEST, Vec::new()), OTHER);
    peer.join(OTHER);
    wait(&joined).expect("joined");
    while !peer.machine.is_quiet() {
        peer.read();
    }
    peer.machine.left(JOB, Farewell { collectives: 1, ..Farewell::default() });
    let farewell = peer.machine.poll_frame(0, NOW).expect("nothing is ahead of it");
    assert_eq!(farewell.header.kind, Kind::Left);
    let payload = farewell.payload.bytes().expect("it has some");
    let (half, rest) = payload.split_at(payload.len() / 2);
    peer.stream.write_all(&[&seal(farewell.header, payload)[..], half].concat()).expect("the engine reads");
    // A whole turn of the engine's loop is between the two.
    (0..2).for_each(|_| drop(engine.stats().expect("it runs")));
    first.abort("a test");
    engine.stats().expect("it runs");
    peer.stream.write_all(rest).expect("the engine reads");

    let mut result = vec![0; 10];
    // SAFETY: the buffer outlives the wait below.
    let ticket = unsafe { second.start(call(Collective::Recv { from: 1 }, &mut result)) };
    peer.machine.send(Outgoing {
        key: MessageKey { group: OTHER, space: FROM_PEER, op: OpSeq(0), message: 0 },
        priority: Priority(0),
        is_changed: false,
        fingerprint: fingerprint(10),
        coflow: 0,
        body: Body::Owned([7; 40].into()),
    });
    peer.flush();
    wait(&ticket).expect("the other group goes on");
}

/// A frame that cuts an element in two is refused where it meets the reduction: the group fails, the failure names the peer,
/// and the engine lives.
#[test]
fn a_frame_that_cuts_an_element() {
    let engine = engine();
    let (group, joined) = join(&engine, &contact(LARGEST, Vec::new()));
    let mut peer = Hand::new(connect(&engine, tcp));
    peer.join(JOB);
    wait(&joined).expect("joined");
    let mut tensor = vec![1u32; 16_000];
    let mut reduce = call(Collective::Reduce { root: 0 }, &mut tensor);
    reduce.fingerprint = Fingerprint::new(Name::Reduce, Some(ReduceOp::Sum), DType::I32, Some(0), 16_000);
    let fingerprint = reduce.fingerprint;
    // SAFETY: the buffer outlives the wait below.
    let ticket = unsafe { group.start(reduce) };
    let grant = loop {
        let (header, _) = peer.read();
        if header.kind == Kind::Grant {
            break header;
        }
    };
    let body = Body::Owned(vec![1; 64_000].into());
    peer.machine.send(Outgoing {
        key: grant.key,
        priority: Priority(0),
        is_changed: false,
        fingerprint,
        coflow: 0,
        body,
    });
    let mut frame = loop {
        let frame = peer.machine.poll_frame(0, NOW).expect("a data frame");
        if frame.header.kind == Kind::Data {
            break frame;
        }
    };
    frame.header.length = 16_385;
    let payload = vec![1; 16_385];
    peer.stream.write_all(&[&seal(frame.header, &payload)[..], &payload].concat()).expect("the engine reads");
    let failure = wait(&ticket).expect_err("refused");
    assert_eq!(failure.kind, FailureKind::Mismatch, "{failure}");
    for part in ["rank 1", "sent bytes 0+16385", "not whole elements"] {
        assert!(failure.message.contains(part), "{failure}");
    }
    engine.stats().expect("it runs");
}

/// More idle connections than may be open without a proof keep nobody out, over TCP or over the local socket: the oldest one
/// makes room for a member, while the others stay.
#[test]
fn many_idle_unauthenticated_peers_keep_nobody_out() {
    fn run<S: Stream>(engine: &Engine, open: impl Fn(&Engine) -> S) {
        let began = Instant::now();
        let mut idle: Vec<S> = (0..300).map(|_| open(engine)).collect();
        let mut member = connect(engine, &open);
        assert!(member.read(&mut [0; 1024]).expect("frames") > 0);
        // None of them was closed for its age.
        assert!(began.elapsed() < HANDSHAKE_WITHIN, "this machine is too slow for this test");
        assert_eq!(idle[0].read(&mut [0]).expect("the end"), 0, "the oldest has made room");
        let mut newest = idle.pop().expect("there are many");
        assert!(
            shake_hands(&mut newest, &Hello { stream: 1, ..hello(engine, (VERSION_MAJOR, VERSION_MINOR)) }).is_ok(),
            "the newest is still there"
        );
    }

    let over_tcp = engine();
    let (_group, _ticket) = join(&over_tcp, &contact(LARGEST, Vec::new()));
    run(&over_tcp, tcp);
    let over_the_local_socket = engine();
    let (_group, _ticket) = join(&over_the_local_socket, &contact(LARGEST, Vec::new()));
    run(&over_the_local_socket, local);
}

/// Nor do as many that say to be a member, and never prove it: after a second the oldest one makes room.
#[test]
fn many_that_prove_nothing_keep_nobody_out() {
    let engine = engine();
    let (_group, _ticket) = join(&engine, &contact(LARGEST, Vec::new()));
    engine.stats().expect("it has begun to join");
    let claims = Connector::new(hello(&engine, (VERSION_MAJOR, 0)), SECRET).poll_transmit();
    let began = Instant::now();
    let claiming: Vec<TcpStream> = (0..256)
        .map(|_| {
            let mut stream = tcp(&engine);
            stream.write_all(&claims).expect("the engine reads");
            assert!(stream.read(&mut [0; 1024]).expect("the engine answers") > 0);
            stream
        })
        .collect();
    until(|| began.elapsed() > Duration::from_millis(1500));
    let mut member = connect(&engine, tcp);
    assert!(member.read(&mut [0; 1024]).expect("frames") > 0);
    assert!(began.elapsed() < HANDSHAKE_WITHIN, "this machine is too slow for this test");
    drop(claiming);
}

/// Who says to be a member to which the engine connects, and closes, gives the engine no reason to connect once more.
#[test]
fn claims_that_are_not_proved_change_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let engine = engine();
    let member = contact(SMALLEST, vec![listener.local_addr().expect("bound")]);
    let dialled_at = Instant::now();
    let (_group, _ticket) = join(&engine, &member);
    // It is never answered.
    let dialled = listener.accept().expect("the engine connects");
    let claims = Hello { from: SMALLEST, ..hello(&engine, (VERSION_MAJOR, 0)) };
    for _ in 0..20 {
        let mut stream = tcp(&engine);
        stream.write_all(&Connector::new(claims.clone(), b"other").poll_transmit()).expect("the engine reads");
        let _ = stream.read(&mut [0; 1024]);
    }
    listener.set_nonblocking(true).expect("a flag");
    let began = Instant::now();
    while began.elapsed() < Duration::from_millis(300) {
        let is_alone = listener.accept().is_err();
        assert!(dialled_at.elapsed() < HANDSHAKE_WITHIN, "this machine is too slow for this test");
        assert!(is_alone, "the engine connects again");
    }
    drop(dialled);
}

/// The engine's own attempts to connect, however many, leave the places of those that connect to it free.
#[test]
fn own_connections_keep_nobody_out() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mute = listener.local_addr().expect("bound");
    let engine = engine();
    let began = Instant::now();
    // It connects to members with smaller keys, and these never answer.
    let smaller = (0..300u16).map(|at| {
        let mut node = SMALLEST;
        node[14..].copy_from_slice(&at.to_be_bytes());
        contact(node, vec![mute])
    });
    let members: Vec<Contact> =
        [engine.contact().clone()].into_iter().chain(smaller).chain([contact(LARGEST, Vec::new())]).collect();
    let (_group, _ticket) = engine.join(GroupSpec { members, ..spec(&engine, &contact(LARGEST, Vec::new()), JOB) });
    let dialled: Vec<TcpStream> = (0..300).map(|_| listener.accept().expect("the engine connects").0).collect();
    let mut member = connect(&engine, tcp);
    assert!(member.read(&mut [0; 1024]).expect("frames") > 0);
    assert!(began.elapsed() < HANDSHAKE_WITHIN, "this machine is too slow for this test");
    drop(dialled);
}

/// An engine that ends says good-bye only after the peer has acknowledged what was sent to it. Until then a stream that is lost
/// is replaced, and brings it.
#[test]
fn a_good_bye_follows_the_messages() {
    let engine = engine();
    let (group, joined) = join(&engine, &contact(LARGEST, Vec::new()));
    let mut peer = Hand::new(connect(&engine, tcp));
    peer.join(JOB);
    wait(&joined).expect("joined");
    let mut tensor = [7; 5];
    // SAFETY: the buffer outlives the wait.
    wait(&unsafe { group.start(call(Collective::Send { to: 1 }, &mut tensor)) }).expect("it is copied");
    engine.begin_stop(true);
    let is_message = |header: &Header| header.kind == Kind::Data && header.key.space == TO_PEER;
    // The peer says nothing of what comes, until the engine asks whether it lives.
    let mut has_come = false;
    loop {
        let (header, _) = next_frame(&mut peer.stream);
        assert_ne!(header.kind, Kind::Bye, "the message is not acknowledged");
        has_come |= is_message(&header);
        if has_come && header.kind == Kind::Heartbeat {
            break;
        }
    }
    peer.stream.shutdown(Shutdown::Both).expect("it is open");
    peer.machine.stream_down(0);
    peer.stream = connect(&engine, tcp);
    peer.machine.stream_up(0, NOW);
    let mut brought = None;
    loop {
        let (header, payload) = peer.read();
        if is_message(&header) {
            brought = Some(payload);
        }
        if header.kind == Kind::Bye {
            break;
        }
    }
    assert_eq!(brought.as_deref(), Some(&[[7, 0, 0, 0]; 5].concat()[..]));
    peer.flush();
    engine.stop();
}

/// An operation does not wait for a message that a rank has announced and can no longer send, since it has left: here one of
/// two children in a tree, whose turn may not have come.
#[test]
fn what_was_announced_goes_with_its_rank() {
    for announces in [1, 2] {
        let engine = engine();
        let nodes = [LARGEST, [0xfe; 16]];
        let members: Vec<Contact> = [engine.contact().clone()]
            .into_iter()
            .chain((1..).zip(nodes).map(|(rank, node)| Contact { rank, ..contact(node, Vec::new()) }))
            .collect();
        let (group, joined) = engine.join(GroupSpec { members, ..spec(&engine, &contact(LARGEST, Vec::new()), JOB) });
        let mut children: Vec<_> = (1..)
            .zip(nodes)
            .map(|(rank, from)| {
                let stream = connect_as(&engine, tcp, &Hello { rank, from, ..hello(&engine, (VERSION_MAJOR, 0)) });
                // Enough for what ends the join.
                Hand::with(stream, PeerConfig { eager_credit_bytes: 140, ..PeerConfig::default() })
            })
            .collect();
        (1..).zip(&mut children).for_each(|(host, child)| child.join_on_host(JOB, host));
        wait(&joined).expect("joined");
        let mut tensor = [1];
        let mut reduce = call(Collective::Reduce { root: 0 }, &mut tensor);
        reduce.fingerprint = Fingerprint::new(Name::Reduce, Some(ReduceOp::Sum), DType::I32, Some(0), 1);
        let fingerprint = reduce.fingerprint;
        // SAFETY: the buffer outlives the wait below.
        let ticket = unsafe { group.start(reduce) };
        engine.stats().expect("it runs");
        let child = &mut children[announces - 1];
        let key = MessageKey { group: JOB, space: NumberSpace::Collective(ChannelId::MAIN), op: OpSeq(1), message: 0 };
        let body = Body::Owned([1, 0, 0, 0].into());
        child.machine.send(Outgoing { key, priority: Priority(0), is_changed: false, fingerprint, coflow: 0, body });
        child.machine.bye();
        child.flush();
        child.stream.shutdown(Shutdown::Both).expect("it is open");
        let failure = wait(&ticket).expect_err("the child has left");
        assert_eq!(failure.kind, FailureKind::PeerLost, "{failure}");
        let expected = format!("rank {announces} (on test) has left the job");
        assert!(failure.message.contains(&expected), "{failure}");
    }
}

/// What a peer sends in a group that this rank has not joined is not kept where the word that it has left the group, or that the
/// group has failed, has come before on another stream; neither is what it asks. Its credit comes back. In other groups it is.
#[test]
fn messages_that_the_end_of_their_group_has_overtaken() {
    for fails in [false, true] {
        let engine = engine();
        let (_group, joined) = join(&engine, &contact(LARGEST, Vec::new()));
        let mut peer = Hand::new(connect(&engine, tcp));
        peer.join(JOB);
        wait(&joined).expect("joined");
        match fails {
            true => peer.machine.report(
                OTHER,
                &Report {
                    kind: FailureKind::Closed,
                    message: "a test".into(),
                    is_passed_on: false,
                    finished: Counts::default(),
                },
            ),
            false => peer.machine.left(OTHER, Farewell::default()),
        }
        peer.flush();
        let unknown = GroupId(OTHER.0 + 1);
        for group in [OTHER, unknown] {
            let key = MessageKey { group, space: FROM_PEER, op: OpSeq(0), message: 0 };
            let body = Body::Owned([7; 40].into());
            peer.machine.send(Outgoing {
                key,
                priority: Priority(0),
                is_changed: false,
                fingerprint: fingerprint(10),
                coflow: 0,
                body,
            });
            peer.machine.probe(key, fingerprint(10));
        }
        while !peer.machine.is_quiet() {
            peer.read();
        }
        let held = engine.stats().expect("it runs").held;
        assert_eq!((held.early_messages, held.claims, held.remembered_operations), (1, 1, 1), "it has failed: {fails}");
        peer.machine.left(unknown, Farewell::default());
        peer.flush();
        until(|| {
            let held = engine.stats().expect("it runs").held;
            (held.early_messages, held.claims, held.remembered_operations) == (0, 0, 0)
        });
        // A rank that comes later joins in vain where the group has failed.
        let (_late, joined) = join_as(&engine, &contact(LARGEST, Vec::new()), OTHER);
        if fails {
            let failure = wait(&joined).expect_err("it has failed");
            assert!(failure.message.contains("a test"), "{failure}");
        }
    }
}

// ------------------------------------------------------------------------------------------------------------- helpers

fn engine() -> Engine {
    Engine::start(&Config {
        rank: 0,
        host: "test".into(),
        generation: Generation(1),
        addresses: vec!["127.0.0.1".parse().unwrap()],
        ports: 0..=0,
        streams: 1,
        io_threads: 1,
        streams_within_host: 1,
        shared_memory: true,
        checksum: false,
        dead_after: Duration::from_secs(4),
        // A socket that nobody reads shall take less than a batch of frames (256 KiB).
        socket_buffer_bytes: 32 * 1024,
        ptracer: penstock_engine::Ptracer::default(),
        flight_recorder: None,
    })
    .expect("starts")
}

fn contact(node: NodeKey, tcp: Vec<std::net::SocketAddr>) -> Contact {
    Contact { node, rank: 1, host: "test".into(), tcp, memory_epoch: 0, process: penstock_engine::Process::default() }
}

fn join(engine: &Engine, peer: &Contact) -> (Group, Ticket) {
    join_as(engine, peer, JOB)
}

fn join_as(engine: &Engine, peer: &Contact, id: GroupId) -> (Group, Ticket) {
    engine.join(spec(engine, peer, id))
}

fn spec(engine: &Engine, peer: &Contact, id: GroupId) -> GroupSpec {
    GroupSpec {
        id,
        generation: Generation(1),
        rank: 0,
        members: vec![engine.contact().clone(), peer.clone()],
        secret: SECRET.to_vec(),
        algorithm: None,
        name: "test".into(),
    }
}

fn wait(ticket: &Ticket) -> Result<(), Failure> {
    ticket.wait(WITHIN).expect("ends within 30 s")
}

fn until(condition: impl Fn() -> bool) {
    let end = Instant::now() + WITHIN.expect("a limit");
    while !condition() {
        assert!(Instant::now() < end, "it does not come true within 30 s");
        std::thread::yield_now();
    }
}

trait Stream: Read + Write {}
impl<S: Read + Write> Stream for S {}

fn tcp(engine: &Engine) -> TcpStream {
    let stream = TcpStream::connect(engine.contact().tcp[0]).expect("it listens");
    stream.set_read_timeout(WITHIN).expect("a time-out");
    stream
}

fn local(engine: &Engine) -> UnixStream {
    let name = Contact::local_name(&engine.contact().node);
    let address = SocketAddr::from_abstract_name(name.trim_start_matches('\0')).expect("a name");
    let stream = UnixStream::connect_addr(&address).expect("it listens");
    stream.set_read_timeout(WITHIN).expect("a time-out");
    stream
}

fn hello(engine: &Engine, version: (u8, u8)) -> Hello {
    Hello {
        version,
        features: 0,
        job: JOB,
        generation: Generation(1),
        rank: 1,
        from: LARGEST,
        to: engine.contact().node,
        stream: 0,
        nonce: [9; 32],
    }
}

fn shake_hands(stream: &mut dyn Stream, hello: &Hello) -> Result<u32, HandshakeError> {
    let mut connector = Connector::new(hello.clone(), SECRET);
    // One byte at a time: the first frames may come together with the WELCOME, and are not for us.
    let (mut bytes, mut rest) = ([0; 1], Vec::new());
    loop {
        stream.write_all(&connector.poll_transmit()).expect("the engine reads");
        let count = stream.read(&mut bytes).expect("the engine answers");
        assert!(count > 0, "closed without a word");
        if let Some(features) = connector.handle_input(&bytes[..count], &mut rest)? {
            return Ok(features);
        }
    }
}

/// The peer's stream, once the engine knows of the job.
fn connect<S: Stream>(engine: &Engine, open: impl Fn(&Engine) -> S) -> S {
    connect_as(engine, open, &hello(engine, (VERSION_MAJOR, 0)))
}

fn connect_as<S: Stream>(engine: &Engine, open: impl Fn(&Engine) -> S, hello: &Hello) -> S {
    loop {
        let mut stream = open(engine);
        match shake_hands(&mut stream, hello) {
            Ok(_) => return stream,
            Err(error) => assert!(error.is_temporary(), "{error}"),
        }
    }
}

/// How errors say that a peer has another version.
fn newer_than_ours() -> String {
    format!("theirs is {NEWER}.0, ours {VERSION_MAJOR}.0")
}

fn fingerprint(elements: usize) -> Fingerprint {
    Fingerprint::new(Name::PointToPoint, None, DType::I32, None, elements as u64)
}

fn call(collective: Collective, tensor: &mut [u32]) -> Call {
    Call {
        collective,
        fingerprint: fingerprint(tensor.len()),
        dtype: DType::I32,
        op: ReduceOp::Sum,
        bytes: size_of_val(tensor) as u64,
        splits: None,
        input: tensor.as_ptr().cast(),
        output: tensor.as_mut_ptr().cast(),
        tag: 0,
        coflow: 0,
        priority: Priority(0),
        hold: false,
        timeout: 20_000_000_000,
        keep: None,
    }
}

fn next_frame(stream: &mut impl Stream) -> (Header, Vec<u8>) {
    let mut header = [0; Header::BYTES];
    stream.read_exact(&mut header).expect("a header");
    let header = Header::decode(&header).expect("a frame");
    let mut payload = vec![0; header.length as usize];
    stream.read_exact(&mut payload).expect("its payload");
    verify(&header, &payload).expect("its checksum");
    (header, payload)
}

/// The peer's end of a stream: the machine that the engine runs too, at one moment of time, and calls that block.
struct Hand<S> {
    stream: S,
    machine: Peer,
}

impl<S: Stream> Hand<S> {
    fn new(stream: S) -> Hand<S> {
        Hand::with(stream, PeerConfig::default())
    }

    fn with(stream: S, config: PeerConfig) -> Hand<S> {
        let mut machine = Peer::new(PeerConfig { generation: Generation(1), ..config }, NOW);
        machine.stream_up(0, NOW);
        Hand { stream, machine }
    }

    /// Writes all that the machine has.
    fn flush(&mut self) {
        while let Some(frame) = self.machine.poll_frame(0, NOW) {
            let payload = frame.payload.bytes().expect("nothing is sent from memory");
            self.stream.write_all(&[&seal(frame.header, payload)[..], payload].concat()).expect("the engine reads");
        }
    }

    /// The next frame, whole and checked.
    fn read(&mut self) -> (Header, Vec<u8>) {
        self.flush();
        let (header, payload) = next_frame(&mut self.stream);
        self.machine.handle_header(0, &header, OpStatus::Active, NOW).expect("it may come");
        self.machine.handle_frame(0, &header, &payload, OpStatus::Active).expect("it may come");
        (header, payload)
    }

    /// Takes part in the all-gather that ends a join: what the other says of hosts is true here as well.
    fn join(&mut self, group: GroupId) {
        self.join_on_host(group, 0);
    }

    /// The same as a rank on another host, unless this is 0.
    fn join_on_host(&mut self, group: GroupId, host: u8) {
        loop {
            let (Header { kind, key, fingerprint, .. }, mut payload) = self.read();
            if kind == Kind::Data && key.group == group {
                payload[0] ^= host;
                let body = Body::Owned(payload.into());
                self.machine.send(Outgoing {
                    key,
                    priority: Priority(0),
                    is_changed: false,
                    fingerprint,
                    coflow: 0,
                    body,
                });
                return self.flush();
            }
        }
    }
}

fn read_log() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| log::set_logger(&LINES).expect("the only logger"));
    log::set_max_level(log::LevelFilter::Warn);
}

/// How many lines with this text were logged, by all tests.
fn logged(text: &str) -> usize {
    LINES.0.lock().expect("no panic").iter().filter(|line| line.contains(text)).count()
}

/// What is logged.
struct Lines(Mutex<Vec<String>>);

static LINES: Lines = Lines(Mutex::new(Vec::new()));

impl log::Log for Lines {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        self.0.lock().expect("no panic").push(record.args().to_string());
    }

    fn flush(&self) {}
}

/// A version of the protocol that the engine does not speak.
const NEWER: u8 = VERSION_MAJOR + 1;
/// The engine is rank 0 of its groups, the peer rank 1.
const TO_PEER: NumberSpace = NumberSpace::PointToPoint { direction: Direction::Up, tag: 0 };
const FROM_PEER: NumberSpace = NumberSpace::PointToPoint { direction: Direction::Down, tag: 0 };
const JOB: GroupId = GroupId(77);
const OTHER: GroupId = GroupId(78);
const NOW: Time = Time(0);
/// A hand-shake that takes longer is given up by the engine.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(5);
/// Longer than anything here takes, on a machine that is busy.
const WITHIN: Option<Duration> = Some(Duration::from_secs(30));
const SECRET: &[u8] = b"secret";
/// The one with the larger key connects.
const LARGEST: NodeKey = [0xff; 16];
const SMALLEST: NodeKey = [0; 16];
