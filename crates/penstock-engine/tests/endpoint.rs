//! Servers and clients on real engines, over TCP and over memory.

use fastrand::Rng;
use penstock_engine::endpoint::{Ask, Client, Kind, Limits, Reply, Server, Work};
use penstock_engine::{Config, Engine, GroupSpec, Ptracer};
use penstock_types::{Failure, FailureKind, Generation, GroupId, Priority};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const LIMITS: Limits = Limits { calls: 16, request: 1 << 20, push: 4 << 20, in_flight: 8 << 20 };

/// Requests, pushes and pulls bring the right bytes, whatever their length; what the server does not take is refused with a reason,
/// and the connection goes on.
#[test]
fn calls_of_all_kinds() {
    for memory in [false, true] {
        let server = Serving::start(memory, 2);
        let engine = engine(1, memory);
        let client = server.connect(&engine, 1);
        for len in [0, 1, 8192, 8193, 100_001, 3 << 20] {
            let bytes = pattern(len as u64, len);
            wait(&ask(&client, Kind::Push, "kept", &bytes)).expect("pushed");
            assert_eq!(server.kept.lock().expect("kept").last(), Some(&bytes));
            let pull = ask(&client, Kind::Pull, "kept", &[]);
            wait(&pull).expect("pulled");
            assert_eq!(pull.reply().map_or(Vec::new(), |reply| reply.bytes().to_vec()), bytes);
            if len <= LIMITS.request as usize {
                let request = ask(&client, Kind::Request, "reverse", &bytes);
                wait(&request).expect("answered");
                let reversed: Vec<u8> = bytes.iter().rev().copied().collect();
                assert_eq!(request.reply().map_or(Vec::new(), |reply| reply.bytes().to_vec()), reversed);
            }
        }
        let large = vec![0; LIMITS.push as usize + 1];
        for (kind, name, bytes, failure, text) in [
            (Kind::Push, "kept", &large[..], FailureKind::Config, "the server takes 4194304 of a push"),
            (
                Kind::Push,
                "none",
                &large[..9],
                FailureKind::Config,
                "it serves no push called \"none\"; pushes that it serves: kept",
            ),
            (Kind::Request, "fail", &large[..9], FailureKind::Handler, "its handler there has failed: a test wants it"),
        ] {
            let failed = wait(&ask(&client, kind, name, bytes)).expect_err("refused");
            assert!(failed.kind == failure && failed.group_lives && failed.message.contains(text), "{failed}");
            assert!(failed.message.contains("of endpoint test failed"), "{failed}");
        }
        // In good order: nobody waits for its time-out.
        let began = Instant::now();
        client.close(Duration::from_secs(10)).wait(Some(Duration::from_secs(10))).expect("closed").expect("closed");
        server
            .server
            .close(Duration::from_secs(10))
            .wait(Some(Duration::from_secs(10)))
            .expect("closed")
            .expect("closed");
        assert!(began.elapsed() < Duration::from_secs(5));
        assert!(wait(&ask(&client, Kind::Pull, "kept", &[])).is_err_and(|failed| failed.kind == FailureKind::Closed));
    }
}

