//! An engine and a peer made by hand, over real sockets: what it says wrong is answered, and named in the failure.

use penstock_engine::{Config, Contact, Engine, Group, GroupSpec, Ticket};
use penstock_protocol::Header;
use penstock_protocol::handshake::{Acceptor, Connector, HandshakeError, Hello, NodeKey, RefusalCode};
use penstock_types::{Failure, FailureKind, Generation, GroupId};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// A stream whose HELLO has another major version is refused, over TCP and over the local socket: the text on both ends
/// names both versions, and a peer of the right version still gets in.
#[test]
fn a_connector_of_another_version_is_refused() {
    log::set_logger(&LINES).expect("the only test that reads the log");
    log::set_max_level(log::LevelFilter::Warn);
    let engine = engine();
    let (_group, ticket) = join(&engine, &contact(LARGEST, Vec::new()));
    let (mut tcp, mut local) = (tcp(&engine), local(&engine));
    let newer = |stream: &mut dyn Stream| shake_hands(stream, &hello(&engine, (2, 0)));
    for result in [newer(&mut tcp), newer(&mut local)] {
        let Err(HandshakeError::Refused { code, reason }) = result else { panic!("{result:?}") };
        assert_eq!(code, RefusalCode::Version as u8, "{reason}");
        assert!(reason.contains("theirs is 2.0, ours 1.0"), "{reason}");
    }
    let ours = |lines: &[String]| lines.iter().filter(|line| line.contains("theirs is 2.0, ours 1.0")).count();
    until(|| ours(&LINES.0.lock().expect("no panic")) == 2);
    assert!(ticket.result().is_none(), "a stranger has ended the join");
    let mut peer = connect(&engine);
    assert!(peer.read(&mut [0; 1024]).expect("frames") > 0);
}

/// The same where the engine connects: it is told, or finds out itself, and the join fails with the reason.
#[test]
fn an_acceptor_of_another_version_is_named() {
    let mut acceptor = Acceptor::new([1; 32], 0);
    acceptor.refuse(RefusalCode::Version, "protocol versions differ: theirs is 1.0, ours 2.0");
    let refusal = acceptor.poll_transmit();
    // CHALLENGE, its length, the version; then features, nonce and proof.
    let challenge = [&[2, 70, 0, 2, 0][..], &[0; 68]].concat();
    for (answer, expected) in [(refusal, "theirs is 1.0, ours 2.0"), (challenge, "theirs is 2.0, ours 1.0")] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound");
        let engine = engine();
        let (_group, ticket) = join(&engine, &contact(SMALLEST, vec![address]));
        let (mut stream, _) = listener.accept().expect("the engine connects");
        assert!(stream.read(&mut [0; 1024]).expect("a HELLO") > 0);
        stream.write_all(&answer).expect("the engine reads");
        let failure = wait(&ticket).expect_err("refused");
        assert_eq!(failure.kind, FailureKind::Refused, "{failure}");
        assert!(failure.message.contains(expected) && failure.message.contains("rank 1"), "{failure}");
    }
}

/// A peer on this host that sends what is no frame is cut off, and the failure says so; only one that closes its
/// connection is taken for dead.
#[test]
fn a_local_peer_that_breaks_the_protocol() {
    for (bytes, expected, other) in [
        (&[7; Header::BYTES][..], "was cut off: it sent bytes that are not a Penstock frame", "died"),
        (&[], "closed its connection: the process has died", "cut off"),
    ] {
        let engine = engine();
        let (_group, ticket) = join(&engine, &contact(LARGEST, Vec::new()));
        let mut peer = connect(&engine);
        peer.write_all(bytes).expect("the engine reads");
        if bytes.is_empty() {
            drop(peer);
        }
        let failure = wait(&ticket).expect_err("the peer is lost");
        assert_eq!(failure.kind, FailureKind::PeerLost, "{failure}");
        assert!(failure.message.contains(expected) && !failure.message.contains(other), "{failure}");
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
        shared_memory: true,
        checksum: false,
        dead_after: Duration::from_secs(4),
        socket_buffer_bytes: 0,
    })
    .expect("starts")
}

fn contact(node: NodeKey, tcp: Vec<std::net::SocketAddr>) -> Contact {
    Contact { node, rank: 1, host: "test".into(), tcp, landmark: 0 }
}

fn join(engine: &Engine, peer: &Contact) -> (Group, Ticket) {
    engine.join(GroupSpec {
        id: JOB,
        generation: Generation(1),
        rank: 0,
        members: vec![engine.contact().clone(), peer.clone()],
        secret: SECRET.to_vec(),
        algorithm: None,
        name: "test".into(),
    })
}

fn wait(ticket: &Ticket) -> Result<(), Failure> {
    ticket.wait(Some(Duration::from_secs(30))).expect("ends within 30 s")
}

fn until(condition: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(Instant::now() < end, "it does not come true within 30 s");
        std::thread::yield_now();
    }
}

trait Stream: Read + Write {}
impl<S: Read + Write> Stream for S {}

fn tcp(engine: &Engine) -> TcpStream {
    TcpStream::connect(engine.contact().tcp[0]).expect("it listens")
}

fn local(engine: &Engine) -> UnixStream {
    let name = Contact::local_name(&engine.contact().node);
    let address = SocketAddr::from_abstract_name(name.trim_start_matches('\0')).expect("a name");
    UnixStream::connect_addr(&address).expect("it listens")
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
    let (mut bytes, mut rest) = ([0; 1024], Vec::new());
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
fn connect(engine: &Engine) -> UnixStream {
    loop {
        let mut stream = local(engine);
        match shake_hands(&mut stream, &hello(engine, (1, 0))) {
            Ok(_) => return stream,
            Err(error) => assert!(error.is_temporary(), "{error}"),
        }
    }
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

const JOB: GroupId = GroupId(77);
const SECRET: &[u8] = b"secret";
/// The one with the larger key connects.
const LARGEST: NodeKey = [0xff; 16];
const SMALLEST: NodeKey = [0; 16];