/// A client's engine ends at a random moment amid its calls: each push of its was taken at most once, and once if it was told so; the
/// other client notices nothing; the server keeps nothing.
#[test]
fn a_client_ends_amid_its_calls() {
    let first = std::env::var("PENSTOCK_SEED")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or_else(|| fastrand::u64(..1 << 32));
    let count = std::env::var("PENSTOCK_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(10);
    for seed in first..first + count {
        println!("PENSTOCK_SEED={seed}");
        let mut random = Rng::with_seed(seed);
        let memory = random.bool();
        let server = Serving::start(memory, 1 + random.usize(..3));
        let engines = [1, 2].map(|rank| engine(rank, memory));
        let clients = [1, 2].map(|rank| server.connect(&engines[rank - 1], rank as u64));
        let lens = [1, 5000, 20_000, 300_000, 1 << 20];
        let made: Vec<Vec<(u64, Vec<u8>)>> = (1..=2)
            .map(|client| {
                (0..30)
                    .map(|n| (100 * client + n, pattern(100 * client + n, lens[random.usize(..lens.len())])))
                    .collect()
            })
            .collect();
        let works: Vec<Vec<Work>> = clients
            .iter()
            .zip(&made)
            .map(|(client, made)| made.iter().map(|(_, bytes)| ask(client, Kind::Push, "kept", bytes)).collect())
            .collect();
        let dies_at = random.usize(..30);
        let until = Instant::now() + Duration::from_secs(20);
        // When so many have ended, and then some more microseconds.
        while works[0].iter().filter(|work| work.ticket().result().is_some()).count() < dies_at
            && Instant::now() < until
        {
            std::hint::spin_loop();
        }
        (0..random.u32(..20_000)).for_each(|_| std::hint::spin_loop());
        engines[0].begin_stop(false);
        let ends: Vec<Vec<Result<(), Failure>>> = works.iter().map(|works| works.iter().map(wait).collect()).collect();
        assert!(ends[1].iter().all(Result::is_ok), "{:?}", ends[1]);
        let kept = server.kept.lock().expect("kept").clone();
        for (client, (made, ends)) in made.iter().zip(&ends).enumerate() {
            for ((number, bytes), end) in made.iter().zip(ends) {
                let times = kept.iter().filter(|kept| *kept == bytes).count();
                // Patterns of one byte are those of others, too.
                if bytes.len() > 1 {
                    assert!(
                        times <= 1 && (end.is_err() || times == 1),
                        "client {client}, push {number}: {times} times, {end:?}"
                    );
                }
            }
        }
        let lost = |end: &Result<(), Failure>| end.as_ref().is_err_and(|failed| failed.kind != FailureKind::PeerLost);
        assert!(!ends[0].iter().any(lost), "{:?}", ends[0]);
        until_true(|| {
            server.server.stats().is_some_and(|stats| stats.clients == 1 && stats.held_bytes == 0 && stats.calls == 0)
        });
    }
}

/// The server's engine ends amid calls: those that had not ended fail, say which server is gone and what to do.
#[test]
fn a_server_ends_amid_calls() {
    for memory in [false, true] {
        let server = Serving::start(memory, 1);
        let engine = engine(1, memory);
        let client = server.connect(&engine, 1);
        let bytes = pattern(1, 500_000);
        let works: Vec<Work> = (0..200).map(|_| ask(&client, Kind::Push, "kept", &bytes)).collect();
        wait(&works[20]).expect("pushed");
        server.engine.begin_stop(false);
        let ends: Vec<Result<(), Failure>> = works.iter().map(wait).collect();
        let failures: BTreeSet<(&str, String)> = ends
            .iter()
            .filter_map(|end| end.as_ref().err())
            .map(|failed| (failed.kind.name(), failed.message.clone()))
            .collect();
        let [(kind, text)] = &failures.into_iter().collect::<Vec<_>>()[..] else { panic!("{ends:?}") };
        assert_eq!(*kind, "PeerLost");
        assert!(
            text.contains("push \"kept\" of endpoint test failed: the connection is lost (") && text.contains("rank 0"),
            "{text}"
        );
        let taken = server.kept.lock().expect("kept").len();
        assert!(taken >= ends.iter().filter(|end| end.is_ok()).count());
    }
}

/// Who closes a server twice, as a script's end and its owner may, hears of the end both times, and also once it has ended.
#[test]
fn a_server_is_closed_twice() {
    for _ in 0..50 {
        let server = Server::start("test", LIMITS).expect("started");
        let tickets = [server.close(Duration::from_secs(2)), server.close(Duration::from_secs(2))];
        for ticket in tickets {
            ticket.wait(Some(Duration::from_secs(10))).expect("in time").expect("closed");
        }
        let once_more = server.close(Duration::from_secs(2));
        once_more.wait(Some(Duration::from_secs(10))).expect("in time").expect("closed");
    }
}

/// A server with its handlers, and the engine that it is on.
struct Serving {
    engine: Engine,
    server: Arc<Server>,
    kept: Arc<Mutex<Vec<Vec<u8>>>>,
    handlers: Vec<std::thread::JoinHandle<()>>,
}

impl Serving {
    fn start(memory: bool, threads: usize) -> Serving {
        let server = Arc::new(Server::start("test", LIMITS).expect("starts"));
        for (kind, name) in
            [(Kind::Push, "kept"), (Kind::Pull, "kept"), (Kind::Request, "reverse"), (Kind::Request, "fail")]
        {
            server.serve(kind, name, true);
        }
        let kept = Arc::new(Mutex::new(Vec::new()));
        let handler = |_| {
            let (server, kept) = (server.clone(), kept.clone());
            std::thread::spawn(move || handle(&server, &kept))
        };
        Serving { engine: engine(0, memory), handlers: (0..threads).map(handler).collect(), server, kept }
    }

    fn connect(&self, engine: &Engine, id: u64) -> Client {
        let spec = |rank| GroupSpec {
            id: GroupId(id),
            generation: Generation(0),
            rank,
            members: vec![self.engine.contact().clone(), engine.contact().clone()],
            secret: b"secret".to_vec(),
            algorithm: None,
            name: "endpoint test".into(),
        };
        self.server.accept(&self.engine, spec(0));
        let (client, welcomed) =
            Client::connect(engine, spec(1), "endpoint test", Duration::from_secs(10)).expect("a thread");
        welcomed.wait(Some(Duration::from_secs(10))).expect("an end").expect("connected");
        client
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        drop(self.server.close(Duration::ZERO).wait(Some(Duration::from_secs(10))));
        self.handlers.drain(..).for_each(|handler| handler.join().expect("a handler"));
    }
}

fn handle(server: &Server, kept: &Mutex<Vec<Vec<u8>>>) {
    while let Some(mut asked) = server.next() {
        let body = asked.body().map_or(Vec::new(), |body| body.bytes().to_vec());
        let result = match (asked.kind(), asked.name()) {
            (Kind::Push, _) => {
                kept.lock().expect("kept").push(body);
                Ok(Reply::Empty)
            }
            (Kind::Pull, _) => {
                Ok(Reply::Bytes(kept.lock().expect("kept").last().expect("pushed before").clone().into()))
            }
            (Kind::Request, "reverse") => Ok(Reply::Bytes(body.into_iter().rev().collect())),
            _ => Err("a test wants it".to_owned()),
        };
        // SAFETY: nothing is lent.
        unsafe { asked.answer(result) };
    }
}

/// Bytes that show whose they are.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut random = Rng::with_seed(seed);
    std::iter::repeat_with(|| random.u8(..)).take(len).collect()
}

fn ask(client: &Client, kind: Kind, name: &str, body: &[u8]) -> Work {
    let (name, len, room) = (name.to_owned(), body.len() as u64, 1 << 30);
    let (priority, timeout) = (Priority::USUAL, Duration::from_secs(60));
    // SAFETY: callers wait for its end, and hold the bytes until then.
    unsafe { client.ask(Ask { kind, name, body: body.as_ptr(), len, into: None, room, priority, timeout, keep: None }) }
}

fn wait(work: &Work) -> Result<(), Failure> {
    work.ticket().wait(Some(Duration::from_secs(30))).expect("an end within 30 s")
}

fn until_true(mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < until, "it does not come to that");
        std::thread::yield_now();
    }
}

fn engine(rank: u32, memory: bool) -> Engine {
    let config = Config {
        rank,
        host: "test".into(),
        generation: Generation(0),
        addresses: vec!["127.0.0.1".parse().expect("an address")],
        ports: 0..=0,
        streams: 2,
        io_threads: 1,
        streams_within_host: 2,
        shared_memory: memory,
        ptracer: Ptracer::default(),
        checksum: false,
        dead_after: Duration::from_secs(4),
        socket_buffer_bytes: 0,
        flight_recorder: None,
    };
    Engine::start(&config).expect("starts")
}
